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

inline void open_quotients(const Moment& moment, const Span& span, float* values) {
    const float* scale = moment.scale + first_scale(span);
    const int8_t* codes = static_cast<const int8_t*>(moment.data) + span.begin;
    each_block(span, [=](int at, int length, int b) {
        decode_quotients(codes + at, values + at, length, quotient_unit(scale[b]));
    });
}

// Values that are not finite become zero.
inline void close_quotients(const Moment& moment, const Span& span, float* values) {
    float* scale = moment.scale + first_scale(span);
    int8_t* codes = static_cast<int8_t*>(moment.data) + span.begin;
    const uint32_t word = first_word(span.index, span.step, kPhaseSigned);
    each_block(span, [=](int at, int length, int b) {
        scale[b] = quotient_scale(drop_not_finite(values + at, length));
        const uint32_t here = word + static_cast<uint32_t>(at) * kIndexStride;
        encode_quotients(values + at, codes + at, length, per_quotient(scale[b]), here);
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
        scale[b] = scale_of(largest_magnitude(roots, length), smallest_root(roots, length));
        encode_roots(roots, codes + at, length, scale[b], word + static_cast<uint32_t>(at) * kIndexStride);
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

// A signed int8 moment with a unit: what is kept is its quotient by the root of the unit, that of the unit as it is kept
// when it is opened, that of the unit's values before they are encoded when it is closed.
inline float* open_relative(const Moment& moment, const Moment& unit, const Span& span, float* values) {
    alignas(64) float roots[kTile];
    open_unit(unit, span, roots);
    open_quotients(moment, span, values);
    for (int i = 0; i < span.count; ++i) values[i] = values[i] * roots[i];
    return values;
}

inline void close_relative(const Moment& moment, const float* unit, const Span& span, float* values) {
    for (int i = 0; i < span.count; ++i) values[i] = values[i] / float_of(finite_magnitude(std::sqrt(unit[i])));
    close_quotients(moment, span, values);
}

}  // namespace
