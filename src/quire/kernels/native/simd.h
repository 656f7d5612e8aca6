// One register at a time: GCC's vector extension at the width of the machine's registers; wider ones would go through
// memory. float32 and bfloat16 in memory, float32 in registers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
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

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Floats load(const bf16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
#if defined(__AVX512BF16__)
inline void store(bf16* to, Floats value) {  // to nearest, ties to even
    const __m256bh line = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &line, sizeof line);
}
#else
inline void store(bf16* to, Floats value) {  // to nearest, ties to even; a NaN stays a NaN
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Words is_nan = (Words)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const Halves out = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded), Halves);
    std::memcpy(to, &out, sizeof out);
}
#endif

template <typename T> inline Floats rounded(Floats value);
template <> inline Floats rounded<float>(Floats value) { return value; }
template <> inline Floats rounded<bf16>(Floats value) {
    bf16 line[LANES];
    store(line, value);
    return load(line);
}

// The first `count` lanes, zeros behind them; and back.
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

// body(offset, count) for pieces of a register, the last one shorter if need be.
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

// body(n, row) for rows [row, end), n of them together: MOST while there are so many, then fewer.
template <int MOST, typename Body> inline void by_rows(int64_t row, int64_t end, Body body) {
    for (; row + MOST <= end; row += MOST) body(std::integral_constant<int, MOST>{}, row);
    if constexpr (MOST > 1) by_rows<(MOST > 4 ? MOST / 2 : MOST - 1)>(row, end, body);
}

template <int64_t N, typename V> inline float halve(V x) {  // N numbers, folded in the middle until four are left
    if constexpr (N == 4) {
        return (x[0] + x[2]) + (x[1] + x[3]);
    } else {
        typedef float Half __attribute__((vector_size(2 * N)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof parts);
        return halve<N / 2>(parts[0] + parts[1]);
    }
}
inline float sum(Floats x) { return halve<LANES>(x); }

// The sums of four registers, each added up as `sum` does it, in fewer steps.
typedef float Quad __attribute__((vector_size(16)));
template <int64_t N, typename V> inline Quad fold_to_four(V x) {
    if constexpr (N == 4) {
        return x;
    } else {
        typedef float Half __attribute__((vector_size(2 * N)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof parts);
        return fold_to_four<N / 2>(parts[0] + parts[1]);
    }
}
inline Quad fold_pair(Floats x, Floats y) {  // (x0 + x2, x1 + x3, y0 + y2, y1 + y3)
    typedef int32_t Places __attribute__((vector_size(16)));
    const Quad a = fold_to_four<LANES>(x), b = fold_to_four<LANES>(y);
    return __builtin_shuffle(a, b, Places{0, 1, 4, 5}) + __builtin_shuffle(a, b, Places{2, 3, 6, 7});
}
inline void store_sums(Floats a, Floats b, Floats c, Floats d, float* to) {
    const Quad first = fold_pair(a, b), second = fold_pair(c, d);
#ifdef __aarch64__
    const Quad sums = (Quad)vpaddq_f32((float32x4_t)first, (float32x4_t)second);
#else
    typedef int32_t Places __attribute__((vector_size(16)));
    const Quad sums = __builtin_shuffle(first, second, Places{0, 2, 4, 6}) +
                      __builtin_shuffle(first, second, Places{1, 3, 5, 7});
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

// sum + x * scales[LANE], rounded once where the machine can.
template <int LANE> inline Floats add_scaled(Floats sum, Floats x, Quad scales) {
#ifdef __aarch64__
    return (Floats)vfmaq_laneq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)scales, LANE);
#else
    return sum + x * scales[LANE];
#endif
}

inline float largest(Floats x) {
#ifdef __aarch64__
    return vmaxnmvq_f32((float32x4_t)x);
#else
    float most = x[0];
    for (int64_t i = 1; i < LANES; ++i) most = std::max(most, x[i]);
    return most;
#endif
}

// e^x by 2^n * p(f), relative error below 2e-7 for x in [-87, 88]; smaller x give 0, larger ones e^88. Several at once:
// one step of all comes before the next, so that none waits for its own last one.
template <int64_t N> inline void exponentials(Floats (&x)[N]) {
    constexpr float POLYNOMIAL[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                                    4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
    const Floats magic = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number, in the lowest bits
    Floats f[N], p[N];
    Words shifted[N];
    for (int64_t i = 0; i < N; ++i) {
        const Floats clamped = smaller(x[i], all(88.0f));
        const Floats rounded = clamped * 1.44269504088896341f + magic, n = rounded - magic;
        shifted[i] = (Words)rounded;
        f[i] = clamped - n * 0.693359375f;
        f[i] = f[i] + n * 2.12194440e-4f;
        p[i] = all(POLYNOMIAL[0]);
    }
    for (int64_t k = 1; k < 6; ++k)
        for (int64_t i = 0; i < N; ++i) p[i] = p[i] * f[i] + POLYNOMIAL[k];
    for (int64_t i = 0; i < N; ++i) {
        p[i] = p[i] * f[i] * f[i] + f[i] + 1.0f;
        const Floats scale = (Floats)((shifted[i] << 23) + 0x3F800000u);
        const Ints vanishes = x[i] < all(-87.0f);  // whatever the steps above made of them
        x[i] = (Floats)((Ints)(p[i] * scale) & ~vanishes);
    }
}
inline Floats exponential(Floats x) {
    Floats one[1] = {x};
    exponentials<1>(one);
    return one[0];
}

}  // namespace
