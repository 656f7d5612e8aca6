// Products of float32 rows with quantized weights in whole numbers. A row is rounded to 16 bits, 32 inputs with a scale of
// their own; its numbers times weight levels are summed exactly in int32, and only the sums of 32 or 16 inputs become
// floats.
//
// A weight is level * scale + offset. The weight [outputs, inputs] is cut into panels of 16 outputs, padded with zeros,
// so that its bytes are those of the file. The layout is the same for every instruction set. A panel is
//   scales   [inputs / 32 or 16][16 outputs], float16;
//   offsets  likewise, in formats that have them;
//   lines    for each 32 inputs eight lines of levels, 64 bytes each: byte 4 o + j of line k is input 4 k + j of output o.
// Lines of 8 bits are signed bytes. Lines of fewer bits are unsigned: four bytes lines hold lines 0-3 in the low halves
// and lines 4-7 in the high ones; behind them the fifth bits of all lines (bit k: of line k), or the fifth and sixth ones
// in two lines (bits 2 k and 2 k + 1 of the first one: of line k, of the second one: of line 4 + k). Without offsets the
// middle level, 1 << (bits - 1), is the number 0.
#pragma once

#include "product.h"

namespace {

// A format of such panels: how many bits, with offsets or without, and whether 16 inputs share a scale or 32.
constexpr int64_t WITH_OFFSETS = 16, BY_HALVES = 32;
constexpr int64_t bits_of(int64_t format) { return format & 15; }
constexpr bool has_offsets(int64_t format) { return (format & WITH_OFFSETS) != 0; }
constexpr int64_t scales_of(int64_t format) { return format & BY_HALVES ? 2 : 1; }  // for 32 inputs

constexpr int64_t INT8_OUTPUTS = 16, INT8_GROUP = 32, LINE_BYTES = 64, INT8_LINES = 8;
constexpr int64_t PARTS = INT8_OUTPUTS / LANES;  // registers of a line
constexpr int INT8_ROWS = LANES == 16 ? 8 : 4;   // rows whose sums fit in the registers
constexpr int INT8_TURN = 4;                     // rows that a line is multiplied by before the next line is
constexpr int64_t INT8_ROWS_AT_ONCE = 128;       // of a product: quantized, they stay in the second cache

constexpr int64_t int8_group_bytes(int64_t format) { return bits_of(format) * LINE_BYTES; }
constexpr int64_t int8_factor_bytes(int64_t format) {  // of 32 inputs
    return INT8_OUTPUTS * 2 * scales_of(format) * (has_offsets(format) ? 2 : 1);
}
constexpr int64_t int8_panel_bytes(int64_t format, int64_t inputs) {
    return inputs / INT8_GROUP * (int8_group_bytes(format) + int8_factor_bytes(format));
}

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef Bytes LooseBytes __attribute__((aligned(1), may_alias));
inline Bytes load_line(const uint8_t* from) { return *reinterpret_cast<const LooseBytes*>(from); }

#if defined(__x86_64__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool BY_PAIRS = true;  // x86 without dot products of bytes: those of pairs of 16-bit numbers
#else
constexpr bool BY_PAIRS = false;
#endif
#ifdef __x86_64__
constexpr bool UNSIGNED_LEVELS = true;  // the instructions take unsigned levels: signed ones are moved up by 128
#else
constexpr bool UNSIGNED_LEVELS = false;
#endif

// The level that a line's byte 0 means: sums begin with so many times the sum of the row's numbers, negative.
constexpr int32_t zero_of(int64_t format) {
    if (bits_of(format) == 8) return UNSIGNED_LEVELS ? 128 : 0;
    return has_offsets(format) ? 0 : 1 << (bits_of(format) - 1);
}

// Lines of 32 inputs, of one register's outputs.
template <int64_t FORMAT> inline void load_lines(const uint8_t* from, Bytes (&lines)[INT8_LINES]) {
    constexpr int64_t BITS = bits_of(FORMAT);
    if constexpr (BITS == 8) {
        unroll<8>([&](auto k) {
            lines[k] = load_line(from + k * LINE_BYTES);
            if constexpr (UNSIGNED_LEVELS) lines[k] ^= static_cast<uint8_t>(0x80);
        });
        return;
    }
    unroll<4>([&](auto k) {
        const Bytes both = load_line(from + k * LINE_BYTES);
        lines[k] = both & static_cast<uint8_t>(15);
        lines[k + 4] = (Bytes)((Shorts)both >> 4) & static_cast<uint8_t>(15);
    });
    if constexpr (BITS == 5) {
        const Shorts high = (Shorts)load_line(from + 4 * LINE_BYTES);
        unroll<8>([&](auto k) {
            Shorts moved = high;
            if constexpr (k < 4) moved = high << (4 - k);
            if constexpr (k > 4) moved = high >> (k - 4);
            lines[k] |= (Bytes)moved & static_cast<uint8_t>(16);
        });
    }
    if constexpr (BITS == 6)
        unroll<8>([&](auto k) {
            constexpr int at = 2 * (k % 4);
            const Shorts high = (Shorts)load_line(from + (4 + k / 4) * LINE_BYTES);
            Shorts moved = high;
            if constexpr (at < 4) moved = high << (4 - at);
            if constexpr (at > 4) moved = high >> (at - 4);
            lines[k] |= (Bytes)moved & static_cast<uint8_t>(48);
        });
}

inline Ints all_ints(int32_t x) { return x - Ints{}; }

// A row's number has two digits, 256 high + low, each in int8; where products are of pairs, it is one of 16 bits.
// Sums: 32 numbers times levels below 256, and what they begin with, at most 128 times the same numbers.
constexpr int32_t LARGEST_NUMBER = 127 * 256 + 127;
static_assert(INT8_GROUP * (255 + 128) * (LARGEST_NUMBER + 256) <= INT32_MAX);
constexpr int64_t NUMBERS_BYTES = 2 * INT8_GROUP;  // [32] high digits, [32] low ones; or pairs

// The same four bytes everywhere.
inline Bytes all_fours(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return (Bytes)all_ints(four);
}

// BY_PAIRS: inputs 0 and 2 of four, then 1 and 3, as they come out of a line.
inline void store_numbers(const int16_t (&numbers)[INT8_GROUP], uint8_t* to) {
    if constexpr (BY_PAIRS) {
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

// Sums of two neighbouring 16-bit numbers of `line` times the two of x.
inline Ints add_pairs(Ints sums, Shorts line, Bytes x) {
#if defined(__AVX512BW__)
    return sums + (Ints)_mm512_madd_epi16((__m512i)line, (__m512i)x);
#elif defined(__AVX2__)
    return sums + (Ints)_mm256_madd_epi16((__m256i)line, (__m256i)x);
#elif defined(__x86_64__)
    return sums + (Ints)_mm_madd_epi16((__m128i)line, (__m128i)x);
#else
    return sums;  // not used
#endif
}

// Sums of four neighbouring bytes of `line` times the four of x, which are signed.
inline Ints add_fours(Ints sums, Bytes line, Bytes x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)line, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)line, (__m256i)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    return (Ints)vdotq_s32((int32x4_t)sums, (int8x16_t)line, (int8x16_t)x);
#elif defined(__aarch64__)
    const int8x16_t four = (int8x16_t)x, own = (int8x16_t)line;
    const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(own), vget_low_s8(four)));
    const int32x4_t high = vpaddlq_s16(vmull_high_s8(own, four));
    return sums + (Ints)vpaddq_s32(low, high);
