// Mixture of experts (MoE). Rows that are routed to the same expert are multiplied together, one expert after the
// other.
#pragma once

#include <optional>

#include "low_rank.h"
#include "multiply.h"
#include "rowwise.h"

namespace {

// A packed weight [outputs, inputs] and its bias.
struct PackedLinear {
    int64_t format, inputs, outputs;
    const uint8_t* weight;
    const void* bias;  // [outputs] or null
};

// Weights with the same input, whose outputs are concatenated.
struct PackedParts {
    const PackedLinear* linears;
    int64_t count;
};

// The experts of one layer: gate and up (or up alone) in one gemm, then down.
struct PackedExperts {
    int64_t num, used;
    int64_t first, held;          // experts held here: `held` of them, starting at `first`; others contribute nothing
    int64_t is_normalized;        // a row's weights are divided by their sum
    int64_t shared, shared_gate;  // buffers: the shared expert's output, the logits of its gate; -1: none
    double scale;                 // multiplied into a row's weights
    int64_t groups, groups_used;  // number of expert groups, and how many of them a row may use
    const float* score_bias;      // [num]: experts rank by sigmoid + bias, groups by their top two; null: by softmax
    const PackedParts* gate_up;          // [held]: one weight, or gate and up separately if their formats differ
    const PackedLinear* down;            // [held]
    const Clamp* clamp;                  // of the gated activation, or null
    const float* factors;                // [num]: multiplied into each expert's weight, or null
    int64_t activation, is_gated;        // is_gated: gate_up holds gate and up; otherwise up alone, which is activated
    const LowRankLayer *const *gate_up_adapters, *const *down_adapters;  // [held] each, or null: no LoRA on experts
};

// Multiply x [rows, inputs] by each weight of `parts`; their outputs are concatenated in out [rows, sum of outputs].
template <typename T> void multiply_by_each(const PackedParts& parts, const T* x, int64_t rows, T* out) {
    const PackedLinear *linear = parts.linears, *end = linear + parts.count;
    int64_t width = 0;
    for (const PackedLinear* each = linear; each < end; ++each) width += each->outputs;
    for (; linear < end; out += linear->outputs, ++linear)
        multiply_for<T>(linear->format)(x, linear->weight, static_cast<const T*>(linear->bias),
                                        GemmSizes{rows, linear->inputs, linear->outputs, width}, out);
}

template <typename T> float one(const T* from) { return fetch(from, 1)[0]; }

// Multiply each head of a row by its own weight. A head's `inputs` values become `outputs` values; the `rest` values
// behind them are copied.
template <typename T>
void multiply_heads(const PackedLinear* linears, int64_t heads, int64_t rest, const T* x, int64_t stride, int64_t rows,
                    T* out) {
    const int64_t inputs = linears->inputs, outputs = linears->outputs, width = outputs + rest;
    const std::unique_ptr<T[]> taken(new T[rows * inputs]), made(new T[rows * outputs]);
    for (int64_t head = 0; head < heads; ++head) {
        const T* from = x + head * (inputs + rest);
        T* to = out + head * width;
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(&taken[row * inputs], from + row * stride, inputs * sizeof(T));
        multiply_by_each({linears + head, 1}, taken.get(), rows, made.get());
        for (int64_t row = 0; row < rows; ++row, from += stride, to += heads * width) {
            std::memcpy(to, &made[row * outputs], outputs * sizeof(T));
            std::memcpy(to + outputs, from + inputs, rest * sizeof(T));
        }
    }
}

// shares [num] = softmax of logits [num].
template <typename T> void softmax(const T* logits, int64_t num, float* shares) {
    float largest = one(logits), sum = 0.0f;
    for (int64_t i = 0; i < num; ++i) {
        shares[i] = one(logits + i);
        largest = std::max(largest, shares[i]);
    }
    for (int64_t i = 0; i < num; ++i) sum += shares[i] = std::exp(shares[i] - largest);
    for (int64_t i = 0; i < num; ++i) shares[i] /= sum;
}

// Router scores: softmax of a row's logits [num] or, with a score bias, their sigmoids.
template <typename T> void share_out(const T* logits, const PackedExperts& experts, float* shares) {
    if (experts.score_bias != nullptr) {
        for (int64_t i = 0; i < experts.num; ++i) shares[i] = 1.0f / (1.0f + std::exp(-one(logits + i)));
        return;
    }
    softmax(logits, experts.num, shares);
}

// Set the scores of experts outside the best groups_used groups to -inf.
inline void keep_groups(const PackedExperts& experts, float* ranked) {
    const int64_t size = experts.num / experts.groups;
    std::vector<float> best(experts.groups);
    for (int64_t group = 0; group < experts.groups; ++group) {
        float *first = ranked + group * size, *end = first + size, *most = std::max_element(first, end);
        best[group] = *most;
        if (experts.score_bias == nullptr) continue;
        float second = -INFINITY;
        for (float* each = first; each < end; ++each)
            if (each != most) second = std::max(second, *each);
        best[group] += second;
    }
    std::vector<bool> taken(experts.groups);
    for (int64_t rank = 0; rank < experts.groups_used; ++rank) {
        const int64_t group = std::max_element(best.begin(), best.end()) - best.begin();
        taken[group] = true;
        best[group] = -INFINITY;
    }
    for (int64_t i = 0; i < experts.num; ++i)
        if (!taken[i / size]) ranked[i] = -INFINITY;
}

// Select the top experts of a row by its logits [num], and compute their weights. Ties go to the lowest index. shares:
// scratch [2 * num].
template <typename T>
void choose_experts(const T* logits, const PackedExperts& experts, float* shares, int64_t* chosen, float* weights) {
    float* ranked = shares + experts.num;
    float used = 1e-20f;
    share_out(logits, experts, shares);
    for (int64_t i = 0; i < experts.num; ++i) ranked[i] = shares[i] + (experts.score_bias == nullptr ? 0.0f : experts.score_bias[i]);
    if (experts.groups_used < experts.groups) keep_groups(experts, ranked);
    for (int64_t rank = 0; rank < experts.used; ++rank) {
        const int64_t best = std::max_element(ranked, ranked + experts.num) - ranked;
        chosen[rank] = best;
        used += weights[rank] = shares[best];
        ranked[best] = -INFINITY;
    }
    for (int64_t rank = 0; rank < experts.used; ++rank) {
        weights[rank] = (experts.is_normalized ? weights[rank] / used : weights[rank]) * static_cast<float>(experts.scale);
        if (experts.factors != nullptr) weights[rank] *= experts.factors[chosen[rank]];
    }
}

// Logits [rows, num] -> out, with -inf for all but the `used` experts of a row that rank highest by softmax + bias [num].
template <typename T>
void hide_others(const T* logits, const float* bias, int64_t used, int64_t rows, int64_t num, T* out) {
    std::vector<float> ranked(num);
    for (int64_t row = 0; row < rows; ++row, logits += num, out += num) {
        softmax(logits, num, ranked.data());
        for (int64_t i = 0; i < num; ++i) {
            ranked[i] += bias[i];
            put(out + i, all(-INFINITY), 1);
        }
        for (int64_t rank = 0; rank < used; ++rank) {
            const int64_t best = std::max_element(ranked.begin(), ranked.end()) - ranked.begin();
            out[best] = logits[best];
            ranked[best] = -INFINITY;
        }
    }
}

// out [rows, size] = x times the sigmoid of the highest of a row's logits [rows, num].
template <typename T>
void scale_by_score(const T* x, const T* logits, int64_t rows, int64_t size, int64_t num, T* out) {
    for_each(rows, rows * size > 16384, [&](int64_t row) {
        float highest = one(logits + row * num);
        for (int64_t i = 1; i < num; ++i) highest = std::max(highest, one(logits + row * num + i));
        const Floats factor = rounded<T>(all(1.0f / (1.0f + std::exp(-highest))));
        in_pieces(size, [&](int64_t i, int64_t n) {
            put(out + row * size + i, fetch(x + row * size + i, n) * factor, n);
        });
    });
}

// Pairs of a row and one of its experts, sorted by expert, then by row.
struct Pairs {
    std::vector<int64_t> begins;  // [num + 1]: where each expert's pairs begin
    std::vector<int64_t> rows;    // [pairs]
    std::vector<float> weights;   // [pairs]

