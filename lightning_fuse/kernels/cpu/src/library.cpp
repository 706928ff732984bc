// What Python calls: the table of CPU levels, one step, one sum of squares. Pointers only; see tables.h.
#include <cstdint>

#include "rules.h"
#include "tables.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(LIGHTNING_FUSE_X86_LEVELS)
#include <cpuid.h>
#endif

namespace lightning_fuse {

#define LF_DECLARE(level)                  \
    void step_##level(const Plan&, int);   \
    void sums_##level(const Gradient*, const Piece*, int64_t, double*, int);
LF_DECLARE(baseline)
#if defined(LIGHTNING_FUSE_X86_LEVELS)
LF_DECLARE(v3)
LF_DECLARE(v4)
#endif

namespace {

bool always() { return true; }

#if defined(LIGHTNING_FUSE_X86_LEVELS)
bool has_v3() {
    unsigned a, b, c = 0, d;
    const bool half_floats = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    const bool zero_counts = __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & (1u << 5));
    return half_floats && zero_counts && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
}

bool has_v4() {
    return has_v3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Lowest first.
const Level kLevels[] = {
    {"baseline", always, step_baseline, sums_baseline},
#if defined(LIGHTNING_FUSE_X86_LEVELS)
    {"x86-64-v3", has_v3, step_v3, sums_v3},
    {"x86-64-v4", has_v4, step_v4, sums_v4},
#endif
};
constexpr int kLevelsCount = sizeof kLevels / sizeof kLevels[0];

template <class R>
void scalars_of(const Group& group, int64_t step, float* value) {
    R::scalars(group, step, value);
}

// In the order of the enumeration `Rule`.
constexpr void (*kScalars[])(const Group&, int64_t, float*) = {
    scalars_of<AdamW>, scalars_of<AdamWAmsgrad>, scalars_of<Adam>, scalars_of<AdamAmsgrad>,
    scalars_of<SGD>,   scalars_of<SGDMomentum>,  scalars_of<SGDNesterov>, scalars_of<Lion>,
    scalars_of<LARS>,  scalars_of<LARSNesterov>, scalars_of<LAMB>, scalars_of<AdEMAMix>,
};

// Scalars of every slot. Most slots share group, rule and step with the one before.
void fill_scalars(const Plan& plan, float factor) {
    for (int64_t i = 0; i < plan.slots_count; ++i) {
        const Slot& slot = plan.slots[i];
        const Group& group = plan.groups[slot.group];
        const Slot* before = i ? &plan.slots[i - 1] : nullptr;
        if (before && before->group == slot.group && before->rule == slot.rule && *before->step == *slot.step) {
            plan.scalars[i] = plan.scalars[i - 1];
            continue;
        }
        kScalars[static_cast<int>(slot.rule)](group, static_cast<int64_t>(*slot.step) + 1, plan.scalars[i].value);
        plan.scalars[i].factor = group.maximize != 0.0 ? -factor : factor;
    }
}

}  // namespace
}  // namespace lightning_fuse

using namespace lightning_fuse;

#define LF_EXPORT __attribute__((visibility("default")))

extern "C" {

LF_EXPORT int64_t lightning_fuse_abi() { return kAbi; }

LF_EXPORT int lightning_fuse_levels() { return kLevelsCount; }

LF_EXPORT const char* lightning_fuse_level_name(int level) { return kLevels[level].name; }

LF_EXPORT int lightning_fuse_level_runs_here(int level) { return kLevels[level].runs_here(); }

LF_EXPORT int lightning_fuse_has_openmp() {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// Steps every slot of the plan and returns 1, or none, where *found_inf is not 0, and returns 0.
// Null pointers stand for a factor of 1 and a found_inf of 0.
LF_EXPORT int lightning_fuse_step(int level, const Plan* plan, const float* factor, const float* found_inf, int threads) {
    if (found_inf && *found_inf != 0.0f) return 0;
    fill_scalars(*plan, factor ? *factor : 1.0f);
    kLevels[level].step(*plan, threads);
    for (int64_t i = 0; i < plan->slots_count; ++i) *plan->slots[i].step += 1.0;
    return 1;
}

// Asks the system to back memory with huge pages: a step then misses the address cache far less. Only whole huge pages
// inside [begin, begin + bytes) are asked for, before they are first written. Advice: where it is not taken, nothing happens.
LF_EXPORT void lightning_fuse_prefer_huge_pages(void* begin, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t kHuge = uintptr_t{2} << 20;
    const uintptr_t from = (reinterpret_cast<uintptr_t>(begin) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t to = (reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
    if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
    (void)begin, (void)bytes;
#endif
}

// The sum of all squares; `partial` has room for one number per piece.
LF_EXPORT double lightning_fuse_sum_of_squares(
    int level, const Gradient* grads, const Piece* pieces, int64_t count, double* partial, int threads) {
    kLevels[level].sums(grads, pieces, count, partial, threads);
    double total = 0.0;
    for (int64_t k = 0; k < count; ++k) total += partial[k];
    return total;
}

}