#else
    for (int64_t i = 0; i < LANES; ++i)
        for (int64_t j = 4 * i; j < 4 * i + 4; ++j) sums[i] += static_cast<int8_t>(line[j]) * static_cast<int8_t>(x[j]);
    return sums;
#endif
}

// To `sums` of M rows from ROW on, of each output: its levels of N lines from FIRST on times the numbers of the same
// inputs. A line for all rows, then the next one: an instruction need not wait for the one before it.
template <int N, int FIRST, int ROW, int M, typename Record>
inline __attribute__((always_inline)) void add_lines(Ints (&sums)[M], const Bytes (&lines)[INT8_LINES],
                                                     const Record& rows) {
    Ints high[M] = {};
    unroll<N * M>([&](auto i) __attribute__((always_inline)) {
        constexpr int line = FIRST + i / M, r = i % M;
        const uint8_t* numbers = rows.numbers(ROW + r);
        if constexpr (BY_PAIRS) {
            const Shorts both = (Shorts)lines[line];
            sums[r] = add_pairs(sums[r], both & static_cast<uint16_t>(255), all_fours(numbers + 8 * line));
            sums[r] = add_pairs(sums[r], both >> 8, all_fours(numbers + 8 * line + 4));
        } else {
            high[r] = add_fours(high[r], lines[line], all_fours(numbers + 4 * line));
            sums[r] = add_fours(sums[r], lines[line], all_fours(numbers + INT8_GROUP + 4 * line));
        }
    });
    if constexpr (!BY_PAIRS) unroll<M>([&](auto r) __attribute__((always_inline)) { sums[r] += high[r] * 256; });
}

