// Scales and offsets of panels with super-blocks, as in GGUF K-quants: integer codes times a float16 value that 256
// inputs share. Before a panel is multiplied, its factors are decoded to float16, once for all rows.
#pragma once

#include "int8_formats.h"

namespace {

typedef int8_t Codes __attribute__((vector_size(INT8_OUTPUTS)));
typedef uint16_t CodePairs __attribute__((vector_size(INT8_OUTPUTS)));
typedef Codes LooseCodes __attribute__((aligned(1), may_alias));
constexpr int64_t PARTS = INT8_OUTPUTS / LANES;  // registers of floats for 16 outputs

// Convert int8 codes of 16 outputs to floats (AVX-512, AVX2, NEON or plain).
inline void widen_codes(Codes codes, Floats (&to)[PARTS]) {
#if defined(__AVX512F__)
    to[0] = __builtin_convertvector((Ints)_mm512_maskz_cvtepi8_epi32(0xFFFF, (__m128i)codes), Floats);
#elif defined(__AVX2__)
    to[0] = __builtin_convertvector((Ints)_mm256_cvtepi8_epi32((__m128i)codes), Floats);
    to[1] = __builtin_convertvector((Ints)_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)), Floats);
#elif defined(__aarch64__)
    const int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)codes)), high = vmovl_high_s8((int8x16_t)codes);
    to[0] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    to[1] = (Floats)vcvtq_f32_s32(vmovl_high_s16(low));
    to[2] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    to[3] = (Floats)vcvtq_f32_s32(vmovl_high_s16(high));
#else
    for (int64_t i = 0; i < INT8_OUTPUTS; ++i) to[i / LANES][i % LANES] = codes[i];
#endif
}

// Store codes of 16 outputs times each output's shared value, as float16 [16].
inline void store_factors(Codes codes, const Floats (&shared)[PARTS], uint8_t* to) {
    Floats wide[PARTS];
    widen_codes(codes, wide);
    unroll<PARTS>([&](auto part) { store_float16(to + 2 * part * LANES, wide[part] * shared[part]); });
}

// Load the shared float16 values of 16 outputs as floats.
inline void load_shared(const uint8_t* from, Floats (&to)[PARTS]) {
    unroll<PARTS>([&](auto part) { to[part] = load_float16(from + 2 * part * LANES); });
}

// Decode the factors of a panel with `groups` groups of 32 inputs, to [groups][scales, offsets], each [2 halves][16
// outputs], float16.
template <bool OFFSETS> inline void decode_super_blocks(const uint8_t* panel, int64_t groups, uint8_t* to) {
    constexpr int64_t FORMAT = SUPER_BLOCKS | BY_HALVES | (OFFSETS ? WITH_OFFSETS : 0), EACH = INT8_OUTPUTS * 2;
    const uint8_t* shared = panel;
    const auto* codes = reinterpret_cast<const LooseCodes*>(panel + groups / SUPER_GROUPS * super_factor_bytes(FORMAT));
    for (int64_t block = 0; block < groups / SUPER_GROUPS; ++block, shared += super_factor_bytes(FORMAT)) {
        Floats scales[PARTS], offsets[PARTS];
        load_shared(shared, scales);
        if constexpr (OFFSETS) load_shared(shared + EACH, offsets);
        for (int64_t i = 0; i < SUPER_GROUPS; ++i, to += int8_factor_bytes(FORMAT))
            for (int64_t half = 0; half < 2; ++half, ++codes) {
                if constexpr (OFFSETS) {
                    const Codes high = (Codes)((CodePairs)*codes >> 4);
                    store_factors(*codes & static_cast<int8_t>(15), scales, to + half * EACH);
                    store_factors(high & static_cast<int8_t>(15), offsets, to + (2 + half) * EACH);
                } else {
                    store_factors(*codes, scales, to + half * EACH);
                }
            }
    }
}

// A packed panel and its factors, at the offsets of places_of.
struct PanelBytes {
    const uint8_t *begin, *factors;
};

// Return where the factors of a panel are: in the panel, or with super-blocks decoded to thread-local memory that is
// valid until the next call. Offsets: see places_of.
inline const uint8_t* decode_factors(int64_t format, const uint8_t* panel, int64_t inputs) {
    if (!has_super_blocks(format)) return panel;
    static thread_local std::vector<uint8_t> room;  // thread_local access is slow, so other formats skip it
    const int64_t groups = inputs / INT8_GROUP;
    room.resize(std::max<size_t>(room.size(), groups * int8_factor_bytes(format)));
    (has_offsets(format) ? decode_super_blocks<true> : decode_super_blocks<false>)(panel, groups, room.data());
    return room.data();
}

// Find integer codes between `least` and `most` and one shared float16 value whose products are exactly `factors` [16],
// float16. Returns false if there are none, as for infinities and NaNs.
inline bool find_codes(const uint16_t* factors, int32_t least, int32_t most, uint16_t& shared, int8_t* codes) {
    if (std::any_of(factors, factors + INT8_OUTPUTS, [](uint16_t bits) { return (bits & 0x7C00) == 0x7C00; })) return false;
    Floats wanted[PARTS];
    load_shared(reinterpret_cast<const uint8_t*>(factors), wanted);
    float largest = 0.0f;  // by magnitude
    for (int64_t i = 0; i < INT8_OUTPUTS; ++i) {
        const float factor = wanted[i / LANES][i % LANES];
        if (std::abs(factor) > std::abs(largest)) largest = factor;
    }
    const auto fits = [&](uint16_t bits) {
        uint16_t same[INT8_OUTPUTS];
        std::fill_n(same, INT8_OUTPUTS, bits);
        Floats own[PARTS];
        load_shared(reinterpret_cast<const uint8_t*>(same), own);
        bool found = true;
        for (int64_t part = 0; part < PARTS; ++part) {
            const Floats code = wanted[part] / own[part] + ROUNDING - ROUNDING;
            uint8_t rounded[2 * LANES];
            store_float16(rounded, code * own[part]);
            const Floats made = load_float16(rounded);
            for (int64_t i = 0; i < LANES; ++i) {
                found = found && made[i] == wanted[part][i] && code[i] >= least && code[i] <= most;
                codes[part * LANES + i] = static_cast<int8_t>(found ? code[i] : 0);
            }
            if (!found) break;
        }
        if (found) shared = bits;
        return found;
    };
    shared = 0;
    std::fill_n(codes, INT8_OUTPUTS, static_cast<int8_t>(0));
    if (largest == 0.0f) return true;
    for (int32_t size = std::max(most, -least); size > 0; --size)  // try every magnitude of the largest factor's code
        for (const int32_t code : {size, -size}) {
            if (code < least || code > most) continue;
            uint8_t near[2 * LANES];
            store_float16(near, all(largest / static_cast<float>(code)));
            uint16_t bits;
            std::memcpy(&bits, near, sizeof bits);
            for (const int32_t step : {0, 1, -1}) {  // the factor may have been rounded, so try its neighbours too
                const int32_t place = (bits & 0x7FFF) + step;
                if (place > 0 && place < 0x7C00 && fits(static_cast<uint16_t>((bits & 0x8000) | place))) return true;
            }
        }
    return false;
}

}  // namespace
