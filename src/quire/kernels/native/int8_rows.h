// Activation rows quantized for integer gemm (int8_panels.h).
#pragma once

#include "int8_factors.h"

namespace {

constexpr int INT8_ROWS = LANES == 16 || BY_LANES ? 8 : 4;  // rows whose sums fit in the registers
constexpr int64_t INT8_ROWS_AT_ONCE = 128;  // per gemm call: quantized, they stay in the L2 cache

// Whether the gemm multiplies pairs of 16-bit values: on x86 without byte dot products (VNNI). AVX2 multiplies bytes
// too, but accumulates pairs in 16 bits, which 8-bit weights could overflow.
constexpr bool by_pairs([[maybe_unused]] int64_t format) {
#if !defined(__x86_64__) || defined(__AVX512VNNI__) || defined(__AVXVNNI__)
    return false;
#elif defined(__AVX2__)
    return digits_of(format) == 2 || level_bits_of(format) == 8;
#else
    return true;
#endif
}
#ifdef __x86_64__
constexpr bool UNSIGNED_LEVELS = true;  // the instructions take unsigned weights: signed ones are shifted by 128
#else
constexpr bool UNSIGNED_LEVELS = false;
#endif

// The quantized value that a line's byte 0 represents (zero point): integer sums start at minus this times the sum of
// the row's values. With paired outputs: without offsets for the lower outputs; with offsets, in sixteenths, for the
// upper outputs; byte 0 of the other half represents 0.
constexpr int32_t zero_of(int64_t format) {
    const int32_t middle = has_offsets(format) ? 0 : 1 << (level_bits_of(format) - 1);
    if (has_paired_outputs(format)) return has_offsets(format) ? -128 : middle;
    if (level_bits_of(format) == 8) return UNSIGNED_LEVELS ? 128 : 0;
    // by lanes, values become signed where that is no more work than correcting the sums of one or several rows
    if (BY_LANES && bits_of(format) > 4 && (digits_of(format) == 2 || bits_of(format) == 5)) return 0;
    return middle;
}

// The factor by which a quantized value is scaled in a register; the scales of rows are divided by it.
constexpr int32_t unit_of(int64_t format) {
    return BY_LANES && bits_of(format) == 6 && !has_offsets(format) && zero_of(format) == 0 ? 4 : 1;
}

// Sums of one digit stay below 2^22. By lanes they start at the bit pattern of the float 1.5 * 2^23, and so end as that
// of 1.5 * 2^23 + sum: a float subtraction, which any pipe does in one cycle, then converts them. An integer conversion
// blocks one pipe for two cycles.
constexpr float SUM_ORIGIN = ROUNDING;
constexpr int32_t SUM_ORIGIN_BITS = 0x4B400000;
constexpr bool has_sum_origin(int64_t format) { return BY_LANES && digits_of(format) == 1; }

// A quantized activation is 256 high + low, two int8 digits, or with BYTE_ROWS only the high digit; where the gemm
// multiplies pairs, it is one 16-bit value. Bounds: 32 values times quantized weights below 256, plus the initial
// value, at most 128 times the same values.
//
// Outliers: where one of 32 values is far larger than the others, one digit has too little precision for the others. So
// with BYTE_ROWS such a group also gets a low ("loose") digit, which is multiplied in a separate pass; few rows pay for
// it.
constexpr int32_t LARGEST_DIGIT = 127, LARGEST_NUMBER = 127 * 256 + 127;
constexpr float OUTLIER = 12.0f;  // threshold, in multiples of the mean magnitude of the 32
static_assert(INT8_GROUP * (255 + 128) * (LARGEST_NUMBER + 256) <= INT32_MAX);
static_assert(INT8_GROUP * (255 + 128) * 128 < 1 << 22);
constexpr int64_t NUMBERS_BYTES = 2 * INT8_GROUP;  // [32] high digits, [32] low digits; or pairs

// Whether the sums of high and of low digits are converted to floats separately, the low ones only where they exist.
constexpr bool has_loose_digits(int64_t format) { return digits_of(format) == 1 && !by_pairs(format); }

// Store 32 quantized values as digits or pairs. Pairs: inputs 0 and 2 of four, then 1 and 3, in the order in which
// lines are unpacked.
inline void store_numbers(bool by_pairs, const int16_t (&numbers)[INT8_GROUP], uint8_t* to) {
    if (by_pairs) {
        int16_t pairs[INT8_GROUP];
        for (int64_t i = 0; i < INT8_GROUP; i += 4) {
            pairs[i] = numbers[i], pairs[i + 1] = numbers[i + 2];
            pairs[i + 2] = numbers[i + 1], pairs[i + 3] = numbers[i + 3];
        }
        std::memcpy(to, pairs, sizeof pairs);
    } else {
        for (int64_t i = 0; i < INT8_GROUP; ++i) to[i] = static_cast<uint8_t>((numbers[i] + 128) >> 8);
        for (int64_t i = 0; i < INT8_GROUP; ++i) to[INT8_GROUP + i] = static_cast<uint8_t>(numbers[i]);
    }
}

// Return 32 values as float32, converted in `room` if needed.
inline const float* widened(const float* x, float (&)[INT8_GROUP]) { return x; }
inline const float* widened(const bf16* x, float (&room)[INT8_GROUP]) {
    for (int64_t i = 0; i < INT8_GROUP; i += LANES) put(room + i, fetch(x + i, LANES), LANES);
    return room;
}

// Result of quantizing 32 values to integers times a scale. Without a low digit, the integers are multiples of 256.
struct Rounded {
    float scale;
    bool has_low;
};

// Quantize 32 floats to 16-bit integers with one scale, or to 8 bits where no low digit is needed.
template <int64_t DIGITS> inline Rounded round_group(const float* x, int16_t (&to)[INT8_GROUP]) {
    typedef int16_t Numbers __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    constexpr int64_t PIECES = INT8_GROUP / LANES;
    const float smallest = 1e-30f;  // for smaller magnitudes the inverse overflows a float
    Words sizes{};  // compared as integers, so that NaN is the largest
    Floats values[PIECES], total{};
    for (int64_t p = 0; p < PIECES; ++p) {
        values[p] = load(x + p * LANES);
        const Words size = (Words)values[p] & 0x7FFFFFFFu;
        sizes = size > sizes ? size : sizes;
        total += (Floats)size;
    }
    uint32_t bits = 0;
    for (int64_t i = 0; i < LANES; ++i) bits = std::max<uint32_t>(bits, sizes[i]);
    float largest;
    std::memcpy(&largest, &bits, sizeof largest);
    const bool vanishes = largest < smallest;
    const bool has_low = DIGITS == 2 || largest * INT8_GROUP > OUTLIER * sum(total);
    const int32_t steps = has_low ? LARGEST_NUMBER : LARGEST_DIGIT;
    const Floats inverse = all(vanishes ? 0.0f : steps / largest);
    for (int64_t p = 0; p < PIECES; ++p) {
        Ints whole = (Ints)(values[p] * inverse + ROUNDING) - SUM_ORIGIN_BITS;
        if (!has_low) whole = whole * 256;
        *reinterpret_cast<Numbers*>(to + p * LANES) = __builtin_convertvector(whole, Numbers);
    }
    return {vanishes ? 0.0f : largest / steps / (has_low ? 1 : 256), has_low};
}

// Layout of quantized rows: a row is value * scale. For n rows that are multiplied together, the data of each 32 inputs
// is one record, and records follow each other: [n][32] values; [n] scales; [n] marks (with loose digits, bit 0 is set
// if the row has low digits here, and the first mark also holds twice the distance to the next record in which some row
// has); then for each weight scale of these inputs [n] sums of the values times their scale, and [n] initial values of
// the integer sums (with loose digits, first for the high digits, then for the low ones).
constexpr int64_t record_row_bytes(int64_t format) {
    return NUMBERS_BYTES + 8 + 4 * scales_of(format) * (has_loose_digits(format) ? 3 : 2);
}
constexpr int64_t integer_rows_bytes(int64_t format, int64_t rows, int64_t inputs) {
    return rows * (inputs / INT8_GROUP) * record_row_bytes(format);
}

// Accessors of one record. Format, Rows: integers, or std::integral_constant where known at compile time.
template <typename Format, typename Rows> struct RowRecord {
    Format format;
    Rows rows;
    uint8_t* at;

    uint8_t* numbers(int64_t row) const { return at + row * NUMBERS_BYTES; }
    float& scale(int64_t row) const { return column<float>(0)[row]; }
    int32_t& mark(int64_t row) const { return column<int32_t>(1)[row]; }
    float& sum(int64_t row, int64_t part) const { return column<float>(2 + part)[row]; }
    int32_t& begin(int64_t row, int64_t part, int64_t digit = 0) const {
        return column<int32_t>(2 + (1 + digit) * scales_of(format) + part)[row];
    }
    RowRecord next(int64_t distance = 1) const { return {format, rows, at + distance * rows * record_row_bytes(format)}; }

    bool has_low(int64_t first, int64_t count) const {  // whether any of `count` rows from `first` on has low digits
        int32_t marks = 0;
        for (int64_t r = first; r < first + count; ++r) marks |= mark(r);
        return (marks & 1) != 0;
    }
    int64_t distance() const { return mark(0) >> 1; }

    template <typename T> T* column(int64_t index) const {
        return reinterpret_cast<T*>(at + rows * (NUMBERS_BYTES + 4 * index));
    }
};
template <int64_t FORMAT, int N>
using RecordOf = RowRecord<std::integral_constant<int64_t, FORMAT>, std::integral_constant<int64_t, N>>;

// Call body(group, record) for the groups of 32 inputs in which some row has low digits, in order.
template <typename Record, typename Body>
inline __attribute__((always_inline)) void for_low(const Record& first, int64_t groups, Body body) {
    int64_t group = groups == 0 || first.has_low(0, first.rows) ? 0 : first.distance();
    while (group < groups) {
        const Record record = first.next(group);
        body(group, record);
        group += record.distance();
    }
}

// The parameters of quantize_group for a format, computed once.
struct GroupRounding {
    bool by_pairs, is_loose;
    int32_t zero, origin;  // see zero_of, has_sum_origin
    float part;            // factor of the scales, see unit_of

