// Writing and reading the quantized KV cache, bit for bit as kernels/reference/cache_quantize.py. A head of a block
// holds the values of its tokens, then their scales.
#pragma once

#include "simd.h"
#include "team.h"

namespace {

// How a cache stores values: AS_ROWS (in the activations' dtype) or quantized. FLOAT8_LATENT has no scales.
enum Stored : int64_t { AS_ROWS, INT8, FLOAT8, INT4, FLOAT8_LATENT };

constexpr int64_t INT4_GROUP = 32;  // elements of a head that share a scale and an offset, or gcd(dim, 32)
constexpr float LARGEST_HALF = 65504.0f;
constexpr float LARGEST_FLOAT8 = 448.0f;
constexpr float LEAST_MAGNITUDE = 1e-12f;  // lower bound of a head's largest magnitude

inline int64_t common_divisor(int64_t a, int64_t b) {
    while (b != 0) a = std::exchange(b, a % b);
    return a;
}

// Sizes of one quantized head of one token.
struct HeadFormat {
    int64_t stored, dim;
    int64_t group() const { return stored == INT4 ? common_divisor(dim, INT4_GROUP) : dim; }
    int64_t number_bytes() const { return stored == INT4 ? dim / 2 : dim; }
    int64_t scale_bytes() const { return stored == FLOAT8_LATENT ? 0 : 4 * (dim / group()); }
};

// Scalar float16 to float32.
inline float half_to_float(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
    if (rest >= 0x7C00u) {  // infinity or NaN
        const uint32_t wide = sign | 0x7F800000u | ((rest & 0x3FFu) << 13);
        float x;
        std::memcpy(&x, &wide, 4);
        return x;
    }
    const uint32_t wide = sign | (rest << 13);
    float x;
    std::memcpy(&x, &wide, 4);
    return x * 0x1p112f;
}

inline uint16_t float_to_half(float x) {  // round to nearest even; out of range: infinity
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
    const float size = std::fabs(x);
    if (!(size == size)) return sign | 0x7E00u;
    if (size >= 65520.0f) return sign | 0x7C00u;
    if (size < 0x1p-14f) return sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f));
    bits &= 0x7FFFFFFFu;
    bits += 0xFFFu + ((bits >> 13) & 1u);
    return sign | static_cast<uint16_t>((bits >> 13) - ((127 - 15) << 10));
}

inline uint8_t float_to_e4m3(float x) {  // |x| up to 448, round to nearest even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
    const float size = std::fabs(x);
    if (!(size == size)) return 0x7F;
    if (size < 0x1p-6f) return sign | static_cast<uint8_t>(std::nearbyint(size * 0x1p9f));
    bits &= 0x7FFFFFFFu;
    bits += 0x7FFFFu + ((bits >> 20) & 1u);
    return sign | static_cast<uint8_t>((bits >> 20) - ((127 - 7) << 3));
}

// For finite values: with scales, NaN is encoded in the scale.
inline float e4m3_to_float(uint8_t code) {
    const uint32_t bits = (static_cast<uint32_t>(code & 0x80u) << 24) | (static_cast<uint32_t>(code & 0x7Fu) << 20);
    float x;
    std::memcpy(&x, &bits, 4);
    return x * 0x1p120f;
}

// Quantize one head x [dim] to int8 or float8 with one float32 scale.
inline void quantize_by_head(const float* x, const HeadFormat& format, uint8_t* numbers, uint8_t* scales) {
    float most = 0.0f;
    bool fits = true;
    for (int64_t i = 0; i < format.dim; ++i) {
        const float size = std::fabs(x[i]);
        fits &= size <= 3.402823466e38f;  // false for infinity or NaN
        most = std::max(most, size);
    }
    const float limit = format.stored == INT8 ? 127.0f : LARGEST_FLOAT8;
    most = fits ? std::max(most, LEAST_MAGNITUDE) : NAN;
    const float scale = most / limit, inverse = limit / most;
    std::memcpy(scales, &scale, 4);
    if (!fits) {
        std::memset(numbers, format.stored == INT8 ? 0 : 0x7F, format.dim);
        return;
    }
    for (int64_t i = 0; i < format.dim; ++i) {
        const float scaled = std::clamp(x[i] * inverse, -limit, limit);
        numbers[i] = format.stored == INT8 ? static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(scaled)))
                                           : float_to_e4m3(scaled);
    }
}

// Round a latent x [dim] to float8. Values beyond its range become NaN, so that their request fails.
inline void round_latent(const float* x, const HeadFormat& format, uint8_t* numbers) {
    for (int64_t i = 0; i < format.dim; ++i)
        numbers[i] = std::fabs(x[i]) <= LARGEST_FLOAT8 ? float_to_e4m3(x[i]) : uint8_t{0x7F};
}

