// The step of all parameters and the sum of squares, for one CPU level. Compiled once per level with other flags and
// another LIGHTNING_FUSE_LEVEL; everything here is in an unnamed namespace, so that no level borrows another's code.
//
// A step walks tiles of 1024 elements: open weight and moments as float32, apply the rule, close them again, as n + m + k
// functions of a tile that stays in the first cache. Rules, codecs and master weights meet only in `step_tile`. Where all
// moments are bfloat16, or int8 as Adam keeps them, one loop opens, updates and closes them with the rule, and bfloat16
// weights with it: n loops per kind of weight, for memory waits while a tile goes through one loop after another.
#include <cmath>
#include <cstdint>
#include <thread>

#include "adam_int8.h"
#include "codecs.h"
#include "layout.h"
#include "moments_bf16.h"
#include "rules.h"
#include "squares.h"
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

// Adds up the elements whose norm a layer-wise rule compares with the parameter's.
template <class R>
void add_others(const Scalars& scalars, int count, const float* p, const float* g, float* const* moments, Squares& to) {
    const R rule(scalars);
    const float factor = scalars.factor;
    const float* a = moments[0];
    if constexpr (R::kMoments == 1) {
        to.add_values([=](int i) { return rule.other(p[i], g[i] * factor, a[i]); }, count);
    } else {
        const float* b = moments[1];
        to.add_values([=](int i) { return rule.other(p[i], g[i] * factor, a[i], b[i]); }, count);
    }
}

// Kinds of weights that a loop reads and writes itself: float32 in place or in buffers, and bfloat16 without and with a
// split master weight. Gradients are of the same type.
enum Weights { kFloat32, kBf16, kSplit, kSplit8, kWeights };
using UpdateBf16 = void (*)(const Scalars&, const Span&, const Operands&, const Moment*);
using UpdateInt8 = void (*)(const Scalars&, const Span&, const Operands&, const Moment*, float*, float*);

struct Variant {
    int moments;
    int relative;  // leading moments whose unit is the root of the one after them
    void (*update)(const Scalars&, int, float*, const float*, float* const*);
    UpdateBf16 bf16[kWeights] = {};  // for bfloat16 moments
    UpdateInt8 int8[kWeights] = {};  // for a signed and an unsigned int8 moment at once
    // Of layer-wise rules, or null.
    void (*add_others)(const Scalars&, int, const float*, const float*, float* const*, Squares&) = nullptr;
    double (*ratio)(double, double, const float*) = nullptr;
};

template <class R>
constexpr Variant variant() {
    Variant found{R::kMoments, R::kRelative, update<R>};
    if constexpr (R::kMoments > 0) {
        found.bf16[kFloat32] = update_bf16<R, Float32Weight>;
        found.bf16[kBf16] = update_bf16<R, Bf16Weight>;
        found.bf16[kSplit] = update_bf16<R, SplitWeight>;
        found.bf16[kSplit8] = update_bf16<R, Split8Weight>;
    }
    if constexpr (R::kMoments == 2) {
        found.int8[kFloat32] = update_int8<R, Float32Weight>;
        found.int8[kBf16] = update_int8<R, Bf16Weight>;
        found.int8[kSplit] = update_int8<R, SplitWeight>;
        found.int8[kSplit8] = update_int8<R, Split8Weight>;
    }
    return found;
}

template <class R, class Measured>
constexpr Variant layer_wise() {
    Variant found = variant<R>();
    found.add_others = add_others<Measured>;
    found.ratio = R::ratio;
    return found;
}

