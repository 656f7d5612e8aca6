// C interface of the CPU kernels: functions on raw memory, no torch headers, no engine types. Compiled once for each
// instruction set of paths.py; the loader opens the best one that the CPU can run. Threads: team.h. A row's result
// never depends on the rest of the batch: work is partitioned by position and sums run in a fixed order. `type`: 0
// float32, 1 bfloat16. All pointers are to memory of that type unless said otherwise.

#include <cstdio>

#include "choose.h"
#include "dots.h"
#include "heartbeat.h"
#include "message_ring.h"
#include "multiply.h"
#include "paged_attention.h"
#include "program.h"
#include "repack.h"
#include "rowwise.h"
#include "shared_ranks.h"

namespace {

// Error state of the last call of this thread. No exception may leave an extern "C" function.
thread_local bool has_failed = false;
thread_local char failure[200];

// Run `call` and record the message of an exception.
template <typename Call> void guarded(Call call) {
    try {
        call();
    } catch (const std::exception& error) {
        std::snprintf(failure, sizeof failure, "%s", error.what());
        has_failed = true;
    }
}

}  // namespace

#define DISPATCH(type, ...)        \
    guarded([&] {                  \
        if ((type) == 0) {         \
            using T = float;       \
            __VA_ARGS__;           \
        } else {                   \
            using T = bf16;        \
            __VA_ARGS__;           \
        }                          \
    });

#ifndef QUIRE_SOURCE
#define QUIRE_SOURCE "unknown"
#endif

