// bfloat16 gemm with dot-product instructions that accumulate in float32: vdpbf16ps (AVX-512 BF16) and bfmmla (Arm). A
// weight [outputs, inputs] is packed into panels of PANEL_OUTPUTS outputs. A panel stores, for each DOT_INPUTS inputs,
// those of its first output, then those of the second, and so on; outputs and inputs are padded with zeros. A sum takes
// its inputs in order, DOT_INPUTS at a time, whatever the number of rows. Subnormal values may be flushed to zero, as
// the instructions do.
#pragma once

#include "panels.h"

namespace {

#if defined(__AVX512BF16__)
#define QUIRE_BF16_DOTS 1
constexpr int64_t DOT_INPUTS = 2, DOT_ROWS = 1;  // a register of sums holds one row x 16 outputs
typedef __m512bh DotEntries;
inline DotEntries load_dot_rows(const bf16* from) {  // broadcasts a pair of inputs of a row to all outputs
    int32_t pair;
    std::memcpy(&pair, from, sizeof pair);
    return (DotEntries)_mm512_set1_epi32(pair);
}
inline DotEntries load_dot_weights(const bf16* from) { return (DotEntries)_mm512_loadu_si512(from); }
// sums += dot products of DOT_INPUTS bfloat16 pairs.
inline Floats add_dots(Floats sums, DotEntries rows, DotEntries weights) {
    return (Floats)_mm512_dpbf16_ps((__m512)sums, rows, weights);
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define QUIRE_BF16_DOTS 1
constexpr int64_t DOT_INPUTS = 4, DOT_ROWS = 2;  // a register of sums holds two rows x two outputs
typedef bfloat16x8_t DotEntries;
inline DotEntries load_dot_rows(const bf16* from) { return (DotEntries)vld1q_u16(&from->bits); }
inline DotEntries load_dot_weights(const bf16* from) { return (DotEntries)vld1q_u16(&from->bits); }
// sums += dot products of DOT_INPUTS bfloat16 values, 2 x 2.
inline Floats add_dots(Floats sums, DotEntries rows, DotEntries weights) {
    return (Floats)vbfmmlaq_f32((float32x4_t)sums, rows, weights);
}
#else
constexpr int64_t DOT_INPUTS = 0;  // this path has no such instruction
#endif

#ifdef QUIRE_BF16_DOTS
constexpr int64_t DOT_PIECES = PANEL_OUTPUTS * DOT_ROWS / LANES;  // registers of sums for DOT_ROWS rows of a panel
constexpr int64_t ROW_SUMS = DOT_ROWS * PANEL_OUTPUTS;            // floats in them
constexpr int MOST_DOT_ROWS = 8 / DOT_ROWS;                       // times DOT_ROWS: rows whose sums fit in registers
static_assert(MOST_INPUTS % DOT_INPUTS == 0 && ROWS_AT_ONCE % DOT_ROWS == 0);

constexpr int64_t padded_inputs(int64_t inputs) { return (inputs + DOT_INPUTS - 1) / DOT_INPUTS * DOT_INPUTS; }
constexpr int64_t row_units(int64_t rows) { return (rows + DOT_ROWS - 1) / DOT_ROWS; }  // in units of DOT_ROWS rows

// sums [UNITS][ROW_SUMS] += UNITS * DOT_ROWS interleaved rows x `inputs` inputs of one panel. The inner kernel.
template <int UNITS> void add_panel_dots(const bf16* x, const bf16* weights, int64_t inputs, float* sums) {
    Floats own[UNITS][DOT_PIECES];
    const auto each = [&](auto body) {
        unroll<UNITS * DOT_PIECES>([&](auto i) { body(own[i / DOT_PIECES][i % DOT_PIECES], sums + i * LANES); });
    };
    each([](Floats& sum, const float* from) { sum = load(from); });
    constexpr int64_t WEIGHTS = PANEL_OUTPUTS * DOT_INPUTS, ENTRIES = LANES * DOT_INPUTS / DOT_ROWS;
    for (int64_t i = 0; i < inputs; i += DOT_INPUTS, weights += WEIGHTS, x += UNITS * DOT_ROWS * DOT_INPUTS) {
        if constexpr (DOT_ROWS == 1) {  // the weights stay in registers, rows are loaded one by one
            DotEntries entries[DOT_PIECES];
            unroll<DOT_PIECES>([&](auto p) { entries[p] = load_dot_weights(weights + p * ENTRIES); });
            unroll<UNITS>([&](auto u) {
                const DotEntries rows = load_dot_rows(x + u * DOT_ROWS * DOT_INPUTS);
                unroll<DOT_PIECES>([&](auto p) { own[u][p] = add_dots(own[u][p], rows, entries[p]); });
            });
        } else {  // the other way round: the sums of rows need fewer registers
            DotEntries rows[UNITS];
            unroll<UNITS>([&](auto u) { rows[u] = load_dot_rows(x + u * DOT_ROWS * DOT_INPUTS); });
            unroll<DOT_PIECES>([&](auto p) {
                const DotEntries entries = load_dot_weights(weights + p * ENTRIES);
                unroll<UNITS>([&](auto u) { own[u][p] = add_dots(own[u][p], rows[u], entries); });
            });
        }
    }
    each([](const Floats& sum, float* to) { store(to, sum); });
}

// Interleave units [begin, end) of x [rows, inputs], n units together: [inputs / DOT_INPUTS][n][DOT_ROWS][DOT_INPUTS],
// padded with zeros for missing rows and inputs.
inline void weave_dot_rows(const bf16* x, int64_t begin, int64_t end, const GemmSizes& sizes, bf16* woven) {
    const int64_t inputs = sizes.inputs, padded = padded_inputs(inputs);
    by_rows<MOST_DOT_ROWS>(begin, end, [&](auto n, int64_t unit) {
        bf16* to = woven + unit * DOT_ROWS * padded;
        for (int64_t i = 0; i < padded; i += DOT_INPUTS)
            for (int64_t row = unit * DOT_ROWS; row < (unit + n) * DOT_ROWS; ++row, to += DOT_INPUTS) {
                if (row < sizes.rows && i + DOT_INPUTS <= inputs) {
                    std::memcpy(to, x + row * inputs + i, DOT_INPUTS * sizeof(bf16));
                    continue;
                }
                std::memset(to, 0, DOT_INPUTS * sizeof(bf16));
                if (row < sizes.rows) std::memcpy(to, x + row * inputs + i, (inputs - i) * sizeof(bf16));
            }
    });
}

// Multiply all interleaved rows by one panel, to sums [units][ROW_SUMS].
inline void multiply_dot_panel(const bf16* woven, const bf16* panel, const GemmSizes& sizes, float* sums) {
    const int64_t units = row_units(sizes.rows), inputs = padded_inputs(sizes.inputs);
    std::fill(sums, sums + units * ROW_SUMS, 0.0f);
    for (int64_t from = 0; from < inputs; from += MOST_INPUTS)  // so many inputs stay in the L1 cache
        by_rows<MOST_DOT_ROWS>(0, units, [&](auto n, int64_t unit) {
            add_panel_dots<n>(woven + (unit * inputs + from * n) * DOT_ROWS, panel + from * PANEL_OUTPUTS,
                              std::min(MOST_INPUTS, inputs - from), sums + unit * ROW_SUMS);
        });
}

// Copy the sums of one row to `line` in the order of outputs.
inline void gather_dots(const float* sums, int64_t row, float* line) {
    const float* unit = sums + row / DOT_ROWS * ROW_SUMS;
    constexpr int64_t TOGETHER = LANES / DOT_ROWS;  // outputs of a row in a register
    for (int64_t p = 0; p < DOT_PIECES; ++p)
        std::memcpy(line + p * TOGETHER, unit + p * LANES + row % DOT_ROWS * TOGETHER, TOGETHER * sizeof(float));
}

// Multiply up to ROWS_AT_ONCE rows by all panels, with bias; `woven` is scratch memory for the interleaved rows.
inline void multiply_some_dots(const bf16* x, const uint8_t* weight, const bf16* bias, const GemmSizes& sizes, bf16* woven,
                               bf16* out) {
    const int64_t units = row_units(sizes.rows), inputs = padded_inputs(sizes.inputs);
    for_each((units + MOST_DOT_ROWS - 1) / MOST_DOT_ROWS, sizes.rows * inputs > MANY_NUMBERS, [&](int64_t i) {
        weave_dot_rows(x, i * MOST_DOT_ROWS, std::min<int64_t>((i + 1) * MOST_DOT_ROWS, units), sizes, woven);
    });
    const int64_t panels = (sizes.outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS, panel_numbers = inputs * PANEL_OUTPUTS;
    share_out(panels, sizes.panels_in_turn(panel_numbers * 2), sizes.is_large(), [&] {
        return [&, sums = std::vector<float>(units * ROW_SUMS)](int64_t panel) mutable {
            const bf16* entries = reinterpret_cast<const bf16*>(weight) + panel * panel_numbers;
            multiply_dot_panel(woven, entries, sizes, sums.data());
            const int64_t begin = panel * PANEL_OUTPUTS, count = std::min(PANEL_OUTPUTS, sizes.outputs - begin);
            for (int64_t row = 0; row < sizes.rows; ++row) {
                float line[PANEL_OUTPUTS];
                gather_dots(sums.data(), row, line);
                in_pieces(count, [&](int64_t i, int64_t n) {
                    const Floats value = load(line + i);
                    put(out + row * sizes.out_stride + begin + i,
                        bias == nullptr ? value : rounded<bf16>(value) + fetch(bias + begin + i, n), n);
                });
            }
        };
    });
}

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null); all bfloat16.
inline void multiply_dots(const bf16* x, const uint8_t* weight, const bf16* bias, const GemmSizes& sizes, bf16* out) {
    static thread_local std::vector<bf16> room;
    const int64_t at_once = row_units(std::min(ROWS_AT_ONCE, sizes.rows)) * DOT_ROWS;
    room.resize(std::max<size_t>(room.size(), at_once * padded_inputs(sizes.inputs)));
    for (int64_t row = 0; row < sizes.rows; row += ROWS_AT_ONCE) {
        GemmSizes some = sizes;
        some.rows = std::min(ROWS_AT_ONCE, sizes.rows - row);
        multiply_some_dots(x + row * sizes.inputs, weight, bias, some, room.data(), out + row * sizes.out_stride);
    }
}
#endif

}  // namespace
