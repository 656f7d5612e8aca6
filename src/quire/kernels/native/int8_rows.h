// Rows as products in whole numbers take them (int8_panels.h).
#pragma once

#include "int8_factors.h"

namespace {

constexpr int INT8_ROWS = LANES == 16 || BY_LANES ? 8 : 4;  // rows whose sums fit in the registers
constexpr int64_t INT8_ROWS_AT_ONCE = 128;  // of a product: quantized, they stay in the second cache

// x86 without dot products of bytes: those of pairs of 16-bit numbers. AVX2 multiplies bytes too, but its sums of two
// products have 16 bits, which levels of 8 bits could leave.
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
constexpr bool UNSIGNED_LEVELS = true;  // the instructions take unsigned levels: signed ones are moved up by 128
#else
constexpr bool UNSIGNED_LEVELS = false;
#endif

// The level that a line's byte 0 means: sums begin with so many times the sum of the row's numbers, negative. With paired
// outputs: of lower ones without offsets, of upper ones, in sixteenths, with offsets; byte 0 of the others means 0.
constexpr int32_t zero_of(int64_t format) {
    const int32_t middle = has_offsets(format) ? 0 : 1 << (level_bits_of(format) - 1);
    if (has_paired_outputs(format)) return has_offsets(format) ? -128 : middle;
    if (level_bits_of(format) == 8) return UNSIGNED_LEVELS ? 128 : 0;
    // by lanes, levels become signed where that is no more work than adding to the sums of a row, or of several rows
    if (BY_LANES && bits_of(format) > 4 && (digits_of(format) == 2 || bits_of(format) == 5)) return 0;
    return middle;
}

// What a level is multiplied by in a register: the scales of rows are so many times smaller.
constexpr int32_t unit_of(int64_t format) {
    return BY_LANES && bits_of(format) == 6 && !has_offsets(format) && zero_of(format) == 0 ? 4 : 1;
}

// Sums of one digit stay below 2^22. By lanes they begin with the bits of the float 1.5 * 2^23, and so end with
// those of 1.5 * 2^23 + sum: a subtraction makes them floats, which takes any pipe for a cycle; a conversion takes one
// pipe for two.
constexpr float SUM_ORIGIN = ROUNDING;
constexpr int32_t SUM_ORIGIN_BITS = 0x4B400000;
constexpr bool has_sum_origin(int64_t format) { return BY_LANES && digits_of(format) == 1; }

// A row's number is 256 high + low, two digits in int8, or with BYTE_ROWS high alone; where products are of pairs, it is
// one of 16 bits. Sums: 32 numbers times levels below 256, and what they begin with, at most 128 times the same numbers.
//
// Outliers: where one of 32 numbers is far larger than the others, one digit leaves little of these. So with BYTE_ROWS such
// 32 numbers get a low digit too, which is multiplied in a pass of its own: what that costs, few rows pay.
constexpr int32_t LARGEST_DIGIT = 127, LARGEST_NUMBER = 127 * 256 + 127;
constexpr float OUTLIER = 12.0f;  // times the mean size of the 32
static_assert(INT8_GROUP * (255 + 128) * (LARGEST_NUMBER + 256) <= INT32_MAX);
static_assert(INT8_GROUP * (255 + 128) * 128 < 1 << 22);
constexpr int64_t NUMBERS_BYTES = 2 * INT8_GROUP;  // [32] high digits, [32] low ones; or pairs

// Whether sums of high and of low digits are made floats apart, the low ones only where there are any.
constexpr bool has_loose_digits(int64_t format) { return digits_of(format) == 1 && !by_pairs(format); }

// Pairs: inputs 0 and 2 of four, then 1 and 3, as they come out of a line.
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

// 32 numbers as float32; `room` is for those that are not.
inline const float* widened(const float* x, float (&)[INT8_GROUP]) { return x; }
inline const float* widened(const bf16* x, float (&room)[INT8_GROUP]) {
    for (int64_t i = 0; i < INT8_GROUP; i += LANES) put(room + i, fetch(x + i, LANES), LANES);
    return room;
}

// 32 numbers of a row as whole numbers times a scale: with one digit, 256 times these.
struct Rounded {
    float scale;
    bool has_low;
};

template <int64_t DIGITS> inline Rounded round_group(const float* x, int16_t (&to)[INT8_GROUP]) {
    typedef int16_t Numbers __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
    constexpr int64_t PIECES = INT8_GROUP / LANES;
    const float smallest = 1e-30f;  // of what lies closer to 0, the inverse has no room in a float
    Words sizes{};  // as whole numbers, so that a NaN is the largest
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

// Rows as they are multiplied: a row is number * scale. Of n rows that are multiplied together, what belongs to 32 inputs
// lies in one record, one record behind the other: [n][32] numbers; [n] scales; [n] marks, with loose digits 1 where the
// row has low ones, and in the first mark twice the distance to the next record where a row has some; then for each weight
// scale of these inputs [n] sums of the numbers times their scale, and [n] numbers that sums begin with, with loose digits
// first those of the high ones, then those of the low ones.
constexpr int64_t record_row_bytes(int64_t format) {
    return NUMBERS_BYTES + 8 + 4 * scales_of(format) * (has_loose_digits(format) ? 3 : 2);
}
constexpr int64_t integer_rows_bytes(int64_t format, int64_t rows, int64_t inputs) {
    return rows * (inputs / INT8_GROUP) * record_row_bytes(format);
}

// Format, Rows: numbers, or std::integral_constant where the compiler knows them.
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

    bool has_low(int64_t first, int64_t count) const {  // one of `count` rows from the first on
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

// body(group, record) for 32 inputs at a time where a row has low digits, in order.
template <typename Record, typename Body>
inline __attribute__((always_inline)) void for_low(const Record& first, int64_t groups, Body body) {
    int64_t group = groups == 0 || first.has_low(0, first.rows) ? 0 : first.distance();
    while (group < groups) {
        const Record record = first.next(group);
        body(group, record);
        group += record.distance();
    }
}

// What quantize_group does for a format, found once for many groups.
struct GroupRounding {
    bool by_pairs, is_loose;
    int32_t zero, origin;  // see zero_of, has_sum_origin
    float part;            // of a scale, see unit_of

    explicit GroupRounding(int64_t format)
        : by_pairs(::by_pairs(format)), is_loose(has_loose_digits(format)), zero(zero_of(format)),
          origin(has_sum_origin(format) ? SUM_ORIGIN_BITS : 0), part(1.0f / static_cast<float>(unit_of(format))) {}
};

// SHAPE: of a format BYTE_ROWS and BY_HALVES, which these loops must know.
template <int64_t SHAPE> using RecordOfShape = RowRecord<std::integral_constant<int64_t, SHAPE>, int64_t>;

// 32 numbers of row r.
template <int64_t SHAPE>
inline void quantize_group(const GroupRounding& how, const float* x, const RecordOfShape<SHAPE>& record, int64_t r) {
    constexpr int64_t SCALES = scales_of(SHAPE), EACH = INT8_GROUP / SCALES;
    int16_t numbers[INT8_GROUP];
    const Rounded rounded = round_group<digits_of(SHAPE)>(x, numbers);
    store_numbers(how.by_pairs, numbers, record.numbers(r));
    // with loose digits, the scale is that of the high ones
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

// `count` rows x [count, inputs], in records of so many from `at` on.
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
    for (int64_t from = 0; from < inputs; from += INT8_GROUP, ++distance) {  // from the last record to the first
        const RecordOfShape<SHAPE> record{{}, count, at -= record_bytes};
        record.mark(0) += static_cast<int32_t>(2 * distance);
        if (record.has_low(0, count)) distance = 0;
    }
}

// Whether one of so many rows, in records from `at` on, has loose low digits.
inline bool have_low_digits(uint8_t* at, int64_t rows, int64_t inputs) {
    const RecordOfShape<0> first{{}, rows, at};
    return first.has_low(0, rows) || first.distance() < inputs / INT8_GROUP;
}

// Rows [row, row + count) of x [rows, inputs], in records of so many. To nearest, ties to even. A group with a NaN or an
// infinity gets such a scale, and so its products are none either.
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
