// The update rules for one element; the twin of rules/*.py, operation by operation. Built with -ffp-contract=off.
// A rule's scalars come from float64 and are rounded to float32 once; `update` changes its moments in place.
#pragma once

#include <cmath>
#include <cstdint>

#include "tables.h"

namespace {

using lightning_fuse::Group;
using lightning_fuse::kTrust;
using lightning_fuse::Scalars;

// base^exponent by squaring, in the order of the exponent's bits: the same bits everywhere, which pow() is not.
inline double power(double base, int64_t exponent) {
    double result = 1.0;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1) result *= base;
        base *= base;
    }
    return result;
}

// torch.maximum: a NaN on either side wins.
inline float maximum(float a, float b) { return (a > b || a != a) ? a : b; }

struct AdamBase {
    static constexpr int kRelative = 1;  // leading moments in units of the root of the one after them
    float beta1, one_minus_beta1, beta2, one_minus_beta2, eps, step_size, inv_sqrt_correction2, decay;

    explicit AdamBase(const Scalars& s)
        : beta1(s.value[0]), one_minus_beta1(s.value[1]), beta2(s.value[2]), one_minus_beta2(s.value[3]),
          eps(s.value[4]), step_size(s.value[5]), inv_sqrt_correction2(s.value[6]), decay(s.value[7]) {}

    static void scalars(const Group& group, int64_t step, double decay, float* value) {
        value[0] = static_cast<float>(group.beta1);
        value[1] = static_cast<float>(1.0 - group.beta1);
        value[2] = static_cast<float>(group.beta2);
        value[3] = static_cast<float>(1.0 - group.beta2);
        value[4] = static_cast<float>(group.eps);
        value[5] = static_cast<float>(group.lr / (1.0 - power(group.beta1, step)));
        value[6] = static_cast<float>(1.0 / std::sqrt(1.0 - power(group.beta2, step)));
        value[7] = static_cast<float>(decay);
    }

    void average(float g, float& m, float& v) const {
        m = m * beta1 + g * one_minus_beta1;
        v = v * beta2 + (g * g) * one_minus_beta2;
    }

    float move(float p, float m, float root) const {
        const float denominator = root * inv_sqrt_correction2 + eps;
        return p - (m / denominator) * step_size;
    }
};

struct AdamW : AdamBase {
    static constexpr int kMoments = 2;
    using AdamBase::AdamBase;

    static void scalars(const Group& group, int64_t step, float* value) {
        AdamBase::scalars(group, step, 1.0 - group.lr * group.weight_decay, value);
    }

    // `root` is sqrt(v), which int8 state needs again.
    float update(float p, float g, float& m, float& v, float& root) const {
        p = p * decay;
        average(g, m, v);
        root = std::sqrt(v);
        return move(p, m, root);
    }

    float update(float p, float g, float& m, float& v) const {
        float root;
        return update(p, g, m, v, root);
    }
};

struct AdamWAmsgrad : AdamW {
    static constexpr int kMoments = 3;
    using AdamW::AdamW;

    float update(float p, float g, float& m, float& v, float& largest) const {
        p = p * decay;
        average(g, m, v);
        largest = maximum(largest, v);
        return move(p, m, std::sqrt(largest));
    }
};

// Coupled decay: `decay` is the weight decay itself.
struct Adam : AdamBase {
    static constexpr int kMoments = 2;
    using AdamBase::AdamBase;

    static void scalars(const Group& group, int64_t step, float* value) {
        AdamBase::scalars(group, step, group.weight_decay, value);
    }

    float update(float p, float g, float& m, float& v, float& root) const {
        average(g + p * decay, m, v);
        root = std::sqrt(v);
        return move(p, m, root);
    }

    float update(float p, float g, float& m, float& v) const {
        float root;
        return update(p, g, m, v, root);
    }
};

struct AdamAmsgrad : Adam {
    static constexpr int kMoments = 3;
    using Adam::Adam;

    float update(float p, float g, float& m, float& v, float& largest) const {
        average(g + p * decay, m, v);
        largest = maximum(largest, v);
        return move(p, m, std::sqrt(largest));
    }
};

struct SGD {
    static constexpr int kMoments = 0;
    static constexpr int kRelative = 0;
    float lr, weight_decay, momentum, gain;

    explicit SGD(const Scalars& s) : lr(s.value[0]), weight_decay(s.value[1]), momentum(s.value[2]), gain(s.value[3]) {}

