// Gemm of float32 or bfloat16 activations with a weight [outputs, inputs] packed into panels of PANEL_OUTPUTS outputs,
// padded with zeros, in vector registers. An output is accumulated over its inputs in order, in float32, whatever the
// number of rows. In memory a panel is
//   PLAIN    for each input, PANEL_OUTPUTS float32 values;
//   HALVES   likewise in bfloat16: a shift converts them to float32, so they take half the bytes at no other cost;
//   NIBBLES  for each group of 32 inputs, PANEL_OUTPUTS scales, as many offsets (float16), then 16 lines of PANEL_OUTPUTS
//            bytes: line i has the 4-bit values of input i in the low halves and of input i + 16 in the high ones;
//   BYTES    the same with 32 lines of signed bytes, one per input.
// Quantized values are dequantized one piece of a panel at a time, once for all rows. Kernels may read 16 bytes past
// the last panel.
#pragma once

#include "gemm.h"
#include "weave.h"

namespace {

constexpr int64_t PANEL_PIECES = 3, PANEL_OUTPUTS = PANEL_PIECES * LANES;
constexpr int64_t GROUP_INPUTS = 32, HALF_GROUP = GROUP_INPUTS / 2;
constexpr int MOST_ROWS = LANES == 8 ? 4 : 8;              // rows whose sums fit in the registers
// Inputs of a panel that are processed at a time: they stay in the L1 cache, next to the rows' inputs.
constexpr int64_t MOST_INPUTS = (LANES == 16 ? 6144 : 7680) / PANEL_OUTPUTS;
constexpr int INPUTS_IN_TURN = LANES == 16 ? 2 : 1;        // loop unrolling: fewer instructions per FMA
constexpr int64_t ROWS_AT_ONCE = 256;                      // interleaved at a time
constexpr int64_t PANELS_TOGETHER = 4;                     // their sums stay in L2, with the rows' inputs
constexpr int64_t ROWS_TOGETHER = 4 * MOST_ROWS;           // from here on, panels are processed together
#ifdef __AVX2__
constexpr bool LEVELS_PAY = true;
#else
constexpr bool LEVELS_PAY = false;  // with four lanes, dequantizing takes longer than reading float32 weights
#endif
static_assert(MOST_INPUTS % GROUP_INPUTS == 0);

constexpr int64_t group_bytes(Format format) {
    return PANEL_OUTPUTS * (4 + (format == NIBBLES ? HALF_GROUP : GROUP_INPUTS));
}
constexpr int64_t panel_bytes(Format format, int64_t inputs) {
    if (format == PLAIN || format == HALVES) return inputs * PANEL_OUTPUTS * (format == PLAIN ? 4 : 2);
    return inputs / GROUP_INPUTS * group_bytes(format);
}

// The first PANEL_OUTPUTS bytes of a line as floats. Reads 16 bytes.
typedef Floats Pieces[PANEL_PIECES];
#ifdef __aarch64__
inline void widen(int8x16_t bytes, Pieces& levels) {
    const int16x8_t first = vmovl_s8(vget_low_s8(bytes)), second = vmovl_high_s8(bytes);
    levels[0] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(first)));
    levels[1] = (Floats)vcvtq_f32_s32(vmovl_high_s16(first));
    levels[2] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(second)));
}
inline void load_bytes(const uint8_t* line, Pieces& levels) { widen(vreinterpretq_s8_u8(vld1q_u8(line)), levels); }

// Convert bytes below 16 to floats: only the two upper bytes of such a float are nonzero, so they are table lookups
// (tbl), which is cheaper than conversions.
inline void look_up(uint8x16_t bytes, Pieces& levels) {
    alignas(16) static constexpr uint8_t FOURTH[] = {0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                                     0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};
    alignas(16) static constexpr uint8_t THIRD[] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0,
                                                    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
    const uint8x16_t fourth = vqtbl1q_u8(vld1q_u8(FOURTH), bytes), third = vqtbl1q_u8(vld1q_u8(THIRD), bytes);
    const uint16x8_t zero = vdupq_n_u16(0), first = vreinterpretq_u16_u8(vzip1q_u8(third, fourth));
    levels[0] = (Floats)vzip1q_u16(zero, first);
    levels[1] = (Floats)vzip2q_u16(zero, first);
    levels[2] = (Floats)vzip1q_u16(zero, vreinterpretq_u16_u8(vzip2q_u8(third, fourth)));
}
inline void load_nibbles(const uint8_t* line, Pieces& low, Pieces& high) {
    const uint8x16_t bytes = vld1q_u8(line);
    look_up(vandq_u8(bytes, vdupq_n_u8(15)), low);
    look_up(vshrq_n_u8(bytes, 4), high);
}
#else
// Load LANES bytes, signed or unsigned, as int32. By intrinsics where possible: compilers convert them one by one.
inline Ints widen_signed(const uint8_t* bytes) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
#else
    Ints wide;
    for (int64_t i = 0; i < LANES; ++i) wide[i] = static_cast<int8_t>(bytes[i]);
    return wide;
