// The float32 weight behind a parameter, and the parameter behind a new weight; the twin of formats/master.py.
#pragma once

#include <cstdint>

#include "codecs.h"
#include "rounding.h"
#include "tables.h"

namespace {

using lightning_fuse::Dtype;
using lightning_fuse::Master;
using lightning_fuse::Slot;

// Only a master weight keeps NaNs in this one form: it is the NaN that survives splitting.
inline uint32_t canonical(float weight) {
    const uint32_t bits = bits_of(weight);
    return is_nan(bits) ? 0x7FC00000u : bits;
}

// Values of a tile as float32: where they are, or in `buffer`.
inline const float* widened(Dtype dtype, const void* from, int count, float* buffer) {
    const uint16_t* halves = static_cast<const uint16_t*>(from);
    switch (dtype) {
        case Dtype::kFloat32:
            return static_cast<const float*>(from);
        case Dtype::kBFloat16:
            for (int i = 0; i < count; ++i) buffer[i] = from_bf16(halves[i]);
            break;
        case Dtype::kFloat16:
            for (int i = 0; i < count; ++i) buffer[i] = from_fp16(halves[i]);
            break;
    }
    return buffer;
}

inline void narrow(Dtype dtype, const float* __restrict weight, int count, uint16_t* __restrict to) {
    if (dtype == Dtype::kBFloat16) {
        for (int i = 0; i < count; ++i) to[i] = bf16_nearest(weight[i]);
    } else if (dtype == Dtype::kFloat16) {
        for (int i = 0; i < count; ++i) to[i] = to_fp16(weight[i]);
    }
}

inline void join_split(const uint16_t* __restrict param, const int16_t* __restrict kept, int count, float* __restrict weight) {
    for (int i = 0; i < count; ++i) {
        weight[i] = float_of((static_cast<uint32_t>(param[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(kept[i])));
    }
}

inline void split(const float* __restrict weight, int count, uint16_t* __restrict param, int16_t* __restrict kept) {
    for (int i = 0; i < count; ++i) {
        const uint32_t bits = canonical(weight[i]);
        param[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        kept[i] = static_cast<int16_t>(bits);
    }
}

inline void join_split8(const uint16_t* __restrict param, const int8_t* __restrict kept, int count, float* __restrict weight) {
    for (int i = 0; i < count; ++i) {
        const uint32_t lower = static_cast<uint32_t>(static_cast<int32_t>(kept[i])) << 8;
        weight[i] = float_of((static_cast<uint32_t>(param[i]) << 16) + lower);
    }
}

inline void split8(const float* __restrict weight, int count, uint16_t* __restrict param, int8_t* __restrict kept, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        const uint32_t bits = canonical(weight[i]);
        const uint32_t dithered = bits + ((word + static_cast<uint32_t>(i) * kIndexStride) >> 24);
        // An infinity or NaN has no neighbours to be between; a finite weight may not become one of them.
        const uint32_t rounded = ((bits & 0x7FFFFFFFu) + 0xFFu < 0x7F800000u ? dithered : bits) >> 8;
        param[i] = static_cast<uint16_t>((rounded + 0x80u) >> 8);
        kept[i] = static_cast<int8_t>(rounded);
    }
}

// Somebody may have written to the parameter since: where it is not what the copy rounds to, it wins.
inline void reconcile(Dtype dtype, const uint16_t* __restrict param, int count, float* __restrict copy) {
    if (dtype == Dtype::kBFloat16) {
        for (int i = 0; i < count; ++i) copy[i] = bf16_nearest(copy[i]) == param[i] ? copy[i] : from_bf16(param[i]);
    } else {
        for (int i = 0; i < count; ++i) copy[i] = to_fp16(copy[i]) == param[i] ? copy[i] : from_fp16(param[i]);
    }
}

// The float32 weight of a tile: in place, or in `buffer`. `param` holds the tile's parameters, contiguous.
inline float* open_weight(const Slot& slot, const Span& span, void* param, float* buffer) {
    switch (slot.master) {
        case Master::kNone:
            return const_cast<float*>(widened(slot.dtype, param, span.count, buffer));
        case Master::kCopy:
            reconcile(slot.dtype, static_cast<uint16_t*>(param), span.count, static_cast<float*>(slot.kept) + span.begin);
            return static_cast<float*>(slot.kept) + span.begin;
        case Master::kSplit:
            join_split(static_cast<uint16_t*>(param), static_cast<int16_t*>(slot.kept) + span.begin, span.count, buffer);
            break;
        case Master::kSplit8:
            join_split8(static_cast<uint16_t*>(param), static_cast<int8_t*>(slot.kept) + span.begin, span.count, buffer);
            break;
    }
    return buffer;
}

inline void close_weight(const Slot& slot, const Span& span, float* weight, void* param) {
    uint16_t* halves = static_cast<uint16_t*>(param);
    switch (slot.master) {
        case Master::kNone:
            narrow(slot.dtype, weight, span.count, halves);
            break;
        case Master::kCopy:
            for (int i = 0; i < span.count; ++i) weight[i] = float_of(canonical(weight[i]));
            narrow(slot.dtype, weight, span.count, halves);
            break;
        case Master::kSplit:
            split(weight, span.count, halves, static_cast<int16_t*>(slot.kept) + span.begin);
            break;
        case Master::kSplit8: {
            const uint32_t word = first_word(span.index, span.step, kPhaseWeight);
            split8(weight, span.count, halves, static_cast<int8_t*>(slot.kept) + span.begin, word);
            break;
        }
    }
}

}  // namespace
