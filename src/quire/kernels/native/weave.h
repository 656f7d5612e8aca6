// Interleaves rows for gemms: the inner kernels read the same input of several rows from adjacent elements.
#pragma once

#include "simd.h"

namespace {

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Interleave `inputs` inputs of N rows of x, `stride` apart, to [inputs][N]: with AVX-512 a transpose of 8 x 8.
template <int N, typename T> inline void weave(const T* x, int64_t stride, int64_t inputs, float* to) {
    int64_t i = 0;
#ifdef __AVX512F__
    if constexpr (N == 8 && std::is_same_v<T, float>)
        for (; i + 8 <= inputs; i += 8, to += 64) {
            __m512 both[4], pairs[4], fours[4];
            for (int r = 0; r < 4; ++r) {  // rows r and r + 4
                const __m512 upper = _mm512_castps256_ps512(_mm256_loadu_ps(x + r * stride + i));
                const __m256d lower = _mm256_castps_pd(_mm256_loadu_ps(x + (r + 4) * stride + i));
                both[r] = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(upper), lower, 1));
            }
            for (int r = 0; r < 4; r += 2) {
                pairs[r] = _mm512_unpacklo_ps(both[r], both[r + 1]);
                pairs[r + 1] = _mm512_unpackhi_ps(both[r], both[r + 1]);
            }
            for (int k = 0; k < 4; ++k) {  // inputs k and k + 4 of four rows, then of the other four
                const __m512d a = _mm512_castps_pd(pairs[k / 2]), b = _mm512_castps_pd(pairs[k / 2 + 2]);
                fours[k] = _mm512_castpd_ps(k % 2 ? _mm512_unpackhi_pd(a, b) : _mm512_unpacklo_pd(a, b));
            }
            for (int k = 0; k < 4; k += 2) {
                _mm512_storeu_ps(to + 8 * k, _mm512_shuffle_f32x4(fours[k], fours[k + 1], 0x88));
                _mm512_storeu_ps(to + 8 * k + 32, _mm512_shuffle_f32x4(fours[k], fours[k + 1], 0xDD));
            }
        }
#endif
    for (; i < inputs; ++i)
        for (int r = 0; r < N; ++r) *to++ = as_float(x[r * stride + i]);
}

}  // namespace
