// Kernels on each row separately: norms, rotary positions, activations, cache writes.
#pragma once

#include "simd.h"
#include "team.h"

namespace {

// out = x / rms(x) * weight, per row of x [rows, size]; rounds to T before multiplying by the weight.
template <typename T, typename W>
void rms_norm(const T* x, int64_t stride, const W* weight, T* out, int64_t out_stride, int64_t rows, int64_t size,
              float eps) {
    for_each(rows, rows * size > 32768, [&](int64_t row) {
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
    });
}

// (x - mean) / standard deviation * weight + bias; weight_bias [2, size].
template <typename T>
void layer_norm(const T* x, int64_t stride, const T* weight_bias, T* out, int64_t out_stride, int64_t rows,
                int64_t size, float eps) {
    const T* bias = weight_bias + size;
    for_each(rows, rows * size > 32768, [&](int64_t row) {
        const T* in = x + row * stride;
        T* to = out + row * out_stride;
        Floats total = {};
        in_pieces(size, [&](int64_t i, int64_t count) { total = total + fetch(in + i, count); });
        const float mean = sum(total) / static_cast<float>(size);
        Floats squares = {};
        in_pieces(size, [&](int64_t i, int64_t count) {
            float line[LANES] = {};  // lanes past the end stay zero
            put(line, fetch(in + i, count) - mean, count);
            const Floats value = load(line);
            squares = add_product(squares, value, value);
        });
        const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
        in_pieces(size, [&](int64_t i, int64_t count) {
            const Floats normal = (fetch(in + i, count) - mean) * scale;
            put(to + i, add_product(fetch(bias + i, count), normal, fetch(weight_bias + i, count)), count);
        });
    });
}

// log(sum(exp(x))) of each row of x [rows, size], given the row maxima best [rows], to out [rows]. A row is summed in
// pieces of a fixed size, which are added in order, so the result does not depend on other rows or the number of
// threads.
inline void log_sum_exp(const float* x, const float* best, float* out, int64_t rows, int64_t size) {
    constexpr int64_t AT_ONCE = 4, PIECE_SIZE = 4096;
    const int64_t pieces = (size + PIECE_SIZE - 1) / PIECE_SIZE;
    std::vector<float> sums(rows * pieces);
    for_each(rows * pieces, rows * size > 8192, [&](int64_t i) {
        const int64_t row = i / pieces, begin = i % pieces * PIECE_SIZE, end = std::min(begin + PIECE_SIZE, size);
        const float* from = x + row * size;
        const Floats largest = all(best[row]);
        Floats totals[AT_ONCE] = {};
        for (int64_t at = begin; at < end; at += AT_ONCE * LANES) {
            Floats values[AT_ONCE];
            if (at + AT_ONCE * LANES <= end) {
                for (int64_t k = 0; k < AT_ONCE; ++k) values[k] = load(from + at + k * LANES) - largest;
            } else {
                float line[AT_ONCE * LANES];
                std::fill(line, line + AT_ONCE * LANES, -INFINITY);
                std::memcpy(line, from + at, (end - at) * sizeof(float));
                for (int64_t k = 0; k < AT_ONCE; ++k) values[k] = load(line + k * LANES) - largest;
            }
            exponentials<AT_ONCE>(values);
            for (int64_t k = 0; k < AT_ONCE; ++k) totals[k] = totals[k] + values[k];
        }
        sums[i] = sum((totals[0] + totals[1]) + (totals[2] + totals[3]));
    });
    for (int64_t row = 0; row < rows; ++row) {
        double total = 0;
        for (int64_t piece = 0; piece < pieces; ++piece) total += sums[row * pieces + piece];
        out[row] = static_cast<float>(best[row] + std::log(total));
    }
}

// Apply rotary positions to the first `dim` elements of heads [rows, heads, head_dim] in place; cos and sin [rows,
// dim], the first half of sin negated.
template <typename T>
void rotate(T* x, int64_t stride, const T* cos, const T* sin, int64_t angle_stride, int64_t rows, int64_t heads,
            int64_t head_dim, int64_t dim) {
    const int64_t half = dim / 2;
    for_each(rows, rows * heads * dim > 65536, [&](int64_t row) {
        const T* c = cos + row * angle_stride;
        const T* s = sin + row * angle_stride;
        for (int64_t head = 0; head < heads; ++head) {
            T* first = x + row * stride + head * head_dim;
            T* second = first + half;
            in_pieces(half, [&](int64_t i, int64_t count) {
                const Floats a = fetch(first + i, count), b = fetch(second + i, count);
                put(first + i, add_product(b * fetch(s + i, count), a, fetch(c + i, count)), count);
                put(second + i, add_product(a * fetch(s + half + i, count), b, fetch(c + half + i, count)), count);
            });
        }
    });
}

enum Activation : int64_t { SILU, GELU, GELU_TANH, RELU, RELU_SQUARED };

// Sigmoid: 1 / (1 + e^-x).
inline Floats logistic(Floats x) { return 1.0f / (1.0f + exponential(smaller(-x, all(LARGEST_EXPONENT)))); }

// x times the normal CDF at x: Abramowitz and Stegun 7.1.26, error below 1e-7 |x|.
inline Floats gelu(Floats x) {
    const Floats z = larger(x, -x) * 0.70710678118654752f, t = 1.0f / add_product(all(1.0f), z, all(0.3275911f));
    Floats p = all(1.061405429f);
    for (const float next : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        p = add_product(all(next), p, t);
    const Floats tail = 0.5f * p * t * exponential(-z * z);  // 1 - CDF at |x|
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <Activation KIND> inline Floats activated(Floats x) {
    if constexpr (KIND == SILU) return x / (1.0f + exponential(smaller(-x, all(LARGEST_EXPONENT))));
    if constexpr (KIND == GELU) return gelu(x);
    if constexpr (KIND == GELU_TANH)
        return x * logistic(1.5957691216057308f * add_product(x, 0.044715f * x * x, x));  // 0.5 (1 + tanh z)
    const Floats positive = x < 0.0f ? all(0.0f) : x;
    return KIND == RELU_SQUARED ? positive * positive : positive;
}

// Apply an activation to x [count] in place.
template <Activation KIND, typename T> void activate_all(T* x, int64_t count) {
    for_each((count + 4096 - 1) / 4096, count > 16384, [&](int64_t index) {
        const int64_t begin = index * 4096;
        in_pieces(std::min<int64_t>(4096, count - begin), [&](int64_t i, int64_t n) {
            put(x + begin + i, activated<KIND>(fetch(x + begin + i, n)), n);
        });
    });
}

// Apply the activation `kind` to x [count] in place.
template <typename T> void activate(int64_t kind, T* x, int64_t count) {
    switch (kind) {
        case SILU: activate_all<SILU>(x, count); break;
        case GELU: activate_all<GELU>(x, count); break;
        case GELU_TANH: activate_all<GELU_TANH>(x, count); break;
        case RELU: activate_all<RELU>(x, count); break;
        case RELU_SQUARED: activate_all<RELU_SQUARED>(x, count); break;
    }
}

// A clamped silu gate: with g = min(gate, limit) and u = up clamped to [-limit, limit], the result is g * sigmoid(alpha
// * g) * (u + shift).
struct Clamp {
    double limit, alpha, shift;
};

// out [rows, size] = gated(gate, up), elementwise, for gate_up [rows, 2 * size].
template <typename T, typename Gated>
void gate_by(const T* gate_up, T* out, int64_t rows, int64_t size, const Gated& gated) {
    for_each(rows, rows * size > 16384, [&](int64_t row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* to = out + row * size;
        in_pieces(size, [&](int64_t i, int64_t count) {
            put(to + i, gated(fetch(gate + i, count), fetch(up + i, count)), count);
        });
    });
}

template <Activation KIND, typename T> void gate_all(const T* gate_up, T* out, int64_t rows, int64_t size) {
    gate_by(gate_up, out, rows, size, [](Floats gate, Floats up) { return rounded<T>(activated<KIND>(gate)) * up; });
}

// The clamped silu gate for gate_up [rows, 2 * size], see Clamp.
template <typename T> void gate_clamped(const Clamp& clamp, const T* gate_up, T* out, int64_t rows, int64_t size) {
    const Floats limit = all(static_cast<float>(clamp.limit));
    const float alpha = static_cast<float>(clamp.alpha), shift = static_cast<float>(clamp.shift);
    gate_by(gate_up, out, rows, size, [&](Floats gate, Floats up) {
        const Floats kept = smaller(gate, limit);
        return kept * logistic(kept * alpha) * (larger(smaller(up, limit), -limit) + shift);
    });
}

// out [rows, size] = activation(gate) * up for gate_up [rows, 2 * size]; with a clamp, the clamped silu gate.
template <typename T>
void gate(int64_t kind, const Clamp* clamp, const T* gate_up, T* out, int64_t rows, int64_t size) {
    if (clamp != nullptr) return gate_clamped(*clamp, gate_up, out, rows, size);
    switch (kind) {
        case SILU: gate_all<SILU>(gate_up, out, rows, size); break;
        case GELU: gate_all<GELU>(gate_up, out, rows, size); break;
        case GELU_TANH: gate_all<GELU_TANH>(gate_up, out, rows, size); break;
        case RELU: gate_all<RELU>(gate_up, out, rows, size); break;
        case RELU_SQUARED: gate_all<RELU_SQUARED>(gate_up, out, rows, size); break;
    }
}

// Copy keys and values [rows, heads, dim] to slots [rows, heads] of caches viewed as [slots, dim]. value may be null.
template <typename T>
void write_cache(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* key_cache, T* value_cache,
                 const int64_t* slots, int64_t rows, int64_t heads, int64_t dim) {
    for_each(rows, rows * heads * dim > 65536, [&](int64_t row) {
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t to = slots[row * heads + head] * dim;
            std::memcpy(key_cache + to, key + row * key_stride + head * dim, dim * sizeof(T));
            if (value != nullptr) std::memcpy(value_cache + to, value + row * value_stride + head * dim, dim * sizeof(T));
        }
    });
}

}  // namespace
