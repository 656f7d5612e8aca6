// LoRA: y += B (A x) for a batch with several adapters (grouped low-rank gemm). Each adapter is in a slot of a layer's
// memory.
//
// A layer stacks `parts` matrices by their outputs (q, k and v), and an adapter has its own pair (A, B) for each: A
// [rank, inputs], B [outputs of the part, rank]. In a slot the A of all parts are stacked as one matrix, then follows
// B, one matrix per span of outputs. A matrix is packed into panels of 16 outputs, padded with zeros; a panel stores
// one line per input or, for tile units, per pair of interleaved inputs. Values are of the activations' dtype, or
// bfloat16 for float32 activations where that is exact: a step in which each row has its own adapter is bound by the
// bandwidth of reading them. An adapter of lower rank leaves the end of its slot unused. Every sum runs over the inputs
// in order, so a row's result does not depend on the other rows.
#pragma once

#include "amx.h"

namespace {

constexpr int64_t LOW_RANK_OUTPUTS = 16, UNIT_ROWS = 16;

// Adjacent outputs of a layer that belong to the same part.
struct OutputSpan {
    int64_t part, first, count;
};

// The adapters of one layer. `tiled`: packed for AMX tile units.
struct LowRankLayer {
    int64_t inputs, parts, num_spans, tiled, slot_bytes;
    const OutputSpan* spans;
    const int64_t* ranks;   // [slots, parts], padded as tiles need it; 0: the adapter does not change the part
    const int64_t* halved;  // [slots, 2]: whether A and B are stored in bfloat16 for float32 activations
    const uint8_t* slots;
};

inline int64_t panels_of(int64_t outputs) { return (outputs + LOW_RANK_OUTPUTS - 1) / LOW_RANK_OUTPUTS; }

// Pack the rows of a matrix [rows, inputs] as the outputs from `first` on of panels with `lines` lines of TOGETHER
// inputs.
template <int64_t TOGETHER, typename T>
void pack_panels(const T* matrix, int64_t stride, int64_t rows, int64_t inputs, int64_t first, int64_t lines,
                 T* panels) {
    for (int64_t output = first; output < first + rows; ++output, matrix += stride) {
        T* to = panels + (output / LOW_RANK_OUTPUTS * lines * LOW_RANK_OUTPUTS + output % LOW_RANK_OUTPUTS) * TOGETHER;
        for (int64_t i = 0; i < inputs; ++i)
            to[i / TOGETHER * LOW_RANK_OUTPUTS * TOGETHER + i % TOGETHER] = matrix[i];
    }
}

// Where the matrices of one adapter are stored in one layer.
struct Adapter {
    const LowRankLayer& layer;
    const int64_t* ranks;  // of each part
    const uint8_t* memory;
    int64_t rank, lines;  // sum over all parts; lines in a panel of A
    bool a_halved, b_halved;

    Adapter(const LowRankLayer& of, int64_t slot)
        : layer(of), ranks(of.ranks + slot * of.parts), memory(of.slots + slot * of.slot_bytes), rank(0),
          lines(of.tiled ? (of.inputs + TILE_INPUTS - 1) / TILE_INPUTS * LINES : of.inputs),
          a_halved(of.halved[2 * slot] != 0), b_halved(of.halved[2 * slot + 1] != 0) {
        for (int64_t part = 0; part < of.parts; ++part) rank += ranks[part];
    }
    int64_t lines_for(int64_t inputs) const { return layer.tiled ? inputs / 2 : inputs; }
    int64_t inner_panels() const { return panels_of(rank); }
    int64_t outer_panels() const {  // of the spans that the adapter changes
        int64_t count = 0;
        for (int64_t i = 0; i < layer.num_spans; ++i)
            if (ranks[layer.spans[i].part] > 0) count += panels_of(layer.spans[i].count);
        return count;
    }
    int64_t column(int64_t part) const {  // column of x A^T where a part begins
        int64_t before = 0;
        for (int64_t i = 0; i < part; ++i) before += ranks[i];
        return before;
    }
};

// Up to UNIT_ROWS rows of one adapter, which are computed together.
struct RowUnit {
    int64_t slot, begin, count;  // begin, count: range in RowUnits::rows
};

// The rows that have an adapter, sorted by adapter. Built once for all layers of a step.
struct RowUnits {
    std::vector<int64_t> rows;
    std::vector<RowUnit> units;

