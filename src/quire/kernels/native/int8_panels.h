// Integer gemm of activations with quantized weights. A row is quantized to 8 or 16 bits with a scale per 32 inputs
// (int8_rows.h). Its values times the quantized weights are summed exactly in int32, and only the sums over 32 or 16
// inputs are converted to float.
//
// A weight is value * scale + offset. The weight [outputs, inputs] is packed into panels of 16 outputs, padded with
// zeros, at the size of the GGUF file plus at most a tenth, with these exceptions. Q4_K takes 1.11 of the file, as
// offsets are float16 (bytes, as the file has them, cost 4 % of the speed). Values of fewer than 4 bits are stored in
// 4, except those of Q2_K and Q3_K: TQ1_0 takes 2.4 of the file, TQ2_0 and GPTQ of 2 bits 2.0, GPTQ of 3 bits 1.35. A
// panel is
//   table    in formats that have one: 16 signed bytes, then zeros up to 64;
//   scales   [inputs / 32 or 16; wide: / 128][16 outputs], float16;
//   offsets  likewise, in formats that have them;
//   lines    for each 32 inputs eight lines, 64 bytes each: byte 4 o + j of line k is input 4 k + j of output o.
// With Arm's dot products, the scales, offsets and lines of 32 inputs are stored together, then those of the next 32,
// so that memory is read in one stream. Factors that 128 inputs share precede the lines of all 128. With super-blocks
// (Q2_K, Q3_K) a panel is
//   shared   [inputs / 256][scales, offsets if there are any][16 outputs], float16;
//   codes    [inputs / 16][16 outputs], a byte: the signed code of the scale; with offsets, four bits for the scale, and
//            four for the offset in the high half;
//   lines    as above.
//
// Lines of 8 bits are signed bytes. Lines of fewer bits are unsigned. With 2 bits, two byte lines hold lines 0-3 and
// 4-7, the lowest bits first. With 3 bits, byte line j of three holds line 2 j in its bits 0-2 and line 2 j + 1 in bits
// 3-5; bits 6 and 7 of byte lines 0 and 1 are the low bits of lines 6 and 7, those of byte line 2 their third bits.
// With 4 bits and more, four byte lines hold lines 0-3 in the low halves and lines 4-7 in the high ones; behind them
// come the fifth bits of all lines (bit k: of line k), or the fifth and sixth bits in two byte lines (bits 2 k and 2 k
// + 1 of the first one: of line k, of the second one: of line 4 + k). Without offsets, the middle value 1 << (bits - 1)
// represents 0. With a table, values are its entries, and lines hold indices into it.
//
// With Arm's dot products, the two 4-bit values of a byte belong to one input and two outputs, so that no instruction
// is needed to extract the upper one. A line has 32 bytes: the low half of byte 4 o + j of line k is input 4 k + j of
// output o; the high half is that of output 8 + o with its highest bit inverted. As a signed byte it is low + 16 (high
// - 8), so the sums of whole bytes, minus those of their low halves, are 16 times the sums of the high ones.
#pragma once

#ifdef __ARM_FEATURE_DOTPROD
#include "int8_lanes.h"
#else
#include "int8_lines.h"
#endif
#ifdef __AMX_INT8__
#include "int8_tiles.h"
#endif

namespace {

// Epilogue of one panel: stores at most 16 outputs per row to `out`, with bias.
template <typename T> struct PanelResults {
    T* out;
    const T* bias;  // of these outputs, or null
    int64_t stride, count;

    // Store sums [rows][PARTS] of rows `row` and on.
    void put_sums(const Floats* sums, int64_t row, int64_t rows) const {
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t part = 0; part * LANES < count; ++part) {
                const int64_t at = part * LANES, some = std::min(LANES, count - at);
                const Floats value = sums[r * PARTS + part];
                put(out + (row + r) * stride + at, bias == nullptr ? value : rounded<T>(value) + fetch(bias + at, some),
                    some);
            }
    }
};

// The functions that are compiled per format. All other code takes the format as an argument, so it is compiled once.
struct Int8Kernels {
    int64_t format;
    // [rows together]: multiply_int8_panel; null except for the counts that rows_together returns
    void (*multiply[INT8_ROWS + 1])(uint8_t* rows, int64_t inputs, const PanelBytes& panel, Floats* sums);
    // add_low_digits, or null if `multiply` includes it
    void (*add_low)(uint8_t* rows, int64_t count, int64_t inputs, const PanelBytes& panel, Floats* sums);
#ifdef __AMX_INT8__
    void (*multiply_tiles)(uint8_t* room, int64_t rows, int64_t inputs, const PanelBytes& panel, Floats* sums);  // or null
#endif
};