// Rows as they are multiplied: a row is number * scale. Of n rows that are multiplied together, what belongs to 32 inputs
// lies in one record, one record behind the other: [n][32] numbers, [n] scales, then for each weight scale of these inputs
// [n] sums of the numbers times -ZERO, and [n] sums of the numbers times their scale.
template <int64_t SCALES, int32_t ZERO> struct IntegerRows {
    static constexpr int64_t ROW_BYTES = NUMBERS_BYTES + 4 + 8 * SCALES;  // of a record

    static int64_t bytes(int64_t rows, int64_t inputs) { return rows * (inputs / INT8_GROUP) * ROW_BYTES; }

    template <int N> struct Record {
        uint8_t* at;
        uint8_t* numbers(int64_t row) const { return at + row * NUMBERS_BYTES; }
        float& scale(int64_t row) const { return reinterpret_cast<float*>(at + N * NUMBERS_BYTES)[row]; }
        int32_t& begin(int64_t row, int64_t part) const {
            return reinterpret_cast<int32_t*>(at + N * (NUMBERS_BYTES + 4))[part * N + row];
        }
        float& sum(int64_t row, int64_t part) const {
            return reinterpret_cast<float*>(at + N * (NUMBERS_BYTES + 4 + 4 * SCALES))[part * N + row];
        }
        Record next() const { return {at + N * ROW_BYTES}; }
    };

    // Rows [row, row + N) of x [rows, inputs]. To nearest, ties to even. A group with a NaN or an infinity gets such a
    // scale, and so its products are none either.
    template <int N> static void quantize(const float* x, int64_t row, int64_t inputs, uint8_t* room) {
        Record<N> record{room + bytes(row, inputs)};
        for (int64_t from = 0; from < inputs; from += INT8_GROUP, record = record.next())
            for (int64_t r = 0; r < N; ++r) {
                int16_t numbers[INT8_GROUP];
                const float scale = quantize_group(x + (row + r) * inputs + from, numbers);
                store_numbers(numbers, record.numbers(r));
                record.scale(r) = scale;
                constexpr int64_t EACH = INT8_GROUP / SCALES;
                for (int64_t part = 0; part < SCALES; ++part) {
                    int32_t sum = 0;
                    for (int64_t i = 0; i < EACH; ++i) sum += numbers[part * EACH + i];
                    record.begin(r, part) = -ZERO * sum;
                    record.sum(r, part) = scale * static_cast<float>(sum);
                }
            }
    }

    static float quantize_group(const float* x, int16_t (&to)[INT8_GROUP]) {
        typedef int16_t Numbers __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
        constexpr int64_t PIECES = INT8_GROUP / LANES;
        const float smallest = 1e-30f;  // of what lies closer to 0, the inverse has no room in a float
        const Floats magic = all(12582912.0f);  // see `exponentials`
        Words sizes{};  // as whole numbers, so that a NaN is the largest
        Floats values[PIECES];
        for (int64_t p = 0; p < PIECES; ++p) {
            values[p] = load(x + p * LANES);
            const Words size = (Words)values[p] & 0x7FFFFFFFu;
            sizes = size > sizes ? size : sizes;
        }
        uint32_t bits = 0;
        for (int64_t i = 0; i < LANES; ++i) bits = std::max<uint32_t>(bits, sizes[i]);
        float largest;
        std::memcpy(&largest, &bits, sizeof largest);
        const bool vanishes = largest < smallest;
        const Floats inverse = all(vanishes ? 0.0f : LARGEST_NUMBER / largest);
        for (int64_t p = 0; p < PIECES; ++p) {
            const Ints whole = (Ints)(values[p] * inverse + magic) - (Ints)magic;
            *reinterpret_cast<Numbers*>(to + p * LANES) = __builtin_convertvector(whole, Numbers);
        }
        return vanishes ? 0.0f : largest / LARGEST_NUMBER;
    }
};
template <int64_t FORMAT> using RowsFor = IntegerRows<scales_of(FORMAT), zero_of(FORMAT)>;

