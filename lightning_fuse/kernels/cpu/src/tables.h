// What crosses the border between Python and C++: plain tables of 64-bit fields, written by kernels/cpu/plan.py.
// Every change here is a change of kAbi, and of the same names in kernels/cpu/tables.py.
#pragma once

#include <cstdint>

namespace lightning_fuse {

constexpr int64_t kAbi = 6;
constexpr int kMaxMoments = 3;

enum class Rule : int64_t { kAdamW, kAdamWAmsgrad, kAdam, kAdamAmsgrad, kSGD, kSGDMomentum, kSGDNesterov, kLion,
                           kLARS, kLARSNesterov, kLAMB, kAdEMAMix };
enum class Codec : int64_t { kFloat32, kBFloat16Signed, kBFloat16Unsigned, kInt8Signed, kInt8Unsigned };
enum class Master : int64_t { kNone, kCopy, kSplit, kSplit8 };
enum class Dtype : int64_t { kFloat32, kBFloat16, kFloat16 };

// Strides of a tensor that is not contiguous, in elements; followed in memory by `dims` sizes and `dims` strides.
// A null pointer stands for contiguous.
struct Layout {
    int64_t dims;
    const int64_t* sizes() const { return &dims + 1; }
    const int64_t* strides() const { return &dims + 1 + dims; }
};

struct Moment {
    Codec codec;
    void* data;    // values or codes, row-major
    float* scale;  // one per block, or null
};

// One parameter and its state: all that stays the same from step to step.
struct Slot {
    Rule rule;
    Dtype dtype;
    Master master;
    int64_t group;  // row of the table of hyperparameters
    void* param;
    const Layout* layout;
    void* kept;     // what the master weight keeps beside the parameter, or null
    double* step;   // updates applied so far, a whole number
    int64_t numel;
    int64_t row;          // elements in which blocks lie without a cut
    int64_t first_index;  // index of the first element in the whole, unsharded parameter
    Moment moments[kMaxMoments];
};

struct Gradient {
    const void* data;
    Dtype dtype;
    const Layout* layout;
};

// Elements [begin, end) of one slot, in row-major order; both are starts of blocks, or the end.
struct Piece {
    int64_t slot;
    int64_t begin;
    int64_t end;
};

// A parameter group, float64 as the user gave them. What a rule does not have is 0.
struct Group {
    double lr, weight_decay, beta1, beta2, eps, momentum, dampening, maximize, trust_coefficient, beta3, alpha, t_alpha, t_beta3;
};

// Scalars of one update, each rounded to float32 once; what they are called is the rule's affair.
constexpr int kTrust = 12;  // where the trust ratio of a layer-wise rule is put once its norms are known

struct Scalars {
    float factor;  // of the gradient, its sign included
    float value[kTrust + 1];
};

enum class Phase : int64_t { kMeasure, kStep };

// What one thread takes at a time, in this order: pieces [from, to). A step may come only after all measures of its wave.
struct Task {
    Phase phase;
    int64_t from, to;
    int64_t wave;  // -1 where nothing is measured
};

// Pieces [from, to), all of some slots: small enough that a cache still holds them when they are stepped.
struct Wave {
    int64_t from, to;
    int64_t tasks;  // of measuring
    int64_t left;   // of those, in the step that runs
    int64_t ready;
};

struct Plan {
    int64_t slots_count;
    const Slot* slots;
    const Gradient* grads;
    const Piece* pieces;
    int64_t tasks_count;
    const Task* tasks;
    const Group* groups;
    Scalars* scalars;  // room for one per slot
    int64_t waves_count;
    Wave* waves;
    double* norms;  // room for two sums of squares per piece, where there are waves
};

// What one CPU level offers. `threads` is a request: a build without OpenMP runs one.
struct Level {
    const char* name;
    bool (*runs_here)();
    void (*step)(const Plan& plan, int threads);
    void (*sums)(const Gradient* grads, const Piece* pieces, int64_t count, double* partial, int threads);
};

}  // namespace lightning_fuse
