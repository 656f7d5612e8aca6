// Gated delta nets, see kernels/delta.py. Each run of a row's tokens is computed token by token, so the result does not
// depend on how a prompt is cut into chunks.
#pragma once

#include "recurrent.h"

namespace {

// The parameters of a gated delta net layer.
struct PackedDelta {
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t gates;  // buffer with strengths, then decays [rows, 2 * value_heads]
    const float *rate, *bias, *norm;  // [value_heads] twice, [value_dim]
    double eps;

    int64_t channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
    int64_t matrix() const { return key_dim * value_dim; }
};

// Scale x [size] to unit length times `scale`, in float32. Returns the factor.
template <typename T> float unit(const T* x, int64_t size, float scale, float* to) {
    Floats squares = {};
    in_pieces(size, [&](int64_t i, int64_t count) {
        const Floats value = fetch(x + i, count);
        squares = add_product(squares, value, value);
    });
    const float factor = scale / std::sqrt(sum(squares) + 1e-6f);
    in_pieces(size, [&](int64_t i, int64_t count) { put(to + i, fetch(x + i, count) * factor, count); });
    return factor;
}

// The delta rule for one token and one head: reads the state matrix [key_dim, value_dim] at `from`, writes the updated
// one to `to` (may be the same), and computes the token's output.
struct DeltaStep {
    const float *query, *key;
    float decay, strength, both;  // both: dot product of query and key
    int64_t key_dim, value_dim;

    // N vector registers of columns of the state matrix.
    template <int N, typename T>
    void columns(const T* value, const float* from, float* to, int64_t count, float* read) const {
        Floats known[N] = {}, base[N] = {}, change[N];
        const auto width = [&](int i) { return N == 1 ? count : LANES; };
        for (int64_t k = 0; k < key_dim; ++k)
            for (int i = 0; i < N; ++i) {
                const Floats line = fetch(from + k * value_dim + i * LANES, width(i));
                known[i] = add_product(known[i], line, all(key[k]));
                base[i] = add_product(base[i], line, all(query[k]));
            }
        for (int i = 0; i < N; ++i) {
            change[i] = (fetch(value + i * LANES, width(i)) - known[i] * decay) * strength;
            put(read + i * LANES, add_product(base[i] * decay, change[i], all(both)), width(i));
        }
        for (int64_t k = 0; k < key_dim; ++k)
            for (int i = 0; i < N; ++i) {
                const int64_t at = k * value_dim + i * LANES;
                put(to + at, add_product(fetch(from + at, width(i)) * decay, change[i], all(key[k])), width(i));
            }
    }

    // All columns: updates the state and stores the output `read` [value_dim].
    template <typename T> void go(const T* value, const float* from, float* to, float* read) const {
        int64_t i = 0;
        for (; i + 4 * LANES <= value_dim; i += 4 * LANES) columns<4>(value + i, from + i, to + i, LANES, read + i);
        for (; i < value_dim; i += LANES)
            columns<1>(value + i, from + i, to + i, std::min(LANES, value_dim - i), read + i);
    }
};

// Gated delta net for one head over one run: delta rule, RMS norm, and the silu gate z [tokens, value size]; out
// [tokens, value size].
template <typename T>
void delta_run(const T* mixed, const T* z, int64_t z_stride, const T* gates, const PackedDelta& delta,
               const StateMemory& memory, int64_t run, int64_t head, T* out) {
    const int64_t key_dim = delta.key_dim, value_dim = delta.value_dim, keys = delta.key_heads * key_dim;
    const int64_t key_head = head / (delta.value_heads / delta.key_heads), heads = delta.value_heads;
    std::vector<float> query(key_dim), key(key_dim), read(value_dim);
    const auto [begin, end] = memory.runs[run];
    const float* from = nullptr;
    for (int64_t each = begin; each < end; ++each) {
        const StateSegment& segment = memory.segments[each];
        float* to = memory.at(segment.written) + head * delta.matrix();
        if (segment.read >= 0) {
            from = memory.at(segment.read) + head * delta.matrix();
        } else if (from == nullptr) {
            std::fill(to, to + delta.matrix(), 0.0f);
            from = to;
        }
        for (int64_t token = segment.first; token < segment.first + segment.count; ++token) {
            const T* line = mixed + token * delta.channels();
            unit(line + key_head * key_dim, key_dim, 1.0f / std::sqrt(static_cast<float>(key_dim)), query.data());
            unit(line + keys + key_head * key_dim, key_dim, 1.0f, key.data());
            Floats both = {};
            in_pieces(key_dim, [&](int64_t i, int64_t n) {
                both = add_product(both, fetch(&query[i], n), fetch(&key[i], n));
            });
            const float strength = fetch(gates + token * 2 * heads + head, 1)[0];
            const float pace = fetch(gates + token * 2 * heads + heads + head, 1)[0];
            const float decay = std::exp(delta.rate[head] * softplus(pace + delta.bias[head]));
            const DeltaStep step{query.data(), key.data(), decay, 1.0f / (1.0f + std::exp(-strength)), sum(both),
                                 key_dim,      value_dim};
            step.go(line + 2 * keys + head * value_dim, from, to, read.data());
            from = to;
            Floats squares = {};
            in_pieces(value_dim, [&](int64_t i, int64_t n) {
                const Floats value = fetch(&read[i], n);
                squares = add_product(squares, value, value);
            });
            const float scale =
                1.0f / std::sqrt(sum(squares) / static_cast<float>(value_dim) + static_cast<float>(delta.eps));
            in_pieces(value_dim, [&](int64_t i, int64_t n) {
                const Floats gate = activated<SILU>(fetch(z + token * z_stride + head * value_dim + i, n));
                const Floats normal = fetch(&read[i], n) * scale * fetch(delta.norm + i, n);
                put(out + token * heads * value_dim + head * value_dim + i, normal * gate, n);
            });
        }
    }
}

// Gated delta net for all runs and heads, in parallel; out [tokens, value size].
template <typename T>
void gated_delta(const T* mixed, const T* z, int64_t z_stride, const T* gates, const PackedDelta& delta,
                 const StateMemory& memory, T* out) {
    const int64_t count = memory.runs.size() * delta.value_heads;
    for_each(count, count > 1, [&](int64_t i) {
        delta_run(mixed, z, z_stride, gates, delta, memory, i / delta.value_heads, i % delta.value_heads, out);
    });
}

// Multiply x [rows, size] by the sigmoid of logits whose rows are `stride` apart.
template <typename T> void gate_by_sigmoid(T* x, const T* logits, int64_t stride, int64_t rows, int64_t size) {
    for_each(rows, rows * size > 16384, [&](int64_t row) {
        in_pieces(size, [&](int64_t i, int64_t n) {
            T* at = x + row * size + i;
            put(at, fetch(at, n) * rounded<T>(logistic(fetch(logits + row * stride + i, n))), n);
        });
    });
}

}  // namespace