// N rows from `row` on times one panel -> sums. A row's sums run over its groups in order, however many rows there are.
template <int64_t FORMAT, int N>
inline void multiply_int8_rows(uint8_t* rows, int64_t inputs, const uint8_t* panel, Floats (&sums)[N][PARTS]) {
    constexpr int64_t SCALES = scales_of(FORMAT), LINES_EACH = INT8_LINES / SCALES;
    const int64_t groups = inputs / INT8_GROUP;
    const uint8_t *scales = panel, *offsets = panel + groups * SCALES * INT8_OUTPUTS * 2;
    const uint8_t* lines = panel + groups * int8_factor_bytes(FORMAT);
    typename RowsFor<FORMAT>::template Record<N> record{rows};
    for (int64_t group = 0; group < groups; ++group, lines += int8_group_bytes(FORMAT), record = record.next()) {
        unroll<PARTS>([&](auto part) {
            Bytes own[INT8_LINES];
            load_lines<FORMAT>(lines + part * 4 * LANES, own);
            unroll<SCALES>([&](auto half) {
                const int64_t place = (group * SCALES + half) * INT8_OUTPUTS * 2 + part * 2 * LANES;
                const Floats scale = load_float16(scales + place);
                Floats offset{};
                if constexpr (has_offsets(FORMAT)) offset = load_float16(offsets + place);
                constexpr int M = N % INT8_TURN == 0 ? INT8_TURN : N;
                unroll<N / M>([&](auto some) __attribute__((always_inline)) {
                    constexpr int ROW = some * M;
                    Ints whole[M] = {};
                    if constexpr (zero_of(FORMAT) != 0)
                        unroll<M>([&](auto r) __attribute__((always_inline)) {
                            whole[r] = all_ints(record.begin(ROW + r, half));
                        });
                    add_lines<LINES_EACH, half * LINES_EACH, ROW>(whole, own, record);
                    unroll<M>([&](auto i) __attribute__((always_inline)) {
                        constexpr int r = ROW + i;
                        Floats& sum = sums[r][part];
                        sum = add_product(sum, __builtin_convertvector(whole[i], Floats), scale * record.scale(r));
                        if constexpr (has_offsets(FORMAT)) sum = add_product(sum, offset, all(record.sum(r, half)));
                    });
                });
            });
        });
    }
}

// Up to INT8_ROWS_AT_ONCE rows; `room` is for them.
template <int64_t FORMAT>
void multiply_int8_some(const float* x, const uint8_t* weight, const float* bias, const Product& product, uint8_t* room,
                        float* out) {
    using Rows = RowsFor<FORMAT>;
    const int64_t panels = (product.outputs + INT8_OUTPUTS - 1) / INT8_OUTPUTS, inputs = product.inputs;
    for_each((product.rows + INT8_ROWS - 1) / INT8_ROWS, product.rows * inputs > MANY_NUMBERS / 2, [&](int64_t i) {
        by_rows<INT8_ROWS>(i * INT8_ROWS, std::min((i + 1) * INT8_ROWS, product.rows), [&](auto n, int64_t row) {
            Rows::template quantize<n>(x, row, inputs, room);
        });
    });
    share_out(panels, PANELS_IN_TURN, product.is_large(), [&] {
        return [&](int64_t panel) {
            const uint8_t* own = weight + panel * int8_panel_bytes(FORMAT, inputs);
            const int64_t begin = panel * INT8_OUTPUTS, count = std::min(INT8_OUTPUTS, product.outputs - begin);
            by_rows<INT8_ROWS>(0, product.rows, [&](auto n, int64_t row) {
                Floats sums[n][PARTS] = {};
                multiply_int8_rows<FORMAT, n>(room + Rows::bytes(row, inputs), inputs, own, sums);
                for (int r = 0; r < n; ++r)
                    for (int64_t part = 0; part * LANES < count; ++part) {
                        const int64_t at = begin + part * LANES, some = std::min(LANES, count - part * LANES);
                        const Floats value = sums[r][part];
                        put(out + (row + r) * product.out_stride + at,
                            bias == nullptr ? value : value + fetch(bias + at, some), some);
                    }
            });
        };
    });
}

// x [rows, inputs] times the weight, transposed, plus a bias [outputs] or null -> out [rows, outputs].
template <int64_t FORMAT>
void multiply_int8(const float* x, const uint8_t* weight, const float* bias, const Product& product, float* out) {
    static thread_local std::vector<uint8_t> room;
    const int64_t most = std::min(INT8_ROWS_AT_ONCE, product.rows);
    room.resize(std::max<size_t>(room.size(), RowsFor<FORMAT>::bytes(most, product.inputs)));
    for (int64_t row = 0; row < product.rows; row += INT8_ROWS_AT_ONCE) {
        Product some = product;
        some.rows = std::min(INT8_ROWS_AT_ONCE, product.rows - row);
        multiply_int8_some<FORMAT>(x + row * product.inputs, weight, bias, some, room.data(),
                                   out + row * product.out_stride);
    }
}

}  // namespace
