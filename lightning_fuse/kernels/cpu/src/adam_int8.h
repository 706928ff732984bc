// Adam over int8 moments as one, in three passes over a tile: the codecs' decoding, the rule and the quotient of the
// moments; the search for the largest and smallest of each block; the encoding of both, which needs the scales that they
// give. The root that the rule takes of v serves the quotient and the codec of v. Same operations as int8.h, same bits.
// The search in the loop of the rule would be fewer instructions, but the roots and divisions of the next block would
// wait for it.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "codecs.h"
#include "int8.h"
#include "rules.h"
#include "weights.h"

namespace {

// Multiples of the dither's stride, so that a vector of words is one addition.
struct Turns {
    alignas(64) uint32_t word[kBlock];
};
constexpr Turns turns() {
    Turns all{};
    for (int i = 0; i < kBlock; ++i) all.word[i] = static_cast<uint32_t>(i) * kIndexStride;
    return all;
}
constexpr Turns kTurns = turns();

// Updates one block. Leaves the quotients of the new moments, first by root of the second, and the roots.
// kGiven: `roots` holds those of the old second moments, else they are decoded on the way.
template <bool kGiven, class W, class R>
inline void update_block(
    const R& rule, float factor, int count, uint32_t word, typename W::Stored* __restrict p,
    typename W::Kept* __restrict kept, const typename W::Stored* __restrict g, const int8_t* __restrict m_codes,
    float m_unit, const uint8_t* __restrict v_codes, Levels levels, float* __restrict quotients,
    float* __restrict roots) {
    for (int i = 0; i < count; ++i) {
        float root = kGiven ? roots[i] : root_of_code(v_codes[i], levels);
        float first = (static_cast<float>(m_codes[i]) * m_unit) * root, second = root * root;
        const float weight = rule.update(W::open(p, kept, i), W::read(g[i]) * factor, first, second, root);
        W::close(weight, p, kept, i, word + kTurns.word[i]);
        quotients[i] = first / root;
        roots[i] = root;
    }
}

// Bits of the largest and smallest root of a block, and of its quotients' largest magnitude.
struct Extremes {
    int32_t largest, smallest, quotient;
};

inline Extremes extremes(const float* __restrict quotients, const float* __restrict roots, int count) {
    int32_t largest = 0, smallest = kInfinity, most = 0;
    for (int i = 0; i < count; ++i) {
        const int32_t bits = static_cast<int32_t>(bits_of(roots[i]));
        const int32_t magnitude = static_cast<int32_t>(bits_of(quotients[i]) & 0x7FFFFFFFu);
        largest = bits > largest ? bits : largest;
        smallest = bits < smallest ? bits : smallest;
        most = magnitude > most ? magnitude : most;
    }
    return {largest, smallest, most};
}

// Encodes both moments of one block. `word` is the dither word of the second moment's first element; the first moment's
// is half a turn further.
inline void encode_block(
    const float* __restrict quotients, int8_t* __restrict m_codes, float per_unit, const float* __restrict roots,
    uint8_t* __restrict v_codes, Levels levels, int count, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        const uint32_t here = word + kTurns.word[i];
        v_codes[i] = unsigned_code(roots[i], levels, here);
        m_codes[i] = quotient_code(quotients[i], per_unit, here ^ (kPhaseSigned - kPhaseUnsigned));
    }
}

template <bool kWhole, class R, class W>
void update_blocks(
    const Scalars& scalars, const Span& span, const Operands& operands, const Moment* moments, float* quotients,
    float* roots) {
    const R rule(scalars);
    const float factor = scalars.factor;
    const Typed<W> tile(operands, span);
    float* m_scale = moments[0].scale + first_scale(span);
    float* v_scale = moments[1].scale + first_scale(span);
    int8_t* m_codes = static_cast<int8_t*>(moments[0].data) + span.begin;
    uint8_t* v_codes = static_cast<uint8_t*>(moments[1].data) + span.begin;
    const uint32_t first = first_word(span.index, span.step, kPhaseUnsigned), of_weight = weight_word(span);
    float unit[kTile], smallest[kTile];
    Levels levels[kTile];
    const int blocks = each_block<kWhole>(span, [](int, int, int) {});
    for (int b = 0; b < blocks; ++b) {
        unit[b] = quotient_unit(m_scale[b]);
        levels[b] = levels_of(v_scale[b]);
    }
    each_block<kWhole>(span, [&](int at, int length, int b) {
        const auto update = [&](auto given) {
            update_block<given.value, W>(
                rule, factor, length, of_weight + static_cast<uint32_t>(at) * kIndexStride, tile.param + at,
                moved(tile.kept, at), tile.grad + at, m_codes + at, unit[b], v_codes + at, levels[b], quotients + at,
                roots + at);
        };
        if (!is_wide(v_scale[b])) return update(std::false_type());
        decode_roots(v_codes + at, roots + at, length, v_scale[b]);
        update(std::true_type());
    });
    each_block<kWhole>(span, [&](int at, int length, int b) {
        const Extremes found = extremes(quotients + at, roots + at, length);
        v_scale[b] = float_of(static_cast<uint32_t>(found.largest));
        m_scale[b] = float_of(static_cast<uint32_t>(found.quotient));
        smallest[b] = float_of(static_cast<uint32_t>(found.smallest));
        // A root that is 0 or NaN leaves a quotient that is not finite; an infinite root is the largest.
        if (found.largest >= kInfinity || found.quotient >= kInfinity) {
            v_scale[b] = drop_not_finite(roots + at, length);
            m_scale[b] = drop_not_finite(quotients + at, length);
            smallest[b] = smallest_root(roots + at, length);
        }
    });
    // From largest values to scales and what a unit is worth, for all blocks at once.
    for (int b = 0; b < blocks; ++b) v_scale[b] = scale_of(v_scale[b], smallest[b]);
    each_block<kWhole>(span, [&](int at, int length, int b) {
        if (is_wide(v_scale[b])) m_scale[b] = by_last_level(quotients + at, roots + at, length, v_scale[b]);
    });
    for (int b = 0; b < blocks; ++b) {
        m_scale[b] = quotient_scale(m_scale[b]);
        levels[b] = levels_of(v_scale[b]);
        unit[b] = per_quotient(m_scale[b]);
    }
    each_block<kWhole>(span, [&](int at, int length, int b) {
        const uint32_t word = first + static_cast<uint32_t>(at) * kIndexStride;
        encode_block(quotients + at, m_codes + at, unit[b], roots + at, v_codes + at, levels[b], length, word);
        if (is_wide(v_scale[b])) encode_wide(roots + at, v_codes + at, length, v_scale[b], word);
    });
}

// A tile. Blocks of one known length take three quarters of the time.
template <class R, class W>
void update_int8(
    const Scalars& scalars, const Span& span, const Operands& operands, const Moment* moments, float* quotients,
    float* roots) {
    const auto update = has_whole_blocks(span) ? update_blocks<true, R, W> : update_blocks<false, R, W>;
    update(scalars, span, operands, moments, quotients, roots);
}

}  // namespace
