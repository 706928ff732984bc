// Adam over int8 moments as one: the codecs' decoding, the rule and the search for the largest root in one loop; the
// second moment's encoding and the first's division by what became of it in another; the first's encoding in a third.
// The root that the rule takes of v is the first of the two that its codec needs. Same operations as codecs.h, same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "codecs.h"
#include "rules.h"

namespace {

// One block; leaves the new first moments in `m`, the roots of the new second ones in `roots`, and returns the largest.
// kWide: `roots` holds those of the old second moments, else they are decoded on the way.
template <bool kWide, class R>
float update_block(
    const R& rule, float factor, int count, float* __restrict p, const float* __restrict g,
    const int8_t* __restrict m_codes, float m_unit, const uint8_t* __restrict v_codes, float v_unit,
    float* __restrict m, float* __restrict roots) {
    int32_t most = 0;
    for (int i = 0; i < count; ++i) {
        const float q = static_cast<float>(m_codes[i]) * m_unit;
        const float x = static_cast<float>(v_codes[i]) * v_unit;
        float root = kWide ? roots[i] : x * x;
        float first = (q * std::fabs(q)) * root, second = root * root;
        p[i] = rule.update(p[i], g[i] * factor, first, second, root);
        m[i] = first;
        const int32_t magnitude = static_cast<int32_t>(finite_magnitude(root));
        roots[i] = float_of(static_cast<uint32_t>(magnitude));
        most = magnitude > most ? magnitude : most;
    }
    return float_of(static_cast<uint32_t>(most));
}

// A first moment in units of its root: leaves the root of the quotient's magnitude, with the quotient's sign, and returns
// the bits of the magnitude; a quotient that is not finite counts as zero.
inline int32_t to_unit(float& m, float root) {
    const float quotient = m / root;
    const uint32_t magnitude = finite_magnitude(quotient);
    m = std::copysign(std::sqrt(float_of(magnitude)), quotient);
    return static_cast<int32_t>(magnitude);
}

// Encodes second moments and divides the first ones by what became of them; returns the largest quotient.
inline float encode_second(
    const float* __restrict roots, uint8_t* __restrict codes, float* __restrict m, int count, float scale, uint32_t word) {
    const float per_unit = scale > 0.0f ? 255.0f / scale : 0.0f, unit = scale / 255.0f;
    int32_t most = 0;
    for (int i = 0; i < count; ++i) {
        const int32_t code =
            unsigned_code(std::sqrt(roots[i]), per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
        const float x = static_cast<float>(code) * unit;
        codes[i] = static_cast<uint8_t>(code);
        const int32_t magnitude = to_unit(m[i], x * x);
        most = magnitude > most ? magnitude : most;
    }
    return float_of(static_cast<uint32_t>(most));
}

// The same for a wide block; rare, so it is put together from the codec's parts.
inline float encode_second_wide(
    float* __restrict roots, uint8_t* __restrict codes, float* __restrict m, int count, float scale, uint32_t word) {
    decode_roots(codes, roots, count, encode_roots(roots, codes, count, scale, word));
    int32_t most = 0;
    for (int i = 0; i < count; ++i) {
        const int32_t magnitude = to_unit(m[i], roots[i]);
        most = magnitude > most ? magnitude : most;
    }
    return float_of(static_cast<uint32_t>(most));
}

template <class R>
void update_int8(
    const Scalars& scalars, const Span& span, float* p, const float* g, const Moment* moments, float* m, float* roots) {
    const R rule(scalars);
    const float factor = scalars.factor;
    float* m_scale = moments[0].scale + first_scale(span);
    float* v_scale = moments[1].scale + first_scale(span);
    int8_t* m_codes = static_cast<int8_t*>(moments[0].data) + span.begin;
    uint8_t* v_codes = static_cast<uint8_t*>(moments[1].data) + span.begin;
    const uint32_t m_word = first_word(span.index, span.step, kPhaseSigned);
    const uint32_t v_word = first_word(span.index, span.step, kPhaseUnsigned);
    float m_unit[kTile], v_unit[kTile];
    const int blocks = count_blocks(span);
    for (int b = 0; b < blocks; ++b) {
        m_unit[b] = signed_unit(m_scale[b]);
        v_unit[b] = v_scale[b] / 255.0f;
    }
    each_block(span, [&](int at, int length, int b) {
        auto update = update_block<false, R>;
        if (bits_of(v_scale[b]) >> 31) {
            decode_roots(v_codes + at, roots + at, length, v_scale[b]);
            update = update_block<true, R>;
        }
        v_scale[b] = update(
            rule, factor, length, p + at, g + at, m_codes + at, m_unit[b], v_codes + at, v_unit[b], m + at, roots + at);
    });
    // Largest roots to scales, for all blocks at once.
    for (int b = 0; b < blocks; ++b) v_scale[b] = grid_ceil(std::sqrt(v_scale[b]));
    each_block(span, [&](int at, int length, int b) {
        const uint32_t word = v_word + static_cast<uint32_t>(at) * kIndexStride;
        const bool wide = is_wide(roots + at, length, v_scale[b]);
        m_scale[b] = wide ? encode_second_wide(roots + at, v_codes + at, m + at, length, v_scale[b], word)
                          : encode_second(roots + at, v_codes + at, m + at, length, v_scale[b], word);
        v_scale[b] = wide ? -v_scale[b] : v_scale[b];
    });
    for (int b = 0; b < blocks; ++b) m_unit[b] = per_signed_unit(m_scale[b]);
    each_block(span, [&](int at, int length, int b) {
        for (int i = at; i < at + length; ++i) {
            m_codes[i] = signed_code(m[i], m_unit[b], m_word + static_cast<uint32_t>(i) * kIndexStride);
        }
    });
}

}  // namespace