    RowUnits(const int64_t* slots, int64_t count) {  // slots [count]: negative for a row without an adapter
        const int64_t num = count == 0 ? 0 : *std::max_element(slots, slots + count) + 1;
        if (num <= 0) return;
        std::vector<int64_t> ends(num + 1, 0);
        for (int64_t row = 0; row < count; ++row)
            if (slots[row] >= 0) ++ends[slots[row] + 1];
        for (int64_t slot = 0; slot < num; ++slot) ends[slot + 1] += ends[slot];
        rows.resize(ends[num]);
        for (int64_t slot = 0; slot < num; ++slot)
            for (int64_t begin = ends[slot]; begin < ends[slot + 1]; begin += UNIT_ROWS)
                units.push_back({slot, begin, std::min(UNIT_ROWS, ends[slot + 1] - begin)});
        for (int64_t row = 0; row < count; ++row)
            if (slots[row] >= 0) rows[ends[slots[row]]++] = row;
    }
};

// The rows of x that belong to one unit: in place if they are consecutive, else gathered.
template <typename N> struct UnitRows {
    const N* first;
    int64_t stride, count;
};

// Gather the rows of a unit, converted to N and zero-padded to `padded` inputs, or return them in place.
template <typename T, typename N>
UnitRows<N> take_rows(const T* x, int64_t stride, const int64_t* rows, int64_t count, int64_t inputs, int64_t padded,
                      std::vector<N>& room) {
    if constexpr (std::is_same_v<T, N>)
        if (inputs == padded && rows[count - 1] - rows[0] == count - 1) return {x + rows[0] * stride, stride, count};
    room.resize(std::max<size_t>(room.size(), UNIT_ROWS * padded));
    for (int64_t row = 0; row < count; ++row) {
        N* to = room.data() + row * padded;
        const T* from = x + rows[row] * stride;
        if constexpr (std::is_same_v<T, N>) std::memcpy(to, from, inputs * sizeof(T));
        else in_pieces(inputs, [&](int64_t i, int64_t n) { put(to + i, fetch(from + i, n), n); });
        std::memset(static_cast<void*>(to + inputs), 0, (padded - inputs) * sizeof(N));
    }
    return {room.data(), padded, count};
}

// Panels of W for float32 rows, with vector registers.
template <typename W> struct VectorLines {
    static constexpr int64_t LINE_BYTES = LOW_RANK_OUTPUTS * sizeof(W);
    static constexpr int64_t PIECES = LOW_RANK_OUTPUTS / LANES;
    static constexpr int64_t AHEAD = 64;  // lines
    static constexpr int MOST_ROWS = LANES == 8 ? 2 : 4, MOST_PANELS = LANES / 4;  // their sums fit in the registers

    // Multiply ROWS rows by PANELS adjacent panels of `lines` lines, to found [ROWS][PANELS][16].
    template <int ROWS, int PANELS>
    static __attribute__((noinline)) void add_up(const float* x, int64_t stride, const uint8_t* panel, int64_t lines,
                                                 float* found) {
        const W* weights = reinterpret_cast<const W*>(panel);
        // Explicit prefetch: hardware prefetchers do not follow short panels.
        const int64_t ahead = std::min(lines * PANELS, AHEAD) * LOW_RANK_OUTPUTS;
        Floats sums[ROWS][PANELS * PIECES] = {};
        for (int64_t k = 0; k < lines; ++k) {
            Floats entries[PANELS * PIECES];
            unroll<PANELS * static_cast<int>(PIECES)>([&](auto i) {
                const W* line = weights + (i / PIECES * lines + k) * LOW_RANK_OUTPUTS;
                if (i % PIECES == 0) __builtin_prefetch(line + ahead);
                entries[i] = load(line + i % PIECES * LANES);
            });
            unroll<ROWS>([&](auto r) {
                const Floats factor = all(x[r * stride + k]);
                unroll<PANELS * static_cast<int>(PIECES)>(
                    [&](auto i) { sums[r][i] = add_product(sums[r][i], entries[i], factor); });
            });
        }
        std::memcpy(found, &sums, sizeof sums);
    }

    // Multiply all rows by all panels: give(row, panel, sums [16]).
    template <typename Give>
    static void multiply(const UnitRows<float>& rows, const uint8_t* memory, int64_t lines, int64_t panels, Give give) {
        by_rows<MOST_PANELS>(0, panels, [&](auto num, int64_t panel) {
            by_rows<MOST_ROWS>(0, rows.count, [&](auto n, int64_t row) {
                float found[n * num * LOW_RANK_OUTPUTS];
                add_up<n, num>(rows.first + row * rows.stride, rows.stride, memory + panel * lines * LINE_BYTES, lines, found);
                for (int i = 0; i < n * num; ++i) give(row + i / num, panel + i % num, found + i * LOW_RANK_OUTPUTS);
            });
        });
    }
};

// Vector kernels for activations of T on any CPU, computed in float32; panels of T or of bfloat16.
template <typename T> struct VectorUnits {
    typedef float Number;

    static int64_t padded(int64_t inputs) { return inputs; }
    static int64_t line_bytes(bool halved) { return halved ? VectorLines<bf16>::LINE_BYTES : VectorLines<T>::LINE_BYTES; }

    // Multiply rows by `panels` panels of `lines` lines: give(row, panel, sums [16]).
    template <typename Give>
    void multiply(const UnitRows<float>& rows, const uint8_t* memory, bool halved, int64_t lines, int64_t panels,
                  Give give) {
        if (halved) VectorLines<bf16>::multiply(rows, memory, lines, panels, give);
        else VectorLines<T>::multiply(rows, memory, lines, panels, give);
    }
};

#ifdef __AMX_BF16__
// AMX kernels for bfloat16 rows and panels: tiles 0-3 hold sums, 4 rows, 6 weights. A panel has at most one tile of
// lines, or whole tiles. One per thread.
class TileUnits {
    static constexpr int64_t LINE_BYTES = 64;
    static constexpr int64_t AHEAD = 2048;  // bytes prefetched ahead of the tiles
    int64_t rows_ = 0, lines_ = 0;          // of the current tile configuration

