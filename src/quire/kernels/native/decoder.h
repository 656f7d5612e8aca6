// All layers of a plain decoder in one call: what is small between the products must not go through an interpreter.
#pragma once

#include "multiply.h"
#include "paged_attention.h"
#include "rowwise.h"

namespace {

struct PackedLinear {
    int64_t format, inputs, outputs;
    const uint8_t* weight;
    const void* bias;  // [outputs] or null
};

struct DecoderLayer {
    const void *input_norm, *head_scales, *output_norm;  // [hidden]; [query + kv heads, dim] or null; [hidden]
    PackedLinear qkv, o, gate_up, down;
    void *keys, *values;  // the layer's cache
};

struct DecoderSizes {
    int64_t layers, hidden, query_heads, kv_heads, dim, intermediate, block_size;
    double eps, scale;
    Shape shape() const { return {query_heads, kv_heads, dim, block_size}; }
};

struct DecoderStep {
    int64_t tokens, num_spans, angle_stride;
    void* x;  // [tokens, hidden]: embeddings in, hidden states out
    const void *cos, *sin;
    const int64_t *slots, *tables, *spans;
    void* scratch;  // scratch_values() per token
};

inline int64_t scratch_values(const DecoderSizes& sizes) {
    return 2 * sizes.hidden + (2 * sizes.query_heads + 2 * sizes.kv_heads) * sizes.dim + 3 * sizes.intermediate;
}

template <typename T> void add_rows_to(T* x, const T* more, int64_t count) {
#pragma omp parallel for schedule(static) if (count > 65536)
    for (int64_t begin = 0; begin < count; begin += 4096)
        in_pieces(std::min<int64_t>(4096, count - begin), [&](int64_t i, int64_t n) {
            put(x + begin + i, fetch(x + begin + i, n) + fetch(more + begin + i, n), n);
        });
}

// Whether every linear of the layer has a kernel for rows of T: asked once, before any layer runs.
template <typename T> bool can_multiply(const DecoderLayer& layer) {
    for (const PackedLinear* linear : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down})
        if (multiply_for<T>(linear->format) == nullptr) return false;
    return true;
}

template <typename T> void multiply(const T* x, int64_t rows, const PackedLinear& linear, T* out) {
    const Product product{rows, linear.inputs, linear.outputs, linear.outputs};
    multiply_for<T>(linear.format)(x, linear.weight, static_cast<const T*>(linear.bias), product, out);
}

template <typename T>
void norm_heads(T* heads, int64_t stride, const T* scales, const DecoderSizes& sizes, int64_t tokens) {
    for (int64_t head = 0; head < sizes.query_heads + sizes.kv_heads; ++head) {
        T* own = heads + head * sizes.dim;
        rms_norm(own, stride, scales + head * sizes.dim, own, stride, tokens, sizes.dim, static_cast<float>(sizes.eps));
    }
}

// Needs can_multiply<T>(layer).
template <typename T>
void run_layer(const DecoderLayer& layer, const DecoderSizes& sizes, const DecoderStep& step, const Cut& cut) {
    const int64_t tokens = step.tokens, hidden = sizes.hidden, dim = sizes.dim, width = layer.qkv.outputs;
    const int64_t rotated = sizes.query_heads + sizes.kv_heads, query = sizes.query_heads * dim;
    const float eps = static_cast<float>(sizes.eps);
    T* x = static_cast<T*>(step.x);
    T* normed = static_cast<T*>(step.scratch);
    T* qkv = normed + tokens * hidden;
    T* attended = qkv + tokens * width;
    T* both = attended + tokens * query;
    T* active = both + tokens * 2 * sizes.intermediate;
    T* change = active + tokens * sizes.intermediate;

    rms_norm(x, hidden, static_cast<const T*>(layer.input_norm), normed, hidden, tokens, hidden, eps);
    multiply(normed, tokens, layer.qkv, qkv);
    if (layer.head_scales != nullptr) norm_heads(qkv, width, static_cast<const T*>(layer.head_scales), sizes, tokens);
    rotate(qkv, width, static_cast<const T*>(step.cos), static_cast<const T*>(step.sin), step.angle_stride, tokens,
           rotated, dim);
    write_cache(qkv + query, width, qkv + rotated * dim, width, static_cast<T*>(layer.keys),
                static_cast<T*>(layer.values), step.slots, tokens, sizes.kv_heads, dim);
    const Keys<T> cache{static_cast<const T*>(layer.keys), static_cast<const T*>(layer.values), step.tables};
    paged_attention<T>(qkv, width, cache, cut, attended, sizes.shape(), static_cast<float>(sizes.scale));
    multiply(attended, tokens, layer.o, change);
    add_rows_to(x, change, tokens * hidden);

    rms_norm(x, hidden, static_cast<const T*>(layer.output_norm), normed, hidden, tokens, hidden, eps);
    multiply(normed, tokens, layer.gate_up, both);
    silu_mul(both, active, tokens, sizes.intermediate);
    multiply(active, tokens, layer.down, change);
    add_rows_to(x, change, tokens * hidden);
}

template <typename T>
void run_layers(const DecoderLayer* layers, const DecoderSizes& sizes, const DecoderStep& step) {
    const Cut cut = cut_for<T>(reinterpret_cast<const Span*>(step.spans), step.num_spans, step.tables, sizes.shape());
    for (int64_t i = 0; i < sizes.layers; ++i) run_layer<T>(layers[i], sizes, step, cut);
}

}  // namespace
