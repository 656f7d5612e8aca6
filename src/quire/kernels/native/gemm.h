// What all gemm kernels with a packed weight share.
#pragma once

#include "simd.h"
#include "team.h"

namespace {

// Format of a packed weight. PLAIN: values of the activations' dtype. NIBBLES, BYTES: quantized to 4 or 8 bits, value *
// scale + offset, both float16, shared by 32 adjacent inputs of an output. HALVES: bfloat16, whatever the activations
// are.
enum Format : int64_t { PLAIN = 0, NIBBLES = 1, BYTES = 2, HALVES = 3 };

constexpr int64_t PANELS_IN_TURN = 4;      // adjacent panels that a thread takes at once, at least
constexpr int64_t TURN_BYTES = 1 << 20;    // bytes of a weight that a thread reads per turn with one row

// The sizes of a gemm.
struct GemmSizes {
    int64_t rows, inputs, outputs, out_stride;  // out_stride: elements from one row of the result to the next
    bool is_large() const { return rows * inputs * outputs > 65536; }  // takes microseconds: worth several threads

    // Panels that a thread takes at once. At the end of a turn, prefetched data is lost, and the next turn starts with
    // a cache miss: with few rows, where reading dominates, turns are long.
    int64_t panels_in_turn(int64_t panel_bytes) const {
        return std::max(PANELS_IN_TURN, TURN_BYTES / std::max<int64_t>(1, panel_bytes * rows));
    }
};
constexpr int64_t MANY_NUMBERS = 1 << 15;  // elements; above this, work on rows is divided among threads

// Load LANES float16 values.
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
    const Floats magnitude = (Floats)((bits & 0x7FFFu) << 13) * 5.192296858534828e33f;  // 2^112: exponent biases
    const Words is_none = (Words)((bits & 0x7C00u) == 0x7C00u);  // an infinity or a NaN stays one
    return (Floats)((Words)magnitude | (is_none & 0x7F800000u) | (bits & 0x8000u) << 16);
#endif
}

// Store LANES floats in the range of float16 as float16, round to nearest even.
inline void store_float16(uint8_t* to, Floats value) {
#ifdef __aarch64__
    vst1_u8(to, vreinterpret_u8_f16(vcvt_f16_f32((float32x4_t)value)));
#elif defined(__AVX512F__)
    const __m256i halves = _mm512_maskz_cvtps_ph(0xFFFF, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    const Words bits = (Words)value, size = bits & 0x7FFFFFFFu;
    const Words normal = (size + 0xFFFu + (size >> 13 & 1u) - (112u << 23)) >> 13;
    const Words small = (Words)((Floats)size + 0.5f) - 0x3F000000u;  // 0.5: its last bit is the smallest float16
    const Words is_small = (Words)((Floats)size < 6.103515625e-5f);
    const Words halves = (is_small & small) | (~is_small & normal) | (bits >> 16 & 0x8000u);
    const Halves narrow = narrowed(halves);
    std::memcpy(to, &narrow, sizeof narrow);
#endif
}

}  // namespace
