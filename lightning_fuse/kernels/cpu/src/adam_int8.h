// Adam over int8 moments as one: the codecs' decoding, the rule and the search for the largest value in one loop, both
// encodings in a second. The units for division and square roots are what limits it, so the rest runs beside them, and the
// root that the rule takes of v is the first of the two that its codec needs. Same operations as codecs.h, same bits.
#pragma once

#include <cmath>
#include <cstdint>

#include "codecs.h"
#include "rules.h"

namespace {

// One block; leaves the new first moments in `m`, the roots of the new second ones in `roots`, and their largest.
template <class R>
void update_block(
    const R& rule, float factor, int count, float* __restrict p, const float* __restrict g,
    const int8_t* __restrict m_codes, float m_unit, const uint8_t* __restrict v_codes, float v_unit,
    float* __restrict m, float* __restrict roots, float* largest_m, float* largest_root) {
    int32_t most_m = 0, most_root = 0;
    for (int i = 0; i < count; ++i) {
        const float q = static_cast<float>(m_codes[i]) * m_unit;
        const float x = static_cast<float>(v_codes[i]) * v_unit;
        const float square = x * x;
        float first = q * std::fabs(q), second = square * square, root;
        p[i] = rule.update(p[i], g[i] * factor, first, second, root);
        m[i] = first;
        roots[i] = root;
        const int32_t m_magnitude = static_cast<int32_t>(finite_magnitude(first));
        const int32_t root_magnitude = static_cast<int32_t>(finite_magnitude(root));
        most_m = m_magnitude > most_m ? m_magnitude : most_m;
        most_root = root_magnitude > most_root ? root_magnitude : most_root;
    }
    *largest_m = float_of(static_cast<uint32_t>(most_m));
    *largest_root = float_of(static_cast<uint32_t>(most_root));
}

inline void encode_block(
    const float* __restrict m, int8_t* __restrict m_codes, float m_factor, uint32_t m_word,
    const float* __restrict roots, uint8_t* __restrict v_codes, float v_factor, uint32_t v_word, int count) {
    for (int i = 0; i < count; ++i) {
        const uint32_t step = static_cast<uint32_t>(i) * kIndexStride;
        m_codes[i] = signed_code(m[i], m_factor, m_word + step);
        v_codes[i] = unsigned_code(std::sqrt(float_of(finite_magnitude(roots[i]))), v_factor, v_word + step);
    }
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
    float m_unit[kTile], v_unit[kTile];
    const int blocks = count_blocks(span);
    for (int b = 0; b < blocks; ++b) {
        m_unit[b] = Signed::unit(m_scale[b]);
        v_unit[b] = Unsigned::unit(v_scale[b]);
    }
    each_block(span, [&](int at, int length, int b) {
        update_block(
            rule, factor, length, p + at, g + at, m_codes + at, m_unit[b], v_codes + at, v_unit[b], m + at, roots + at,
            m_scale + b, v_scale + b);
    });
    for (int b = 0; b < blocks; ++b) {
        m_unit[b] = Signed::per_unit(m_scale[b]);
        v_scale[b] = grid_ceil(std::sqrt(v_scale[b]));
        v_unit[b] = Unsigned::per_unit(v_scale[b]);
    }
    const uint32_t m_word = first_word(span.index, span.step, kPhaseSigned);
    const uint32_t v_word = first_word(span.index, span.step, kPhaseUnsigned);
    each_block(span, [&](int at, int length, int b) {
        const uint32_t step = static_cast<uint32_t>(at) * kIndexStride;
        encode_block(
            m + at, m_codes + at, m_unit[b], m_word + step, roots + at, v_codes + at, v_unit[b], v_word + step, length);
    });
}

}  // namespace
