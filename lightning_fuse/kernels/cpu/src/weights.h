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

// How a loop reads and writes one weight: the parameter, and what a master weight keeps beside it. `word` is the dither
// word of the element. `Stored` is the type of the parameter and of a gradient that is read in the same loop.

struct Float32Weight {
    using Stored = float;
    using Kept = int8_t;  // nothing is kept
    static float read(float stored) { return stored; }
    static float open(const float* param, const Kept*, int i) { return param[i]; }
    static void close(float weight, float* param, Kept*, int i, uint32_t) { param[i] = weight; }
};

struct Bf16Weight {
    using Stored = uint16_t;
    using Kept = int8_t;  // nothing is kept
    static float read(uint16_t stored) { return from_bf16(stored); }
    static float open(const uint16_t* param, const Kept*, int i) { return from_bf16(param[i]); }
    static void close(float weight, uint16_t* param, Kept*, int i, uint32_t) { param[i] = bf16_nearest(weight); }
};

struct Fp16Weight {
    using Stored = uint16_t;
    using Kept = int8_t;  // nothing is kept
    static float open(const uint16_t* param, const Kept*, int i) { return from_fp16(param[i]); }
    static void close(float weight, uint16_t* param, Kept*, int i, uint32_t) { param[i] = to_fp16(weight); }
};

struct SplitWeight : Bf16Weight {
    using Kept = int16_t;

    static float open(const uint16_t* param, const int16_t* kept, int i) {
        return float_of((static_cast<uint32_t>(param[i]) << 16) + static_cast<uint32_t>(static_cast<int32_t>(kept[i])));
    }

    static void close(float weight, uint16_t* param, int16_t* kept, int i, uint32_t) {
        const uint32_t bits = canonical(weight);
        param[i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
        kept[i] = static_cast<int16_t>(bits);
    }
};

struct Split8Weight : Bf16Weight {
    using Kept = int8_t;

    static float open(const uint16_t* param, const int8_t* kept, int i) {
        const uint32_t lower = static_cast<uint32_t>(static_cast<int32_t>(kept[i])) << 8;
        return float_of((static_cast<uint32_t>(param[i]) << 16) + lower);
    }

    static void close(float weight, uint16_t* param, int8_t* kept, int i, uint32_t word) {
        const uint32_t bits = canonical(weight);
        const uint32_t dithered = bits + (word >> 24);
        // An infinity or NaN has no neighbours to be between; a finite weight may not become one of them.
        const uint32_t rounded = ((bits & 0x7FFFFFFFu) + 0xFFu < 0x7F800000u ? dithered : bits) >> 8;
        param[i] = static_cast<uint16_t>((rounded + 0x80u) >> 8);
        kept[i] = static_cast<int8_t>(rounded);
    }
};

inline uint32_t weight_word(const Span& span) { return first_word(span.index, span.step, kPhaseWeight); }

// What a tile's kept values begin at; null stays null.
template <class T>
T* moved(T* values, int64_t by) {
    return values ? values + by : nullptr;
}

// A tile of weights and gradients as a rule's loop finds them, of one type; `kept` is that of the whole parameter.
struct Operands {
    void* param;
    const void* grad;
    void* kept;
};

template <class W>
struct Typed {
    typename W::Stored* param;
    const typename W::Stored* grad;
    typename W::Kept* kept;

    Typed(const Operands& of, const Span& span)
        : param(static_cast<typename W::Stored*>(of.param)), grad(static_cast<const typename W::Stored*>(of.grad)),
          kept(moved(static_cast<typename W::Kept*>(of.kept), span.begin)) {}
};

// All weights of a tile, from or to float32 in `weight`.
template <class W>
void open_all(const void* param, void* kept, const Span& span, float* __restrict weight) {
    const typename W::Stored* __restrict p = static_cast<const typename W::Stored*>(param);
    const typename W::Kept* __restrict k = moved(static_cast<typename W::Kept*>(kept), span.begin);
    for (int i = 0; i < span.count; ++i) weight[i] = W::open(p, k, i);
}

template <class W>
void close_all(const float* __restrict weight, void* param, void* kept, const Span& span) {
    typename W::Stored* __restrict p = static_cast<typename W::Stored*>(param);
    typename W::Kept* __restrict k = moved(static_cast<typename W::Kept*>(kept), span.begin);
    const uint32_t word = weight_word(span);
    for (int i = 0; i < span.count; ++i) W::close(weight[i], p, k, i, word + static_cast<uint32_t>(i) * kIndexStride);
}

// Values of a tile as float32: where they are, or in `buffer`.
inline const float* widened(Dtype dtype, const void* from, const Span& span, float* buffer) {
    switch (dtype) {
        case Dtype::kFloat32:
            return static_cast<const float*>(from);
        case Dtype::kBFloat16:
            open_all<Bf16Weight>(from, nullptr, span, buffer);
            break;
        case Dtype::kFloat16:
            open_all<Fp16Weight>(from, nullptr, span, buffer);
            break;
    }
    return buffer;
}

inline void narrow(Dtype dtype, const float* weight, const Span& span, void* to) {
    if (dtype == Dtype::kBFloat16) close_all<Bf16Weight>(weight, to, nullptr, span);
    if (dtype == Dtype::kFloat16) close_all<Fp16Weight>(weight, to, nullptr, span);
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
    float* copy = nullptr;
    switch (slot.master) {
        case Master::kNone:
            return const_cast<float*>(widened(slot.dtype, param, span, buffer));
        case Master::kCopy:
            copy = static_cast<float*>(slot.kept) + span.begin;
            reconcile(slot.dtype, static_cast<uint16_t*>(param), span.count, copy);
            return copy;
        case Master::kSplit:
            open_all<SplitWeight>(param, slot.kept, span, buffer);
            break;
        case Master::kSplit8:
            open_all<Split8Weight>(param, slot.kept, span, buffer);
            break;
    }
    return buffer;
}

inline void close_weight(const Slot& slot, const Span& span, float* weight, void* param) {
    switch (slot.master) {
        case Master::kCopy:
            for (int i = 0; i < span.count; ++i) weight[i] = float_of(canonical(weight[i]));
            narrow(slot.dtype, weight, span, param);
            break;
        case Master::kNone:
            narrow(slot.dtype, weight, span, param);
            break;
        case Master::kSplit:
            close_all<SplitWeight>(weight, param, slot.kept, span);
            break;
        case Master::kSplit8:
            close_all<Split8Weight>(weight, param, slot.kept, span);
            break;
    }
}

}  // namespace