// Collect the functions of one format.
template <int64_t FORMAT> constexpr Int8Kernels make_int8_kernels() {
    Int8Kernels kernels{};
    kernels.format = FORMAT;
    kernels.multiply[1] = multiply_int8_panel<FORMAT, 1>;
    kernels.multiply[2] = multiply_int8_panel<FORMAT, 2>;
    kernels.multiply[3] = multiply_int8_panel<FORMAT, 3>;
    kernels.multiply[4] = multiply_int8_panel<FORMAT, 4>;
    kernels.multiply[INT8_ROWS] = multiply_int8_panel<FORMAT, INT8_ROWS>;
#ifndef __ARM_FEATURE_DOTPROD
    if constexpr (has_loose_digits(FORMAT)) kernels.add_low = add_low_digits<FORMAT>;
#endif
#ifdef __AMX_INT8__
    if constexpr (has_loose_digits(FORMAT)) kernels.multiply_tiles = multiply_int8_tiles<FORMAT>;
#endif
    return kernels;
}
template <int64_t FORMAT> constexpr Int8Kernels INT8_KERNELS = make_int8_kernels<FORMAT>();

// How many of `rest` rows to multiply together next, at most `most`.
constexpr int64_t rows_together(int64_t most, int64_t rest) {
    while (most > rest) most = most > 4 ? most / 2 : most - 1;
    return most;
}

// Integer gemm of up to INT8_ROWS_AT_ONCE rows; `room` is scratch memory for the quantized rows.
template <typename T> struct Int8Gemm {
    const Int8Kernels& kernels;
    const T* x;
    const uint8_t* weight;
    const T* bias;
    GemmSizes sizes;
    uint8_t* room;
    T* out;

    // Byte offset of row `row` in the scratch memory.
    int64_t place_of(int64_t row) const { return integer_rows_bytes(kernels.format, row, sizes.inputs); }

    // Quantize all rows to records of up to `most` rows.
    void quantize(int64_t most) const {
        for_each((sizes.rows + most - 1) / most, sizes.rows * sizes.inputs > MANY_NUMBERS / 2, [&](int64_t i) {
            const int64_t end = std::min((i + 1) * most, sizes.rows);
            for (int64_t row = i * most, n; row < end; row += n) {
                n = rows_together(most, end - row);
                quantize_rows(kernels.format, x, row, n, sizes.inputs, room);
            }
        });
    }

    // Call a function made by `make()`, once per thread, with each panel and its epilogue, in parallel over panels.
    template <typename Make> void for_panels(Make make) const {
        const int64_t panels = (sizes.outputs + INT8_OUTPUTS - 1) / INT8_OUTPUTS, inputs = sizes.inputs;
        const int64_t bytes = int8_panel_bytes(kernels.format, inputs);
        share_out(panels, sizes.panels_in_turn(bytes), sizes.is_large(), [&] {
            return [&, take = make()](int64_t panel) mutable {
                const uint8_t* own = weight + panel * bytes;
                const int64_t begin = panel * INT8_OUTPUTS, count = std::min(INT8_OUTPUTS, sizes.outputs - begin);
                take(PanelBytes{own, decode_factors(kernels.format, own, inputs)},
                     PanelResults<T>{out + begin, bias == nullptr ? nullptr : bias + begin, sizes.out_stride, count});
            };
        });
    }

    // Multiply rows `row` and on by one panel.
    void multiply_panel(int64_t row, const PanelBytes& panel, const PanelResults<T>& results) const {
        for (int64_t n; row < sizes.rows; row += n) {
            n = rows_together(INT8_ROWS, sizes.rows - row);
            Floats sums[INT8_ROWS * PARTS];
            uint8_t* const records = room + place_of(row);
            kernels.multiply[n](records, sizes.inputs, panel, sums);
            if (kernels.add_low != nullptr && have_low_digits(records, n, sizes.inputs))
                kernels.add_low(records, n, sizes.inputs, panel, sums);
            results.put_sums(sums, row, n);
        }
    }

    // Run the gemm: on AMX int8 tiles for whole blocks of rows where available, else on vector units.
    void go() const {
#ifdef __AMX_INT8__
        if (has_tiles && kernels.multiply_tiles != nullptr && sizes.rows >= INT8_TILE_ROWS) {
            quantize(INT8_TILE_ROWS);
            const int64_t tiled = sizes.rows / INT8_TILE_ROWS * INT8_TILE_ROWS;
            return for_panels([&] {
                const TileShapes shapes = int8_tile_shapes(scales_of(kernels.format));
                return [&, tiled, in_use = TilesInUse(shapes)](const PanelBytes& panel, const PanelResults<T>& results) {
                    Floats sums[INT8_ROWS_AT_ONCE];
                    kernels.multiply_tiles(room, tiled, sizes.inputs, panel, sums);
                    results.put_sums(sums, 0, tiled);
                    multiply_panel(tiled, panel, results);
                };
            });
        }
#endif
        quantize(INT8_ROWS);
        for_panels([&] {
            return [&](const PanelBytes& panel, const PanelResults<T>& results) { multiply_panel(0, panel, results); };
        });
    }
};

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null), in integer arithmetic.
template <typename T>
void multiply_int8_by(const Int8Kernels& kernels, const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes,
                      T* out) {
    static thread_local std::vector<uint8_t> room;
    const int64_t most = std::min(INT8_ROWS_AT_ONCE, sizes.rows);
    room.resize(std::max<size_t>(room.size(), integer_rows_bytes(kernels.format, most, sizes.inputs)));
    for (int64_t row = 0; row < sizes.rows; row += INT8_ROWS_AT_ONCE) {
        GemmSizes some = sizes;
        some.rows = std::min(INT8_ROWS_AT_ONCE, sizes.rows - row);
        Int8Gemm<T>{kernels, x + row * sizes.inputs, weight, bias, some, room.data(), out + row * sizes.out_stride}
            .go();
    }
}