    // Configure the tiles for this many rows and lines, unless they are already.
    void lay_out(int64_t rows, int64_t lines) {
        if (rows == rows_ && lines == lines_) return;
        rows_ = rows;
        lines_ = lines;
        TileShapes shapes(rows);
        shapes.line_bytes[4] = static_cast<uint16_t>(4 * lines);
        shapes.lines[6] = static_cast<uint8_t>(lines);
        configure_tiles(shapes);
    }

    // Multiply up to 16 rows by PANELS (1-4) adjacent panels: give(row, panel, sums [16]).
    template <int PANELS, typename Give>
    void add_up(const UnitRows<bf16>& rows, const uint8_t* panel, int64_t lines, Give give) const {
        const int64_t size = lines * LINE_BYTES, stride = rows.stride * sizeof(bf16);
        const uint8_t* end = panel + size;
        clear_sums<(PANELS > 2)>();
        for (const bf16* x = rows.first; panel < end; panel += lines_ * LINE_BYTES, x += TILE_INPUTS) {
            for (int64_t i = 0; i < lines_ * LINE_BYTES; i += LINE_BYTES)
                for (int p = 0; p < PANELS; ++p) _mm_prefetch(panel + p * size + AHEAD + i, _MM_HINT_T0);
            finish_stores();
            _tile_loadd(4, x, stride);
            _tile_loadd(6, panel, 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (PANELS > 1) {
                _tile_loadd(6, panel + size, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if constexpr (PANELS > 2) {
                _tile_loadd(6, panel + 2 * size, 64);
                _tile_dpbf16ps(2, 4, 6);
            }
            if constexpr (PANELS > 3) {
                _tile_loadd(6, panel + 3 * size, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        alignas(64) float sums[PANELS][UNIT_ROWS * LOW_RANK_OUTPUTS];
        _tile_stored(0, sums[0], 64);
        if constexpr (PANELS > 1) _tile_stored(1, sums[1], 64);
        if constexpr (PANELS > 2) _tile_stored(2, sums[2], 64);
        if constexpr (PANELS > 3) _tile_stored(3, sums[3], 64);
        finish_stores();
        for (int64_t row = 0; row < rows.count; ++row)
            for (int p = 0; p < PANELS; ++p) give(row, p, sums[p] + row * LOW_RANK_OUTPUTS);
    }

   public:
    typedef bf16 Number;

    ~TileUnits() { _tile_release(); }

    static int64_t padded(int64_t inputs) { return (inputs + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS; }
    static int64_t line_bytes(bool) { return LINE_BYTES; }

    // The same as in VectorUnits.
    template <typename Give>
    void multiply(const UnitRows<bf16>& rows, const uint8_t* memory, bool, int64_t lines, int64_t panels, Give give) {
        lay_out(rows.count, std::min(lines, LINES));
        by_rows<4>(0, panels, [&](auto num, int64_t panel) {
            add_up<num>(rows, memory + panel * lines * LINE_BYTES, lines,
                        [&](int64_t row, int64_t p, const float* sums) { give(row, panel + p, sums); });
        });
    }
};
#endif

// y += B (A x) for one layer, with the kernels `Units`.
template <typename T, typename Units> struct LowRankAdd {
    typedef typename Units::Number Number;  // dtype of the gathered rows and of A x

    const LowRankLayer& layer;
    const RowUnits& groups;
    const T* x;
    int64_t x_stride;
    T* y;
    int64_t y_stride;

    // Shrink: multiply a unit's rows by panels [begin, end) of A, to inner [UNIT_ROWS, inner_stride].
    void shrink(Units& by, const RowUnit& unit, const Adapter& adapter, int64_t begin, int64_t end, Number* inner,
                int64_t inner_stride) const {
        static thread_local std::vector<Number> room;
        const auto rows = take_rows<T, Number>(x, x_stride, &groups.rows[unit.begin], unit.count, layer.inputs,
                                               Units::padded(layer.inputs), room);
        const uint8_t* memory = adapter.memory + begin * adapter.lines * Units::line_bytes(adapter.a_halved);
        const auto give = [&](int64_t row, int64_t panel, const float* sums) {
            Number* to = inner + row * inner_stride + (begin + panel) * LOW_RANK_OUTPUTS;
            for (int64_t i = 0; i < LOW_RANK_OUTPUTS; i += LANES) store(to + i, load(sums + i));
        };
        by.multiply(rows, memory, adapter.a_halved, adapter.lines, end - begin, give);
    }

    // Expand: multiply `inner` by panels [begin, end) of B over all spans, and add the result to y.
    void expand(Units& by, const RowUnit& unit, const Adapter& adapter, int64_t begin, int64_t end,
                const Number* inner, int64_t inner_stride) const {
        const uint8_t* memory =
            adapter.memory + adapter.inner_panels() * adapter.lines * Units::line_bytes(adapter.a_halved);
        for (int64_t i = 0; i < layer.num_spans && end > 0; ++i) {
            const OutputSpan& span = layer.spans[i];
            const int64_t rank = adapter.ranks[span.part], panels = rank > 0 ? panels_of(span.count) : 0;
            const int64_t bytes = adapter.lines_for(rank) * Units::line_bytes(adapter.b_halved);  // of a panel
            const int64_t low = std::max<int64_t>(0, begin), high = std::min(panels, end);
            if (low < high) {
                const UnitRows<Number> rows{inner + adapter.column(span.part), inner_stride, unit.count};
                const auto give = [&](int64_t row, int64_t panel, const float* sums) {
                    const int64_t output = (low + panel) * LOW_RANK_OUTPUTS;
                    T* to = y + groups.rows[unit.begin + row] * y_stride + span.first + output;
                    in_pieces(std::min(LOW_RANK_OUTPUTS, span.count - output), [&](int64_t j, int64_t n) {
                        put(to + j, fetch(to + j, n) + load(sums + j), n);
                    });
                };
                by.multiply(rows, memory + low * bytes, adapter.b_halved, adapter.lines_for(rank), high - low, give);
            }
            begin -= panels;
            end -= panels;
            memory += panels * bytes;
        }
    }

    // Run all units. `shares`: the number of pieces into which the panels of each unit are divided among threads, where
    // there are few units.
    void go(int64_t shares) const {
        static thread_local std::vector<Number> room;
        const int64_t units = static_cast<int64_t>(groups.units.size());
        int64_t stride = 0;
        for (const RowUnit& unit : groups.units)
            stride = std::max(stride, Adapter(layer, unit.slot).inner_panels() * LOW_RANK_OUTPUTS);
        if (stride == 0) return;
        room.resize(std::max<size_t>(room.size(), units * UNIT_ROWS * stride));
        Number* const inner = room.data();
        const auto each = [&](Units& by, int64_t item, bool shrinks, bool expands) {
            const int64_t share = item % shares;
            const RowUnit& unit = groups.units[item / shares];
            const Adapter adapter(layer, unit.slot);
            if (adapter.rank == 0) return;
            const auto cut = [&](int64_t panels, int64_t index) { return panels * index / shares; };
            const int64_t first = adapter.inner_panels(), second = adapter.outer_panels();
            Number* own = inner + item / shares * UNIT_ROWS * stride;
            if (shrinks) shrink(by, unit, adapter, cut(first, share), cut(first, share + 1), own, stride);
            if (expands) expand(by, unit, adapter, cut(second, share), cut(second, share + 1), own, stride);
        };
        const auto share = [&](bool shrinks, bool expands) {
            share_out(units * shares, 1, true, [&] {
                return [&, shrinks, expands, by = Units()](int64_t item) mutable { each(by, item, shrinks, expands); };
            });
        };
        if (shares == 1) return share(true, true);  // one pass per unit reads A and B together
        share(true, false);
        share(false, true);
    }
};

// y [rows, y_stride] += B (A x) for the rows of x [rows, x_stride] that have an adapter.
template <typename T>
void low_rank_add(const LowRankLayer& layer, const RowUnits& groups, const T* x, int64_t x_stride, T* y,
                  int64_t y_stride) {
    const int64_t units = static_cast<int64_t>(groups.units.size()), threads = num_threads();
    if (units == 0) return;
    const int64_t shares = threads == 1 || units >= 4 * threads ? 1 : (4 * threads + units - 1) / units;
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bf16>)
        if (layer.tiled) return LowRankAdd<T, TileUnits>{layer, groups, x, x_stride, y, y_stride}.go(shares);
#endif
    LowRankAdd<T, VectorUnits<T>>{layer, groups, x, x_stride, y, y_stride}.go(shares);
}

}  // namespace