    explicit GroupRounding(int64_t format)
        : by_pairs(::by_pairs(format)), is_loose(has_loose_digits(format)), zero(zero_of(format)),
          origin(has_sum_origin(format) ? SUM_ORIGIN_BITS : 0), part(1.0f / static_cast<float>(unit_of(format))) {}
};

// SHAPE: the flags BYTE_ROWS and BY_HALVES of a format, which are compiled in.
template <int64_t SHAPE> using RecordOfShape = RowRecord<std::integral_constant<int64_t, SHAPE>, int64_t>;

// Quantize 32 values of row r into a record.
template <int64_t SHAPE>
inline void quantize_group(const GroupRounding& how, const float* x, const RecordOfShape<SHAPE>& record, int64_t r) {
    constexpr int64_t SCALES = scales_of(SHAPE), EACH = INT8_GROUP / SCALES;
    int16_t numbers[INT8_GROUP];
    const Rounded rounded = round_group<digits_of(SHAPE)>(x, numbers);
    store_numbers(how.by_pairs, numbers, record.numbers(r));
    // with loose digits, the scale refers to the high digit
    record.scale(r) = (how.is_loose ? rounded.scale * 256 : rounded.scale) * how.part;
    record.mark(r) = rounded.has_low;
    const auto* digits = reinterpret_cast<const int8_t*>(record.numbers(r));
    for (int64_t part = 0; part < SCALES; ++part) {
        int32_t sum = 0, high = 0;
        for (int64_t i = part * EACH; i < (part + 1) * EACH; ++i) sum += numbers[i];
        record.sum(r, part) = rounded.scale * static_cast<float>(sum);
        if (how.zero == 0) {
            record.begin(r, part) = how.origin;
            if (how.is_loose) record.begin(r, part, 1) = how.origin;
        } else if (how.is_loose) {
            for (int64_t i = part * EACH; i < (part + 1) * EACH; ++i) high += digits[i];
            record.begin(r, part) = how.origin - how.zero * high;
            record.begin(r, part, 1) = how.origin - how.zero * (sum - 256 * high);
        } else {
            record.begin(r, part) = how.origin - how.zero * sum;
        }
    }
}

// Quantize `count` rows of x [count, inputs] into records of `count` rows, starting at `at`.
template <int64_t SHAPE, typename T>
void quantize_shape(int64_t format, const T* x, int64_t count, int64_t inputs, uint8_t* at) {
    const GroupRounding how(format);
    const int64_t record_bytes = count * record_row_bytes(format);
    for (int64_t from = 0; from < inputs; from += INT8_GROUP, at += record_bytes)
        for (int64_t r = 0; r < count; ++r) {
            float wide[INT8_GROUP];
            quantize_group<SHAPE>(how, widened(x + r * inputs + from, wide), {{}, count, at}, r);
        }
    if (!how.is_loose) return;
    int64_t distance = 1;
    for (int64_t from = 0; from < inputs; from += INT8_GROUP, ++distance) {  // from the last record back to the first
        const RecordOfShape<SHAPE> record{{}, count, at -= record_bytes};
        record.mark(0) += static_cast<int32_t>(2 * distance);
        if (record.has_low(0, count)) distance = 0;
    }
}

// Whether any of `rows` rows, in records starting at `at`, has loose low digits.
inline bool have_low_digits(uint8_t* at, int64_t rows, int64_t inputs) {
    const RecordOfShape<0> first{{}, rows, at};
    return first.has_low(0, rows) || first.distance() < inputs / INT8_GROUP;
}

// Quantize rows [row, row + count) of x [rows, inputs] into records of `count` rows, round to nearest even. A group
// with a NaN or an infinity gets such a scale, so the row's results are not finite either.
template <typename T>
void quantize_rows(int64_t format, const T* x, int64_t row, int64_t count, int64_t inputs, uint8_t* room) {
    const int64_t shape = format & (BYTE_ROWS | BY_HALVES);
    const auto quantize = shape == 0           ? quantize_shape<0, T>
                          : shape == BYTE_ROWS ? quantize_shape<BYTE_ROWS, T>
                          : shape == BY_HALVES ? quantize_shape<BY_HALVES, T>
                                               : quantize_shape<BYTE_ROWS | BY_HALVES, T>;
    quantize(format, x + row * inputs, count, inputs, room + integer_rows_bytes(format, row, inputs));
}

}  // namespace
