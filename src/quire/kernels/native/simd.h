// Vector registers by the compiler's vector extension at the native register width (AVX-512: 16 lanes, AVX: 8, SSE and
// NEON: 4); wider types would go through memory. float32 and bfloat16 in memory, float32 in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <memory>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

// Broadcast.
inline Floats all(float x) { return x - Floats{}; }

// Unaligned access. Not by memcpy: compilers then keep whole arrays of registers in memory.
typedef Floats LooseFloats __attribute__((aligned(4), may_alias));
typedef Halves LooseHalves __attribute__((aligned(2), may_alias));

// bfloat16 bits to the upper halves of 32-bit words, and back. On Arm, GCC would convert them lane by lane, and shifts
// run on only one of the two vector units, while interleaving with zeros runs on both.
#if defined(__aarch64__)
inline Words raised(Halves bits) {
    return (Words)vzip1q_u16(vdupq_n_u16(0), vcombine_u16((uint16x4_t)bits, vdup_n_u16(0)));
}
inline Halves narrowed(Words bits) { return (Halves)vmovn_u32((uint32x4_t)bits); }
#else
inline Words raised(Halves bits) { return __builtin_convertvector(bits, Words) << 16; }
inline Halves narrowed(Words bits) { return __builtin_convertvector(bits, Halves); }
#endif

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
inline Floats load(const bf16* from) {
    const Halves bits = *reinterpret_cast<const LooseHalves*>(from);
    return (Floats)raised(bits);
}

inline void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }
#if defined(__AVX512BF16__)
inline void store(bf16* to, Floats value) {  // round to nearest even
    *reinterpret_cast<LooseHalves*>(to) = (Halves)_mm512_cvtneps_pbh((__m512)value);
}
#else
inline void store(bf16* to, Floats value) {  // round to nearest even; NaN stays NaN
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Words is_nan = (Words)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    *reinterpret_cast<LooseHalves*>(to) = narrowed((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded));
}
#endif

// Round to the precision of T.
template <typename T> inline Floats rounded(Floats value);
template <> inline Floats rounded<float>(Floats value) { return value; }
template <> inline Floats rounded<bf16>(Floats value) {
    bf16 line[LANES];
    store(line, value);
    return load(line);
}

// Load or store the first `count` lanes; the rest is zero.
template <typename T> inline Floats load_some(const T* from, int64_t count) {
    T line[LANES] = {};
    std::memcpy(line, from, count * sizeof(T));
    return load(line);
}
template <typename T> inline void store_some(T* to, Floats value, int64_t count) {
    T line[LANES];
    store(line, value);
    std::memcpy(to, line, count * sizeof(T));
}

// Call body(offset, count) for register-sized pieces; the last one may be shorter.
template <typename Body> inline void in_pieces(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, size - i);
}
template <typename T> inline Floats fetch(const T* from, int64_t count) {
    return count == LANES ? load(from) : load_some(from, count);
}
template <typename T> inline void put(T* to, Floats value, int64_t count) {
    if (count == LANES)
        store(to, value);
    else
        store_some(to, value, count);
}

