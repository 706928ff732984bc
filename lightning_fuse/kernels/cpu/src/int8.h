// One block of int8 codes, the twin of formats/int8.py: scales, single codes, and loops over a block.
#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"

namespace {

// A value that is not finite counts as zero in its block.
inline uint32_t finite_magnitude(float x) {
    const uint32_t magnitude = bits_of(x) & 0x7FFFFFFFu;
    return magnitude < 0x7F800000u ? magnitude : 0u;
}

// The largest magnitude of a block; magnitudes are ordered as their bits are.
inline float largest_magnitude(const float* x, int count) {
    int32_t largest = 0;
    for (int i = 0; i < count; ++i) {
        const int32_t magnitude = static_cast<int32_t>(finite_magnitude(x[i]));
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(static_cast<uint32_t>(largest));
}

// What is not finite becomes zero; returns the largest magnitude.
inline float drop_not_finite(float* values, int count) {
    for (int i = 0; i < count; ++i) values[i] = is_finite(bits_of(values[i])) ? values[i] : 0.0f;
    return largest_magnitude(values, count);
}

// A scale is 35/32 of the largest root, rounded up to 2 bits of mantissa; its lowest bits are the block's kind.
constexpr uint32_t kScaleMask = (1u << 21) - 1;
constexpr uint32_t kWide = 2;

inline float scale_of(float largest, float smallest) {
    const float scale = float_of((bits_of(largest * 1.09375f) + kScaleMask) & ~kScaleMask);
    const uint32_t kind = (smallest < scale * 0x1p-5f) + (smallest < scale * 0x1p-9f);
    return largest > 0.0f ? float_of(bits_of(scale) | kind) : 0.0f;
}

inline bool is_wide(float scale) { return (bits_of(scale) & 3u) == kWide; }

// Where the codes of a block stand that is not wide: level 0 has the bits of the offset, which is added to the root, and
// a code is shifted by some bits.
struct Levels {
    float offset;
    int32_t shift;
};

inline Levels levels_of(float scale) {
    const uint32_t bits = bits_of(scale), kind = bits & 3u;
    return {float_of(bits - kind) * (kind ? 0x1p-8f : 0x1p-4f), static_cast<int32_t>(17 + kind)};
}

// Of wide blocks, by quarter of the mantissa: how many levels lie in it, how many before it, and mantissa bits from one
// to the next; as arithmetic, which vectorises where a table does not.
inline int32_t levels_in(int32_t quarter) { return 5 - (quarter > 0) - (quarter > 2); }
inline int32_t levels_before(int32_t quarter) { return 4 * quarter + (quarter > 0); }
inline int32_t level_step(int32_t quarter) { return quarter == 0 ? 419431 : quarter == 3 ? 699051 : 524288; }

// The number of the level that a scale is.
inline int32_t top_level(float scale) {
    const int32_t bits = static_cast<int32_t>(bits_of(scale));
    return (bits >> 23) * 16 + levels_before(bits >> 21 & 3);
}

// One code. What is truncated is never negative, so truncating is rounding down.

// `root` is the square root of the value's magnitude, with the value's sign.
inline int8_t signed_code(float root, float per_unit, uint32_t word) {
    int32_t code = static_cast<int32_t>(plus_dither(std::fabs(root) * per_unit, word));
    code = code > 127 ? 127 : code;
    return static_cast<int8_t>(static_cast<int32_t>(bits_of(root)) < 0 ? -code : code);
}

inline uint8_t unsigned_code(float root, const Levels& levels, uint32_t word) {
    const uint32_t above = bits_of(root + levels.offset) - bits_of(levels.offset);
    return static_cast<uint8_t>((above + (word >> (32 - levels.shift))) >> levels.shift);
}

inline float root_of_code(uint8_t code, const Levels& levels) {
    return float_of(bits_of(levels.offset) + (static_cast<uint32_t>(code) << levels.shift)) - levels.offset;
}

// Of a wide block: the level below, and how far it is to the next one.
inline uint8_t wide_code(float root, int32_t top, uint32_t word) {
    const int32_t bits = static_cast<int32_t>(bits_of(root)), quarter = bits >> 21 & 3, rest = bits & 0x1FFFFF;
    const int32_t above = (rest * levels_in(quarter) + static_cast<int32_t>(word >> 11)) >> 21;
    int32_t code = (bits >> 23) * 16 + levels_before(quarter) + above - top + 255;
    code = code > 255 ? 255 : code < 1 ? 1 : code;
    return static_cast<uint8_t>(bits > 0 ? code : 0);
}

inline float root_of_wide_code(uint8_t code, int32_t top) {
    const int32_t number = code - 255 + top, place = number & 15;
    const int32_t quarter = (place >= levels_before(1)) + (place >= levels_before(2)) + (place >= levels_before(3));
    const int32_t mantissa = (quarter << 21) + (place - levels_before(quarter)) * level_step(quarter);
    return code ? float_of(static_cast<uint32_t>((number >> 4) * (1 << 23) + mantissa)) : 0.0f;
}

// A quotient's code, evenly spaced; `per_unit` makes it a fraction of 24 bits, and shifting rounds down.
constexpr float kQuotientCodes = 127.0f * 0x1p24f - 256.0f;
constexpr float kSmallestQuotient = 0x1p-64f;

inline float quotient_scale(float largest) { return largest >= kSmallestQuotient ? largest : 0.0f; }
inline float per_quotient(float scale) { return scale > 0.0f ? kQuotientCodes / scale : 0.0f; }
inline int8_t quotient_code(float quotient, float per_unit, uint32_t word) {
    return static_cast<int8_t>((static_cast<int32_t>(quotient * per_unit) + static_cast<int32_t>(word >> 8)) >> 24);
}

// What a code of momentum stands for is its square times a unit of the block. Squares are exact, and fit into 16 bits.
inline float signed_square(int8_t code) {
    const int16_t wide = code, magnitude = static_cast<int16_t>(wide < 0 ? -wide : wide);
    return static_cast<float>(static_cast<int16_t>(wide * magnitude));
}
inline float signed_unit(float scale) { return scale / 16129.0f; }  // 127^2
inline float quotient_unit(float scale) { return scale / 127.0f; }

// One block each. `word` is the dither word of the block's first element.

inline void decode_signed(const int8_t* __restrict codes, float* __restrict values, int count, float unit) {
    for (int i = 0; i < count; ++i) values[i] = signed_square(codes[i]) * unit;
}

inline void decode_quotients(const int8_t* __restrict codes, float* __restrict values, int count, float unit) {
    for (int i = 0; i < count; ++i) values[i] = static_cast<float>(codes[i]) * unit;
}

// Square roots of what the codes stand for.
inline void decode_roots(const uint8_t* __restrict codes, float* __restrict roots, int count, float scale) {
    if (is_wide(scale)) {
        const int32_t top = top_level(scale);
        for (int i = 0; i < count; ++i) roots[i] = root_of_wide_code(codes[i], top);
        return;
    }
    const Levels levels = levels_of(scale);
    for (int i = 0; i < count; ++i) roots[i] = root_of_code(codes[i], levels);
}

inline void encode_signed(
    const float* __restrict values, int8_t* __restrict codes, int count, float per_unit, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        const float root = std::copysign(std::sqrt(float_of(finite_magnitude(values[i]))), values[i]);
        codes[i] = signed_code(root, per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

inline void encode_quotients(
    const float* __restrict values, int8_t* __restrict codes, int count, float per_unit, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        codes[i] = quotient_code(values[i], per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

// The smallest root that is not zero, or infinity.
inline float smallest_root(const float* roots, int count) {
    int32_t least = kInfinity;
    for (int i = 0; i < count; ++i) {
        const int32_t bits = static_cast<int32_t>(bits_of(roots[i])), some = bits > 0 ? bits : kInfinity;
        least = some < least ? some : least;
    }
    return float_of(static_cast<uint32_t>(least));
}

// Quotients by roots that a wide block raises to its last level become quotients by that; returns the largest magnitude.
inline float by_last_level(float* __restrict quotients, const float* __restrict roots, int count, float scale) {
    const float last = root_of_wide_code(1, top_level(scale));
    for (int i = 0; i < count; ++i) {
        const float share = roots[i] / last;
        quotients[i] = quotients[i] * (roots[i] < last ? share : 1.0f);
    }
    return largest_magnitude(quotients, count);
}

// From roots, all of them finite.
inline void encode_wide(const float* __restrict roots, uint8_t* __restrict codes, int count, float scale, uint32_t word) {
    const int32_t top = top_level(scale);
    for (int i = 0; i < count; ++i) {
        codes[i] = wide_code(roots[i], top, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

inline void encode_roots(const float* __restrict roots, uint8_t* __restrict codes, int count, float scale, uint32_t word) {
    if (is_wide(scale)) return encode_wide(roots, codes, count, scale, word);
    const Levels levels = levels_of(scale);
    for (int i = 0; i < count; ++i) {
        codes[i] = unsigned_code(roots[i], levels, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

inline float per_signed_unit(float scale) { return scale > 0.0f ? 127.0f / std::sqrt(scale) : 0.0f; }

}  // namespace
