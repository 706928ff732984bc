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

// Mantissas of 2^(k/16), rounded to float32; the last one carries into the exponent. Every second is one of 2^(k/8).
constexpr uint32_t kMantissas[17] = {
    0x000000, 0x05AAC3, 0x0B95C2, 0x11C3D3, 0x1837F0, 0x1EF532, 0x25FED7, 0x2D583F, 0x3504F3,
    0x3D08A4, 0x45672A, 0x4E248C, 0x5744FD, 0x60CCDF, 0x6AC0C7, 0x75257D, 0x800000};
constexpr int kWideLevels = 96;
constexpr int kWideShare = 8;
constexpr int32_t kLevelOfOne = 16 * 127;

// The smallest float32 on the grid 2^(k/8) that is not below x; 0 for 0.
inline float grid_ceil(float x) {
    const uint32_t bits = bits_of(x), mantissa = bits & 0x7FFFFFu;
    int steps = 0;
    for (int k = 0; k < 8; ++k) steps += mantissa > kMantissas[2 * k];
    return x > 0.0f ? float_of((bits & 0x7F800000u) + kMantissas[2 * steps]) : 0.0f;
}

// The level of a given number, 2^(number / 16 - 127).
inline float level(int32_t number) {
    return float_of((static_cast<uint32_t>(number >> 4) << 23) + kMantissas[number & 15]);
}

// The number of the level that is the square of a scale on the grid 2^(k/8).
inline int32_t top_level(float scale) {
    const uint32_t bits = bits_of(scale) & 0x7FFFFFFFu, mantissa = bits & 0x7FFFFFu;
    int32_t eighths = 0;
    for (int k = 1; k < 8; ++k) eighths += mantissa >= kMantissas[2 * k];
    return (static_cast<int32_t>(bits >> 23) - 127) * 32 + eighths * 4 + kLevelOfOne;
}

// A block is wide where an eighth of what is not zero in it lies below 1/64 of its top level: where the sum of these
// shares is not negative, and something is there.
inline float wide_limit(float scale) { return level(top_level(scale) - kWideLevels); }
inline int32_t wide_share(float root, float limit) {
    const int32_t bits = static_cast<int32_t>(bits_of(root)), side = root < limit ? kWideShare - 1 : -1;
    return bits > 0 ? side : 0;
}

// One code. What is truncated is never negative, so truncating is rounding down.

// `root` is the square root of the value's magnitude, with the value's sign.
inline int8_t signed_code(float root, float per_unit, uint32_t word) {
    int32_t code = static_cast<int32_t>(plus_dither(std::fabs(root) * per_unit, word));
    code = code > 127 ? 127 : code;
    return static_cast<int8_t>(static_cast<int32_t>(bits_of(root)) < 0 ? -code : code);
}

inline int32_t unsigned_code(float fourth, float per_unit, uint32_t word) {
    int32_t code = static_cast<int32_t>(plus_dither(fourth * per_unit, word));
    code = code > 255 ? 255 : code;
    // A value > 0 never becomes code 0: 1 for every positive float, 0 for zero, as an integer that vectorises.
    const int32_t least = static_cast<int32_t>((bits_of(fourth) + 0x7FFFFFFFu) >> 31);
    return code < least ? least : code;
}

// A code of a wide block: the level below, and how far it is to the next one.
inline uint8_t level_code(float root, int32_t top, uint32_t word) {
    const uint32_t bits = bits_of(root), mantissa = bits & 0x7FFFFFu;
    int below = 0;
    for (int k = 1; k < 16; ++k) below += mantissa >= kMantissas[k];
    const float rest = static_cast<float>(static_cast<int32_t>(mantissa - kMantissas[below]));
    const float gap = static_cast<float>(static_cast<int32_t>(kMantissas[below + 1] - kMantissas[below]));
    const int32_t number = static_cast<int32_t>(bits >> 23) * 16 + below + static_cast<int32_t>(rest / gap + dither_fraction(word));
    int32_t code = number - top + 255;
    code = code > 255 ? 255 : code < 1 ? 1 : code;
    return static_cast<uint8_t>(root > 0.0f ? code : 0);
}