// Quantize one head x [dim] to int4, with a float16 scale and offset per group, two elements per byte.
inline void quantize_by_group(const float* x, const HeadFormat& format, uint8_t* numbers, uint8_t* scales) {
    const int64_t group = format.group();
    for (int64_t begin = 0; begin < format.dim; begin += group, scales += 4) {
        float low = x[begin], high = x[begin];
        bool fits = true;
        for (int64_t i = begin; i < begin + group; ++i) {
            fits &= std::fabs(x[i]) <= 3.402823466e38f;
            low = std::min(low, x[i]);
            high = std::max(high, x[i]);
        }
        fits &= std::fabs(low) <= LARGEST_HALF && (high - low) / 15.0f <= LARGEST_HALF;
        const uint16_t kept[2] = {float_to_half(fits ? (high - low) / 15.0f : NAN), float_to_half(fits ? low : NAN)};
        std::memcpy(scales, kept, 4);
        const float scale = half_to_float(kept[0]), step = scale == 0.0f ? 1.0f : scale, offset = half_to_float(kept[1]);
        const auto level = [&](int64_t i) {
            const float above = (x[i] - offset) / step;  // NaN if the scale or the offset is
            return above == above ? static_cast<uint8_t>(std::clamp(std::nearbyint(above), 0.0f, 15.0f)) : uint8_t{0};
        };
        for (int64_t i = begin; i < begin + group; i += 2)
            numbers[i / 2] = static_cast<uint8_t>(level(i) | (level(i + 1) << 4));
    }
}

// Quantize heads [rows, heads, dim] and write them to slots [rows * heads] of the cache; a head of a block has
// `block_size` tokens in `head_bytes` bytes.
template <typename T>
void write_quantized(const T* x, int64_t stride, uint8_t* cache, const int64_t* slots, int64_t rows, int64_t heads,
                     const HeadFormat& format, int64_t block_size, int64_t head_bytes) {
    for_each(rows, rows * heads * format.dim > 16384, [&](int64_t row) {
        std::vector<float> wide(format.dim);
        for (int64_t head = 0; head < heads; ++head) {
            const T* from = x + row * stride + head * format.dim;
            in_pieces(format.dim, [&](int64_t i, int64_t n) { put(wide.data() + i, fetch(from + i, n), n); });
            const int64_t slot = slots[row * heads + head], place = slot % block_size;
            uint8_t* base = cache + slot / block_size * head_bytes;
            uint8_t* scales = base + block_size * format.number_bytes() + place * format.scale_bytes();
            uint8_t* numbers = base + place * format.number_bytes();
            if (format.stored == INT4) quantize_by_group(wide.data(), format, numbers, scales);
            else if (format.stored == FLOAT8_LATENT) round_latent(wide.data(), format, numbers);
            else quantize_by_head(wide.data(), format, numbers, scales);
        }
    });
}

// Dequantize one head of one token to floats, `to` [dim].
inline void read_quantized(const uint8_t* numbers, const uint8_t* scales, const HeadFormat& format, float* to) {
    if (format.stored == INT4) {
        const int64_t group = format.group();
        for (int64_t begin = 0; begin < format.dim; begin += group, scales += 4) {
            uint16_t kept[2];
            std::memcpy(kept, scales, 4);
            const float scale = half_to_float(kept[0]), offset = half_to_float(kept[1]);
            const uint8_t* from = numbers + begin / 2;
            for (int64_t i = 0; i < group / 2; ++i) {
                to[begin + 2 * i] = static_cast<float>(from[i] & 15) * scale + offset;
                to[begin + 2 * i + 1] = static_cast<float>(from[i] >> 4) * scale + offset;
            }
        }
        return;
    }
    if (format.stored == FLOAT8_LATENT) {
        for (int64_t i = 0; i < format.dim; ++i)
            to[i] = (numbers[i] & 0x7F) == 0x7F ? NAN : e4m3_to_float(numbers[i]);
        return;
    }
    float scale;
    std::memcpy(&scale, scales, 4);
    if (format.stored == INT8) {
        const int8_t* from = reinterpret_cast<const int8_t*>(numbers);
        for (int64_t i = 0; i < format.dim; ++i) to[i] = static_cast<float>(from[i]) * scale;
    } else {
        for (int64_t i = 0; i < format.dim; ++i) to[i] = e4m3_to_float(numbers[i]) * scale;
    }
}

}  // namespace