template <int64_t FORMAT, typename T>
void multiply_int8(const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes, T* out) {
    multiply_int8_by(INT8_KERNELS<FORMAT>, x, weight, bias, sizes, out);
}

// The quantized value of input `input` of 32, of output `place` of 16.
inline int32_t stored_level(int64_t format, const uint8_t* table, const uint8_t* lines, int64_t place, int64_t input) {
    const int64_t bits = bits_of(format), line = input / 4, at = input % 4;
    const auto byte = [&](int64_t of) -> int32_t { return lines[of * LINE_BYTES + 4 * place + at]; };
    if (bits == 8) return static_cast<int8_t>(byte(line));
    int32_t level;
    if (bits == 2) {
        level = byte(line / 4) >> 2 * (line % 4) & 3;
    } else if (bits == 3) {
        level = line < 6 ? byte(line / 2) >> 3 * (line % 2) & 7 : byte(line - 6) >> 6 | (byte(2) >> line & 1) << 2;
    } else if (has_paired_outputs(format)) {
        const int32_t both = lines[line * PAIRED_BYTES + 4 * (place % (INT8_OUTPUTS / 2)) + at];
        level = place < INT8_OUTPUTS / 2 ? both & 15 : both >> 4 ^ 8;
    } else {
        level = byte(line % 4) >> (line < 4 ? 0 : 4) & 15;
    }
    if (has_table(format)) return static_cast<int8_t>(table[level]);
    if (bits == 5) level |= (byte(4) >> line & 1) << 4;
    if (bits == 6) level |= (byte(4 + line / 4) >> 2 * (line % 4) & 3) << 4;
    return level - (has_offsets(format) ? 0 : 1 << (bits - 1));
}

// Dequantize outputs `places` [count] of a weight to out [count, inputs]. Returns false, and does nothing, if an index
// is out of range.
inline bool read_int8_rows(int64_t format, const uint8_t* panels, const int64_t* places, const GemmSizes& sizes,
                           float* out) {
    const int64_t count = sizes.rows, inputs = sizes.inputs;
    for (int64_t row = 0; row < count; ++row)
        if (places[row] < 0 || places[row] >= sizes.outputs) return false;
    const int64_t groups = inputs / INT8_GROUP, scales = scales_of(format), each = INT8_GROUP / scales;
    for_each(count, count * inputs > MANY_NUMBERS, [&](int64_t row) {
        const uint8_t* panel = panels + places[row] / INT8_OUTPUTS * int8_panel_bytes(format, inputs);
        const uint8_t* decoded = decode_factors(format, panel, inputs);
        const int64_t place = places[row] % INT8_OUTPUTS;
        for (int64_t part = 0; part < groups * scales; ++part) {
            const GroupPlaces places = places_of(format, groups, part / scales);
            const int64_t half = part % scales;
            const auto factor = [&](int64_t first) {
                const uint8_t* own = decoded + first + 2 * (half * INT8_OUTPUTS + place / LANES * LANES);
                return load_float16(own)[place % LANES];
            };
            const float scale = factor(places.scales), offset = has_offsets(format) ? factor(places.offsets) : 0.0f;
            float* to = out + row * inputs + part * each;
            for (int64_t i = 0; i < each; ++i) {
                const int32_t level = stored_level(format, panel, panel + places.lines, place, half * each + i);
                to[i] = static_cast<float>(level) * scale;
                if (has_offsets(format)) to[i] = to[i] + offset;
            }
        }
    });
    return true;
}

}  // namespace