// body(0), ..., body(N - 1), unrolled with compile-time indices, so that arrays indexed by them stay in registers. A
// body that takes an int and does not use it as a template argument is compiled once.
template <int... I, typename Body>
inline __attribute__((always_inline)) void unroll(std::integer_sequence<int, I...>, Body body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, typename Body> inline __attribute__((always_inline)) void unroll(Body body) {
    unroll(std::make_integer_sequence<int, N>{}, body);
}

// Call body(n, row) for rows [row, end), n rows together: MOST as long as possible, then fewer. n is a compile-time
// constant.
template <int MOST, typename Body> inline void by_rows(int64_t row, int64_t end, Body body) {
    for (; row + MOST <= end; row += MOST) body(std::integral_constant<int, MOST>{}, row);
    if constexpr (MOST > 1) by_rows<(MOST > 4 ? MOST / 2 : MOST - 1)>(row, end, body);
}

// Reduce N lanes to four with `join`, halving each time.
typedef float Quad __attribute__((vector_size(16)));
template <int64_t N, typename V, typename Join> inline Quad fold_to_four(V x, Join join) {
    if constexpr (N == 4) {
        return x;
    } else {
        typedef float Half __attribute__((vector_size(2 * N)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof parts);
        return fold_to_four<N / 2>(join(parts[0], parts[1]), join);
    }
}
inline Quad sum_to_four(Floats x) {
    return fold_to_four<LANES>(x, [](auto a, auto b) { return a + b; });
}
inline float sum(Floats x) {
    const Quad four = sum_to_four(x);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// Select four of the eight lanes of two registers.
template <int A, int B, int C, int D> inline Quad pick(Quad x, Quad y) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(x, y, A, B, C, D);
#else
    typedef int32_t Places __attribute__((vector_size(16)));
    return __builtin_shuffle(x, y, Places{A, B, C, D});
#endif
}

// Horizontal sums of four registers, each in the same order as `sum`, in fewer steps.
inline Quad fold_pair(Floats x, Floats y) {  // (x0 + x2, x1 + x3, y0 + y2, y1 + y3)
    const Quad a = sum_to_four(x), b = sum_to_four(y);
    return pick<0, 1, 4, 5>(a, b) + pick<2, 3, 6, 7>(a, b);
}
inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
    const Quad first = fold_pair(a, b), second = fold_pair(c, d);
#ifdef __aarch64__
    const Quad sums = (Quad)vpaddq_f32((float32x4_t)first, (float32x4_t)second);
#else
    const Quad sums = pick<0, 2, 4, 6>(first, second) + pick<1, 3, 5, 7>(first, second);
#endif
    std::memcpy(to, &sums, sizeof sums);
}

#ifdef __aarch64__
inline Floats larger(Floats a, Floats b) { return (Floats)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)vminnmq_f32((float32x4_t)a, (float32x4_t)b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif

// sum + x * y, an FMA where the CPU has one. By intrinsic: left alone, a compiler fuses in one loop and not in another,
// and a row must have the same bits in both.
inline Floats add_product(Floats sum, Floats x, Floats y) {
#if defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)y);
#elif defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)sum);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)sum);
#else
    return sum + x * y;
#endif
}

// sum + x * scales[LANE], as add_product.
template <int LANE> inline Floats add_scaled(Floats sum, Floats x, Quad scales) {
#ifdef __aarch64__
    return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)scales, LANE);
#else
    return add_product(sum, x, all(scales[LANE]));
#endif
}

// Horizontal maximum.
inline float largest(Floats x) {
#ifdef __aarch64__
    return vmaxnmvq_f32((float32x4_t)x);
#else
    const auto larger_of = [](auto a, auto b) { return a > b ? a : b; };
    const Quad four = fold_to_four<LANES>(x, larger_of);
    return std::max(std::max(four[0], four[2]), std::max(four[1], four[3]));
#endif
}

// 1.5 * 2^23: adding it rounds a value of up to 22 bits to an integer, which is then in the lowest bits of the sum.
constexpr float ROUNDING = 12582912.0f;

// exp(x) by 2^n * p(f), relative error below 2e-7, for x up to LARGEST_EXPONENT; x below -87 gives 0. N registers at
// once, interleaved to hide the FMA latency.
constexpr float LARGEST_EXPONENT = 88.0f;
template <int64_t N> inline void exponentials(Floats (&x)[N]) {
    constexpr float POLYNOMIAL[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                                    1.6666665459e-1f, 5.0000001201e-1f, 1.0f,             1.0f};
    Floats f[N], p[N];
    Words shifted[N];
    for (int64_t i = 0; i < N; ++i) {
        const Floats rounded = add_product(all(ROUNDING), x[i], all(1.44269504088896341f)), n = rounded - ROUNDING;
        shifted[i] = (Words)rounded << 23;
        f[i] = add_product(x[i], n, all(-0.693359375f));
        f[i] = add_product(f[i], n, all(2.12194440e-4f));
        p[i] = all(POLYNOMIAL[0]);
    }
    for (int64_t k = 1; k < 8; ++k)
        for (int64_t i = 0; i < N; ++i) p[i] = add_product(all(POLYNOMIAL[k]), p[i], f[i]);
    for (int64_t i = 0; i < N; ++i) {
        const Words scaled = (Words)p[i] + shifted[i];  // add n to the exponent
        const Words vanishes = (Words)(x[i] < all(-87.0f));  // overrides the result for these lanes
        x[i] = (Floats)(scaled & ~vanishes);
    }
}
inline Floats exponential(Floats x) {
    Floats one[1] = {x};
    exponentials<1>(one);
    return one[0];
}

}  // namespace
