// What all products of rows with a packed weight share.
#pragma once

#include "simd.h"
#include "team.h"

namespace {

// Numbers of the rows' type, or levels of four or eight bits: a weight is level * scale + offset, both float16, shared
// by 32 neighbouring inputs of an output. HALVES: bfloat16 numbers, whatever the type of the rows.
enum Format : int64_t { PLAIN = 0, NIBBLES = 1, BYTES = 2, HALVES = 3 };

constexpr int64_t PANELS_IN_TURN = 4;      // neighbours in memory that a thread takes at once, at least
constexpr int64_t TURN_BYTES = 1 << 20;    // of a weight, which a thread reads in a turn for one row

struct Product {
    int64_t rows, inputs, outputs, out_stride;  // out_stride: from one row of the result to the next
    bool is_large() const { return rows * inputs * outputs > 65536; }  // takes microseconds: threads share it

    // Panels that a thread takes at once. What was asked of memory ahead of the last one is lost, and the first one of the
    // next turn waits for memory: where rows are few and the reading takes the time, turns are long.
    int64_t panels_in_turn(int64_t panel_bytes) const {
        return std::max(PANELS_IN_TURN, TURN_BYTES / std::max<int64_t>(1, panel_bytes * rows));
    }
};
constexpr int64_t MANY_NUMBERS = 1 << 15;  // of rows: threads share what is done to each

// LANES float16 numbers, none of them infinite or NaN.
inline Floats load_float16(const uint8_t* from) {
#ifdef __aarch64__
    return (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#elif defined(__AVX512F__)
    return (Floats)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Words bits = __builtin_convertvector(halves, Words);
    const Floats magnitude = (Floats)((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;  // 2^112: exponents' distance
    return (Floats)((Words)magnitude | (bits & 0x8000u) << 16);
#endif
}

}  // namespace