// In the order of the enumeration `Rule`.
constexpr Variant kVariants[] = {
    variant<AdamW>(), variant<AdamWAmsgrad>(), variant<Adam>(), variant<AdamAmsgrad>(),
    variant<SGD>(), variant<SGDMomentum>(), variant<SGDNesterov>(), variant<Lion>(),
    layer_wise<LARS, LARS>(), layer_wise<LARSNesterov, LARS>(), layer_wise<LAMB, LAMB>(), variant<AdEMAMix>(),
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

const void* contiguous(const Gradient& grad, const Span& span, void* buffer) {
    return contiguous(const_cast<void*>(grad.data), grad.dtype, grad.layout, span.begin, span.count, buffer);
}

void* contiguous(const Slot& slot, const Span& span, void* buffer) {
    return contiguous(slot.param, slot.dtype, slot.layout, span.begin, span.count, buffer);
}

const float* open_gradient(const Gradient& grad, const Span& span, float* raw, float* buffer) {
    return widened(grad.dtype, contiguous(grad, span, raw), span, buffer);
}

// How many leading moments are kept in units of the root of the one after them.
int relative_moments(const Variant& variant, const Slot& slot) {
    return slot.moments[0].codec == Codec::kInt8Signed ? variant.relative : 0;
}

// float32 values of all moments: in place, or in the buffers.
void open_moments(
    const Variant& variant, const Slot& slot, const Span& span, float (*buffers)[kTile], float** moments) {
    const int relative = relative_moments(variant, slot);
    for (int k = 0; k < relative; ++k) moments[k] = open_relative(slot.moments[k], slot.moments[relative], span, buffers[k]);
    for (int k = relative; k < variant.moments; ++k) moments[k] = open_moment(slot.moments[k], span, buffers[k]);
}

// The rule over float32 values of all moments.
void step_opened(
    const Variant& variant, const Slot& slot, const Scalars& scalars, const Span& span, float* weight, const float* g,
    float (*buffers)[kTile]) {
    const int relative = relative_moments(variant, slot);
    float* moments[kMaxMoments];
    open_moments(variant, slot, span, buffers, moments);
    variant.update(scalars, span.count, weight, g, moments);
    for (int k = 0; k < relative; ++k) {
        close_relative(slot.moments[k], slot.moments[relative].codec, moments[relative], span, moments[k]);
    }
    for (int k = relative; k < variant.moments; ++k) close_moment(slot.moments[k], span, moments[k]);
}

// The kind of weights that lie as a loop reads them itself; other kinds and gradients go through float32 buffers.
Weights weights_of(const Slot& slot, const Gradient& grad) {
    if (slot.dtype != Dtype::kBFloat16 || grad.dtype != Dtype::kBFloat16 || slot.master == Master::kCopy) return kFloat32;
    return slot.master == Master::kSplit ? kSplit : slot.master == Master::kSplit8 ? kSplit8 : kBf16;
}

bool all_bf16(const Variant& variant, const Slot& slot) {
    bool all = variant.moments > 0;
    for (int k = 0; k < variant.moments; ++k) all = all && is_bf16(slot.moments[k]);
    return all;
}

bool all_int8(const Variant& variant, const Slot& slot) {
    return variant.int8[kFloat32] && slot.moments[0].codec == Codec::kInt8Signed &&
           slot.moments[1].codec == Codec::kInt8Unsigned;
}

// Moments that the rule's own loop reads and writes as they are kept, if there is such a loop.
bool step_kept(
    const Variant& variant, Weights weights, const Slot& slot, const Scalars& scalars, const Span& span,
    const Operands& operands, float (*buffers)[kTile]) {
    if (all_int8(variant, slot)) {
        variant.int8[weights](scalars, span, operands, slot.moments, buffers[0], buffers[1]);
    } else if (all_bf16(variant, slot)) {
        variant.bf16[weights](scalars, span, operands, slot.moments);
    } else {
        return false;
    }
    return true;
}

void step_tile(const Slot& slot, const Gradient& grad, const Scalars& scalars, const Span& span) {
    alignas(64) float weights[kTile], grads[kTile], raw_param[kTile], raw_grad[kTile], values[kMaxMoments][kTile];
    const Variant& variant = kVariants[static_cast<int>(slot.rule)];
    void* param = contiguous(slot, span, raw_param);
    const void* from = contiguous(grad, span, raw_grad);
    const Weights kind = weights_of(slot, grad);
    if (kind == kFloat32 || !step_kept(variant, kind, slot, scalars, span, {param, from, slot.kept}, values)) {
        const float* g = widened(grad.dtype, from, span, grads);
        float* weight = open_weight(slot, span, param, weights);
        if (!step_kept(variant, kFloat32, slot, scalars, span, {weight, g, nullptr}, values)) {
            step_opened(variant, slot, scalars, span, weight, g, values);
        }
        close_weight(slot, span, weight, param);
    }
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

// Calls run(span) for each tile of a piece.
template <class Run>
void each_tile(const Plan& plan, const Piece& piece, int64_t tile, Run run) {
    const Slot& slot = plan.slots[piece.slot];
    for (int64_t begin = piece.begin; begin < piece.end;) {
        const int64_t end = begin + tile < piece.end ? block_start(begin + tile, slot.row) : piece.end;
        run(Span{begin, static_cast<int>(end - begin), slot.row, slot.first_index + begin, static_cast<int64_t>(*slot.step) + 1});
        begin = end;
    }
}

// Whether a rule reads and writes memory directly; a piece is then one tile, for no buffer bounds its length.
bool in_place(const Slot& slot, const Gradient& grad) {
    bool direct = slot.dtype == Dtype::kFloat32 && grad.dtype == Dtype::kFloat32 && !slot.layout && !grad.layout;
    for (int k = 0; k < kVariants[static_cast<int>(slot.rule)].moments; ++k) {
        direct = direct && slot.moments[k].codec == Codec::kFloat32;
    }
    return direct;
}

// int8 takes half tiles: half a page of float32 is read, then memory waits for as long as it is encoded.
void step_piece(const Plan& plan, const Piece& piece) {
    const Slot& slot = plan.slots[piece.slot];
    const bool int8 = all_int8(kVariants[static_cast<int>(slot.rule)], slot);
    const int64_t tile = in_place(slot, plan.grads[piece.slot]) ? piece.end - piece.begin : int8 ? kTile / 2 : kTile;
    each_tile(plan, piece, tile, [&](const Span& span) {
        step_tile(slot, plan.grads[piece.slot], plan.scalars[piece.slot], span);
    });
}

double sum_of_squares(const Gradient& grad, const Piece& piece) {
    alignas(64) float raw[kTile], buffer[kTile];
    Squares squares(piece.end - piece.begin);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kTile) {
        const int count = static_cast<int>(piece.end - begin < kTile ? piece.end - begin : kTile);
        squares.add(open_gradient(grad, Span{begin, count, 0, 0, 0}, raw, buffer), count);
    }
    return squares.sum();
}

// The first phase of a layer-wise rule: what a step would see, summed and thrown away. Writes nothing but the two sums,
// and a master copy whose parameter somebody has written to.
void measure_piece(const Plan& plan, int64_t number) {
    alignas(64) float weights[kTile], grads[kTile], raw_param[kTile], raw_grad[kTile], values[kMaxMoments][kTile];
    const Piece& piece = plan.pieces[number];
    const Slot& slot = plan.slots[piece.slot];
    const Variant& variant = kVariants[static_cast<int>(slot.rule)];
    if (!variant.add_others) return;
    Squares own(piece.end - piece.begin), other(piece.end - piece.begin);
    each_tile(plan, piece, kTile, [&](const Span& span) {
        const float* g = open_gradient(plan.grads[piece.slot], span, raw_grad, grads);
        void* param = contiguous(slot, span, raw_param);
        const float* weight = open_weight(slot, span, param, weights);
        float* moments[kMaxMoments];
        open_moments(variant, slot, span, values, moments);
        own.add(weight, span.count);
        variant.add_others(plan.scalars[piece.slot], span.count, weight, g, moments, other);
    });
    plan.norms[2 * number] = own.sum();
    plan.norms[2 * number + 1] = other.sum();
}

// Between the phases: the trust ratios of all slots of a wave.
void set_ratios(const Plan& plan, const Wave& wave) {
    for (int64_t k = wave.from; k < wave.to;) {
        const int64_t index = plan.pieces[k].slot;
        const Variant& variant = kVariants[static_cast<int>(plan.slots[index].rule)];
        double own = 0.0, other = 0.0;
        for (; k < wave.to && plan.pieces[k].slot == index; ++k) {
            own += variant.ratio ? plan.norms[2 * k] : 0.0;
            other += variant.ratio ? plan.norms[2 * k + 1] : 0.0;
        }
        float* value = plan.scalars[index].value;
        if (variant.ratio) value[kTrust] = static_cast<float>(variant.ratio(std::sqrt(own), std::sqrt(other), value));
    }
}

// Tasks are taken in order and measures wait for nobody, so whoever waits here waits for measures that somebody is at.
void run(const Plan& plan, const Task& task) {
    Wave* wave = task.wave < 0 ? nullptr : plan.waves + task.wave;
    if (task.phase == Phase::kMeasure) {
        for (int64_t k = task.from; k < task.to; ++k) measure_piece(plan, k);
        if (__atomic_sub_fetch(&wave->left, 1, __ATOMIC_ACQ_REL)) return;
        set_ratios(plan, *wave);
        __atomic_store_n(&wave->ready, 1, __ATOMIC_RELEASE);
        return;
    }
    while (wave && !__atomic_load_n(&wave->ready, __ATOMIC_ACQUIRE)) std::this_thread::yield();
    for (int64_t k = task.from; k < task.to; ++k) step_piece(plan, plan.pieces[k]);
}

}  // namespace

namespace lightning_fuse {

void LF_NAME(step)(const Plan& plan, int threads) {
    int64_t next = 0;
    for (int64_t k = 0; k < plan.waves_count; ++k) {
        plan.waves[k].left = plan.waves[k].tasks;
        plan.waves[k].ready = 0;
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t task; (task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < plan.tasks_count;) {
        run(plan, plan.tasks[task]);
    }
}

void LF_NAME(sums)(const Gradient* grads, const Piece* pieces, int64_t count, double* partial, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t k = 0; k < count; ++k) partial[k] = sum_of_squares(grads[pieces[k].slot], pieces[k]);
}

}  // namespace lightning_fuse
