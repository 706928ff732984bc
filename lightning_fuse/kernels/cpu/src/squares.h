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
        double lanes[kLanes];
        std::memcpy(lanes, lanes_, sizeof lanes);
        int i = 0;
        for (; i < count && at_ % kLanes && at_ < whole_; ++i, ++at_) lanes[at_ % kLanes] += square(x[i]);
        for (; count - i >= kLanes && at_ + kLanes <= whole_; i += kLanes, at_ += kLanes) {
            for (int k = 0; k < kLanes; ++k) lanes[k] += square(x[i + k]);
        }
        for (; i < count && at_ < whole_; ++i, ++at_) lanes[at_ % kLanes] += square(x[i]);
        for (; i < count; ++i, ++at_) rest_ += square(x[i]);
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
    static double square(float x) { return static_cast<double>(x) * static_cast<double>(x); }

    int64_t whole_, at_ = 0;
    double lanes_[kLanes] = {}, rest_ = 0.0;
};

}  // namespace
