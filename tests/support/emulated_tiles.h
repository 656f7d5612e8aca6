// The instructions of the tile units of x86 (AMX) that integer products use, and VNNI's dot product, in plain code: included
// before the kernels, it lets a CPU with AVX-512 alone run what is written for them.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1
#define __AVX512VNNI__ 1

namespace emulated {

struct Tile {
    uint8_t bytes[16][64];
};
inline thread_local Tile tiles[8];
inline thread_local uint16_t widths[8];  // bytes of a line
inline thread_local uint8_t heights[8];
inline int64_t num_products = 0;

inline void clear(int tile) { std::memset(&tiles[tile], 0, sizeof(Tile)); }

inline void configure(const void* shapes) {
    const auto* from = static_cast<const uint8_t*>(shapes);
    for (int i = 0; i < 8; ++i) {
        std::memcpy(&widths[i], from + 16 + 2 * i, 2);
        heights[i] = from[48 + i];
        clear(i);
    }
}

inline void load(int tile, const void* from, int64_t stride) {
    clear(tile);
    for (int line = 0; line < heights[tile]; ++line)
        std::memcpy(tiles[tile].bytes[line], static_cast<const uint8_t*>(from) + line * stride, widths[tile]);
}

inline void store(int tile, void* to, int64_t stride) {
    for (int line = 0; line < heights[tile]; ++line)
        std::memcpy(static_cast<uint8_t*>(to) + line * stride, tiles[tile].bytes[line], widths[tile]);
}

// Signed bytes of `a` times unsigned ones of `b`, four at a time, on top of the whole numbers of `to`.
inline void add_products(int to, int a, int b) {
    ++num_products;
    for (int row = 0; row < heights[to]; ++row)
        for (int column = 0; column < widths[to] / 4; ++column) {
            int32_t sum;
            std::memcpy(&sum, &tiles[to].bytes[row][4 * column], 4);
            for (int i = 0; i < widths[a]; ++i)
                sum += static_cast<int8_t>(tiles[a].bytes[row][i]) * tiles[b].bytes[i / 4][4 * column + i % 4];
            std::memcpy(&tiles[to].bytes[row][4 * column], &sum, 4);
        }
}

// Unsigned bytes of `a` times signed ones of `b`, four at a time, on top of whole numbers.
inline __m512i add_dots(__m512i sums, __m512i a, __m512i b) {
    int32_t own[16];
    uint8_t left[64];
    int8_t right[64];
    std::memcpy(own, &sums, 64), std::memcpy(left, &a, 64), std::memcpy(right, &b, 64);
    for (int i = 0; i < 64; ++i) own[i / 4] += left[i] * right[i];
    return _mm512_loadu_si512(own);
}

}  // namespace emulated

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _mm512_dpbusd_epi32(sums, a, b) emulated::add_dots(sums, a, b)
#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_release() static_cast<void>(0)
#define _tile_zero(tile) emulated::clear(tile)
#define _tile_loadd(tile, from, stride) emulated::load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated::store(tile, to, stride)
#define _tile_dpbsud(to, a, b) emulated::add_products(to, a, b)
#define _tile_dpbf16ps(to, a, b) __builtin_trap()  // products of bfloat16 are not emulated, nor is what rounds to it
#define _mm512_cvtne2ps_pbh(upper, lower) (__builtin_trap(), __m512i{})
#define _mm512_cvtneps_pbh(values) (__builtin_trap(), __m256i{})