inline float level_of_code(uint8_t code, int32_t top) { return code ? level(code - 255 + top) : 0.0f; }

// What a code stands for is its square times a unit of the block. Squares are exact, and fit into 16 bits.
inline float signed_square(int8_t code) {
    const int16_t wide = code, magnitude = static_cast<int16_t>(wide < 0 ? -wide : wide);
    return static_cast<float>(static_cast<int16_t>(wide * magnitude));
}
inline float unsigned_square(uint8_t code) {
    const uint16_t wide = code;
    return static_cast<float>(static_cast<int32_t>(static_cast<uint16_t>(wide * wide)));
}
inline float signed_unit(float scale) { return scale / 16129.0f; }             // 127^2
inline float unsigned_unit(float scale) { return (scale * scale) / 65025.0f; }  // 255^2

// One block each. `word` is the dither word of the block's first element.

inline void decode_signed(const int8_t* __restrict codes, float* __restrict values, int count, float unit) {
    for (int i = 0; i < count; ++i) values[i] = signed_square(codes[i]) * unit;
}

// Square roots of what the codes stand for.
inline void decode_roots(const uint8_t* __restrict codes, float* __restrict roots, int count, float scale) {
    if (bits_of(scale) >> 31) {
        const int32_t top = top_level(scale);
        for (int i = 0; i < count; ++i) roots[i] = level_of_code(codes[i], top);
        return;
    }
    const float unit = unsigned_unit(scale);
    for (int i = 0; i < count; ++i) roots[i] = unsigned_square(codes[i]) * unit;
}

