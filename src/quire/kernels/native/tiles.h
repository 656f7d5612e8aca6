// Weights [outputs, inputs] cut into tiles of 16 outputs x 32 inputs, as the tile units of recent CPUs take them.
//
// A tile has 16 lines of 32 lanes; lane j of line r belongs to output j / 2 and input 2 r + j % 2. Tiles follow each
// other along the inputs, then along the outputs, which are padded with zeros to a multiple of 32. In memory a tile is
//   PLAIN    16 x 32 bfloat16;
//   NIBBLES  16 scales, 16 offsets (float16, one per output), then 16 x 16 bytes: lane j in the low half of byte j for
//            j < 16, in the high half of byte j - 16 above; a weight is level * scale + offset;
//   BYTES    scales and offsets as above, then 16 x 32 signed bytes.
// So four-bit and eight-bit files are multiplied as they are, with a quarter or half of the bytes to read.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t TILE_OUTPUTS = 16, TILE_INPUTS = 32, LINES = 16, TILE_LANES = 32;
constexpr int64_t PAIR_OUTPUTS = 2 * TILE_OUTPUTS;  // two tiles side by side are worked on together
constexpr int64_t SCALE_BYTES = 2 * 2 * TILE_OUTPUTS;

enum Format : int64_t { PLAIN = 0, NIBBLES = 1, BYTES = 2 };

constexpr int64_t line_bytes(Format format) { return format == PLAIN ? 64 : format == NIBBLES ? 16 : 32; }
constexpr int64_t tile_bytes(Format format) {
    return LINES * line_bytes(format) + (format == PLAIN ? 0 : SCALE_BYTES);
}

struct Product {
    int64_t rows, inputs, outputs, out_stride;  // out_stride: from one row of the result to the next
    int64_t tiles() const { return inputs / TILE_INPUTS; }
    int64_t pairs() const { return (outputs + PAIR_OUTPUTS - 1) / PAIR_OUTPUTS; }
};

// LANES float16 numbers, none of them infinite or NaN.
inline Floats load_float16(const uint8_t* from) {
#ifdef __aarch64__
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Floats magnitude = (Floats)((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;  // 2^112: exponents' distance
    return (Floats)((Words)magnitude | (bits & 0x8000u) << 16);
#endif
}

// --------------------------------------------------------------------------------------------- a few float32 rows
// Lanes are summed as they lie, even and odd inputs apart, and folded at the end. A level is first brought to a float
// (level - ZERO) / UNIT that is cheap to make; then per tile and lane:
// sum(weight * x) = scale * UNIT * sum(float * x) + (offset + scale * ZERO) * sum(x).

constexpr int64_t PIECES = TILE_LANES / LANES;
typedef int64_t Longs __attribute__((vector_size(4 * LANES)));

inline Floats repeat_pair(const float* pair) {  // (a, b) -> a b a b ...
    int64_t both;
    std::memcpy(&both, pair, sizeof both);
    return (Floats)(both - Longs{});
}

#ifdef __aarch64__
template <Format FORMAT> constexpr float ZERO = FORMAT == NIBBLES ? -16.0f : 0.0f;
template <Format FORMAT> constexpr float UNIT = FORMAT == NIBBLES ? 16.0f : 1.0f;

inline void widen(int8x16_t bytes, Floats* levels) {
    const int16x8_t halves[2] = {vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes))};
    for (int h = 0; h < 2; ++h) {
        levels[2 * h] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves[h])));
        levels[2 * h + 1] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_high_s16(halves[h])));
    }
}
// Bytes of (level << 3) become the upper mantissa bits of numbers from 1 to 2: 1 + level / 16. Zips are cheaper than
// conversions.
inline void mantissas(uint8x16_t shifted, Floats* levels) {
    const uint8x16_t third = vorrq_u8(vandq_u8(shifted, vdupq_n_u8(0x78)), vdupq_n_u8(0x80)), fourth = vdupq_n_u8(0x3F);
    const uint16x8_t zero = vdupq_n_u16(0);
    const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(third, fourth));
    const uint16x8_t high = vreinterpretq_u16_u8(vzip2q_u8(third, fourth));
    levels[0] = (Floats)vzip1q_u16(zero, low);
    levels[1] = (Floats)vzip2q_u16(zero, low);
    levels[2] = (Floats)vzip1q_u16(zero, high);
    levels[3] = (Floats)vzip2q_u16(zero, high);
}
template <Format FORMAT> inline void load_levels(const uint8_t* line, Floats levels[PIECES]) {
    const uint8x16_t bytes = vld1q_u8(line);
    if constexpr (FORMAT == BYTES) {
        widen(vreinterpretq_s8_u8(bytes), levels);
        widen(vld1q_s8(reinterpret_cast<const int8_t*>(line) + 16), levels + 4);
    } else {
        mantissas(vshlq_n_u8(bytes, 3), levels);
        mantissas(vshrq_n_u8(bytes, 1), levels + 4);
    }
}
#else
template <Format FORMAT> constexpr float ZERO = 0.0f;
template <Format FORMAT> constexpr float UNIT = 1.0f;
typedef uint8_t Octets __attribute__((vector_size(LANES)));
typedef int8_t SignedOctets __attribute__((vector_size(LANES)));

