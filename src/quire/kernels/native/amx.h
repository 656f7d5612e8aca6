// bfloat16 gemm with tiled weights on AMX tile units. Each result accumulates over the inputs in order, 32 at a time,
// in float32, so a row's result does not depend on the other rows of the batch.
#pragma once

#include "tiles.h"

#ifdef __AMX_BF16__
#include <immintrin.h>

namespace {

constexpr int64_t ROW_BLOCK = 32;
constexpr int64_t CACHED_BYTES = 3 << 18;  // packed rows kept in the L2 cache while the weight streams through

// Whether this process may use AMX tile registers. Set by quire_prepare, after cpu_features.cpp asked the operating
// system.
bool has_tiles = false;

// Compiler barrier: the tile load intrinsics do not declare which memory they read, so earlier stores must be finished.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// Tile configuration. Tiles 0-3 hold sums (two tiles of rows x two of 16 outputs), 4-5 activation rows, 6-7 weights. A
// tile of rows has `rows` lines: 16 (zeros past the last row), or fewer for a gemm of less than one tile, which does
// not use tiles 2, 3 and 5.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t lines[16] = {};
    explicit TileShapes(int64_t rows) {
        lines[0] = lines[1] = lines[2] = lines[3] = lines[4] = lines[5] = static_cast<uint8_t>(rows);
        lines[6] = lines[7] = LINES;
    }
};

// Load a tile configuration into this thread's tile registers.
inline void configure_tiles(const TileShapes& shapes) {
    finish_stores();
    _tile_loadconfig(&shapes);
}

// Configures this thread's tile registers, and releases them at the end of the scope.
struct TilesInUse {
    explicit TilesInUse(const TileShapes& shapes) { configure_tiles(shapes); }
    TilesInUse(const TilesInUse&) = delete;
    ~TilesInUse() { _tile_release(); }
};

inline __m512 twice(__m512 values, bool upper) {  // the lower or upper eight of sixteen floats, each duplicated
    const __m512i lower_places = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    return _mm512_permutexvar_ps(upper ? _mm512_add_epi32(lower_places, _mm512_set1_epi32(8)) : lower_places, values);
}