    static void scalars(const Group& group, int64_t step, float* value) {
        value[0] = static_cast<float>(group.lr);
        value[1] = static_cast<float>(group.weight_decay);
        value[2] = static_cast<float>(group.momentum);
        value[3] = static_cast<float>(step == 1 ? 1.0 : 1.0 - group.dampening);
    }

    float update(float p, float g) const {
        g = g + p * weight_decay;
        return p - g * lr;
    }
};

struct SGDMomentum : SGD {
    static constexpr int kMoments = 1;
    using SGD::SGD;

    float update(float p, float g, float& b) const {
        g = g + p * weight_decay;
        b = b * momentum + g * gain;
        return p - b * lr;
    }
};

struct SGDNesterov : SGD {
    static constexpr int kMoments = 1;
    using SGD::SGD;

    float update(float p, float g, float& b) const {
        g = g + p * weight_decay;
        b = b * momentum + g * gain;
        return p - (g + b * momentum) * lr;
    }
};

// Layer-wise rules: `other` is the element whose norm the parameter's is compared with, `ratio` the trust ratio of both
// norms in float64. The ratio is a scalar of `update`; it is 1 where a norm is 0 or no number.

struct LARS {
    static constexpr int kMoments = 1;
    static constexpr int kRelative = 0;
    float lr, weight_decay, momentum, trust;

    explicit LARS(const Scalars& s)
        : lr(s.value[0]), weight_decay(s.value[1]), momentum(s.value[2]), trust(s.value[kTrust]) {}

    static void scalars(const Group& group, int64_t, float* value) {
        value[0] = static_cast<float>(group.lr);
        value[1] = static_cast<float>(group.weight_decay);
        value[2] = static_cast<float>(group.momentum);
        value[3] = static_cast<float>(group.trust_coefficient);
        value[4] = static_cast<float>(group.eps);
    }

    static double ratio(double param, double other, const float* value) {
        constexpr double kLimit = 100.0;
        if (!(param > 0.0 && other > 0.0)) return 1.0;
        const double below = other + static_cast<double>(value[1]) * param + static_cast<double>(value[4]);
        const double found = static_cast<double>(value[3]) * param / below;
        return found < kLimit ? found : kLimit;
    }

    float other(float, float g, float) const { return g; }

    float update(float p, float g, float& b) const {
        g = (g + p * weight_decay) * trust;
        b = b * momentum + g;
        return p - b * lr;
    }
};

struct LARSNesterov : LARS {
    using LARS::LARS;

    float update(float p, float g, float& b) const {
        g = (g + p * weight_decay) * trust;
        b = b * momentum + g;
        return p - (g + b * momentum) * lr;
    }
};

struct LAMB : AdamBase {
    static constexpr int kMoments = 2;
    float inv_correction1, weight_decay, lr, trust;

    explicit LAMB(const Scalars& s)
        : AdamBase(s), inv_correction1(s.value[5]), weight_decay(s.value[7]), lr(s.value[8]), trust(s.value[kTrust]) {}

    static void scalars(const Group& group, int64_t step, float* value) {
        AdamBase::scalars(group, step, group.weight_decay, value);
        value[5] = static_cast<float>(1.0 / (1.0 - power(group.beta1, step)));
        value[8] = static_cast<float>(group.lr);
    }

    static double ratio(double param, double other, const float*) {
        return param > 0.0 && other > 0.0 ? param / other : 1.0;
    }

    float direction(float p, float m, float root) const {
        const float denominator = root * inv_sqrt_correction2 + eps;
        return (m * inv_correction1) / denominator + p * weight_decay;
    }

    // What the update will subtract, from copies of the moments.
    float other(float p, float g, float m, float v) const {
        average(g, m, v);
        return direction(p, m, std::sqrt(v));
    }

    float update(float p, float g, float& m, float& v, float& root) const {
        average(g, m, v);
        root = std::sqrt(v);
        return p - (direction(p, m, root) * trust) * lr;
    }

    float update(float p, float g, float& m, float& v) const {
        float root;
        return update(p, g, m, v, root);
    }
};

// The series of rules/ademamix.py, term by term: -1 / log(beta), and exp(-1 / tau).
inline double time_constant(double beta) {
    if (beta == 0.0) return 0.0;
    int exponent;
    const double mantissa = std::frexp(beta, &exponent);
    const double y = (mantissa - 1.0) / (mantissa + 1.0), square = y * y;
    double total = 0.0;
    for (int term = 17; term >= 0; --term) total = total * square + 1.0 / (2 * term + 1);
    return -1.0 / (exponent * 0.6931471805599453 + 2.0 * (y * total));
}

