// A rule over bfloat16 moments in one loop: what codecs.h does in a loop per moment before and after the rule costs more
// than the rule itself. Same operations, same bits.
#pragma once

#include <cstdint>

#include "codecs.h"
#include "rounding.h"
#include "rules.h"

namespace {

inline bool is_bf16(const Moment& moment) {
    return moment.codec == Codec::kBFloat16Signed || moment.codec == Codec::kBFloat16Unsigned;
}

template <class R>
void update_bf16(
    const Scalars& scalars, const Span& span, float* __restrict p, const float* __restrict g, const Moment* moments) {
    const R rule(scalars);
    const float factor = scalars.factor;
    const uint32_t first = bf16_word(moments[0], span);
    uint16_t* __restrict a = static_cast<uint16_t*>(moments[0].data) + span.begin;
    if constexpr (R::kMoments == 1) {
        for (int i = 0; i < span.count; ++i) {
            float m = from_bf16(a[i]);
            p[i] = rule.update(p[i], g[i] * factor, m);
            a[i] = bf16_dithered(m, first + static_cast<uint32_t>(i) * kIndexStride);
        }
    } else {
        // Half a turn, or nothing, from the first moment's dither to the others'.
        const uint32_t turn = bf16_word(moments[1], span) ^ first;
        uint16_t* __restrict b = static_cast<uint16_t*>(moments[1].data) + span.begin;
        uint16_t* __restrict c = R::kMoments == 3 ? static_cast<uint16_t*>(moments[2].data) + span.begin : nullptr;
        for (int i = 0; i < span.count; ++i) {
            const uint32_t word = first + static_cast<uint32_t>(i) * kIndexStride;
            float m = from_bf16(a[i]), v = from_bf16(b[i]);
            if constexpr (R::kMoments == 3) {
                float largest = from_bf16(c[i]);
                p[i] = rule.update(p[i], g[i] * factor, m, v, largest);
                c[i] = bf16_dithered(largest, word ^ turn);
            } else {
                p[i] = rule.update(p[i], g[i] * factor, m, v);
            }
            a[i] = bf16_dithered(m, word);
            b[i] = bf16_dithered(v, word ^ turn);
        }
    }
}

}  // namespace