template <Format FORMAT> inline void load_levels(const uint8_t* line, Floats levels[PIECES]) {
    if constexpr (FORMAT == BYTES) {
        for (int64_t p = 0; p < PIECES; ++p) {
            SignedOctets bytes;
            std::memcpy(&bytes, line + p * LANES, sizeof bytes);
            levels[p] = __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
        }
    } else {
        for (int64_t p = 0; p < PIECES / 2; ++p) {
            Octets bytes;
            std::memcpy(&bytes, line + p * LANES, sizeof bytes);
            const Words words = __builtin_convertvector(bytes, Words);
            levels[p] = __builtin_convertvector((Ints)(words & 15u), Floats);
            levels[PIECES / 2 + p] = __builtin_convertvector((Ints)(words >> 4), Floats);
        }
    }
}
#endif

// What 16 outputs multiply their sums by: a tile's scales and offsets, one per lane.
template <Format FORMAT> struct Factors {
    Floats scale[PIECES], offset[PIECES];
    explicit Factors(const uint8_t* tile) {
        Ints lower, upper;  // (0, 0, 1, 1, ...) and the same from the middle on
        for (int64_t i = 0; i < LANES; ++i) lower[i] = i / 2, upper[i] = (LANES + i) / 2;
        for (int64_t p = 0; p < PIECES; p += 2) {
            const Floats scales = load_float16(tile + p * LANES), offsets = load_float16(tile + 32 + p * LANES);
            const Floats units = scales * UNIT<FORMAT>, shifts = offsets + scales * ZERO<FORMAT>;
            scale[p] = __builtin_shuffle(units, lower), scale[p + 1] = __builtin_shuffle(units, upper);
            offset[p] = __builtin_shuffle(shifts, lower), offset[p + 1] = __builtin_shuffle(shifts, upper);
        }
    }
};

// x [ROWS, inputs] and the sums of its even and odd entries per tile [ROWS, tiles, 2] -> 16 outputs of each row.
template <Format FORMAT, int ROWS>
void few_rows_panel(const float* x, const float* sums, const uint8_t* tiles, const Product& product, float* out) {
    Floats total[ROWS][PIECES] = {};
    for (int64_t t = 0; t < product.tiles(); ++t, tiles += tile_bytes(FORMAT)) {
        Floats part[ROWS][PIECES] = {};
        for (int64_t r = 0; r < LINES; ++r) {
            Floats levels[PIECES];
            load_levels<FORMAT>(tiles + SCALE_BYTES + r * line_bytes(FORMAT), levels);
            for (int row = 0; row < ROWS; ++row) {
                const Floats pair = repeat_pair(x + row * product.inputs + t * TILE_INPUTS + 2 * r);
                for (int64_t p = 0; p < PIECES; ++p) part[row][p] += levels[p] * pair;
            }
        }
        const Factors<FORMAT> factors(tiles);
        for (int row = 0; row < ROWS; ++row) {
            const Floats sum = repeat_pair(sums + (row * product.tiles() + t) * 2);
            for (int64_t p = 0; p < PIECES; ++p)
                total[row][p] += part[row][p] * factors.scale[p] + sum * factors.offset[p];
        }
    }
    for (int row = 0; row < ROWS; ++row) {
        float lanes[TILE_LANES];
        for (int64_t p = 0; p < PIECES; ++p) store(lanes + p * LANES, total[row][p]);
        for (int64_t i = 0; i < TILE_OUTPUTS; ++i) out[row * TILE_OUTPUTS + i] = lanes[2 * i] + lanes[2 * i + 1];
    }
}

template <Format FORMAT, int ROWS>
void few_rows(const float* x, const float* sums, const uint8_t* tiles, const float* bias, const Product& product,
              float* out) {
    const int64_t panels = (product.outputs + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
#pragma omp parallel for schedule(static)
    for (int64_t panel = 0; panel < panels; ++panel) {
        float found[ROWS * TILE_OUTPUTS];
        const int64_t begin = panel * TILE_OUTPUTS, count = std::min(TILE_OUTPUTS, product.outputs - begin);
        few_rows_panel<FORMAT, ROWS>(x, sums, tiles + panel * product.tiles() * tile_bytes(FORMAT), product, found);
        for (int row = 0; row < ROWS; ++row)
            in_pieces(count, [&](int64_t i, int64_t n) {
                const Floats value = fetch(found + row * TILE_OUTPUTS + i, n);
                put(out + row * product.out_stride + begin + i,
                    bias == nullptr ? value : value + fetch(bias + begin + i, n), n);
            });
    }
}

// x [rows, inputs] times the weight, transposed, plus a bias [outputs] or none -> out [rows, outputs]. Costs a reading
// of the weight per two rows.
template <Format FORMAT>
void multiply_few(const float* x, const uint8_t* tiles, const float* bias, const Product& product, float* out) {
    std::vector<float> sums(product.rows * product.tiles() * 2);
    for (int64_t i = 0; i < product.rows * product.tiles(); ++i)
        for (int64_t k = 0; k < TILE_INPUTS; ++k) sums[2 * i + k % 2] += x[i * TILE_INPUTS + k];
    int64_t row = 0;
    for (; row + 2 <= product.rows; row += 2)
        few_rows<FORMAT, 2>(x + row * product.inputs, sums.data() + row * product.tiles() * 2, tiles, bias, product,
                            out + row * product.out_stride);
    if (row < product.rows)
        few_rows<FORMAT, 1>(x + row * product.inputs, sums.data() + row * product.tiles() * 2, tiles, bias, product,
                            out + row * product.out_stride);
}

}  // namespace
