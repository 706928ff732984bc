// How moments are kept; the twin of formats/floating.py and formats/blocks.py. A codec is two passes over one tile:
// `open` gives float32 values (fp32 in place, without a copy), `close` encodes what the rule made of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "int8.h"
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

// Whether all blocks of a tile have kBlock elements.
inline bool has_whole_blocks(const Span& span) { return span.row % kBlock == 0; }

// Calls run(first element of the tile, length, number in the tile) for each block; returns how many there are.
template <bool kWhole, class Run>
int each_block(const Span& span, Run run) {
    int number = 0;
    if constexpr (kWhole) {
        for (; number * kBlock < span.count; ++number) run(number * kBlock, kBlock, number);
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

template <class Run>
int each_block(const Span& span, Run run) {
    return has_whole_blocks(span) ? each_block<true>(span, run) : each_block<false>(span, run);
}

inline int64_t first_scale(const Span& span) {
    const int64_t per_row = (span.row + kBlock - 1) / kBlock;
    return span.begin / span.row * per_row + span.begin % span.row / kBlock;
}

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

inline void close_relative(const Moment& moment, Codec of_unit, const float* unit, const Span& span, float* values) {
    alignas(64) float roots[kTile];
    for (int i = 0; i < span.count; ++i) {
        roots[i] = float_of(finite_magnitude(std::sqrt(unit[i])));
        values[i] = values[i] / roots[i];
    }
    if (of_unit == Codec::kInt8Unsigned) {
        each_block(span, [&](int at, int length, int) {
            const float scale = scale_of(largest_magnitude(roots + at, length), smallest_root(roots + at, length));
            if (!is_wide(scale)) return;
            drop_not_finite(values + at, length);
            by_last_level(values + at, roots + at, length, scale);
        });
    }
    close_quotients(moment, span, values);
}

}  // namespace