#endif
}
inline Ints widen(const uint8_t* bytes) { return widen_signed(bytes) & 0xFF; }

inline void load_bytes(const uint8_t* line, Pieces& levels) {
    for (int64_t p = 0; p < PANEL_PIECES; ++p)
        levels[p] = __builtin_convertvector(widen_signed(line + p * LANES), Floats);
}
inline void load_nibbles(const uint8_t* line, Pieces& low, Pieces& high) {
    for (int64_t p = 0; p < PANEL_PIECES; ++p) {
        const Ints both = widen(line + p * LANES);
        low[p] = __builtin_convertvector(both & 15, Floats);
        high[p] = __builtin_convertvector(both >> 4, Floats);
    }
}
#endif

// Dequantize a group to floats [GROUP_INPUTS][PANEL_OUTPUTS] with one rounding, since value * scale is exact.
template <Format FORMAT> inline void unpack_group(const uint8_t* group, float* to) {
    Pieces scales, offsets;
    for (int64_t p = 0; p < PANEL_PIECES; ++p) {
        scales[p] = load_float16(group + 2 * p * LANES);
        offsets[p] = load_float16(group + 2 * (PANEL_OUTPUTS + p * LANES));
    }
    const auto give = [&](int64_t input, const Pieces& levels) {
        for (int64_t p = 0; p < PANEL_PIECES; ++p)
            store(to + input * PANEL_OUTPUTS + p * LANES, add_product(offsets[p], levels[p], scales[p]));
    };
    const uint8_t* line = group + 4 * PANEL_OUTPUTS;
    Pieces low, high;
    for (int64_t i = 0; i < (FORMAT == NIBBLES ? HALF_GROUP : GROUP_INPUTS); ++i, line += PANEL_OUTPUTS) {
        if constexpr (FORMAT == NIBBLES) {
            load_nibbles(line, low, high);
            give(HALF_GROUP + i, high);
        } else {
            load_bytes(line, low);
        }
        give(i, low);
    }
}

// Dequantize the groups of `inputs` inputs to floats [inputs][PANEL_OUTPUTS].
template <Format FORMAT> inline void unpack_groups(const uint8_t* groups, int64_t inputs, float* to) {
    for (int64_t i = 0; i < inputs; i += GROUP_INPUTS, groups += group_bytes(FORMAT))
        unpack_group<FORMAT>(groups, to + i * PANEL_OUTPUTS);
}

// Return inputs [from, from + count) of a panel as floats, in place or dequantized to `room`. `from` must begin a
// group.
inline const float* plain_inputs(Format format, const uint8_t* panel, int64_t from, int64_t count, float* room) {
    if (format == PLAIN) return reinterpret_cast<const float*>(panel) + from * PANEL_OUTPUTS;
    if (format == HALVES) {
        const bf16* halves = reinterpret_cast<const bf16*>(panel) + from * PANEL_OUTPUTS;
        for (int64_t i = 0; i < count * PANEL_OUTPUTS; i += LANES) store(room + i, load(halves + i));
        return room;
    }
    panel += from / GROUP_INPUTS * group_bytes(format);
    if (format == NIBBLES)
        unpack_groups<NIBBLES>(panel, count, room);
    else
        unpack_groups<BYTES>(panel, count, room);
    return room;
}

// sum += x * *factor. With AVX-512 the FMA broadcasts the factor from memory itself, which saves an instruction.
#ifdef __AVX512F__
constexpr int SPREAD_ROWS = 4;  // rows whose factors are broadcast by the FMA: with more, loads become the bottleneck
inline __attribute__((always_inline)) void add_spread(Floats& sum, Floats x, const float* factor) {
    asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(x), "m"(*factor));
}
#else
constexpr int SPREAD_ROWS = 0;
inline void add_spread(Floats& sum, Floats x, const float* factor) { sum = add_product(sum, x, all(*factor)); }
#endif