inline double decay_of(double tau) {
    if (tau <= 1.0 / 64.0) return 0.0;
    const double x = (-1.0 / tau) / 256.0;
    double total = 1.0;
    for (int term = 14; term > 0; --term) total = 1.0 + (x / term) * total;
    for (int k = 0; k < 8; ++k) total *= total;
    return total;
}

struct AdEMAMix {
    static constexpr int kMoments = 3;
    static constexpr int kRelative = 2;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, beta3, one_minus_beta3, alpha, eps, inv_correction1,
        inv_sqrt_correction2, lr, decay;

    explicit AdEMAMix(const Scalars& s)
        : beta1(s.value[0]), one_minus_beta1(s.value[1]), beta2(s.value[2]), one_minus_beta2(s.value[3]),
          beta3(s.value[4]), one_minus_beta3(s.value[5]), alpha(s.value[6]), eps(s.value[7]),
          inv_correction1(s.value[8]), inv_sqrt_correction2(s.value[9]), lr(s.value[10]), decay(s.value[11]) {}

    static double scheduled_beta3(const Group& group, double step) {
        if (step >= group.t_beta3) return group.beta3;
        const double first = time_constant(group.beta1);
        const double found = decay_of(first + (time_constant(group.beta3) - first) * (step / group.t_beta3));
        return found < group.beta3 ? found : group.beta3;
    }

    static void scalars(const Group& group, int64_t step, float* value) {
        const double at = static_cast<double>(step), beta3 = scheduled_beta3(group, at);
        const double alpha = at >= group.t_alpha ? group.alpha : group.alpha * (at / group.t_alpha);
        value[0] = static_cast<float>(group.beta1);
        value[1] = static_cast<float>(1.0 - group.beta1);
        value[2] = static_cast<float>(group.beta2);
        value[3] = static_cast<float>(1.0 - group.beta2);
        value[4] = static_cast<float>(beta3);
        value[5] = static_cast<float>(1.0 - beta3);
        value[6] = static_cast<float>(alpha);
        value[7] = static_cast<float>(group.eps);
        value[8] = static_cast<float>(1.0 / (1.0 - power(group.beta1, step)));
        value[9] = static_cast<float>(1.0 / std::sqrt(1.0 - power(group.beta2, step)));
        value[10] = static_cast<float>(group.lr);
        value[11] = static_cast<float>(1.0 - group.lr * group.weight_decay);
    }

    float update(float p, float g, float& fast, float& slow, float& v) const {
        p = p * decay;
        fast = fast * beta1 + g * one_minus_beta1;
        slow = slow * beta3 + g * one_minus_beta3;
        v = v * beta2 + (g * g) * one_minus_beta2;
        const float direction = fast * inv_correction1 + slow * alpha;
        const float denominator = std::sqrt(v) * inv_sqrt_correction2 + eps;
        return p - (direction / denominator) * lr;
    }
};

// Reads betas, lr and weight_decay; the sign of a zero is 0, and a NaN stays one.
struct Lion {
    static constexpr int kMoments = 1;
    static constexpr int kRelative = 0;
    float beta1, one_minus_beta1, beta2, one_minus_beta2, lr, decay;

    explicit Lion(const Scalars& s)
        : beta1(s.value[0]), one_minus_beta1(s.value[1]), beta2(s.value[2]), one_minus_beta2(s.value[3]),
          lr(s.value[4]), decay(s.value[5]) {}

    static void scalars(const Group& group, int64_t, float* value) {
        value[0] = static_cast<float>(group.beta1);
        value[1] = static_cast<float>(1.0 - group.beta1);
        value[2] = static_cast<float>(group.beta2);
        value[3] = static_cast<float>(1.0 - group.beta2);
        value[4] = static_cast<float>(group.lr);
        value[5] = static_cast<float>(1.0 - group.lr * group.weight_decay);
    }

    float update(float p, float g, float& m) const {
        const float c = m * beta1 + g * one_minus_beta1;
        const float sign = c > 0.0f ? 1.0f : c < 0.0f ? -1.0f : c;
        p = p * decay - sign * lr;
        m = m * beta2 + g * one_minus_beta2;
        return p;
    }
};

}  // namespace
