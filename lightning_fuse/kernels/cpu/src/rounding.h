// Roundings and the dither sequence, on integer bits; the twin of formats/rounding.py.
// All loops of the kernels are written so that the compiler vectorises them: no branches, 32-bit lanes.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

constexpr uint32_t kIndexStride = 0x9E3779B1u;
constexpr uint32_t kStepStride = 0x9E3779B9u;
constexpr uint32_t kPhaseUnsigned = 0;
constexpr uint32_t kPhaseSigned = 1u << 31;
constexpr uint32_t kPhaseWeight = 1u << 30;

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

constexpr int32_t kInfinity = 0x7F800000;  // bits; a larger magnitude is a NaN

inline bool is_nan(uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }
inline bool is_finite(uint32_t bits) { return (bits & 0x7FFFFFFFu) < 0x7F800000u; }

// The dither word of element i is first_word(...) + i * kIndexStride, modulo 2^32.
inline uint32_t first_word(int64_t index, int64_t step, uint32_t phase) {
    return static_cast<uint32_t>(index) * kIndexStride + static_cast<uint32_t>(step) * kStepStride + phase;
}

inline float dither_fraction(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f; }

// The sum of a number and a dither fraction, rounded once. The product is exact, so fusing it changes no bit.
inline float plus_dither(float x, uint32_t word) {
#ifdef __FMA__
    return __builtin_fmaf(static_cast<float>(static_cast<int32_t>(word >> 8)), 0x1p-24f, x);
#else
    return x + dither_fraction(word);
#endif
}

inline float from_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

inline uint16_t bf16_nearest(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(is_nan(bits) ? (bits >> 16) | 0x40u : rounded);
}

// The magnitude is rounded; a finite one never becomes infinite: above the last number there is nothing to round up to.
// A NaN is quiet, as arithmetic leaves it, and stays one.
inline uint16_t bf16_dithered(float x, uint32_t word) {
    const uint32_t bits = bits_of(x);
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7FFFFFFFu);
    return static_cast<uint16_t>((bits + (magnitude < 0x7F7F0000 ? word >> 16 : 0u)) >> 16);
}

// Exact, subnormals included: the product moves the exponent by 112 and normalises.
inline float from_fp16(uint16_t half) {
    const uint32_t magnitude = (static_cast<uint32_t>(half) & 0x7FFFu) << 13;
    const uint32_t finite = bits_of(float_of(magnitude) * 0x1p112f);
    const uint32_t value = magnitude >= 0x0F800000u ? magnitude | 0x7F800000u : finite;
    return float_of(value | (static_cast<uint32_t>(half) & 0x8000u) << 16);
}

// To nearest, ties to even. Below 2^-14 the sum with 0.5 rounds at 2^-24, the last place of a subnormal.
inline uint16_t to_fp16(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFFu;
    const uint32_t normal = ((magnitude + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    uint32_t value = magnitude < 0x38800000u ? subnormal : normal;
    value = magnitude >= 0x477FF000u ? 0x7C00u : value;
    value = magnitude > 0x7F800000u ? 0x7E00u : value;
    return static_cast<uint16_t>(value | ((bits >> 16) & 0x8000u));
}

}  // namespace