inline void encode_signed(
    const float* __restrict values, int8_t* __restrict codes, int count, float per_unit, uint32_t word) {
    for (int i = 0; i < count; ++i) {
        const float root = std::copysign(std::sqrt(float_of(finite_magnitude(values[i]))), values[i]);
        codes[i] = signed_code(root, per_unit, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

inline void encode_levels(const float* __restrict roots, uint8_t* __restrict codes, int count, float scale, uint32_t word) {
    const int32_t top = top_level(scale);
    for (int i = 0; i < count; ++i) {
        codes[i] = level_code(roots[i], top, word + static_cast<uint32_t>(i) * kIndexStride);
    }
}

// From roots, all of them finite; returns the scale to store.
inline float encode_roots(const float* __restrict roots, uint8_t* __restrict codes, int count, float scale, uint32_t word) {
    const float per_unit = scale > 0.0f ? 255.0f / scale : 0.0f, limit = wide_limit(scale);
    int32_t share = 0;
    for (int i = 0; i < count; ++i) {
        const uint32_t here = word + static_cast<uint32_t>(i) * kIndexStride;
        codes[i] = static_cast<uint8_t>(unsigned_code(std::sqrt(roots[i]), per_unit, here));
        share += wide_share(roots[i], limit);
    }
    if (share < 0 || !(scale > 0.0f)) return scale;
    encode_levels(roots, codes, count, scale, word);
    return -scale;
}

inline float per_signed_unit(float scale) { return scale > 0.0f ? 127.0f / std::sqrt(scale) : 0.0f; }

// The int8 codecs of one tile.

inline void open_signed(const Moment& moment, const Span& span, float* values) {
    const float* scale = moment.scale + first_scale(span);
    const int8_t* codes = static_cast<const int8_t*>(moment.data) + span.begin;
    each_block(span, [=](int at, int length, int b) {
        decode_signed(codes + at, values + at, length, signed_unit(scale[b]));
    });
}

inline void close_signed(const Moment& moment, const Span& span, const float* values) {
    float* scale = moment.scale + first_scale(span);
    int8_t* codes = static_cast<int8_t*>(moment.data) + span.begin;
    const uint32_t word = first_word(span.index, span.step, kPhaseSigned);
    each_block(span, [=](int at, int length, int b) {
        scale[b] = largest_magnitude(values + at, length);
        const uint32_t here = word + static_cast<uint32_t>(at) * kIndexStride;
        encode_signed(values + at, codes + at, length, per_signed_unit(scale[b]), here);
    });
}

inline void open_roots(const Moment& moment, const Span& span, float* roots) {
    const float* scale = moment.scale + first_scale(span);
    const uint8_t* codes = static_cast<const uint8_t*>(moment.data) + span.begin;
    each_block(span, [=](int at, int length, int b) { decode_roots(codes + at, roots + at, length, scale[b]); });
}

inline void close_unsigned(const Moment& moment, const Span& span, const float* values) {
    float* scale = moment.scale + first_scale(span);
    uint8_t* codes = static_cast<uint8_t*>(moment.data) + span.begin;
    const uint32_t word = first_word(span.index, span.step, kPhaseUnsigned);
    each_block(span, [=](int at, int length, int b) {
        float roots[kBlock];
        for (int i = 0; i < length; ++i) roots[i] = std::sqrt(float_of(finite_magnitude(values[at + i])));
        // The root of the largest value is the largest root: a correctly rounded root never changes the order.
        const float largest = grid_ceil(std::sqrt(largest_magnitude(roots, length)));
        scale[b] = encode_roots(roots, codes + at, length, largest, word + static_cast<uint32_t>(at) * kIndexStride);
    });
}

// The dither word of the first element of a bfloat16 moment.
inline uint32_t bf16_word(const Moment& moment, const Span& span) {
    return first_word(span.index, span.step, moment.codec == Codec::kBFloat16Signed ? kPhaseSigned : kPhaseUnsigned);
}

// float32 values of one moment: in place, or in `buffer`.
inline float* open_moment(const Moment& moment, const Span& span, float* buffer) {
    switch (moment.codec) {
        case Codec::kFloat32:
            return static_cast<float*>(moment.data) + span.begin;
        case Codec::kBFloat16Signed:
        case Codec::kBFloat16Unsigned: {
            const uint16_t* kept = static_cast<const uint16_t*>(moment.data) + span.begin;
            for (int i = 0; i < span.count; ++i) buffer[i] = from_bf16(kept[i]);
            break;
        }
        case Codec::kInt8Signed:
            open_signed(moment, span, buffer);
            break;
        case Codec::kInt8Unsigned:
            open_roots(moment, span, buffer);
            for (int i = 0; i < span.count; ++i) buffer[i] = buffer[i] * buffer[i];
            break;
    }
    return buffer;
}

inline void close_moment(const Moment& moment, const Span& span, const float* values) {
    switch (moment.codec) {
        case Codec::kFloat32:
            break;
        case Codec::kBFloat16Signed:
        case Codec::kBFloat16Unsigned: {
            uint16_t* kept = static_cast<uint16_t*>(moment.data) + span.begin;
            const uint32_t word = bf16_word(moment, span);
            for (int i = 0; i < span.count; ++i) {
                kept[i] = bf16_dithered(values[i], word + static_cast<uint32_t>(i) * kIndexStride);
            }
            break;
        }
        case Codec::kInt8Signed:
            close_signed(moment, span, values);
            break;
        case Codec::kInt8Unsigned:
            close_unsigned(moment, span, values);
            break;
    }
}

// Square roots of what a moment is kept as; 0 where they are not finite.
inline void open_unit(const Moment& moment, const Span& span, float* roots) {
    if (moment.codec == Codec::kInt8Unsigned) return open_roots(moment, span, roots);
    const float* values = open_moment(moment, span, roots);
    for (int i = 0; i < span.count; ++i) roots[i] = float_of(finite_magnitude(std::sqrt(values[i])));
}

// From a moment relative to its unit to the moment, and back. The first roots are those of the unit as it is kept, the
// second those of its values before they are encoded; a quotient that is not finite is kept as a zero.
inline void from_units(const float* __restrict roots, float* __restrict values, int count) {
    for (int i = 0; i < count; ++i) values[i] = values[i] * roots[i];
}

inline void to_units(const float* __restrict unit, float* __restrict values, int count) {
    for (int i = 0; i < count; ++i) values[i] = values[i] / float_of(finite_magnitude(std::sqrt(unit[i])));
}

}  // namespace
