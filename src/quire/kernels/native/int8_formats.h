// The formats of quantized weights that are multiplied in whole numbers, and where their panels (int8_panels.h) hold what.
#pragma once

#include "product.h"

namespace {

// A format of such panels: how many bits, with offsets or without, and whether 16 inputs share a scale or 32; and whether
// rows that are multiplied by them are rounded to 16 bits, or to 8 but for outliers. Scales and offsets are float16 numbers,
// each for as many inputs as share it. WIDE: 128 inputs share both. SUPERBLOCKS: an offset is a byte times a float16 number
// that 256 inputs share, which is so for groups of 32 inputs alone.
constexpr int64_t WITH_OFFSETS = 16, BY_HALVES = 32, BYTE_ROWS = 64, SUPERBLOCKS = 128, WIDE = 256;
constexpr int64_t TABLE = 7;  // in place of the bits: 4 bits are the place of a signed byte in a table of 16
constexpr bool has_table(int64_t format) { return (format & 15) == TABLE; }
constexpr int64_t bits_of(int64_t format) { return has_table(format) ? 4 : format & 15; }  // as it is stored
constexpr int64_t level_bits_of(int64_t format) { return has_table(format) ? 8 : bits_of(format); }
constexpr int64_t digits_of(int64_t format) { return format & BYTE_ROWS ? 1 : 2; }
constexpr bool has_offsets(int64_t format) { return (format & WITH_OFFSETS) != 0; }
constexpr int64_t scales_of(int64_t format) { return format & BY_HALVES ? 2 : 1; }  // for 32 inputs

#ifdef __ARM_FEATURE_DOTPROD
constexpr bool BY_LANES = true;  // see int8_lanes.h
#else
constexpr bool BY_LANES = false;
#endif
constexpr int64_t INT8_OUTPUTS = 16, INT8_GROUP = 32, LINE_BYTES = 64, INT8_LINES = 8;

// A span is 128 or 256 inputs that share float16 numbers, else 32 inputs: so many times 32.
constexpr int64_t SUPERBLOCK_GROUPS = 8;
constexpr bool has_offset_bytes(int64_t format) { return (format & SUPERBLOCKS) != 0; }
constexpr bool is_wide(int64_t format) { return (format & WIDE) != 0; }
constexpr int64_t groups_of_span(int64_t format) {
    return has_offset_bytes(format) ? SUPERBLOCK_GROUPS : is_wide(format) ? 4 : 1;
}

// Factors, for each of 16 outputs: those of a span, with all bytes, and those of 32 inputs.
constexpr int64_t HALVES_BYTES = 2 * INT8_OUTPUTS;
constexpr int64_t offset_bytes_of(int64_t format) { return has_offset_bytes(format) ? INT8_OUTPUTS : 0; }  // of 32 inputs
constexpr int64_t int8_span_bytes(int64_t format) {
    if (has_offset_bytes(format)) return HALVES_BYTES + groups_of_span(format) * offset_bytes_of(format);
    return is_wide(format) ? HALVES_BYTES * (1 + has_offsets(format)) : 0;
}
constexpr int64_t int8_factor_bytes(int64_t format) {  // of 32 inputs
    const int64_t kinds = is_wide(format) ? 0 : has_offsets(format) && !has_offset_bytes(format) ? 2 : 1;
    return HALVES_BYTES * scales_of(format) * kinds;
}
constexpr int64_t int8_table_bytes(int64_t format) { return has_table(format) ? LINE_BYTES : 0; }  // of a panel
constexpr int64_t int8_group_bytes(int64_t format) { return bits_of(format) * LINE_BYTES; }  // lines of 32 inputs
constexpr int64_t int8_panel_bytes(int64_t format, int64_t inputs) {
    const int64_t groups = inputs / INT8_GROUP;
    return int8_table_bytes(format) + groups / groups_of_span(format) * int8_span_bytes(format) +
           groups * (int8_factor_bytes(format) + int8_group_bytes(format));
}

// Where a panel of so many times 32 inputs holds what belongs to some 32: bytes from its begin.
struct GroupPlaces {
    int64_t scales, offsets, bytes, lines;
};
constexpr GroupPlaces places_of(int64_t format, int64_t groups, int64_t group) {
    const int64_t table = int8_table_bytes(format), span = group / groups_of_span(format), halves = HALVES_BYTES;
    const int64_t scales = scales_of(format) * halves, lines = int8_group_bytes(format);
    if (BY_LANES) {
        const int64_t each = int8_factor_bytes(format) + lines, in_span = int8_span_bytes(format);
        const int64_t begin = table + span * (in_span + groups_of_span(format) * each);
        const int64_t own = begin + in_span + group % groups_of_span(format) * each;
        const int64_t offsets = is_wide(format) ? begin + halves : has_offset_bytes(format) ? begin : own + scales;
        const int64_t bytes = begin + halves + group % groups_of_span(format) * offset_bytes_of(format);
        return {is_wide(format) ? begin : own, offsets, bytes, own + each - lines};
    }
    const int64_t spans = groups / groups_of_span(format), all_scales = is_wide(format) ? spans * halves : groups * scales;
    const bool by_span = is_wide(format) || has_offset_bytes(format);
    const int64_t all_offsets = has_offsets(format) ? (by_span ? spans * halves : groups * scales) : 0;
    const int64_t bytes = table + all_scales + all_offsets, each = offset_bytes_of(format);
    return {table + (is_wide(format) ? span * halves : group * scales),
            table + all_scales + (by_span ? span * halves : group * scales), bytes + group * each,
            bytes + groups * each + group * lines};
}

// Whether the two levels of a byte are of one input and two outputs.
constexpr bool has_paired_outputs(int64_t format) { return BY_LANES && bits_of(format) == 4 && !has_table(format); }
constexpr int64_t PAIRED_BYTES = LINE_BYTES / 2;  // a line of such levels

// The factors of 32 inputs. A byte times a float16 number is exact.
template <int64_t FORMAT> struct GroupFactors {
    const uint8_t *scales, *offsets, *bytes;

    GroupFactors(const uint8_t* panel, const GroupPlaces& places)
        : scales(panel + places.scales), offsets(panel + places.offsets), bytes(panel + places.bytes) {}

    // Of LANES outputs from `output` on; half: of 32 inputs, 0 where they share factors.
    Floats scale(int64_t half, int64_t output) const { return load_float16(scales + 2 * (half * INT8_OUTPUTS + output)); }
    Floats offset(int64_t half, int64_t output) const {
        if constexpr (!has_offset_bytes(FORMAT)) return load_float16(offsets + 2 * (half * INT8_OUTPUTS + output));
        const Ints byte = load_bytes(bytes + output);
        return __builtin_convertvector(byte, Floats) * load_float16(offsets + 2 * output);
    }
};

}  // namespace