    // Route all rows, and sort the pairs by expert (counting sort).
    template <typename T> Pairs(const T* logits, const PackedExperts& experts, int64_t num_rows) {
        const int64_t count = num_rows * experts.used;
        std::vector<int64_t> chosen(count);
        std::vector<float> found(count), shares(2 * experts.num);
        begins.assign(experts.num + 1, 0);
        for (int64_t row = 0; row < num_rows; ++row)
            choose_experts(logits + row * experts.num, experts, shares.data(), &chosen[row * experts.used],
                           &found[row * experts.used]);
        for (const int64_t expert : chosen) ++begins[expert + 1];
        for (int64_t expert = 0; expert < experts.num; ++expert) begins[expert + 1] += begins[expert];
        rows.resize(count);
        weights.resize(count);
        std::vector<int64_t> next(begins.begin(), begins.end() - 1);
        for (int64_t pair = 0; pair < count; ++pair) {
            const int64_t place = next[chosen[pair]]++;
            rows[place] = pair / experts.used;
            weights[place] = found[pair];
        }
    }

    int64_t most(int64_t first, int64_t held) const {  // the largest number of pairs of one of these experts
        int64_t found = 0;
        for (int64_t i = first; i < first + held; ++i) found = std::max(found, begins[i + 1] - begins[i]);
        return found;
    }
};

// Initialize sums [rows, hidden] with the shared expert's output times the sigmoid of its gate, or with zeros.
template <typename T> void begin_sums(const T* shared, const T* gate, int64_t rows, int64_t hidden, float* sums) {
    for_each(rows, rows * hidden > 65536, [&](int64_t row) {
        const float factor = gate == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(-one(gate + row)));
        in_pieces(hidden, [&](int64_t i, int64_t n) {
            put(sums + row * hidden + i, shared == nullptr ? Floats{} : fetch(shared + row * hidden + i, n) * factor, n);
        });
    });
}

