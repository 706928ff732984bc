// Sums of squares in one order: that of `ordered_sums` in kernels/reference.py.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

// The sum over one piece, fed tile by tile. 32 running sums, whatever the width of the vectors and the length of the
// tiles, added up in one order: the same bits at every level.
class Squares {
  public:
    explicit Squares(int64_t length) : whole_(length - length % kLanes) {}

    void add(const float* x, int count) {
        add_values([x](int i) { return x[i]; }, count);
    }

    // The same of values that are computed on the way: value(i) for i from 0 to count - 1.
    template <class Value>
    void add_values(Value value, int count) {
        double lanes[kLanes];
        std::memcpy(lanes, lanes_, sizeof lanes);
        int i = 0;
        for (; i < count && at_ % kLanes && at_ < whole_; ++i, ++at_) add_square(lanes[at_ % kLanes], value(i));
        for (; count - i >= kLanes && at_ + kLanes <= whole_; i += kLanes, at_ += kLanes) {
            for (int k = 0; k < kLanes; ++k) add_square(lanes[k], value(i + k));
        }
        for (; i < count && at_ < whole_; ++i, ++at_) add_square(lanes[at_ % kLanes], value(i));
        for (; i < count; ++i, ++at_) add_square(rest_, value(i));
        std::memcpy(lanes_, lanes, sizeof lanes);
    }

    double sum() const {
        double lanes[kLanes];
        std::memcpy(lanes, lanes_, sizeof lanes);
        for (int half = kLanes / 2; half; half /= 2) {
            for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
        }
        return lanes[0] + rest_;
    }

  private:
    static constexpr int kLanes = 32;

    // The square of a float32 is exact in float64, so fusing it with the addition changes no bit.
    static void add_square(double& sum, float x) {
        const double wide = x;
#ifdef __FMA__
        sum = __builtin_fma(wide, wide, sum);
#else
        sum += wide * wide;
#endif
    }

    int64_t whole_, at_ = 0;
    double lanes_[kLanes] = {}, rest_ = 0.0;
};

}  // namespace