// One input: FMA of `weights` of all outputs of the panel with `x` of ROWS rows. Always inline, like everything below
// it, since a function call would spill the sums to memory.
template <int ROWS, typename W>
inline __attribute__((always_inline)) void add_input(const W* weights, const float* x,
                                                     Floats (&sums)[ROWS][PANEL_PIECES]) {
    Pieces entries;
    for (int64_t p = 0; p < PANEL_PIECES; ++p) entries[p] = load(weights + p * LANES);
    if constexpr (ROWS >= 4 && LANES == 4) {  // one load for four factors
        unroll<ROWS / 4>([&](auto quarter) __attribute__((always_inline)) {
            const Quad four = load(x + 4 * quarter);
            unroll<4 * PANEL_PIECES>([&](auto i) __attribute__((always_inline)) {
                Floats& own = sums[4 * quarter + i / PANEL_PIECES][i % PANEL_PIECES];
                own = add_scaled<i / PANEL_PIECES>(own, entries[i % PANEL_PIECES], four);
            });
        });
    } else {
        unroll<ROWS>([&](auto r) __attribute__((always_inline)) {
            if constexpr (ROWS == MOST_ROWS && r >= ROWS - SPREAD_ROWS) {
                for (int64_t p = 0; p < PANEL_PIECES; ++p) add_spread(sums[r][p], entries[p], x + r);
            } else {
                const Floats factor = all(x[r]);
                for (int64_t p = 0; p < PANEL_PIECES; ++p) sums[r][p] = add_product(sums[r][p], entries[p], factor);
            }
        });
    }
}

// Sums of rows and the outputs of a panel: [rows][PANEL_OUTPUTS], with `stride` floats from one row to the next.
struct Sums {
    const float* before;  // sums over the previous inputs, PANEL_OUTPUTS floats per row; null: none
    float* to;
    int64_t stride;
};

// What the inner kernel prefetches in MOST_ROWS parts, spread over its inputs: in a burst, cache misses would wait for
// each other.
struct Ahead {
    const uint8_t* weights;  // of the next piece, to the L2 cache
    int64_t bytes;
    const float *sums, *out;  // of the next MOST_ROWS rows, PANEL_OUTPUTS or `stride` floats apart; null: none
    int64_t stride;

    inline __attribute__((always_inline)) void fetch_part(int64_t part) const {
        for (int64_t i = 64 * part; i < bytes; i += 64 * MOST_ROWS) __builtin_prefetch(weights + i, 0, 2);
        for (int64_t i = 0; i < PANEL_OUTPUTS; i += 16) {
            if (sums != nullptr) __builtin_prefetch(sums + part * PANEL_OUTPUTS + i, 1, 3);
            if (out != nullptr) __builtin_prefetch(out + part * stride + i, 1, 3);
        }
    }
};

// The inner kernel: x [inputs][ROWS] times weights [inputs][PANEL_OUTPUTS], added to the sums so far. `ahead` may be
// null.
template <int ROWS, typename W>
void add_inputs(const float* x, const W* weights, int64_t inputs, const Sums& sums, const Ahead* ahead) {
    Floats own[ROWS][PANEL_PIECES] = {};
    const auto each = [&](auto body) __attribute__((always_inline)) {
        unroll<ROWS * PANEL_PIECES>([&](auto i) __attribute__((always_inline)) {
            body(own[i / PANEL_PIECES][i % PANEL_PIECES], i / PANEL_PIECES, i % PANEL_PIECES * LANES);
        });
    };
    const auto add = [&](auto count) __attribute__((always_inline)) {
        unroll<count>([&](auto i) __attribute__((always_inline)) {
            add_input<ROWS>(weights + i * PANEL_OUTPUTS, x + i * ROWS, own);
        });
        weights += count * PANEL_OUTPUTS;
        x += count * ROWS;
    };
    if (const float* before = sums.before)
        each([&](Floats& sum, int64_t row, int64_t i) __attribute__((always_inline)) {
            sum = load(before + row * PANEL_OUTPUTS + i);
        });
    if (ROWS == MOST_ROWS && ahead != nullptr) {
        const int64_t turns = inputs / (ROWS * INPUTS_IN_TURN);
        for (int64_t part = 0; part < ROWS; ++part) {
            ahead->fetch_part(part);
            for (int64_t i = 0; i < turns; ++i) add(std::integral_constant<int, INPUTS_IN_TURN>{});
        }
        inputs -= turns * ROWS * INPUTS_IN_TURN;
    }
    for (; inputs >= INPUTS_IN_TURN; inputs -= INPUTS_IN_TURN) add(std::integral_constant<int, INPUTS_IN_TURN>{});
    if constexpr (INPUTS_IN_TURN > 1)
        for (; inputs > 0; --inputs) add(std::integral_constant<int, 1>{});
    float* const to = sums.to;
    const int64_t stride = sums.stride;
    each([&](const Floats& sum, int64_t row, int64_t i) __attribute__((always_inline)) {
        store(to + row * stride + i, sum);
    });
}