extern "C" {

// The digest of the sources, set by the build; the loader compares it with the sources beside the library.
const char* quire_source() { return QUIRE_SOURCE; }

// Must be called before anything else, and when the number of threads changes. tiles: whether AMX may be used.
void quire_prepare([[maybe_unused]] int64_t tiles, int64_t threads) {
#ifdef __AMX_BF16__
    has_tiles = tiles != 0;
#endif
    set_num_threads(threads);
}

// Pin thread i of the kernels to cores[i]; see pinning.h.
void quire_pin_threads(const int64_t* cores, int64_t count) { pin_threads(cores, count); }

// nodes: a mask of NUMA nodes to interleave pages over; 0: the default, first touch.
int64_t quire_interleave_memory(int64_t nodes) { return interleave_memory(static_cast<uint64_t>(nodes)); }

// Return the error of this thread's calls since this was last asked, and clear it; null: none.
const char* quire_take_failure() {
    if (!has_failed) return nullptr;
    has_failed = false;
    return failure;
}

// weight_type: the type of x, or float32.
void quire_rms_norm(int64_t type, int64_t weight_type, const void* x, int64_t x_stride, const void* weight, void* out,
                    int64_t rows, int64_t size, double eps) {
    const auto norm = [&](auto* from, auto* scales) {
        using T = std::remove_const_t<std::remove_pointer_t<decltype(from)>>;
        rms_norm(from, x_stride, scales, static_cast<T*>(out), size, rows, size, static_cast<float>(eps));
    };
    DISPATCH(type, {
        if (weight_type == 0) norm(static_cast<const T*>(x), static_cast<const float*>(weight));
        else norm(static_cast<const T*>(x), static_cast<const T*>(weight));
    })
}

// weight_bias [2, size]: see layer_norm.
void quire_layer_norm(int64_t type, const void* x, int64_t x_stride, const void* weight_bias, void* out, int64_t rows,
                      int64_t size, double eps) {
    DISPATCH(type, layer_norm<T>(static_cast<const T*>(x), x_stride, static_cast<const T*>(weight_bias),
                                 static_cast<T*>(out), size, rows, size, static_cast<float>(eps)))
}

// x [rows, size] and best [rows], the maximum of each row, both float32: see log_sum_exp.
void quire_log_sum_exp(const float* x, const float* best, float* out, int64_t rows, int64_t size) {
    guarded([&] { log_sum_exp(x, best, out, rows, size); });
}

// kind: see Activation; x [count], in place.
void quire_activate(int64_t type, int64_t kind, void* x, int64_t count) {
    DISPATCH(type, activate<T>(kind, static_cast<T*>(x), count))
}

// Rotary positions in place: see rotate; angle_stride: elements between the rows of cos and sin.
void quire_rotate(int64_t type, void* x, int64_t stride, const void* cos, const void* sin, int64_t angle_stride,
                  int64_t rows, int64_t heads, int64_t head_dim, int64_t dim) {
    DISPATCH(type, rotate<T>(static_cast<T*>(x), stride, static_cast<const T*>(cos), static_cast<const T*>(sin),
                             angle_stride, rows, heads, head_dim, dim))
}

// Whether there is a kernel for every weight of the operations.
int64_t quire_can_run(int64_t type, const Operation* operations, int64_t count) {
    int64_t can = 0;
    DISPATCH(type, can = can_multiply<T>(operations, count))
    return can;
}

// Run operations in order; quire_can_run must have returned true for them.
void quire_run(int64_t type, const Operation* operations, int64_t count, ProgramRun* run) {
    const PinnedCaller pinned;
    DISPATCH(type, Interpreter<T>{operations, count, *run}.go())
}

// Whether bfloat16 rows can be multiplied by tiled weights (AMX).
int64_t quire_has_tile_units() {
#ifdef __AMX_BF16__
    return has_tiles;
#else
    return 0;
#endif
}

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null), for a weight packed in `format` (see
// panels.h; PLAIN for bfloat16: tiles.h, bf16_dots.h). Returns false, and does nothing, if there is no kernel for it.
int64_t quire_multiply(int64_t type, int64_t format, const void* x, const uint8_t* weight, const void* bias, void* out,
                       int64_t rows, int64_t inputs, int64_t outputs) {
    const GemmSizes sizes{rows, inputs, outputs, outputs};
    bool has_kernel = false;
    DISPATCH(type, {
        const Multiply<T> multiply = multiply_for<T>(format);
        has_kernel = multiply != nullptr;
        if (has_kernel)
            multiply(static_cast<const T*>(x), weight, static_cast<const T*>(bias), sizes, static_cast<T*>(out));
    })
    return has_kernel;
}

// Outputs of a panel, see panels.h.
int64_t quire_panel_outputs() { return PANEL_OUTPUTS; }

// Inputs that one bfloat16 dot-product instruction accumulates, see bf16_dots.h; 0: this path has none.
int64_t quire_dot_inputs() { return DOT_INPUTS; }

// Whether gemm of float32 rows is at least as fast with quantized panels as with float panels.
int64_t quire_level_panels_pay() { return LEVELS_PAY; }

// out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T for an unpacked row-major weight, all float32;
// inputs: a multiple of 16.
void quire_multiply_rows(const float* x, const float* weight, float* out, int64_t rows, int64_t inputs,
                         int64_t outputs) {
    guarded([&] { multiply_rows(x, weight, GemmSizes{rows, inputs, outputs, outputs}, out); });
}

// Unpack blocks of a GGUF type to one byte per value. Returns whether the type is known.
int64_t quire_read_blocks(int64_t type, const uint8_t* blocks, int64_t count, uint8_t* levels) {
    bool is_known = false;
    guarded([&] { is_known = read_blocks(type, blocks, count, levels); });
    return is_known;
}

// See find_levels.
void quire_find_levels(const uint8_t* levels, int64_t count, uint8_t* seen) {
    guarded([&] { find_levels(levels, count, seen); });
}

// See find_super_blocks.
int64_t quire_find_super_blocks(const uint16_t* factors, int64_t count, int64_t least, int64_t most, uint16_t* shared,
                                int8_t* codes) {
    bool has_all = false;
    guarded([&] { has_all = find_super_blocks(factors, count, least, most, shared, codes); });
    return has_all;
}

// Pack a quantized weight into panels of `format`, see Levels; inputs: a multiple of 32, and of the span or
// super-block.
void quire_pack_int8(int64_t format, const uint8_t* levels, int64_t middle, const uint16_t* scales,
                     const uint16_t* offsets, const uint8_t* table, const uint8_t* codes, int64_t outputs, int64_t inputs,
                     uint8_t* panels) {
    guarded([&] {
        const Levels weight{levels, scales, offsets, table, codes, outputs, inputs, static_cast<uint8_t>(middle)};
        pack_int8(weight, format, panels);
    });
}

// Dequantize outputs `places` [count] of a weight in panels of `format` to out [count, inputs]. Returns false if an
// index is out of range.
int64_t quire_read_int8_rows(int64_t format, const uint8_t* panels, const int64_t* places, float* out, int64_t count,
                             int64_t inputs, int64_t outputs) {
    bool has_all = false;
    guarded([&] { has_all = read_int8_rows(format, panels, places, GemmSizes{count, inputs, outputs, inputs}, out); });
    return has_all;
}

// See pack_panels; tiled: for AMX tile units, two inputs per line.
void quire_pack_low_rank(int64_t type, int64_t tiled, const void* matrix, int64_t stride, int64_t rows, int64_t inputs,
                         int64_t first, int64_t lines, void* panels) {
    DISPATCH(type, {
        const auto pack = tiled ? pack_panels<2, T> : pack_panels<1, T>;
        pack(static_cast<const T*>(matrix), stride, rows, inputs, first, lines, static_cast<T*>(panels));
    })
}

// y [rows, outputs] += B (A x) for x [rows, inputs]; slots [rows]: the adapter of each row, negative: none.
void quire_low_rank_add(int64_t type, const LowRankLayer* layer, const int64_t* slots, const void* x, int64_t x_stride,
                        void* y, int64_t y_stride, int64_t rows) {
    DISPATCH(type, low_rank_add<T>(*layer, RowUnits(slots, rows), static_cast<const T*>(x), x_stride,
                                   static_cast<T*>(y), y_stride))
}

// Gated activation; clamp: see Clamp, or null.
void quire_gate(int64_t type, int64_t activation, const Clamp* clamp, const void* gate_up, void* out, int64_t rows,
                int64_t size) {
    DISPATCH(type, gate<T>(activation, clamp, static_cast<const T*>(gate_up), static_cast<T*>(out), rows, size))
}

// Copy keys and values to cache slots: see write_cache.
void quire_write_cache(int64_t type, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                       void* key_cache, void* value_cache, const int64_t* slots, int64_t rows, int64_t heads,
                       int64_t dim) {
    DISPATCH(type, write_cache<T>(static_cast<const T*>(key), key_stride, static_cast<const T*>(value), value_stride,
                                  static_cast<T*>(key_cache), static_cast<T*>(value_cache), slots, rows, heads, dim))
}

// Quantize key [rows, heads, dim] and write it to slots of a quantized cache; stored, block_size, head_bytes: see
// Shape.
void quire_write_quantized(int64_t type, int64_t stored, const void* key, int64_t stride, void* cache,
                           const int64_t* slots, int64_t rows, int64_t heads, int64_t dim, int64_t block_size,
                           int64_t head_bytes) {
    const HeadFormat format{stored, dim};
    DISPATCH(type, write_quantized<T>(static_cast<const T*>(key), stride, static_cast<uint8_t*>(cache), slots, rows,
                                      heads, format, block_size, head_bytes))
}

// spans: [num_spans, 4] of int64, see Span; tables: all block tables, concatenated; out [tokens, heads * value_dim];
// block_heads, stored, head_bytes: see Shape; cap, window, sinks, slopes: see Rule.
void quire_paged_attention(int64_t type, const void* query, int64_t query_stride, const void* keys, const void* values,
                           const int64_t* tables, const int64_t* spans, int64_t num_spans, void* out,
                           int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t block_size, int64_t value_dim,
                           int64_t block_heads, int64_t stored, int64_t head_bytes, double scale, double cap,
                           int64_t window, const void* sinks, const float* slopes) {
    const Rule rule{static_cast<float>(scale), static_cast<float>(cap), window, sinks, slopes};
    const Shape shape{query_heads, kv_heads, dim, block_size, value_dim, block_heads, stored, head_bytes};
    DISPATCH(type, {
        const Keys<T> cache{static_cast<const T*>(keys), static_cast<const T*>(values), tables};
        const Cut cut = cut_for<T>(reinterpret_cast<const Span*>(spans), num_spans, tables, shape);
        paged_attention<T>(static_cast<const T*>(query), query_stride, cache, cut, static_cast<T*>(out), shape, rule);
    })
}

// Sample tokens [samples] from logits [samples, size], which are overwritten; negative if there is none; see choose.h.
void quire_choose(float* logits, int64_t samples, int64_t size, const ChoiceColumns* by, const int64_t* rows,
                  const int64_t* lengths, const int64_t* num_prompt, int64_t* tokens) {
    guarded([&] { choose_tokens(logits, samples, size, *by, {rows, lengths, num_prompt}, tokens); });
}

// The same from hidden states [samples, inputs], float32, and an LM head packed in `format` with bias [size] or null.
// Keeps scratch memory for the logits of the largest call. Returns false, and does nothing, if there is no kernel for
// the weight.
int64_t quire_choose_by_head(int64_t format, const float* states, int64_t inputs, const uint8_t* weight, const float* bias,
                             int64_t samples, int64_t size, const ChoiceColumns* by, const int64_t* rows,
                             const int64_t* lengths, const int64_t* num_prompt, int64_t* tokens) {
    const Multiply<float> multiply = multiply_for<float>(format);
    if (multiply == nullptr) return false;
    guarded([&] {
        static thread_local std::vector<float> logits;
        logits.resize(std::max<size_t>(logits.size(), samples * size));
        multiply(states, weight, bias, GemmSizes{samples, inputs, size, size}, logits.data());
        choose_tokens(logits.data(), samples, size, *by, {rows, lengths, num_prompt}, tokens);
    });
    return true;
}

// Apply token bitmasks to logits in place: see mask_logits.
void quire_mask_logits(float* logits, int64_t size, const int64_t* places, const uint32_t* bits, int64_t masked,
                       int64_t words) {
    guarded([&] { mask_logits(logits, size, places, bits, masked, words); });
}

// Collectives between the ranks of one machine, see shared_ranks.h.
void quire_give_and_meet(RankPages* pages, const void* data, int64_t bytes) { give_and_meet(*pages, data, bytes); }

void quire_all_reduce(int64_t type, RankPages* pages, void* x, int64_t count) {
    DISPATCH(type, all_reduce<T>(*pages, static_cast<T*>(x), count))
}

// Messages between an engine and its ranks, see message_ring.h.
int64_t quire_post_message(const MessageRing* ring, int64_t length, int64_t kind, const void* data, int64_t stored) {
    return post_message(*ring, length, kind, data, stored);
}

int64_t quire_await_message(const MessageRing* ring, int64_t reader, int64_t taken, int64_t microseconds) {
    return await_message(*ring, reader, static_cast<uint32_t>(taken), microseconds);
}

int64_t quire_await_all(const MessageRing* rings, int64_t count, int64_t taken, int64_t microseconds) {
    return await_all(rings, count, static_cast<uint32_t>(taken), microseconds);
}

// Heartbeat of this process, see heartbeat.h.
int64_t quire_start_beating(uint64_t* beats, int64_t socket, double seconds) {
    return start_beating(beats, socket, seconds);
}

void quire_stop_beating() { stop_beating(); }
}
