// The formats of quantized weights for integer gemm, and the layout of their panels (int8_panels.h).
#pragma once

#include "gemm.h"

namespace {

// A format number combines the bits of a quantized value with flags. WITH_OFFSETS: value * scale + offset. BY_HALVES:
// 16 inputs share a scale, not 32. BYTE_ROWS: activations are quantized to 8 bits except for outliers, not to 16. WIDE:
// 128 inputs share scale and offset. SUPER_BLOCKS: a factor is an integer code times a float16 value that 256 inputs
// share, rounded to float16 (int8_factors.h). Scales and offsets are float16 otherwise.
constexpr int64_t WITH_OFFSETS = 16, BY_HALVES = 32, BYTE_ROWS = 64, WIDE = 128, SUPER_BLOCKS = 256;
constexpr int64_t TABLE = 7;  // in place of the bits: 4 bits index a table of 16 signed bytes
constexpr bool has_table(int64_t format) { return (format & 15) == TABLE; }
constexpr int64_t bits_of(int64_t format) { return has_table(format) ? 4 : format & 15; }  // as stored
constexpr int64_t level_bits_of(int64_t format) { return has_table(format) ? 8 : bits_of(format); }
constexpr int64_t digits_of(int64_t format) { return format & BYTE_ROWS ? 1 : 2; }
constexpr bool has_offsets(int64_t format) { return (format & WITH_OFFSETS) != 0; }
constexpr int64_t scales_of(int64_t format) { return format & BY_HALVES ? 2 : 1; }  // per 32 inputs

#ifdef __ARM_FEATURE_DOTPROD
constexpr bool BY_LANES = true;  // see int8_lanes.h
#else
constexpr bool BY_LANES = false;
#endif
constexpr int64_t INT8_OUTPUTS = 16, INT8_GROUP = 32, LINE_BYTES = 64, INT8_LINES = 8;

// A span is the inputs that share factors, at least 32. In units of 32 inputs:
constexpr bool is_wide(int64_t format) { return (format & WIDE) != 0; }
constexpr int64_t groups_of_span(int64_t format) { return is_wide(format) ? 4 : 1; }

// With super-blocks, 32 inputs have one byte of codes per half and output.
constexpr bool has_super_blocks(int64_t format) { return (format & SUPER_BLOCKS) != 0; }
constexpr int64_t SUPER_GROUPS = 8;  // groups of 32 inputs per super-block
constexpr int64_t super_factor_bytes(int64_t format) { return INT8_OUTPUTS * 2 * (has_offsets(format) ? 2 : 1); }
constexpr int64_t super_bytes(int64_t format, int64_t groups) {  // bytes before the lines, for `groups` groups
    return groups / SUPER_GROUPS * super_factor_bytes(format) + groups * scales_of(format) * INT8_OUTPUTS;
}

constexpr int64_t int8_factor_bytes(int64_t format) {  // of a span, as float16
    return INT8_OUTPUTS * 2 * scales_of(format) * (has_offsets(format) ? 2 : 1);
}
constexpr int64_t int8_table_bytes(int64_t format) { return has_table(format) ? LINE_BYTES : 0; }  // per panel
constexpr int64_t int8_group_bytes(int64_t format) { return bits_of(format) * LINE_BYTES; }  // lines of 32 inputs
constexpr int64_t int8_span_bytes(int64_t format) {
    return int8_factor_bytes(format) + groups_of_span(format) * int8_group_bytes(format);
}
constexpr int64_t int8_panel_bytes(int64_t format, int64_t inputs) {
    const int64_t groups = inputs / INT8_GROUP;
    if (has_super_blocks(format)) return super_bytes(format, groups) + groups * int8_group_bytes(format);
    return int8_table_bytes(format) + groups / groups_of_span(format) * int8_span_bytes(format);
}

// Offsets in bytes of the factors and lines of one group of 32 inputs within a panel of `groups` groups. With
// super-blocks, the offsets of scales and offsets are relative to what `decode_factors` returns.
struct GroupPlaces {
    int64_t scales, offsets, lines;
};
constexpr GroupPlaces places_of(int64_t format, int64_t groups, int64_t group) {
    const int64_t table = int8_table_bytes(format), lines = int8_group_bytes(format), factors = int8_factor_bytes(format);
    const int64_t each = scales_of(format) * INT8_OUTPUTS * 2, span = group / groups_of_span(format);
    if (has_super_blocks(format))
        return {group * factors, group * factors + each, super_bytes(format, groups) + group * lines};
    if (BY_LANES) {
        const int64_t begin = table + span * int8_span_bytes(format);
        return {begin, begin + each, begin + factors + group % groups_of_span(format) * lines};
    }
    const int64_t spans = groups / groups_of_span(format);
    return {table + span * each, table + (spans + span) * each, table + spans * factors + group * lines};
}

// Whether the two 4-bit values of a byte belong to one input and two outputs.
constexpr bool has_paired_outputs(int64_t format) { return BY_LANES && bits_of(format) == 4 && !has_table(format); }
constexpr int64_t PAIRED_BYTES = LINE_BYTES / 2;  // a line of such values

// The scales and offsets of a group of 32 inputs.
struct GroupFactors {
    const uint8_t *scales, *offsets;

    // For LANES outputs from `output` on; half: which 16 inputs, 0 if all 32 share factors.
    Floats scale(int64_t half, int64_t output) const { return load_float16(scales + 2 * (half * INT8_OUTPUTS + output)); }
    Floats offset(int64_t half, int64_t output) const { return load_float16(offsets + 2 * (half * INT8_OUTPUTS + output)); }
};

}  // namespace
