// Elements of a tensor that is not contiguous, by their row-major index, to and from a contiguous buffer.
#pragma once

#include <cstdint>

#include "tables.h"

namespace {

using lightning_fuse::Layout;

constexpr int kMaxDims = 16;

// Calls run(first, offset, stride, count) for each stretch of the last dimension that [begin, begin + count) holds.
template <class Run>
void each_run(const Layout& layout, int64_t begin, int64_t count, Run run) {
    const int last = static_cast<int>(layout.dims) - 1;
    const int64_t *sizes = layout.sizes(), *strides = layout.strides();
    int64_t place[kMaxDims], offset = 0, rest = begin;
    for (int d = last; d >= 0; --d) {
        place[d] = rest % sizes[d];
        rest /= sizes[d];
        offset += place[d] * strides[d];
    }
    for (int64_t done = 0; done < count;) {
        const int64_t left = sizes[last] - place[last], length = left < count - done ? left : count - done;
        run(done, offset, strides[last], length);
        done += length;
        place[last] += length;
        offset += length * strides[last];
        for (int d = last; d > 0 && place[d] == sizes[d]; --d) {
            offset += strides[d - 1] - place[d] * strides[d];
            place[d] = 0;
            ++place[d - 1];
        }
    }
}

template <class T>
void gather(const T* from, const Layout& layout, int64_t begin, int64_t count, T* to) {
    each_run(layout, begin, count, [=](int64_t first, int64_t offset, int64_t stride, int64_t length) {
        for (int64_t i = 0; i < length; ++i) to[first + i] = from[offset + i * stride];
    });
}

template <class T>
void scatter(const T* from, const Layout& layout, int64_t begin, int64_t count, T* to) {
    each_run(layout, begin, count, [=](int64_t first, int64_t offset, int64_t stride, int64_t length) {
        for (int64_t i = 0; i < length; ++i) to[offset + i * stride] = from[first + i];
    });
}

}  // namespace
