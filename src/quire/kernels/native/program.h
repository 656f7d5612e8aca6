// A model's layers as a list of operations that run in one call, so that the small operations between the gemms do not
// go through the Python interpreter. The list is built once, when the layers are traced; see program.py.
#pragma once

#include <deque>
#include <optional>
#include <utility>

#include "delta.h"
#include "experts.h"
#include "low_rank.h"
#include "mamba.h"
#include "paged_attention.h"
#include "selective.h"
#include "shared_ranks.h"

namespace {

enum Kind : int64_t {
    RMS_NORM,
    MULTIPLY,
    ROTATE,
    WRITE,
    ATTEND,
    GATE,
    ADD,
    SELECT,
    NARROW,
    LAYER_NORM,
    ACTIVATE,
    MIX,
    SCALE,
    TIMES,
    CONVOLVE,
    DELTA,
    GATE_BY,
    MULTIPLY_HEADS,
    LOW_RANK_ADD,
    ALL_REDUCE,
    MAMBA,
    HIDE_OTHERS,
    SCALE_BY_SCORE,
    SELECTIVE,
    FIRST_COLUMNS
};

// One operation on buffers [rows, width]. Fields that a kind does not use are zero.
struct Operation {
    int64_t kind;
    int64_t x, y, out;  // buffers: input; second input; output
    int64_t column;     // where the used part of x (of y in TIMES) begins
    int64_t groups, size;  // parts per row, and the values of each
    int64_t layer;         // index of the cache, of the angles, or the activation
    int64_t kv_heads, block_size;
    int64_t window;      // of attention, see Rule
    // weights of a norm [groups, size] or [2, size] with its bias; PackedLinears, PackedExperts,
    // PackedConvolution, PackedDelta, PackedMamba, PackedSelective, LowRankLayer, sinks, RankPages, a Clamp or null,
    // factors of columns [width], or ranking biases
    const void* weight;
    double number;       // eps of a norm, or the scale of attention, of what is added, or of x
    double cap;          // softcap of attention
    int64_t wide;        // whether a norm's weights are float32 though activations are not
    int64_t table;       // index of the layer's block table, see ProgramRun
    int64_t latent;      // how many elements of a key are its value (MLA); 0: values are stored separately
    int64_t block_heads;  // of attention, see Shape
    int64_t stored, head_bytes;  // of a cache, see Shape
    const float* slopes;  // of attention, see Rule
};

// The cos and sin tables of rotary positions for the rows of a step.
struct Angles {
    const void *cos, *sin;
    int64_t stride, dim;
};

// One step and the addresses of its buffers. NARROW reduces `rows` to num_wanted.
struct ProgramRun {
    int64_t rows, num_wanted, num_spans;
    const int64_t *const *slots, *const *tables;  // per block table; the layout of all tables is given by the spans
    const int64_t* spans;
    const int64_t* wanted;  // [num_wanted]: the rows to select; null: all rows
    void** buffers;
    const int64_t* widths;
    const Angles* angles;
    void** keys;
    void** values;
    float** states;  // per recurrent layer
    int64_t state_stride;
    const int64_t* segments;
    int64_t num_segments;
    const int64_t *adapters, *wanted_adapters;  // LoRA slot of each row, and of each selected one; null: no adapters
};

// x += rounded(more * scale), elementwise over `count` values.
template <typename T> void add_rows_to(T* x, const T* more, float scale, int64_t count) {
    for_each((count + 4096 - 1) / 4096, count > 65536, [&](int64_t index) {
        const int64_t begin = index * 4096;
        in_pieces(std::min<int64_t>(4096, count - begin), [&](int64_t i, int64_t n) {
            put(x + begin + i, fetch(x + begin + i, n) + rounded<T>(fetch(more + begin + i, n) * scale), n);
        });
    });
}

// x *= scale, elementwise over `count` values.
template <typename T> void scale_rows(T* x, float scale, int64_t count) {
    for_each((count + 4096 - 1) / 4096, count > 65536, [&](int64_t index) {
        const int64_t begin = index * 4096;
        in_pieces(std::min<int64_t>(4096, count - begin),
                  [&](int64_t i, int64_t n) { put(x + begin + i, fetch(x + begin + i, n) * scale, n); });
    });
}

// x [rows, size] *= rows of y that are `stride` apart, elementwise.
template <typename T> void multiply_rows_by(T* x, const T* y, int64_t stride, int64_t rows, int64_t size) {
    for_each(rows, rows * size > 65536, [&](int64_t row) {
        in_pieces(size, [&](int64_t i, int64_t n) {
            T* to = x + row * size + i;
            put(to, fetch(to, n) * fetch(y + row * stride + i, n), n);
        });
    });
}

// Runs the operations of a program, one after the other, on activations of T.
template <typename T> struct Interpreter {
    const Operation* operations;
    int64_t count;
    ProgramRun& run;

    T* at(int64_t buffer) const { return static_cast<T*>(run.buffers[buffer]); }
    int64_t width(int64_t buffer) const { return run.widths[buffer]; }

    void norm(const Operation& op) const {
        if (op.wide) norm_by(op, static_cast<const float*>(op.weight));
        else norm_by(op, static_cast<const T*>(op.weight));
    }

    template <typename W> void norm_by(const Operation& op, const W* weight) const {
        for (int64_t group = 0; group < op.groups; ++group) {
            const int64_t from = op.column + group * op.size;
            rms_norm(at(op.x) + from, width(op.x), weight + group * op.size, at(op.out) + from, width(op.out), run.rows,
                     op.size, static_cast<float>(op.number));
        }
    }

    void multiply(const Operation& op) const {
        const PackedParts parts{static_cast<const PackedLinear*>(op.weight), op.groups};
        multiply_by_each(parts, at(op.x), run.rows, at(op.out));
    }

    void multiply_by_heads(const Operation& op) const {
        multiply_heads(static_cast<const PackedLinear*>(op.weight), op.groups, op.size, at(op.x), width(op.x), run.rows,
                       at(op.out));
    }

    void mix(const Operation& op) const {
        const PackedExperts& experts = *static_cast<const PackedExperts*>(op.weight);
        const T* shared = experts.shared < 0 ? nullptr : at(experts.shared);
        const T* gate = experts.shared_gate < 0 ? nullptr : at(experts.shared_gate);
        mix_experts<T>(at(op.x), at(op.y), shared, gate, experts, run.adapters, run.rows, at(op.out));
    }

    void turn(const Operation& op) const {
        const Angles& angles = run.angles[op.layer];
        rotate(at(op.x) + op.column, width(op.x), static_cast<const T*>(angles.cos), static_cast<const T*>(angles.sin),
               angles.stride, run.rows, op.groups, op.size, angles.dim);
    }

    // Write keys, and values if they are stored separately, from `column` of each row to the paged cache.
    void write(const Operation& op) const {
        const T *keys = at(op.x) + op.column, *values = op.latent > 0 ? nullptr : keys + op.groups * op.size;
        if (op.stored != AS_ROWS) {
            const HeadFormat format{op.stored, op.size};
            const auto put_side = [&](const T* from, void* cache) {
                write_quantized(from, width(op.x), static_cast<uint8_t*>(cache), run.slots[op.table], run.rows, op.groups,
                                format, op.block_size, op.head_bytes);
            };
            put_side(keys, run.keys[op.layer]);
            if (values != nullptr) put_side(values, run.values[op.layer]);
            return;
        }
        write_cache(keys, width(op.x), values, width(op.x), static_cast<T*>(run.keys[op.layer]),
                    static_cast<T*>(run.values[op.layer]), run.slots[op.table], run.rows, op.groups, op.size);
    }

    void attend(const Operation& op, const Cut& cut) const {
        const Keys<T> cache{static_cast<const T*>(run.keys[op.layer]), static_cast<const T*>(run.values[op.layer]),
                            run.tables[op.table]};
        const Rule rule{static_cast<float>(op.number), static_cast<float>(op.cap), op.window, op.weight,
                        op.slopes};
        paged_attention<T>(at(op.x), width(op.x), cache, cut, at(op.out), shape(op), rule);
    }

    StateMemory memory(const Operation& op) const {
        return {run.states[op.layer], run.state_stride, reinterpret_cast<const StateSegment*>(run.segments),
                run.num_segments};
    }

    // CONVOLVE: the causal convolution of a recurrent layer.
    void mix_tokens(const Operation& op) const {
        convolve(at(op.x) + op.column, width(op.x), *static_cast<const PackedConvolution*>(op.weight), memory(op),
                 at(op.out));
    }

    // DELTA: the recurrence of a gated delta net.
    void follow(const Operation& op) const {
        const PackedDelta& delta = *static_cast<const PackedDelta*>(op.weight);
        gated_delta(at(op.x), at(op.y) + op.column, width(op.y), at(delta.gates), delta, memory(op), at(op.out));
    }

    // MAMBA: the scan of a Mamba-2 layer, its gate and norm.
    void scan(const Operation& op) const {
        mamba_scan(at(op.x), at(op.y), width(op.y), *static_cast<const PackedMamba*>(op.weight), memory(op), run.rows,
                   at(op.out));
    }

    // SELECTIVE: the scan of a Mamba layer, and its gate.
    void scan_selective(const Operation& op) const {
        const PackedSelective& layer = *static_cast<const PackedSelective*>(op.weight);
        const Rows<T> low{at(layer.keys), width(layer.keys)}, both{at(layer.gates), width(layer.gates)};
        selective_scan(at(op.x), at(op.y), low, both, layer, memory(op), run.rows, at(op.out));
    }

    // FIRST_COLUMNS: copy the first columns of x to `out`.
    void copy_columns(const Operation& op) const {
        for (int64_t row = 0; row < run.rows; ++row)
            std::memcpy(at(op.out) + row * width(op.out), at(op.x) + row * width(op.x), width(op.out) * sizeof(T));
    }

    // TIMES: multiply by columns of y, or by one factor for each column.
    void scale_columns(const Operation& op) const {
        const T* factors = static_cast<const T*>(op.weight);
        if (factors != nullptr) multiply_rows_by(at(op.x), factors, 0, run.rows, width(op.x));
        else multiply_rows_by(at(op.x), at(op.y) + op.column, width(op.y), run.rows, width(op.x));
    }

    // Copy the selected rows of x to `out`; if all are selected, make `out` an alias of x.
    void select(const Operation& op) const {
        if (run.wanted == nullptr) {
            run.buffers[op.out] = run.buffers[op.x];
            return;
        }
        const int64_t values = width(op.x);
        for (int64_t row = 0; row < run.num_wanted; ++row)
            std::memcpy(at(op.out) + row * values, at(op.x) + run.wanted[row] * values, values * sizeof(T));
    }

    void add_low_rank(const Operation& op, std::optional<RowUnits>& units) const {
        if (run.adapters == nullptr) return;
        if (!units) units.emplace(run.adapters, run.rows);
        low_rank_add(*static_cast<const LowRankLayer*>(op.weight), *units, at(op.x), width(op.x), at(op.out),
                     width(op.out));
    }

    Shape shape(const Operation& op) const {
        return {op.groups, op.kv_heads, op.size, op.block_size, op.latent > 0 ? op.latent : op.size,
                op.block_heads, op.stored, op.head_bytes};
    }

    // Return the attention partition for a shape, computed once per step. One partition serves the layers of all block
    // tables, since rows with the same blocks in the first table share those of the others too. Layers with other heads
    // need another one.
    const Cut& cut_of(const Shape& wanted, std::deque<std::pair<Shape, Cut>>& cuts) const {
        for (const auto& [planned, cut] : cuts)
            if (same(planned, wanted)) return cut;
        const Span* spans = reinterpret_cast<const Span*>(run.spans);
        return cuts.emplace_back(wanted, cut_for<T>(spans, run.num_spans, run.tables[0], wanted)).second;
    }

    // Run all operations in order.
    void go() const {
        std::deque<std::pair<Shape, Cut>> cuts;  // groups point into their Cut, so its address must not change
        std::optional<RowUnits> units;           // of the current rows
        for (int64_t i = 0; i < count; ++i) {
            const Operation& op = operations[i];
            switch (op.kind) {
                case RMS_NORM: norm(op); break;
                case MULTIPLY: multiply(op); break;
                case ROTATE: turn(op); break;
                case WRITE: write(op); break;
                case ATTEND:
                    attend(op, cut_of(shape(op), cuts));
                    break;
                case GATE:
                    gate(op.layer, static_cast<const Clamp*>(op.weight), at(op.x), at(op.out), run.rows, op.size);
                    break;
                case ADD: add_rows_to(at(op.x), at(op.y), static_cast<float>(op.number), run.rows * width(op.x)); break;
                case SELECT: select(op); break;
                case LAYER_NORM:
                    layer_norm(at(op.x), width(op.x), static_cast<const T*>(op.weight), at(op.out), width(op.out),
                               run.rows, op.size, static_cast<float>(op.number));
                    break;
                case ACTIVATE: activate(op.layer, at(op.x), run.rows * width(op.x)); break;
                case NARROW:
                    if (run.wanted == nullptr) break;
                    run.rows = run.num_wanted;
                    run.adapters = run.wanted_adapters;
                    units.reset();
                    break;
                case MIX: mix(op); break;
                case SCALE: scale_rows(at(op.x), static_cast<float>(op.number), run.rows * width(op.x)); break;
                case TIMES: scale_columns(op); break;
                case CONVOLVE: mix_tokens(op); break;
                case DELTA: follow(op); break;
                case MAMBA: scan(op); break;
                case SELECTIVE: scan_selective(op); break;
                case FIRST_COLUMNS: copy_columns(op); break;
                case HIDE_OTHERS:
                    hide_others(at(op.x), static_cast<const float*>(op.weight), op.groups, run.rows, width(op.x),
                                at(op.out));
                    break;
                case SCALE_BY_SCORE:
                    scale_by_score(at(op.x), at(op.y), run.rows, width(op.x), width(op.y), at(op.out));
                    break;
                case GATE_BY: gate_by_sigmoid(at(op.x), at(op.y) + op.column, width(op.y), run.rows, op.size); break;
                case MULTIPLY_HEADS: multiply_by_heads(op); break;
                case LOW_RANK_ADD: add_low_rank(op, units); break;
                case ALL_REDUCE:
                    all_reduce(*static_cast<RankPages*>(const_cast<void*>(op.weight)), at(op.x), run.rows * width(op.x));
                    break;
            }
        }
    }

    static bool same(const Shape& a, const Shape& b) {
        return a.query_heads == b.query_heads && a.kv_heads == b.kv_heads && a.dim == b.dim &&
               a.block_size == b.block_size && a.value_dim == b.value_dim && a.stored == b.stored;
    }
};

// Whether every weight has a kernel for rows of T.
template <typename T> bool has_kernels(const PackedLinear* linears, int64_t count) {
    return std::all_of(linears, linears + count,
                       [](const PackedLinear& linear) { return multiply_for<T>(linear.format) != nullptr; });
}

// Whether every gemm of a program has a kernel for rows of T.
template <typename T> bool can_multiply(const Operation* operations, int64_t count) {
    return std::all_of(operations, operations + count, [](const Operation& op) {
        if (op.kind == MIX) {
            const PackedExperts& experts = *static_cast<const PackedExperts*>(op.weight);
            const auto has_parts = [](const PackedParts& parts) { return has_kernels<T>(parts.linears, parts.count); };
            return std::all_of(experts.gate_up, experts.gate_up + experts.held, has_parts) &&
                   has_kernels<T>(experts.down, experts.held);
        }
        if (op.kind != MULTIPLY && op.kind != MULTIPLY_HEADS) return true;
        return has_kernels<T>(static_cast<const PackedLinear*>(op.weight), op.groups);
    });
}

}  // namespace
