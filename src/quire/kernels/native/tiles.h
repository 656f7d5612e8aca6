// Layout of weights [outputs, inputs] in tiles of 16 outputs x 32 inputs for AMX tile units.
//
// A tile has 16 lines of 32 lanes; lane j of line r belongs to output j / 2 and input 2 r + j % 2. Tiles are ordered by
// inputs, then by outputs, which are padded with zeros to a multiple of 32. In memory a tile is
//   PLAIN    16 x 32 bfloat16;
//   NIBBLES  16 scales, 16 offsets (float16, one per output), then 16 x 16 bytes: lane j in the low half of byte j for
//            j < 16, in the high half of byte j - 16 above; a weight is value * scale + offset;
//   BYTES    scales and offsets as above, then 16 x 32 signed bytes.
// So quantized weights of 4 or 8 bits stay quantized in memory, a quarter or half of the bytes to read.
#pragma once

#include "gemm.h"

namespace {

constexpr int64_t TILE_OUTPUTS = 16, TILE_INPUTS = 32, LINES = 16;
constexpr int64_t PAIR_OUTPUTS = 2 * TILE_OUTPUTS;  // two adjacent tiles are processed together
constexpr int64_t SCALE_BYTES = 2 * 2 * TILE_OUTPUTS;

constexpr int64_t line_bytes(Format format) { return format == PLAIN ? 64 : format == NIBBLES ? 16 : 32; }
constexpr int64_t tile_bytes(Format format) {
    return LINES * line_bytes(format) + (format == PLAIN ? 0 : SCALE_BYTES);
}

inline int64_t tiles_of(const GemmSizes& sizes) { return sizes.inputs / TILE_INPUTS; }
inline int64_t pairs_of(const GemmSizes& sizes) { return (sizes.outputs + PAIR_OUTPUTS - 1) / PAIR_OUTPUTS; }

}  // namespace