// out [rows, hidden] = weighted sum of the outputs of each row's experts for x [rows, hidden], added in the order of
// experts. adapters [rows]: each row's LoRA slot, negative: none; null: no row has one.
template <typename T>
void mix_experts(const T* x, const T* logits, const T* shared, const T* gate, const PackedExperts& experts,
                 const int64_t* adapters, int64_t rows, T* out) {
    const int64_t size = experts.down->inputs, hidden = experts.down->outputs;
    const Pairs pairs(logits, experts, rows);
    const int64_t most = pairs.most(experts.first, experts.held);
    const std::unique_ptr<float[]> sums(new float[rows * hidden]);
    const int64_t wide = experts.is_gated ? 2 * size : size;
    const std::unique_ptr<T[]> taken(new T[most * hidden]), first(new T[most * wide]), gated(new T[most * size]);
    T* inner = experts.is_gated ? gated.get() : first.get();
    const bool adapts = adapters != nullptr && experts.gate_up_adapters != nullptr;
    std::vector<int64_t> slots(adapts ? most : 0);
    begin_sums(shared, gate, rows, hidden, sums.get());
    for (int64_t expert = 0; expert < experts.held; ++expert) {
        const int64_t* at = &pairs.begins[experts.first + expert];
        const int64_t begin = at[0], count = at[1] - begin;
        if (count == 0) continue;
        for (int64_t i = 0; i < count; ++i)
            std::memcpy(&taken[i * hidden], x + pairs.rows[begin + i] * hidden, hidden * sizeof(T));
        std::optional<RowUnits> units;  // the expert's rows, grouped by adapter
        for (int64_t i = 0; adapts && i < count; ++i) slots[i] = adapters[pairs.rows[begin + i]];
        if (adapts) units.emplace(slots.data(), count);
        multiply_by_each(experts.gate_up[expert], taken.get(), count, first.get());
        if (units) low_rank_add(*experts.gate_up_adapters[expert], *units, taken.get(), hidden, first.get(), wide);
        if (experts.is_gated) ::gate<T>(experts.activation, experts.clamp, first.get(), inner, count, size);
        else activate(experts.activation, inner, count * size);
        multiply_by_each({experts.down + expert, 1}, inner, count, taken.get());
        if (units) low_rank_add(*experts.down_adapters[expert], *units, inner, size, taken.get(), hidden);
        for_each(count, count * hidden > 65536, [&](int64_t i) {  // each row occurs at most once
            float* to = &sums[pairs.rows[begin + i] * hidden];
            const Floats weight = all(pairs.weights[begin + i]);
            in_pieces(hidden, [&](int64_t j, int64_t n) {
                put(to + j, add_product(fetch(to + j, n), fetch(&taken[i * hidden + j], n), weight), n);
            });
        });
    }
    for_each(rows, rows * hidden > 65536, [&](int64_t row) {
        in_pieces(hidden, [&](int64_t i, int64_t n) {
            put(out + row * hidden + i, fetch(&sums[row * hidden + i], n), n);
        });
    });
}

}  // namespace
