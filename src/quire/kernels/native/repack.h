// Repacking of quantized weights at load time: GGUF blocks are unpacked to one byte per value, and these are packed
// into the panels of int8_panels.h. Each is one pass over the weight, by all threads.
#pragma once

#include "int8_panels.h"

namespace {

// --------------------------------------------------------------------------------------------- unpacking blocks
// A GGUF block type: its bytes, its number of values, and the function that unpacks it. Scales are not read here.
struct BlockType {
    int64_t bytes, values;
    void (*levels)(const uint8_t* block, uint8_t* out);
};

// Unpack the low halves of `width` bytes, then the high halves.
inline void split_nibbles(const uint8_t* from, int64_t width, uint8_t* out) {
    for (int64_t i = 0; i < width; i++) {
        out[i] = from[i] & 15;
        out[width + i] = from[i] >> 4;
    }
}

// Q4_0, Q4_1: 16 bytes of nibbles from byte START on.
template <int64_t START> inline void nibble_levels(const uint8_t* block, uint8_t* out) {
    split_nibbles(block + START, 16, out);
}

// IQ4_NL, IQ4_XS, MXFP4: 16 bytes of 4-bit indices into a table, `GROUPS` times.
template <int64_t START, int64_t GROUPS, const int8_t* TABLE> inline void table_levels(const uint8_t* block, uint8_t* out) {
    for (int64_t group = 0; group < GROUPS; group++) {
        split_nibbles(block + START + 16 * group, 16, out + 32 * group);
        for (int64_t i = 0; i < 32; i++) out[32 * group + i] = static_cast<uint8_t>(TABLE[out[32 * group + i]]);
    }
}
constexpr int8_t IQ4_LEVELS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t MXFP4_LEVELS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Q5_0 and Q5_1: bit i of four bytes is the fifth bit of value i, then come the nibbles. LEAST: the value of all bits
// zero.
template <int64_t START, int LEAST> inline void five_bit_levels(const uint8_t* block, uint8_t* out) {
    split_nibbles(block + START + 4, 16, out);
    for (int64_t i = 0; i < 32; i++) {
        const int fifth = block[START + i / 8] >> (i % 8) & 1;
        out[i] = static_cast<uint8_t>((out[i] | fifth << 4) + LEAST);
    }
}

inline void q8_0_levels(const uint8_t* block, uint8_t* out) { std::memcpy(out, block + 2, 32); }

inline void q2_k_levels(const uint8_t* block, uint8_t* out) {  // of each 32 bytes: lowest two bits, next two ...
    for (int64_t i = 0; i < 256; i++) out[i] = block[16 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3;
}

inline void q3_k_levels(const uint8_t* block, uint8_t* out) {  // two bits likewise, inverted third bits; value + 8
    for (int64_t i = 0; i < 256; i++) {
        const int low = block[32 + i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3, third = block[i % 32] >> (i / 32) & 1;
        out[i] = static_cast<uint8_t>((low | third << 2) + 4);
    }
}

// Q4_K: groups of 32 bytes of nibbles.
inline void q4_k_levels(const uint8_t* block, uint8_t* out) {
    for (int64_t group = 0; group < 4; group++) split_nibbles(block + 16 + 32 * group, 32, out + 64 * group);
}

// Q5_K: nibbles as in Q4_K; 32 bytes before them hold the fifth bits.
inline void q5_k_levels(const uint8_t* block, uint8_t* out) {
    for (int64_t group = 0; group < 4; group++) split_nibbles(block + 48 + 32 * group, 32, out + 64 * group);
    for (int64_t group = 0; group < 8; group++)
        for (int64_t i = 0; i < 32; i++) out[32 * group + i] |= (block[16 + i] >> group & 1) << 4;
}

// Q6_K: low nibbles, then two high bits per value, minus 32.
inline void q6_k_levels(const uint8_t* block, uint8_t* out) {
    for (int64_t half = 0; half < 2; half++) {
        split_nibbles(block + 64 * half, 64, out + 128 * half);
        for (int64_t group = 0; group < 4; group++)
            for (int64_t i = 0; i < 32; i++) {
                uint8_t& level = out[128 * half + 32 * group + i];
                const int high = block[128 + 32 * half + i] >> (2 * group) & 3;
                level = static_cast<uint8_t>((level | high << 4) - 32);
            }
    }
}

// The block type of a GGUF type number; a null function means that it is not unpacked here.
inline BlockType block_type(int64_t number) {
    switch (number) {
        case 2: return {18, 32, nibble_levels<2>};
        case 3: return {20, 32, nibble_levels<4>};
        case 6: return {22, 32, five_bit_levels<2, -16>};
        case 7: return {24, 32, five_bit_levels<4, 0>};
        case 8: return {34, 32, q8_0_levels};
        case 10: return {84, 256, q2_k_levels};
        case 11: return {110, 256, q3_k_levels};
        case 12: return {144, 256, q4_k_levels};
        case 13: return {176, 256, q5_k_levels};
        case 14: return {210, 256, q6_k_levels};
        case 20: return {18, 32, table_levels<2, 1, IQ4_LEVELS>};
        case 23: return {136, 256, table_levels<8, 8, IQ4_LEVELS>};
        case 39: return {17, 32, table_levels<1, 1, MXFP4_LEVELS>};
        default: return {0, 0, nullptr};
    }
}

constexpr int64_t FEW_LEVELS = 1 << 16;  // up to here, threads cost more than they save

// Unpack `count` blocks. Returns whether the type is known.
inline bool read_blocks(int64_t number, const uint8_t* blocks, int64_t count, uint8_t* levels) {
    const BlockType type = block_type(number);
    if (type.levels == nullptr) return false;
    for_each(count, count * type.values > FEW_LEVELS, [&](int64_t i) {
        type.levels(blocks + i * type.bytes, levels + i * type.values);
    });
    return true;
}

// Set seen [256] to 1 for each byte that occurs in `levels` [count], else to 0.
inline void find_levels(const uint8_t* levels, int64_t count, uint8_t* seen) {
    std::atomic<uint8_t> found[256] = {};
    const int64_t pieces = (count + FEW_LEVELS - 1) / FEW_LEVELS;
    for_each(pieces, pieces > 1, [&](int64_t piece) {
        bool own[256] = {};
        const int64_t end = std::min(count, (piece + 1) * FEW_LEVELS);
        for (int64_t i = piece * FEW_LEVELS; i < end; i++) own[levels[i]] = true;
        for (int64_t level = 0; level < 256; level++)
            if (own[level]) found[level].store(1, std::memory_order_relaxed);
    });
    for (int64_t level = 0; level < 256; level++) seen[level] = found[level].load(std::memory_order_relaxed);
}

// Find the codes of factors [count][16] of 256 inputs each, float16: shared [count], codes [count][16], see find_codes.
// Returns false if some cannot be represented.
inline bool find_super_blocks(const uint16_t* factors, int64_t count, int64_t least, int64_t most, uint16_t* shared,
                              int8_t* codes) {
    std::atomic<bool> has_all{true};
    for_each(count, 16 * count > FEW_LEVELS, [&](int64_t i) {
        if (!has_all.load(std::memory_order_relaxed)) return;
        if (!find_codes(factors + 16 * i, static_cast<int32_t>(least), static_cast<int32_t>(most), shared[i], codes + 16 * i))
            has_all.store(false, std::memory_order_relaxed);
    });
    return has_all;
}

// --------------------------------------------------------------------------------------------- packing panels
// A quantized weight: levels (quantized values) [outputs, inputs]; scales and offsets [outputs, groups of the format],
// float16; table [16]. With super-blocks, scales and offsets are those that 256 inputs share, codes [outputs, inputs / 16].
// What the format does not have is not read.
struct Levels {
    const uint8_t* levels;
    const uint16_t *scales, *offsets;
    const uint8_t *table, *codes;
    int64_t outputs, inputs;
    uint8_t middle;  // added to each value
};

// Pack factors: `count` per output of `rows` outputs, to [count][16 outputs], zeros for missing outputs.
inline void pack_factors(const uint16_t* from, int64_t stride, int64_t rows, int64_t count, uint8_t* to) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t o = 0; o < INT8_OUTPUTS; o++) {
            const uint16_t factor = o < rows ? from[o * stride + i] : 0;
            std::memcpy(to + 2 * (i * INT8_OUTPUTS + o), &factor, sizeof factor);
        }
}

// Pack a value of 2 or 3 bits of line k into its bits of the byte lines from `to` on.
inline void pack_few_bits(uint8_t level, int64_t bits, int64_t k, uint8_t* to) {
    const auto put = [&](int64_t line, int64_t some, int64_t at) {
        to[line * LINE_BYTES] = static_cast<uint8_t>(to[line * LINE_BYTES] | some << at);
    };
    if (bits == 2) return put(k / 4, level, 2 * (k % 4));
    if (k < 6) return put(k / 2, level, 3 * (k % 2));
    put(k - 6, level & 3, 6);
    put(2, level >> 2, k);
}

// Pack lines of one byte per value into the bits of the format.
inline void pack_lines(const uint8_t (&lines)[INT8_LINES][LINE_BYTES], int64_t format, uint8_t* to) {
    const int64_t bits = bits_of(format);
    if (bits == 8) {
        std::memcpy(to, lines, sizeof lines);
        return;
    }
    if (bits < 4) {
        std::memset(to, 0, bits * LINE_BYTES);
        for (int64_t k = 0; k < INT8_LINES; k++)
            for (int64_t i = 0; i < LINE_BYTES; i++) pack_few_bits(lines[k][i], bits, k, to + i);
        return;
    }
    if (has_paired_outputs(format)) {
        for (int64_t k = 0; k < INT8_LINES; k++)
            for (int64_t i = 0; i < PAIRED_BYTES; i++)
                to[k * PAIRED_BYTES + i] =
                    static_cast<uint8_t>((lines[k][i] & 15) | (lines[k][PAIRED_BYTES + i] ^ 8) << 4);
        return;
    }
    for (int64_t k = 0; k < 4; k++)
        for (int64_t i = 0; i < LINE_BYTES; i++)
            to[k * LINE_BYTES + i] = static_cast<uint8_t>((lines[k][i] & 15) | lines[k + 4][i] << 4);
    const int64_t high = bits - 4;  // bits above the first four
    if (high == 0) return;
    std::memset(to + 4 * LINE_BYTES, 0, high * LINE_BYTES);
    for (int64_t k = 0; k < INT8_LINES; k++) {
        const int64_t shared = INT8_LINES / high;
        uint8_t* line = to + (4 + k / shared) * LINE_BYTES;
        for (int64_t i = 0; i < LINE_BYTES; i++)
            line[i] = static_cast<uint8_t>(line[i] | lines[k][i] >> 4 << (k % shared * high));
    }
}

// Read 32 inputs of `rows` outputs as lines of one byte per value. places: index of each value in the table, or null.
inline void read_lines(const Levels& weight, const uint8_t* levels, int64_t rows, const uint8_t* places,
                       uint8_t (&lines)[INT8_LINES][LINE_BYTES]) {
    std::memset(lines, 0, sizeof lines);
    for (int64_t o = 0; o < rows; o++)
        for (int64_t k = 0; k < INT8_LINES; k++) std::memcpy(lines[k] + 4 * o, levels + o * weight.inputs + 4 * k, 4);
    if (places == nullptr && weight.middle == 0) return;
    for (int64_t k = 0; k < INT8_LINES; k++)
        for (int64_t i = 0; i < 4 * rows; i++) {
            uint8_t& level = lines[k][i];
            level = places != nullptr ? places[level] : static_cast<uint8_t>(level + weight.middle);
        }
}

// With super-blocks: pack what precedes the lines of a panel; first, rows: its outputs.
inline void pack_super_blocks(const Levels& weight, int64_t format, int64_t first, int64_t rows, uint8_t* to) {
    const int64_t blocks = weight.inputs / (INT8_GROUP * SUPER_GROUPS), halves = weight.inputs / INT8_GROUP * 2;
    for (int64_t block = 0; block < blocks; block++, to += super_factor_bytes(format)) {
        const int64_t at = first * blocks + block;
        pack_factors(weight.scales + at, blocks, rows, 1, to);
        if (has_offsets(format)) pack_factors(weight.offsets + at, blocks, rows, 1, to + INT8_OUTPUTS * 2);
    }
    for (int64_t half = 0; half < halves; half++)
        for (int64_t o = 0; o < INT8_OUTPUTS; o++) *to++ = o < rows ? weight.codes[(first + o) * halves + half] : 0;
}

// Pack a whole weight into panels.
inline void pack_int8(const Levels& weight, int64_t format, uint8_t* data) {
    const int64_t groups = weight.inputs / INT8_GROUP, span = groups_of_span(format), scales = scales_of(format);
    const int64_t factors = groups / span * scales;  // per output
    const int64_t panels = (weight.outputs + INT8_OUTPUTS - 1) / INT8_OUTPUTS;
    uint8_t in_table[256] = {};
    if (has_table(format))
        for (int64_t place = 0; place < 16; place++) in_table[weight.table[place]] = static_cast<uint8_t>(place);
    for_each(panels, weight.outputs * weight.inputs > FEW_LEVELS, [&](int64_t panel) {
        const int64_t first = panel * INT8_OUTPUTS, rows = std::min(INT8_OUTPUTS, weight.outputs - first);
        uint8_t* to = data + panel * int8_panel_bytes(format, weight.inputs);
        std::memset(to, 0, int8_table_bytes(format));
        if (has_table(format)) std::memcpy(to, weight.table, 16);
        if (has_super_blocks(format)) pack_super_blocks(weight, format, first, rows, to);
        for (int64_t group = 0; group < groups; group++) {
            const GroupPlaces places = places_of(format, groups, group);
            const int64_t at = first * factors + group / span * scales;
            if (!has_super_blocks(format)) {
                pack_factors(weight.scales + at, factors, rows, scales, to + places.scales);
                if (has_offsets(format)) pack_factors(weight.offsets + at, factors, rows, scales, to + places.offsets);
            }
            uint8_t lines[INT8_LINES][LINE_BYTES];
            const uint8_t* levels = weight.levels + first * weight.inputs + group * INT8_GROUP;
            read_lines(weight, levels, rows, has_table(format) ? in_table : nullptr, lines);
            pack_lines(lines, format, to + places.lines);
        }
    });
}

}  // namespace