// Dequantize one tile of 16 outputs x 32 inputs to bfloat16 (AVX-512 BF16), rounded as torch rounds the same values.
template <Format FORMAT> inline void unpack_tile(const uint8_t* tile, uint8_t* to) {
    const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile)));
    const __m512 offsets = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile + 32)));
    const __m512 scale_low = twice(scales, false), scale_high = twice(scales, true);
    const __m512 offset_low = twice(offsets, false), offset_high = twice(offsets, true);
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const uint8_t* line = tile + SCALE_BYTES;
    for (int64_t r = 0; r < LINES; ++r, line += line_bytes(FORMAT)) {
        __m512 low, high;
        if constexpr (FORMAT == NIBBLES) {  // the permute uses only the low 4 bits of each index
            const __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
            low = _mm512_permutexvar_ps(both, numbers);
            high = _mm512_permutexvar_ps(_mm512_srli_epi32(both, 4), numbers);
        } else {
            const __m128i* bytes = reinterpret_cast<const __m128i*>(line);
            low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes)));
            high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1)));
        }
        const __m512 first = _mm512_fmadd_ps(low, scale_low, offset_low);
        const __m512 second = _mm512_fmadd_ps(high, scale_high, offset_high);
        _mm512_storeu_si512(to + r * 64, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

// Pack one block of 32 rows of x [rows, inputs] for the tile units: for each 32 inputs, two tiles of 16 rows. Rows past
// the last one are zeros.
inline void pack_rows(const bf16* x, int64_t rows, int64_t inputs, int64_t block, uint8_t* to) {
    uint8_t* tile = to + block * ROW_BLOCK * inputs * 2;
    for (int64_t t = 0; t < inputs / TILE_INPUTS; ++t)
        for (int64_t i = 0; i < ROW_BLOCK; ++i, tile += 64) {
            const int64_t row = block * ROW_BLOCK + i;
            const bool here = row < rows;
            const __m512i line = here ? _mm512_loadu_si512(x + row * inputs + t * TILE_INPUTS) : _mm512_setzero_si512();
            _mm512_store_si512(tile, line);
        }
}

// Multiply packed rows (a block of 32, or only its first 16) by two weight tiles of 16 outputs x 32 inputs, and add to
// tiles 0-3.
template <bool TWO_TILES> inline void add_tiles(const uint8_t* rows, const uint8_t* left, const uint8_t* right) {
    finish_stores();
    _tile_loadd(6, left, 64);
    _tile_loadd(4, rows, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, 64);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (TWO_TILES) {
        _tile_loadd(5, rows + 1024, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Zero the sum tiles: 0-1, or 0-3 for 32 rows.
template <bool TWO_TILES> inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (TWO_TILES) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

// Store the sum tiles to sums [32 rows][32 outputs].
template <bool TWO_TILES> inline void store_tiles(float* sums) {  // [32][32]
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    if constexpr (TWO_TILES) {
        _tile_stored(2, sums + 16 * 32, 128);
        _tile_stored(3, sums + 16 * 32 + 16, 128);
    }
}

// Multiply packed rows by a pair of panels of unquantized tiles, to sums [32][32]. `STREAMS`: the panels come from
// memory and are prefetched.
template <bool TWO_TILES, bool STREAMS>
inline void multiply_pair(const uint8_t* rows, const uint8_t* left, const uint8_t* right, int64_t tiles, float* sums) {
    clear_sums<TWO_TILES>();
    for (int64_t t = 0; t < tiles; ++t) {
        if constexpr (STREAMS)
            for (int64_t i = 0; i < 1024; i += 64) {
                _mm_prefetch(left + (t + 2) * 1024 + i, _MM_HINT_T0);
                _mm_prefetch(right + (t + 2) * 1024 + i, _MM_HINT_T0);
            }
        add_tiles<TWO_TILES>(rows + t * 2048, left + t * 1024, right + t * 1024);
    }
    store_tiles<TWO_TILES>(sums);
}

// The same for quantized panels that are used once: while the tile units multiply by one pair of tiles, the pair AHEAD
// steps later is dequantized.
template <Format FORMAT, bool TWO_TILES, int64_t AHEAD = 2>
inline void multiply_levels(const uint8_t* rows, const uint8_t* pair, int64_t tiles, float* sums) {
    alignas(64) uint8_t room[AHEAD + 1][2048];
    const auto unpack = [&](int64_t t) {
        if (t >= tiles) return;
        uint8_t* to = room[t % (AHEAD + 1)];
        unpack_tile<FORMAT>(pair + t * tile_bytes(FORMAT), to);
        unpack_tile<FORMAT>(pair + (tiles + t) * tile_bytes(FORMAT), to + 1024);
    };
    clear_sums<TWO_TILES>();
    for (int64_t t = 0; t < AHEAD; ++t) unpack(t);
    for (int64_t t = 0; t < tiles; ++t) {
        unpack(t + AHEAD);
        const uint8_t* plain = room[t % (AHEAD + 1)];
        add_tiles<TWO_TILES>(rows + t * 2048, plain, plain + 1024);
    }
    store_tiles<TWO_TILES>(sums);
}

// Epilogue: add the bias (or null), round to bfloat16 and store sums [rows][32] to out [rows, stride].
inline void give_sums(const float* sums, int64_t rows, int64_t outputs, const bf16* bias, bf16* out, int64_t stride) {
    if (outputs == PAIR_OUTPUTS && bias == nullptr) {
        for (int64_t row = 0; row < rows; ++row, sums += PAIR_OUTPUTS)
            _mm512_storeu_si512(out + row * stride,
                                (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums + 16), _mm512_load_ps(sums)));
        return;
    }
    for (int64_t row = 0; row < rows; ++row)
        in_pieces(outputs, [&](int64_t i, int64_t count) {
            Floats value = fetch(sums + row * PAIR_OUTPUTS + i, count);
            if (bias != nullptr) value = rounded<bf16>(value) + fetch(bias + i, count);
            put(out + row * stride + i, value, count);
        });
}

// Grow `room` if needed and return its first 64-byte aligned address with `bytes` bytes behind it.
inline uint8_t* aligned_room(std::vector<uint8_t>& room, int64_t bytes) {
    if (static_cast<int64_t>(room.size()) < bytes + 64) room.resize(bytes + 64);
    return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(room.data()) + 63) / 64 * 64);
}

// Multiply one pair of panels by all `blocks` of packed rows, calling each(block, sums) in order. `room` holds the pair
// as dequantized tiles.
template <Format FORMAT, bool TWO_TILES, typename Each>
inline void multiply_blocks(const uint8_t* packed, const uint8_t* pair, int64_t blocks, int64_t tiles, uint8_t* room,
                            Each each) {
    alignas(64) float sums[ROW_BLOCK * PAIR_OUTPUTS];
    const uint8_t* left = pair;
    if constexpr (FORMAT != PLAIN) {
        if (blocks == 1) {
            multiply_levels<FORMAT, TWO_TILES>(packed, pair, tiles, sums);
            return each(0, sums);
        }
        for (int64_t t = 0; t < 2 * tiles; ++t) unpack_tile<FORMAT>(pair + t * tile_bytes(FORMAT), room + t * 1024);
        left = room;
    }
    const uint8_t* right = left + tiles * 1024;
    for (int64_t block = 0; block < blocks; ++block) {
        const uint8_t* rows = packed + block * tiles * 2048;
        multiply_pair<TWO_TILES, FORMAT == PLAIN>(rows, left, right, tiles, sums);
        each(block, sums);
    }
}

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null), with AMX tiles; all bfloat16.
template <Format FORMAT>
void multiply_tiles(const bf16* x, const uint8_t* weight, const bf16* bias, const GemmSizes& sizes, bf16* out) {
    static thread_local std::vector<uint8_t> packed_room;
    if (sizes.rows == 0) return;  // a tile configuration with zero lines is invalid
    const int64_t inputs = sizes.inputs, tiles = tiles_of(sizes);
    const int64_t at_once = std::max<int64_t>(1, CACHED_BYTES / (ROW_BLOCK * inputs * 2)) * ROW_BLOCK;
    uint8_t* packed = aligned_room(packed_room, std::min(at_once, sizes.rows + ROW_BLOCK) * inputs * 2);
    for (int64_t first = 0; first < sizes.rows; first += at_once) {
        const int64_t rows = std::min(at_once, sizes.rows - first), blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
        for_each(blocks, rows * inputs > MANY_NUMBERS,
                 [&](int64_t block) { pack_rows(x + first * inputs, rows, inputs, block, packed); });
        const int64_t in_turn = sizes.panels_in_turn(2 * tiles * tile_bytes(FORMAT));
        share_out(pairs_of(sizes), in_turn, sizes.is_large(), [&] {
            static thread_local std::vector<uint8_t> panel_room;
            uint8_t* room = aligned_room(panel_room, FORMAT == PLAIN ? 0 : 2 * tiles * 1024);
            return [&, room, shaped = TilesInUse(TileShapes(std::min<int64_t>(16, sizes.rows)))](int64_t pair) {
                const int64_t column = pair * PAIR_OUTPUTS, outputs = std::min(PAIR_OUTPUTS, sizes.outputs - column);
                const uint8_t* tiled = weight + 2 * pair * tiles * tile_bytes(FORMAT);
                const auto give = [&](int64_t block, const float* sums) {
                    const int64_t row = block * ROW_BLOCK, count = std::min(ROW_BLOCK, rows - row);
                    give_sums(sums, count, outputs, bias == nullptr ? nullptr : bias + column,
                              out + (first + row) * sizes.out_stride + column, sizes.out_stride);
                };
                sizes.rows > 16 ? multiply_blocks<FORMAT, true>(packed, tiled, blocks, tiles, room, give)
                                  : multiply_blocks<FORMAT, false>(packed, tiled, blocks, tiles, room, give);
            };
        });
    }
}

}  // namespace
#endif
