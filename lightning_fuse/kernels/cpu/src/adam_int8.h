// Adam over int8 moments as one, in two passes over a block: the codecs' decoding, the rule, the quotient of the moments
// and the search for the largest of both; then the encoding of both, which need the scales of the block. The root that
// the rule takes of v serves the quotient and the codec of v. Same operations as codecs.h, same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "codecs.h"
#include "rules.h"

namespace {

// What the first pass over a block leaves: bits of the largest root, and of the largest quotient's magnitude.
struct Largest {
    int32_t root, quotient;
};

// One block. Leaves the quotients of the new moments, first by root of the second, and the roots.
// kWide: `roots` holds those of the old second moments, else they are decoded on the way.
template <bool kWide, class R>
inline Largest update_block(
    const R& rule, float factor, int count, float* __restrict p, const float* __restrict g,
    const int8_t* __restrict m_codes, float m_unit, const uint8_t* __restrict v_codes, float v_unit,
    float* __restrict quotients, float* __restrict roots) {
    int32_t most_root = 0, most_quotient = 0;
    for (int i = 0; i < count; ++i) {
        float root = kWide ? roots[i] : unsigned_square(v_codes[i]) * v_unit;
        float first = (signed_square(m_codes[i]) * m_unit) * root, second = root * root;
        p[i] = rule.update(p[i], g[i] * factor, first, second, root);
        const float quotient = first / root;
        quotients[i] = quotient;
        roots[i] = root;
        const int32_t magnitude = static_cast<int32_t>(bits_of(quotient) & 0x7FFFFFFFu);
        const int32_t bits = static_cast<int32_t>(bits_of(root));
        most_quotient = magnitude > most_quotient ? magnitude : most_quotient;
        most_root = bits > most_root ? bits : most_root;
    }
    return {most_root, most_quotient};
}

// What is not finite counts as zero; returns the largest magnitude.
inline int32_t drop_not_finite(float* values, int count) {
    for (int i = 0; i < count; ++i) values[i] = is_finite(bits_of(values[i])) ? values[i] : 0.0f;
    return static_cast<int32_t>(bits_of(largest_magnitude(values, count)));
}

// Encodes both moments of one block; returns whether it is wide. `word` is the dither word of the second moment's first
// element; the first moment's is half a turn further.
inline bool encode_block(
    const float* __restrict quotients, int8_t* __restrict m_codes, float m_per_unit, const float* __restrict roots,
    uint8_t* __restrict v_codes, float v_per_unit, float v_limit, int count, uint32_t word) {
    int32_t share = 0;
    for (int i = 0; i < count; ++i) {
        share += wide_share(roots[i], v_limit);
        const uint32_t here = word + static_cast<uint32_t>(i) * kIndexStride;
        v_codes[i] = static_cast<uint8_t>(unsigned_code(std::sqrt(roots[i]), v_per_unit, here));
        const float half = std::sqrt(std::fabs(quotients[i]));
        m_codes[i] = signed_code(std::copysign(half, quotients[i]), m_per_unit, here ^ (kPhaseSigned - kPhaseUnsigned));
    }
    return share >= 0;
}

template <class R>
void update_int8(
    const Scalars& scalars, const Span& span, float* p, const float* g, const Moment* moments, float* quotients,
    float* roots) {
    const R rule(scalars);
    const float factor = scalars.factor;
    float* m_scale = moments[0].scale + first_scale(span);
    float* v_scale = moments[1].scale + first_scale(span);
    int8_t* m_codes = static_cast<int8_t*>(moments[0].data) + span.begin;
    uint8_t* v_codes = static_cast<uint8_t*>(moments[1].data) + span.begin;
    const uint32_t first = first_word(span.index, span.step, kPhaseUnsigned);
    float m_unit[kTile], v_unit[kTile];
    const int blocks = count_blocks(span);
    for (int b = 0; b < blocks; ++b) {
        m_unit[b] = signed_unit(m_scale[b]);
        v_unit[b] = unsigned_unit(v_scale[b]);
    }
    each_block(span, [&](int at, int length, int b) {
        auto update = update_block<false, R>;
        if (bits_of(v_scale[b]) >> 31) {
            decode_roots(v_codes + at, roots + at, length, v_scale[b]);
            update = update_block<true, R>;
        }
        Largest most = update(
            rule, factor, length, p + at, g + at, m_codes + at, m_unit[b], v_codes + at, v_unit[b], quotients + at,
            roots + at);
        // A root that is 0 or NaN leaves a quotient that is not finite; an infinite root is the largest.
        if (most.root >= kInfinity || most.quotient >= kInfinity) {
            most = {drop_not_finite(roots + at, length), drop_not_finite(quotients + at, length)};
        }
        v_scale[b] = float_of(static_cast<uint32_t>(most.root));
        m_scale[b] = float_of(static_cast<uint32_t>(most.quotient));
    });
    // From largest values to scales and what a unit is worth, for all blocks at once.
    for (int b = 0; b < blocks; ++b) {
        v_scale[b] = grid_ceil(std::sqrt(v_scale[b]));
        v_unit[b] = v_scale[b] > 0.0f ? 255.0f / v_scale[b] : 0.0f;
        m_unit[b] = per_signed_unit(m_scale[b]);
    }
    each_block(span, [&](int at, int length, int b) {
        const uint32_t word = first + static_cast<uint32_t>(at) * kIndexStride;
        const bool wide = encode_block(
            quotients + at, m_codes + at, m_unit[b], roots + at, v_codes + at, v_unit[b], wide_limit(v_scale[b]), length,
            word);
        if (wide && v_scale[b] > 0.0f) {
            encode_levels(roots + at, v_codes + at, length, v_scale[b], word);
            v_scale[b] = -v_scale[b];
        }
    });
}

}  // namespace
