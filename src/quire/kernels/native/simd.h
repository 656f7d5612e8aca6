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

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// e^x by 2^n * p(f), relative error below 2e-7 for x in [-87, 88]; smaller x give 0, larger ones e^88.
inline Floats exponential(Floats x) {
    const Floats clamped = smaller(larger(x, all(-87.0f)), all(88.0f));
    const Floats magic = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
    const Floats n = (clamped * 1.44269504088896341f + magic) - magic;
    Floats f = clamped - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    const Floats zero = {};
    return x < all(-87.0f) ? zero : p * scale;
}

}  // namespace
