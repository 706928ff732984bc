// A rule over bfloat16 moments and any weight in one loop: what codecs.h and weights.h do in loops of their own before and
// after the rule costs more than the rule itself, and memory waits while they run. Same operations, same bits.
#pragma once

#include <cstdint>

#include "codecs.h"
#include "rounding.h"
#include "rules.h"
#include "weights.h"

namespace {

inline bool is_bf16(const Moment& moment) {
    return moment.codec == Codec::kBFloat16Signed || moment.codec == Codec::kBFloat16Unsigned;
}

template <class R, class W>
void update_bf16(const Scalars& scalars, const Span& span, const Operands& operands, const Moment* moments) {
    const Typed<W> at(operands, span);
    typename W::Stored* __restrict p = at.param;
    typename W::Kept* __restrict kept = at.kept;
    const typename W::Stored* __restrict g = at.grad;
    const R rule(scalars);
    const float factor = scalars.factor;
    const uint32_t first = bf16_word(moments[0], span), of_weight = weight_word(span);
    uint16_t* __restrict a = static_cast<uint16_t*>(moments[0].data) + span.begin;
    if constexpr (R::kMoments == 1) {
        for (int i = 0; i < span.count; ++i) {
            const uint32_t turns = static_cast<uint32_t>(i) * kIndexStride;
            float m = from_bf16(a[i]);
            const float weight = rule.update(W::open(p, kept, i), W::read(g[i]) * factor, m);
            W::close(weight, p, kept, i, of_weight + turns);
            a[i] = bf16_dithered(m, first + turns);
        }
    } else {
        // Half a turn, or nothing, from the first moment's dither to the others'.
        const uint32_t turn = bf16_word(moments[1], span) ^ first;
        uint16_t* __restrict b = static_cast<uint16_t*>(moments[1].data) + span.begin;
        const uint32_t last_turn = R::kMoments == 3 ? bf16_word(moments[R::kMoments - 1], span) ^ first : 0;
        uint16_t* __restrict c = R::kMoments == 3 ? static_cast<uint16_t*>(moments[2].data) + span.begin : nullptr;
        for (int i = 0; i < span.count; ++i) {
            const uint32_t turns = static_cast<uint32_t>(i) * kIndexStride, word = first + turns;
            float m = from_bf16(a[i]), v = from_bf16(b[i]), weight = W::open(p, kept, i);
            if constexpr (R::kMoments == 3) {
                float largest = from_bf16(c[i]);
                weight = rule.update(weight, W::read(g[i]) * factor, m, v, largest);
                c[i] = bf16_dithered(largest, word ^ last_turn);
            } else {
                weight = rule.update(weight, W::read(g[i]) * factor, m, v);
            }
            W::close(weight, p, kept, i, of_weight + turns);
            a[i] = bf16_dithered(m, word);
            b[i] = bf16_dithered(v, word ^ turn);
        }
    }
}

}  // namespace
