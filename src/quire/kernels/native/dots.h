// Dot products of float32 rows with rows. Each is summed by vector lanes and then reduced, in the same order whatever
// the number of rows.
#pragma once

#include "gemm.h"

namespace {

constexpr int FUSED = 4;      // rows per inner loop, so that their sums stay in registers
constexpr int64_t LINE = 16;  // floats of a cache line

// scores [ROWS, stride] = ROWS rows x `count` keys of `width` floats, four keys at a time for enough independent sums
// to hide the FMA latency. `keys` must be a multiple of four, repeating the last one if needed. `ahead`: what to
// prefetch meanwhile, or null.
template <int ROWS>
void dot_rows(const float* rows, const float* const* keys, int64_t count, int64_t width, const float* const* ahead,
              float* scores, int64_t stride) {
    for (int64_t t = 0; t < count; t += 4) {
        Floats sums[ROWS][4] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            if (ahead != nullptr && i % LINE == 0)
                for (int k = 0; k < 4; ++k) __builtin_prefetch(ahead[t + k] + i);
            Floats entries[4];
            for (int k = 0; k < 4; ++k) entries[k] = load(keys[t + k] + i);
            for (int r = 0; r < ROWS; ++r) {
                const Floats own = load(rows + r * width + i);
                for (int k = 0; k < 4; ++k) sums[r][k] = add_product(sums[r][k], own, entries[k]);
            }
        }
        for (int r = 0; r < ROWS; ++r)
            store_sums(sums[r][0], sums[r][1], sums[r][2], sums[r][3], scores + r * stride + t);
    }
}

// out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T for an unpacked row-major float32 weight. The
// inputs must be a multiple of LANES.
inline void multiply_rows(const float* x, const float* weight, const GemmSizes& sizes, float* out) {
    constexpr int64_t AT_ONCE = 32;
    for_each((sizes.outputs + AT_ONCE - 1) / AT_ONCE, true, [&](int64_t index) {
        const int64_t begin = index * AT_ONCE;
        const int64_t count = std::min(AT_ONCE, sizes.outputs - begin);
        const float* keys[AT_ONCE];
        for (int64_t i = 0; i < AT_ONCE; ++i) keys[i] = weight + (begin + std::min(i, count - 1)) * sizes.inputs;
        by_rows<FUSED>(0, sizes.rows, [&](auto n, int64_t row) {
            float found[FUSED * AT_ONCE];
            dot_rows<n>(x + row * sizes.inputs, keys, count, sizes.inputs, nullptr, found, AT_ONCE);
            for (int r = 0; r < n; ++r)
                std::memcpy(out + (row + r) * sizes.out_stride + begin, found + r * AT_ONCE, count * sizeof(float));
        });
    });
}

}  // namespace
