// How moments are kept; the twin of formats/floating.py and formats/int8.py. A codec is two passes over one tile:
// `open` gives float32 values (fp32 in place, without a copy), `close` encodes what the rule made of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "rounding.h"
#include "tables.h"

namespace {

using lightning_fuse::Codec;
using lightning_fuse::Moment;

constexpr int kTile = 1024;  // elements worked on at a time: what a rule reads and writes stays in the first cache
constexpr int kBlock = 128;  // elements per scale, at most

// Where a tile lies; it starts at the start of a block and ends at the end of one.
struct Span {
    int64_t begin;
    int count;
    int64_t row;    // elements in which blocks lie without a cut
    int64_t index;  // of the first element in the unsharded parameter
    int64_t step;   // number of this update, from 1
};

// Calls run(first element of the tile, length, number in the tile) for each block; returns how many there are.
template <class Run>
int each_block(const Span& span, Run run) {
    int number = 0;
    if (span.row % kBlock == 0) {
        for (int first = 0; first < span.count; first += kBlock) run(first, kBlock, number++);
        return number;
    }
    int64_t column = span.begin % span.row;
    for (int first = 0; first < span.count;) {
        const int64_t left = span.row - column;
        const int length = static_cast<int>(left < kBlock ? left : kBlock);
        run(first, length, number++);
        first += length;
        column = left == length ? 0 : column + length;
    }
    return number;
}

inline int count_blocks(const Span& span) {
    return each_block(span, [](int, int, int) {});
}

inline int64_t first_scale(const Span& span) {
    const int64_t per_row = (span.row + kBlock - 1) / kBlock;
    return span.begin / span.row * per_row + span.begin % span.row / kBlock;
}

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

// The smallest float32 on the grid 2^(k/8) that is not below x; 0 for 0.
inline float grid_ceil(float x) {
    // Mantissas of 2^(k/8), rounded to float32; the last one carries into the exponent.
    constexpr uint32_t grid[9] = {0x000000, 0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7, 0x800000};
    const uint32_t bits = bits_of(x), mantissa = bits & 0x7FFFFFu;
    int steps = 0;
    for (int k = 0; k < 8; ++k) steps += mantissa > grid[k];
    return x > 0.0f ? float_of((bits & 0x7F800000u) + grid[steps]) : 0.0f;
}

// One code. What is truncated is never negative, so truncating is rounding down.

inline int8_t signed_code(float value, float per_unit, uint32_t word) {
    const float root = std::sqrt(float_of(finite_magnitude(value)));
    int32_t code = static_cast<int32_t>(root * per_unit + dither_fraction(word));
    code = code > 127 ? 127 : code;
    const int32_t sign = static_cast<int32_t>(bits_of(value)) >> 31;
    return static_cast<int8_t>((code ^ sign) - sign);
}

inline uint8_t unsigned_code(float root, float per_unit, uint32_t word) {
    int32_t code = static_cast<int32_t>(root * per_unit + dither_fraction(word));
    code = code > 255 ? 255 : code;
    // A value > 0 never becomes code 0: 1 for every positive float, 0 for zero, as an integer that vectorises.
    const int32_t least = static_cast<int32_t>((bits_of(root) + 0x7FFFFFFFu) >> 31);
    return static_cast<uint8_t>(code < least ? least : code);
}

// One block each. `word` is the dither word of the block's first element.

inline void decode_signed(const int8_t* __restrict codes, float* __restrict values, int count, float unit) {
    for (int i = 0; i < count; ++i) {
        const float q = static_cast<float>(codes[i]) * unit;
        values[i] = q * std::fabs(q);
    }
}

inline void decode_unsigned(const uint8_t* __restrict codes, float* __restrict values, int count, float unit) {
    for (int i = 0; i < count; ++i) {
        const float x = static_cast<float>(codes[i]) * unit;
        const float square = x * x;
        values[i] = square * square;
    }
}

inline void encode_signed(
    const float* __restrict values, int8_t* __restrict codes, int count, float per_unit, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        codes[i] = signed_code(values[i], per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

inline void encode_unsigned(
    const float* __restrict values, uint8_t* __restrict codes, int count, float per_unit, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        const float root = std::sqrt(std::sqrt(float_of(finite_magnitude(values[i]))));
        codes[i] = unsigned_code(root, per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

// The int8 codecs of one tile, generic over signedness: Signed for first moments, Unsigned for second ones.

struct Signed {
    using Code = int8_t;
    static constexpr uint32_t kPhase = kPhaseSigned;
    static float unit(float scale) { return std::sqrt(scale) / 127.0f; }
    static float scale(float largest) { return largest; }
    static float per_unit(float scale) { return scale > 0.0f ? 127.0f / std::sqrt(scale) : 0.0f; }
    static void decode(const Code* codes, float* values, int n, float unit) { decode_signed(codes, values, n, unit); }
    static void encode(const float* values, Code* codes, int n, float per_unit, uint32_t word) {
        encode_signed(values, codes, n, per_unit, word);
    }
};

struct Unsigned {
    using Code = uint8_t;
    static constexpr uint32_t kPhase = kPhaseUnsigned;
    static float unit(float scale) { return scale / 255.0f; }
    // The root of the largest value is the largest root: a correctly rounded root never changes the order.
    static float scale(float largest) { return grid_ceil(std::sqrt(std::sqrt(largest))); }
    static float per_unit(float scale) { return scale > 0.0f ? 255.0f / scale : 0.0f; }
    static void decode(const Code* codes, float* values, int n, float unit) { decode_unsigned(codes, values, n, unit); }
    static void encode(const float* values, Code* codes, int n, float per_unit, uint32_t word) {
        encode_unsigned(values, codes, n, per_unit, word);
    }
};

template <class Kind>
void open_int8(const Moment& moment, const Span& span, float* values) {
    const float* scale = moment.scale + first_scale(span);
    const auto* codes = static_cast<const typename Kind::Code*>(moment.data) + span.begin;
    each_block(span, [=](int first, int length, int number) {
        Kind::decode(codes + first, values + first, length, Kind::unit(scale[number]));
    });
}

template <class Kind>
void close_int8(const Moment& moment, const Span& span, const float* values) {
    float* scale = moment.scale + first_scale(span);
    auto* codes = static_cast<typename Kind::Code*>(moment.data) + span.begin;
    float per_unit[kTile];
    const int blocks = each_block(
        span, [=](int first, int length, int number) { scale[number] = largest_magnitude(values + first, length); });
    for (int b = 0; b < blocks; ++b) {
        scale[b] = Kind::scale(scale[b]);
        per_unit[b] = Kind::per_unit(scale[b]);
    }
    const uint32_t word = first_word(span.index, span.step, Kind::kPhase);
    each_block(span, [=, &per_unit](int first, int length, int number) {
        const uint32_t here = word + static_cast<uint32_t>(first) * kIndexStride;
        Kind::encode(values + first, codes + first, length, per_unit[number], here);
    });
}

// float32 values of one moment: in place, or in `buffer`.
inline float* open_moment(const Moment& moment, const Span& span, float* buffer) {
    switch (moment.codec) {
        case Codec::kFloat32:
            return static_cast<float*>(moment.data) + span.begin;
        case Codec::kBFloat16Nearest:
        case Codec::kBFloat16Dithered: {
            const uint16_t* kept = static_cast<const uint16_t*>(moment.data) + span.begin;
            for (int i = 0; i < span.count; ++i) buffer[i] = from_bf16(kept[i]);
            break;
        }
        case Codec::kInt8Signed:
            open_int8<Signed>(moment, span, buffer);
            break;
        case Codec::kInt8Unsigned:
            open_int8<Unsigned>(moment, span, buffer);
            break;
    }
    return buffer;
}

inline void close_moment(const Moment& moment, const Span& span, const float* values) {
    switch (moment.codec) {
        case Codec::kFloat32:
            break;
        case Codec::kBFloat16Nearest: {
            uint16_t* kept = static_cast<uint16_t*>(moment.data) + span.begin;
            for (int i = 0; i < span.count; ++i) kept[i] = bf16_nearest(values[i]);
            break;
        }
        case Codec::kBFloat16Dithered: {
            uint16_t* kept = static_cast<uint16_t*>(moment.data) + span.begin;
            const uint32_t word = first_word(span.index, span.step, kPhaseUnsigned);
            for (int i = 0; i < span.count; ++i) {
                kept[i] = bf16_dithered(values[i], word + static_cast<uint32_t>(i) * kIndexStride);
            }
            break;
        }
        case Codec::kInt8Signed:
            close_int8<Signed>(moment, span, values);
            break;
        case Codec::kInt8Unsigned:
            close_int8<Unsigned>(moment, span, values);
            break;
    }
}

}  // namespace
