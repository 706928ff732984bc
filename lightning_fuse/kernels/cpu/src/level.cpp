// The step of all parameters and the sum of squares, for one CPU level. Compiled once per level with other flags and
// another LIGHTNING_FUSE_LEVEL; everything here is in an unnamed namespace, so that no level borrows another's code.
//
// A step walks tiles of 1024 elements: open weight and moments as float32, apply the rule, close them again. Rules,
// codecs and master weights meet only in `step_tile`, as n + m + k functions of a tile that stays in the first cache.
#include <cstdint>

#include "adam_int8.h"
#include "codecs.h"
#include "layout.h"
#include "rules.h"
#include "tables.h"
#include "weights.h"

#define LF_JOIN2(a, b) a##b
#define LF_JOIN(a, b) LF_JOIN2(a, b)
#define LF_NAME(function) LF_JOIN(function##_, LIGHTNING_FUSE_LEVEL)

namespace {

using namespace lightning_fuse;

template <class R>
void update(const Scalars& scalars, int count, float* __restrict p, const float* __restrict g, float* const* moments) {
    const R rule(scalars);
    const float factor = scalars.factor;
    if constexpr (R::kMoments == 0) {
        for (int i = 0; i < count; ++i) p[i] = rule.update(p[i], g[i] * factor);
    } else if constexpr (R::kMoments == 1) {
        float* __restrict a = moments[0];
        for (int i = 0; i < count; ++i) p[i] = rule.update(p[i], g[i] * factor, a[i]);
    } else if constexpr (R::kMoments == 2) {
        float *__restrict a = moments[0], *__restrict b = moments[1];
        for (int i = 0; i < count; ++i) p[i] = rule.update(p[i], g[i] * factor, a[i], b[i]);
    } else {
        float *__restrict a = moments[0], *__restrict b = moments[1], *__restrict c = moments[2];
        for (int i = 0; i < count; ++i) p[i] = rule.update(p[i], g[i] * factor, a[i], b[i], c[i]);
    }
}

struct Variant {
    int moments;
    bool has_unit;  // whether the root of the second moment is the unit of the first
    void (*update)(const Scalars&, int, float*, const float*, float* const*);
    // For a signed and an unsigned int8 moment at once, or null.
    void (*update_int8)(const Scalars&, const Span&, float*, const float*, const Moment*, float*, float*);
};

// In the order of the enumeration `Rule`.
constexpr Variant kVariants[] = {
    {AdamW::kMoments, AdamW::kHasUnit, update<AdamW>, update_int8<AdamW>},
    {AdamWAmsgrad::kMoments, AdamWAmsgrad::kHasUnit, update<AdamWAmsgrad>, nullptr},
    {Adam::kMoments, Adam::kHasUnit, update<Adam>, update_int8<Adam>},
    {AdamAmsgrad::kMoments, AdamAmsgrad::kHasUnit, update<AdamAmsgrad>, nullptr},
    {SGD::kMoments, SGD::kHasUnit, update<SGD>, nullptr},
    {SGDMomentum::kMoments, SGDMomentum::kHasUnit, update<SGDMomentum>, nullptr},
    {SGDNesterov::kMoments, SGDNesterov::kHasUnit, update<SGDNesterov>, nullptr},
    {Lion::kMoments, Lion::kHasUnit, update<Lion>, nullptr},
};

// Elements [begin, begin + count), contiguous: where they are, or gathered into `buffer`.
void* contiguous(void* data, Dtype dtype, const Layout* layout, int64_t begin, int count, void* buffer) {
    if (dtype == Dtype::kFloat32) {
        float* values = static_cast<float*>(data);
        if (!layout) return values + begin;
        gather(values, *layout, begin, count, static_cast<float*>(buffer));
    } else {
        uint16_t* values = static_cast<uint16_t*>(data);
        if (!layout) return values + begin;
        gather(values, *layout, begin, count, static_cast<uint16_t*>(buffer));
    }
    return buffer;
}

const float* open_gradient(const Gradient& grad, int64_t begin, int count, float* raw, float* buffer) {
    const void* from = contiguous(const_cast<void*>(grad.data), grad.dtype, grad.layout, begin, count, raw);
    return widened(grad.dtype, from, count, buffer);
}

void step_tile(const Slot& slot, const Gradient& grad, const Scalars& scalars, const Span& span) {
    alignas(64) float weights[kTile], grads[kTile], raw_param[kTile], raw_grad[kTile], values[kMaxMoments][kTile];
    const Variant& variant = kVariants[static_cast<int>(slot.rule)];
    const float* g = open_gradient(grad, span.begin, span.count, raw_grad, grads);
    void* param = contiguous(slot.param, slot.dtype, slot.layout, span.begin, span.count, raw_param);
    float* weight = open_weight(slot, span, param, weights);
    float* moments[kMaxMoments];
    const bool int8 = variant.update_int8 && slot.moments[0].codec == Codec::kInt8Signed &&
                      slot.moments[1].codec == Codec::kInt8Unsigned;
    if (int8) {
        variant.update_int8(scalars, span, weight, g, slot.moments, values[0], values[1]);
    } else {
        alignas(64) float roots[kTile];
        const bool relative = variant.has_unit && slot.moments[0].codec == Codec::kInt8Signed;
        for (int k = 0; k < variant.moments; ++k) moments[k] = open_moment(slot.moments[k], span, values[k]);
        if (relative) {
            open_unit(slot.moments[1], span, roots);
            from_units(roots, moments[0], span.count);
        }
        variant.update(scalars, span.count, weight, g, moments);
        for (int k = variant.moments - 1; k > 0; --k) close_moment(slot.moments[k], span, moments[k]);
        if (relative) {
            open_unit(slot.moments[1], span, roots);
            to_units(roots, moments[0], span.count);
        }
        if (variant.moments) close_moment(slot.moments[0], span, moments[0]);
    }
    close_weight(slot, span, weight, param);
    if (slot.layout && slot.dtype == Dtype::kFloat32) {
        scatter(static_cast<const float*>(param), *slot.layout, span.begin, span.count, static_cast<float*>(slot.param));
    } else if (slot.layout) {
        scatter(static_cast<const uint16_t*>(param), *slot.layout, span.begin, span.count, static_cast<uint16_t*>(slot.param));
    }
}

// The last start of a block at or before `element`.
int64_t block_start(int64_t element, int64_t row) {
    const int64_t column = element % row;
    return element - column % kBlock;
}

// Whether a rule reads and writes memory directly; a piece is then one tile, for no buffer bounds its length.
bool in_place(const Slot& slot, const Gradient& grad) {
    bool direct = slot.dtype == Dtype::kFloat32 && grad.dtype == Dtype::kFloat32 && !slot.layout && !grad.layout;
    for (int k = 0; k < kVariants[static_cast<int>(slot.rule)].moments; ++k) {
        direct = direct && slot.moments[k].codec == Codec::kFloat32;
    }
    return direct;
}

void step_piece(const Plan& plan, const Piece& piece) {
    const Slot& slot = plan.slots[piece.slot];
    const int64_t tile = in_place(slot, plan.grads[piece.slot]) ? piece.end - piece.begin : kTile;
    for (int64_t begin = piece.begin; begin < piece.end;) {
        const int64_t end = begin + tile < piece.end ? block_start(begin + tile, slot.row) : piece.end;
        const Span span{begin, static_cast<int>(end - begin), slot.row, slot.index_start + begin, *slot.step + 1};
        step_tile(slot, plan.grads[piece.slot], plan.scalars[piece.slot], span);
        begin = end;
    }
}

// 32 running sums, whatever the width of the vectors, added up in one order: the same bits at every level.
double sum_of_squares(const Gradient& grad, const Piece& piece) {
    constexpr int kLanes = 32;
    alignas(64) float raw[kTile], buffer[kTile];
    double lanes[kLanes] = {}, rest = 0.0;
    for (int64_t begin = piece.begin; begin < piece.end; begin += kTile) {
        const int count = static_cast<int>(piece.end - begin < kTile ? piece.end - begin : kTile);
        const float* x = open_gradient(grad, begin, count, raw, buffer);
        const int whole = count - count % kLanes;
        for (int i = 0; i < whole; i += kLanes) {
            for (int k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
        }
        for (int i = whole; i < count; ++i) rest += static_cast<double>(x[i]) * static_cast<double>(x[i]);
    }
    for (int half = kLanes / 2; half; half /= 2) {
        for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
    }
    return lanes[0] + rest;
}

}  // namespace

namespace lightning_fuse {

void LF_NAME(step)(const Plan& plan, int threads) {
    const int64_t count = plan.chunks_count;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t chunk = 0; chunk < count; ++chunk) {
        for (int64_t k = plan.chunks[chunk]; k < plan.chunks[chunk + 1]; ++k) step_piece(plan, plan.pieces[k]);
    }
}

void LF_NAME(sums)(const Gradient* grads, const Piece* pieces, int64_t count, double* partial, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t k = 0; k < count; ++k) partial[k] = sum_of_squares(grads[pieces[k].slot], pieces[k]);
}

}  // namespace lightning_fuse
