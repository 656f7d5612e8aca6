// Products with a float32 weight [outputs, inputs] cut into panels: PANEL_OUTPUTS outputs of every input, one input
// behind the other; the outputs are padded with zeros. An output is summed over its inputs in order, however many rows
// there are.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t PANEL_PIECES = 3, PANEL_OUTPUTS = PANEL_PIECES * LANES;
constexpr int MOST_ROWS = LANES == 8 ? 4 : 8;  // rows whose sums fit in the registers
constexpr int64_t MOST_INPUTS = 640;  // of a panel at a time: with as much of the rows they stay in the first cache

struct PanelProduct {
    int64_t rows, inputs, outputs;
    int64_t panels() const { return (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS; }
    int64_t block() const {  // inputs at a time: as few equal blocks as possible
        const int64_t blocks = (inputs + MOST_INPUTS - 1) / MOST_INPUTS;
        return (inputs + blocks - 1) / blocks;
    }
};

// One input: `weights` of all outputs of the panel, `x` of ROWS rows.
template <int ROWS>
inline void add_input(const float* weights, const float* x, Floats (&sums)[ROWS][PANEL_PIECES]) {
    Floats entries[PANEL_PIECES];
    for (int p = 0; p < PANEL_PIECES; ++p) entries[p] = load(weights + p * LANES);
    if constexpr (ROWS >= 4) {
        for (int r = 0; r < ROWS; r += 4) {
            Quad four;
            std::memcpy(&four, x + r, sizeof four);
            for (int p = 0; p < PANEL_PIECES; ++p) {
                sums[r][p] = add_scaled<0>(sums[r][p], entries[p], four);
                sums[r + 1][p] = add_scaled<1>(sums[r + 1][p], entries[p], four);
                sums[r + 2][p] = add_scaled<2>(sums[r + 2][p], entries[p], four);
                sums[r + 3][p] = add_scaled<3>(sums[r + 3][p], entries[p], four);
            }
        }
    } else {
        for (int r = 0; r < ROWS; ++r)
            for (int p = 0; p < PANEL_PIECES; ++p) sums[r][p] += entries[p] * x[r];
    }
}

// x [inputs][ROWS] times weights [inputs][PANEL_OUTPUTS], on top of what `sums` [ROWS][PANEL_OUTPUTS] holds.
template <int ROWS> void add_inputs(const float* x, const float* weights, int64_t inputs, float* sums) {
    Floats own[ROWS][PANEL_PIECES];
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANEL_PIECES; ++p) own[r][p] = load(sums + (r * PANEL_PIECES + p) * LANES);
    for (const float* end = weights + inputs * PANEL_OUTPUTS; weights < end; weights += PANEL_OUTPUTS, x += ROWS)
        add_input<ROWS>(weights, x, own);
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANEL_PIECES; ++p) store(sums + (r * PANEL_PIECES + p) * LANES, own[r][p]);
}

// Rows [begin, end) of x [rows, inputs], n of them together: [inputs][n], at row * inputs.
inline void weave_rows(const float* x, int64_t begin, int64_t end, int64_t inputs, float* woven) {
    by_rows<MOST_ROWS>(begin, end, [&](auto n, int64_t row) {
        float* to = woven + row * inputs;
        for (int64_t i = 0; i < inputs; ++i)
            for (int r = 0; r < n; ++r) *to++ = x[(row + r) * inputs + i];
    });
}

// All rows, woven, times one panel -> sums [rows, PANEL_OUTPUTS].
inline void multiply_panel(const float* woven, const float* weights, const PanelProduct& product, float* sums) {
    std::fill(sums, sums + product.rows * PANEL_OUTPUTS, 0.0f);
    for (int64_t from = 0, block = product.block(); from < product.inputs; from += block)
        by_rows<MOST_ROWS>(0, product.rows, [&](auto n, int64_t row) {
            add_inputs<n>(woven + row * product.inputs + from * n, weights + from * PANEL_OUTPUTS,
                          std::min(block, product.inputs - from), sums + row * PANEL_OUTPUTS);
        });
}

// x [rows, inputs] times the weight, transposed, plus a bias [outputs] or null -> out [rows, outputs].
inline void multiply_panels(const float* x, const float* weight, const float* bias, const PanelProduct& product,
                            float* out) {
    static thread_local std::vector<float> room;
    room.resize(std::max<size_t>(room.size(), product.rows * product.inputs));
    float* const woven = room.data();
#pragma omp parallel for schedule(static) if (product.rows * product.inputs > 65536)
    for (int64_t row = 0; row < product.rows; row += MOST_ROWS)
        weave_rows(x, row, std::min(row + MOST_ROWS, product.rows), product.inputs, woven);
#pragma omp parallel
    {
        std::vector<float> sums(product.rows * PANEL_OUTPUTS);
#pragma omp for schedule(dynamic, 4)
        for (int64_t panel = 0; panel < product.panels(); ++panel) {
            multiply_panel(woven, weight + panel * product.inputs * PANEL_OUTPUTS, product, sums.data());
            const int64_t begin = panel * PANEL_OUTPUTS, count = std::min(PANEL_OUTPUTS, product.outputs - begin);
            for (int64_t row = 0; row < product.rows; ++row)
                in_pieces(count, [&](int64_t i, int64_t n) {
                    const Floats value = load(sums.data() + row * PANEL_OUTPUTS + i);
                    put(out + row * product.outputs + begin + i,
                        bias == nullptr ? value : value + fetch(bias + begin + i, n), n);
                });
        }
    }
}

}  // namespace
