// Integer gemm of int8_panels.h for sixteen rows or more on AMX int8 tiles: one instruction sums 32 or 16 inputs of 16
// rows x 16 outputs. Integer sums are converted to floats and added in the same order as in int8_lines.h, so a row's
// result is bitwise the same in both.
#pragma once

#include "amx.h"
#include "int8_lines.h"

namespace {

constexpr int INT8_TILE_ROWS = 16;

// Tile configuration: tiles 0 and 1 hold sums, 2 and 3 digits of rows, 4 and 5 weights. They are double-buffered: one
// of each pair is in use while the sums of the other are stored.
inline TileShapes int8_tile_shapes(int64_t scales) {
    TileShapes shapes(INT8_TILE_ROWS);
    shapes.line_bytes[2] = shapes.line_bytes[3] = static_cast<uint16_t>(INT8_GROUP / scales);
    shapes.lines[4] = shapes.lines[5] = static_cast<uint8_t>(INT8_LINES / scales);
    return shapes;
}

// One panel, unpacked to one byte per value, times 16 rows at a time. Requires the tile configuration of
// int8_tile_shapes.
template <int64_t FORMAT> class Int8Tiles {
    using Record = RecordOf<FORMAT, INT8_TILE_ROWS>;
    static constexpr int64_t SCALES = scales_of(FORMAT), GROUP_BYTES = INT8_LINES * LINE_BYTES;
    static constexpr int64_t BEHIND = 2, STORED = 4;  // steps before sums are read back; buffers of sums
    static constexpr int64_t SUMS = INT8_TILE_ROWS * INT8_OUTPUTS;

    const int64_t groups_;
    uint8_t* levels_;  // [groups][8 lines][64 bytes]
    const PanelBytes& panel_;

    // Multiply half `half` of 32 inputs: the digits of 16 rows x weights, to sums [16 rows][16 outputs].
    template <int DIGIT> void multiply(int64_t group, int64_t half, const Record& record, int64_t tile, int32_t* sums) const {
        const uint8_t* digits = record.numbers(0) + DIGIT * INT8_GROUP + half * INT8_GROUP / SCALES;
        const uint8_t* levels = levels_ + group * GROUP_BYTES + half * GROUP_BYTES / SCALES;
        if (tile == 0) {
            _tile_zero(0);
            _tile_loadd(2, digits, NUMBERS_BYTES);
            _tile_loadd(4, levels, LINE_BYTES);
            _tile_dpbsud(0, 2, 4);
            _tile_stored(0, sums, 4 * INT8_OUTPUTS);
        } else {
            _tile_zero(1);
            _tile_loadd(3, digits, NUMBERS_BYTES);
            _tile_loadd(5, levels, LINE_BYTES);
            _tile_dpbsud(1, 3, 5);
            _tile_stored(1, sums, 4 * INT8_OUTPUTS);
        }
    }

    // Convert integer sums to floats and add them, times their scales (and offsets), to sums [16 rows].
    template <int DIGIT>
    void add(int64_t group, int64_t half, const Record& record, const int32_t* whole, Floats (&sums)[INT8_TILE_ROWS]) const {
        constexpr float UNIT = DIGIT == 0 ? 1.0f : 1.0f / 256;
        const GroupPlaces places = places_of(FORMAT, groups_, group);
        const GroupFactors factors{panel_.factors + places.scales, panel_.factors + places.offsets};
        const Floats scale = factors.scale(half, 0);
        Floats offset{};
        if constexpr (has_offsets(FORMAT) && DIGIT == 0) offset = factors.offset(half, 0);
        unroll<INT8_TILE_ROWS>([&](int r) __attribute__((always_inline)) {
            Ints own = (Ints)_mm512_load_si512(whole + r * INT8_OUTPUTS);
            if constexpr (zero_of(FORMAT) != 0) own += all_ints(record.begin(r, half, DIGIT));
            sums[r] = add_product(sums[r], __builtin_convertvector(own, Floats), scale * (record.scale(r) * UNIT));
            if constexpr (has_offsets(FORMAT) && DIGIT == 0)
                sums[r] = add_product(sums[r], offset, all(record.sum(r, half)));
        });
    }

   public:
    // Unpack the panel.
    Int8Tiles(const PanelBytes& panel, int64_t inputs) : groups_(inputs / INT8_GROUP), panel_(panel) {
        static thread_local std::vector<uint8_t> room;
        levels_ = aligned_room(room, groups_ * GROUP_BYTES);
        Bytes table{};
        if constexpr (has_table(FORMAT)) table = load_table(panel.begin);
        for (int64_t group = 0; group < groups_; ++group) {
            Bytes lines[INT8_LINES];
            load_lines<FORMAT>(panel.begin + places_of(FORMAT, groups_, group).lines, table, lines);
            unroll<INT8_LINES>([&](auto k) {
                _mm512_store_si512(levels_ + group * GROUP_BYTES + k * LINE_BYTES, (__m512i)lines[k]);
            });
        }
        finish_stores();
    }

    // Multiply 16 rows by the panel, to sums [16], in the order of multiply_int8_panel.
    void multiply(uint8_t* rows, Floats* sums) const {
        alignas(64) int32_t whole[STORED][SUMS];
        Floats own[INT8_TILE_ROWS] = {};
        const Record first{{}, {}, rows};
        const int64_t steps = groups_ * SCALES;
        for (int64_t step = 0; step < steps + BEHIND; ++step) {
            if (step < steps) {
                const int64_t group = step / SCALES;
                multiply<0>(group, step % SCALES, first.next(group), step % 2, whole[step % STORED]);
            }
            if (const int64_t last = step - BEHIND; last >= 0)
                add<0>(last / SCALES, last % SCALES, first.next(last / SCALES), whole[last % STORED], own);
        }
        for_low(first, groups_, [&](int64_t group, const Record& low) {
            for (int64_t half = 0; half < SCALES; ++half) {
                multiply<1>(group, half, low, half % 2, whole[half]);
                add<1>(group, half, low, whole[half], own);
            }
        });
        unroll<INT8_TILE_ROWS>([&](int r) __attribute__((always_inline)) { sums[r] = own[r]; });
    }
};

// Like multiply_int8_panel, including low digits; rows: a multiple of 16, in records of 16 rows.
template <int64_t FORMAT>
void multiply_int8_tiles(uint8_t* room, int64_t rows, int64_t inputs, const PanelBytes& panel, Floats* sums) {
    const Int8Tiles<FORMAT> tiles(panel, inputs);
    for (int64_t row = 0; row < rows; row += INT8_TILE_ROWS)
        tiles.multiply(room + integer_rows_bytes(FORMAT, row, inputs), sums + row);
}

}  // namespace