// Offset of the interleaved rows from `row` on for inputs [from, from + inputs): these inputs of all rows are adjacent,
// so that the data for one piece of a panel is read sequentially.
inline int64_t woven_place(const GemmSizes& sizes, int64_t from, int64_t inputs, int64_t row) {
    return from * sizes.rows + row * inputs;
}

// Interleave rows [begin, end) of x [rows, inputs]: for each MOST_INPUTS inputs, n rows together, as [inputs][n].
template <typename T>
inline void weave_rows(const T* x, int64_t begin, int64_t end, const GemmSizes& sizes, float* woven) {
    by_rows<MOST_ROWS>(begin, end, [&](auto n, int64_t row) {
        for (int64_t from = 0; from < sizes.inputs; from += MOST_INPUTS) {
            const int64_t inputs = std::min(MOST_INPUTS, sizes.inputs - from);
            weave<n>(x + row * sizes.inputs + from, sizes.inputs, inputs,
                     woven + woven_place(sizes, from, inputs, row));
        }
    });
}

// One piece (MOST_INPUTS inputs) of a panel, and where its results go. `next`: the piece that is processed next.
struct Piece {
    const uint8_t *panel, *next;
    int64_t from;  // first of its inputs
    float* sums;   // [rows, PANEL_OUTPUTS]
    float* out;    // if not null, final sums go here, sizes.out_stride apart
};

// Multiply all interleaved rows by MOST_INPUTS inputs of a panel. `room`: scratch for those inputs as floats. With many
// rows, the next piece is prefetched, a part of it with every few rows, and so are the sums of the next rows.
inline void multiply_piece(Format format, const float* woven, const Piece& piece, const GemmSizes& sizes, float* room) {
    const int64_t from = piece.from, inputs = std::min(MOST_INPUTS, sizes.inputs - from);
    const bool is_ahead = sizes.rows >= ROWS_TOGETHER;
    const int64_t bytes = panel_bytes(format, inputs) * MOST_ROWS / sizes.rows;  // for MOST_ROWS rows
    Ahead ahead{piece.next, bytes, nullptr, nullptr, sizes.out_stride};
    const auto add = [&](const auto* weights) {
        by_rows<MOST_ROWS>(0, sizes.rows, [&](auto n, int64_t row) {
            float* own = piece.sums + row * PANEL_OUTPUTS;
            Sums sums{from == 0 ? nullptr : own, own, PANEL_OUTPUTS};
            if (piece.out != nullptr) sums.to = piece.out + row * sizes.out_stride, sums.stride = sizes.out_stride;
            ahead.sums = from == 0 && piece.out != nullptr ? nullptr : own + n * PANEL_OUTPUTS;
            ahead.out = piece.out == nullptr ? nullptr : sums.to + n * sizes.out_stride;
            add_inputs<n>(woven + woven_place(sizes, from, inputs, row), weights, inputs, sums, is_ahead ? &ahead : nullptr);
            ahead.weights += ahead.bytes;
        });
    };
    if (format == HALVES && sizes.rows <= MOST_ROWS)  // each value is used once, so it is not stored as a float
        add(reinterpret_cast<const bf16*>(piece.panel) + from * PANEL_OUTPUTS);
    else
        add(plain_inputs(format, piece.panel, from, inputs, room));
}

inline float* as_floats(float* x) { return x; }
inline float* as_floats(bf16*) { return nullptr; }

