// Kernels that take each row of a batch by itself: norm, rotation, activation, cache write.
#pragma once

#include "simd.h"

namespace {

template <typename T>
void rms_norm(const T* x, int64_t stride, const T* weight, T* out, int64_t out_stride, int64_t rows, int64_t size,
              float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 32768)
    for (int64_t row = 0; row < rows; ++row) {
        const T* in = x + row * stride;
        T* to = out + row * out_stride;
        Floats squares = {};
        in_pieces(size, [&](int64_t i, int64_t count) {
            const Floats value = fetch(in + i, count);
            squares = add_product(squares, value, value);
        });
        const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
        in_pieces(size, [&](int64_t i, int64_t count) {
            put(to + i, rounded<T>(fetch(in + i, count) * scale) * fetch(weight + i, count), count);
        });
    }
}

// heads [rows, heads, dim] turned in place; cos and sin [rows, dim], the first half of sin carrying the minus sign.
template <typename T>
void rotate(T* x, int64_t stride, const T* cos, const T* sin, int64_t angle_stride, int64_t rows, int64_t heads,
            int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 65536)
    for (int64_t row = 0; row < rows; ++row) {
        const T* c = cos + row * angle_stride;
        const T* s = sin + row * angle_stride;
        for (int64_t head = 0; head < heads; ++head) {
            T* first = x + row * stride + head * dim;
            T* second = first + half;
            in_pieces(half, [&](int64_t i, int64_t count) {
                const Floats a = fetch(first + i, count), b = fetch(second + i, count);
                put(first + i, add_product(b * fetch(s + i, count), a, fetch(c + i, count)), count);
                put(second + i, add_product(a * fetch(s + half + i, count), b, fetch(c + half + i, count)), count);
            });
        }
    }
}

enum Activation : int64_t { SILU, GELU_TANH };

inline Floats activate(int64_t activation, Floats x) {
    Floats inside = x;
    if (activation == GELU_TANH) {  // 0.5 (1 + tanh z) is sigmoid(2 z)
        inside = add_product(x, x * x * x, all(0.044715f)) * 1.5957691216057308f;
    }
    return x / (1.0f + exponential(smaller(-inside, all(LARGEST_EXPONENT))));
}

// gate_up [rows, 2 * size] -> activation(gate) * up [rows, size]
template <typename T>
void gate(int64_t activation, const T* gate_up, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* to = out + row * size;
        in_pieces(size, [&](int64_t i, int64_t count) {
            put(to + i, rounded<T>(activate(activation, fetch(gate + i, count))) * fetch(up + i, count), count);
        });
    }
}

// Keys and values [rows, heads, dim] to slots [rows, heads] of a cache seen as [slots, dim].
template <typename T>
void write_cache(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* key_cache, T* value_cache,
                 const int64_t* slots, int64_t rows, int64_t heads, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > 65536)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t to = slots[row * heads + head] * dim;
            std::memcpy(key_cache + to, key + row * key_stride + head * dim, dim * sizeof(T));
            std::memcpy(value_cache + to, value + row * value_stride + head * dim, dim * sizeof(T));
        }
}

}  // namespace