// Multiply all interleaved rows by panels [begin, end): by the same inputs of each panel, then by the next inputs, so
// that rows come from the L2 cache for all panels but the first. `sums`: [panels, rows, PANEL_OUTPUTS].
template <typename T>
void multiply_some_panels(Format format, const float* woven, const uint8_t* weight, const T* bias, const GemmSizes& sizes,
                          int64_t begin, int64_t end, float* room, float* sums, T* out) {
    const int64_t bytes = panel_bytes(format, sizes.inputs);
    const auto is_final = [&](int64_t panel) {  // the sums are the result, and the panel has no padding
        return as_floats(out) != nullptr && bias == nullptr && (panel + 1) * PANEL_OUTPUTS <= sizes.outputs;
    };
    const auto sums_of = [&](int64_t panel) { return sums + (panel - begin) * sizes.rows * PANEL_OUTPUTS; };
    for (int64_t from = 0; from < sizes.inputs; from += MOST_INPUTS)
        for (int64_t panel = begin; panel < end; ++panel) {
            const bool is_last = from + MOST_INPUTS >= sizes.inputs;
            const int64_t next = panel + 1 < end ? panel + 1 : is_last ? end : begin;
            const int64_t next_from = panel + 1 < end ? from : is_last ? 0 : from + MOST_INPUTS;
            float* to = is_last && is_final(panel) ? as_floats(out) + panel * PANEL_OUTPUTS : nullptr;
            const uint8_t* next_piece = weight + next * bytes + panel_bytes(format, next_from);
            multiply_piece(format, woven, {weight + panel * bytes, next_piece, from, sums_of(panel), to}, sizes, room);
        }
    for (int64_t panel = begin; panel < end; ++panel) {
        if (is_final(panel)) continue;
        const int64_t first = panel * PANEL_OUTPUTS, count = std::min(PANEL_OUTPUTS, sizes.outputs - first);
        for (int64_t row = 0; row < sizes.rows; ++row)
            in_pieces(count, [&](int64_t i, int64_t n) {
                const Floats value = load(sums_of(panel) + row * PANEL_OUTPUTS + i);
                put(out + row * sizes.out_stride + first + i,
                    bias == nullptr ? value : rounded<T>(value) + fetch(bias + first + i, n), n);
            });
    }
}

struct alignas(64) Line {  // a cache line, for alignment
    float numbers[16];
};

// Multiply up to ROWS_AT_ONCE rows; `woven` is scratch memory for the interleaved rows.
template <typename T>
void multiply_some(Format format, const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes, float* woven,
                   T* out) {
    const int64_t panels = (sizes.outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for_each((sizes.rows + MOST_ROWS - 1) / MOST_ROWS, sizes.rows * sizes.inputs > MANY_NUMBERS, [&](int64_t i) {
        weave_rows(x, i * MOST_ROWS, std::min((i + 1) * MOST_ROWS, sizes.rows), sizes, woven);
    });
    const int64_t together = sizes.rows < ROWS_TOGETHER ? 1 : PANELS_TOGETHER;
    share_ranges(panels, sizes.panels_in_turn(panel_bytes(format, sizes.inputs)), sizes.is_large(), [&] {
        static thread_local std::vector<float> room;
        static thread_local std::vector<Line> sums;
        if (format != PLAIN) room.resize(MOST_INPUTS * PANEL_OUTPUTS);
        sums.resize(std::max<size_t>(sums.size(), (together * sizes.rows * PANEL_OUTPUTS + 15) / 16));
        return [&, expanded = room.data(), own = sums.data()->numbers](int64_t begin, int64_t end) {
            for (; begin < end; begin += together)
                multiply_some_panels(format, woven, weight, bias, sizes, begin, std::min(begin + together, end), expanded,
                                     own, out);
        };
    });
}

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null).
template <typename T>
void multiply_panels_of(Format format, const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes, T* out) {
    static thread_local std::vector<Line> room;
    room.resize(std::max<size_t>(room.size(), (std::min(ROWS_AT_ONCE, sizes.rows) * sizes.inputs + 15) / 16));
    for (int64_t row = 0; row < sizes.rows; row += ROWS_AT_ONCE) {
        GemmSizes some = sizes;
        some.rows = std::min(ROWS_AT_ONCE, sizes.rows - row);
        multiply_some(format, x + row * sizes.inputs, weight, bias, some, room.data()->numbers,
                      out + row * sizes.out_stride);
    }
}

template <Format FORMAT, typename T>
void multiply_panels(const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes, T* out) {
    multiply_panels_of(FORMAT, x, weight, bias, sizes, out);
}

}  // namespace
