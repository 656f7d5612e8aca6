// Integer gemm with panels of int8_panels.h by Arm's sdot: one instruction multiplies a line of weights by four
// activation digits taken from any lane of a register, so activations are loaded but never broadcast.
#pragma once

#include "int8_rows.h"

namespace {

// With one row, each line is used once and is prefetched so many bytes ahead. Where there is little computation per
// byte (byte rows, fewer than 8 bits), lines are also prefetched to L2 before that, far enough ahead to include the
// start of the next panel.
constexpr bool comes_early(int64_t format) { return digits_of(format) == 1 && bits_of(format) < 8; }
constexpr int64_t bytes_ahead(int64_t format) { return comes_early(format) ? 1536 : 1024; }
constexpr int64_t EARLY_BYTES = 10240;
constexpr int INT8_TURN = 4;  // rows multiplied by a line before the next line is loaded

// With paired outputs, the upper half of a panel's outputs is multiplied by 16 times its quantized values.
constexpr int64_t HALF_OF_PARTS = PARTS / 2;
constexpr float unit_of_part(bool is_upper) { return is_upper ? 1.0f / 16 : 1.0f; }
// The byte of a line where a register's four outputs begin.
constexpr int64_t place_of_part(int64_t format, int64_t part) {
    return 16 * (has_paired_outputs(format) ? part % HALF_OF_PARTS : part);
}

// Extract line K of 2-bit (or 3-bit) values from the byte lines that hold it.
template <int K> inline __attribute__((always_inline)) int8x16_t two_bit_line(uint8x16_t line) {
    if constexpr (K % 4 != 0) line = vshrq_n_u8(line, 2 * (K % 4));
    return vreinterpretq_s8_u8(K % 4 == 3 ? line : vandq_u8(line, vdupq_n_u8(3)));
}
template <int K>
inline __attribute__((always_inline)) int8x16_t three_bit_line(uint8x16_t line, [[maybe_unused]] uint8x16_t third) {
    if constexpr (K >= 6) return vreinterpretq_s8_u8(vbslq_u8(vdupq_n_u8(4), vshrq_n_u8(third, K - 2), vshrq_n_u8(line, 6)));
    if constexpr (K % 2 != 0) line = vshrq_n_u8(line, 3);
    return vreinterpretq_s8_u8(vandq_u8(line, vdupq_n_u8(7)));
}

// Line K of 32 inputs for four outputs, as signed bytes: the quantized values times unit_of(FORMAT), scaled up to fill
// a byte where that takes fewer instructions. UPPER: the upper of paired outputs. table: for formats with a table.
template <int64_t FORMAT, int K, bool UPPER>
inline __attribute__((always_inline)) int8x16_t signed_line(const uint8_t* from, [[maybe_unused]] int8x16_t table) {
    constexpr int64_t BITS = bits_of(FORMAT);
    if constexpr (has_paired_outputs(FORMAT))
        return vreinterpretq_s8_u8(vandq_u8(vld1q_u8(from + K * PAIRED_BYTES), vdupq_n_u8(UPPER ? 0xF0 : 15)));
    const auto read = [&](int line) __attribute__((always_inline)) { return vld1q_u8(from + line * LINE_BYTES); };
    if constexpr (BITS == 2) return two_bit_line<K>(read(K / 4));
    if constexpr (BITS == 3) return three_bit_line<K>(read(K < 6 ? K / 2 : K - 6), read(2));
    uint8x16_t line = read(BITS == 8 ? K : K % 4);
    if constexpr (unit_of(FORMAT) == 4) {  // 6 bits: 4 * (value - 32)
        uint8x16_t high = veorq_u8(read(4 + K / 4), vdupq_n_u8(0xAA));
        if constexpr (K % 4 != 0) high = vshrq_n_u8(high, 2 * (K % 4));
        line = K < 4 ? vshlq_n_u8(line, 2) : vandq_u8(vshrq_n_u8(line, 2), vdupq_n_u8(0x3C));
        line = vsliq_n_u8(line, high, 6);
    } else if constexpr (BITS == 5 && !has_offsets(FORMAT)) {  // value - 16: upper half is ones if bit 5 is clear
        uint8x16_t inverse = vmvnq_u8(read(4));
        asm("" : "+&w"(inverse));  // computed once for all lines
        const uint8x16_t unset = vtstq_u8(inverse, vdupq_n_u8(1 << K));
        line = K < 4 ? vbslq_u8(vdupq_n_u8(15), line, unset) : vsriq_n_u8(unset, line, 4);
    } else if constexpr (BITS < 8) {
        line = K < 4 ? vandq_u8(line, vdupq_n_u8(15)) : vshrq_n_u8(line, 4);
    }
    if constexpr (BITS == 5 && has_offsets(FORMAT))
        line = vbslq_u8(vdupq_n_u8(16), vtstq_u8(read(4), vdupq_n_u8(1 << K)), line);
    if constexpr (BITS == 6 && unit_of(FORMAT) == 1) {
        constexpr int AT = 2 * (K % 4);
        uint8x16_t high = read(4 + K / 4);
        if constexpr (AT < 4) high = vshlq_n_u8(high, 4 - AT);
        if constexpr (AT > 4) high = vshrq_n_u8(high, AT - 4);
        line = vbslq_u8(vdupq_n_u8(48), high, line);
    }
    if constexpr (has_table(FORMAT)) return vqtbl1q_s8(table, line);
    return vreinterpretq_s8_u8(line);
}

// sums of four outputs += four lines x the digits of the same inputs, for one row or four. In assembly for four rows:
// compilers group the instructions of one sum, which then wait for each other.
inline __attribute__((always_inline)) void add_digits(int32x4_t& sums, const int8x16_t* lines, int8x16_t digits) {
    sums = vdotq_laneq_s32(sums, lines[0], digits, 0);
    sums = vdotq_laneq_s32(sums, lines[1], digits, 1);
    sums = vdotq_laneq_s32(sums, lines[2], digits, 2);
    sums = vdotq_laneq_s32(sums, lines[3], digits, 3);
}
inline __attribute__((always_inline)) void add_digits(int32x4_t (&sums)[4], const int8x16_t* lines,
                                                      const int8x16_t (&digits)[4]) {
#define QUIRE_LANE(line, lane)                       \
    "sdot %0.4s, %" line ".16b, %8.4b[" lane "]\n"   \
    "sdot %1.4s, %" line ".16b, %9.4b[" lane "]\n"   \
    "sdot %2.4s, %" line ".16b, %10.4b[" lane "]\n"  \
    "sdot %3.4s, %" line ".16b, %11.4b[" lane "]\n"
    asm(QUIRE_LANE("4", "0") QUIRE_LANE("5", "1") QUIRE_LANE("6", "2") QUIRE_LANE("7", "3")
        : "+&w"(sums[0]), "+&w"(sums[1]), "+&w"(sums[2]), "+&w"(sums[3])
        : "w"(lines[0]), "w"(lines[1]), "w"(lines[2]), "w"(lines[3]), "w"(digits[0]), "w"(digits[1]), "w"(digits[2]),
          "w"(digits[3]));
#undef QUIRE_LANE
}

// sums[0], ..., sums[M - 1] of four outputs += N lines x 4 N digits of M rows.
template <int N, int M, typename Digits>
inline __attribute__((always_inline)) void add_lines(int32x4_t (&sums)[M], const int8x16_t* lines, Digits digits) {
    unroll<N / 4>([&](auto i) __attribute__((always_inline)) {
        int8x16_t own[M];
        unroll<M>([&](auto r) __attribute__((always_inline)) {
            own[r] = vreinterpretq_s8_u8(vld1q_u8(digits(r) + 16 * i));
        });
        if constexpr (M == 4) add_digits(sums, lines + 4 * i, own);
        else unroll<M>([&](auto r) __attribute__((always_inline)) { add_digits(sums[r], lines + 4 * i, own[r]); });
    });
}

// Initial value of a row's integer sums, conversion of the sums to floats, and the scale of a loose low digit relative
// to the high digit.
constexpr float digit_unit(int digit) { return digit == 0 ? 1.0f : 1.0f / 256; }
template <int64_t FORMAT, int DIGIT, bool UPPER, typename Record>
inline __attribute__((always_inline)) int32x4_t first_sums(const Record& record, int64_t row, int64_t half) {
    if constexpr (zero_of(FORMAT) != 0 && (!has_paired_outputs(FORMAT) || UPPER == has_offsets(FORMAT)))
        return vdupq_n_s32(record.begin(row, half, DIGIT));
    else return vdupq_n_s32(has_sum_origin(FORMAT) ? SUM_ORIGIN_BITS : 0);
}
template <int64_t FORMAT> inline __attribute__((always_inline)) Floats as_floats(int32x4_t sums) {
    if constexpr (has_sum_origin(FORMAT)) return (Floats)vsubq_f32(vreinterpretq_f32_s32(sums), vdupq_n_f32(SUM_ORIGIN));
    else return (Floats)vcvtq_f32_s32(sums);
}

// Difference of two sums of one row, as floats. If sums start at SUM_ORIGIN, both do and it cancels.
template <int64_t FORMAT> inline __attribute__((always_inline)) Floats difference(int32x4_t sums, int32x4_t others) {
    if constexpr (has_sum_origin(FORMAT))
        return (Floats)vsubq_f32(vreinterpretq_f32_s32(sums), vreinterpretq_f32_s32(others));
    else return (Floats)vcvtq_f32_s32(vsubq_s32(sums, others));
}

// sums[row] += one half group (or a whole one) of M rows from ROW on, for four outputs: N lines. DIGIT: which loose
// digit, else 0. UPPER: see signed_line.
template <int64_t FORMAT, int DIGIT, bool UPPER, int ROW, int M, int HALF, int N, typename Record>
inline __attribute__((always_inline)) void add_turn(const Record& record, const int8x16_t* lines, Floats scale,
                                                    Floats offset, Floats (&sums)[N]) {
    constexpr int LINES_EACH = INT8_LINES / scales_of(FORMAT);
    constexpr int64_t AT = 4 * HALF * LINES_EACH + DIGIT * INT8_GROUP;
    int32x4_t whole[M];
    const auto first = [&](int64_t r) { return first_sums<FORMAT, DIGIT, UPPER>(record, ROW + r, HALF); };
    unroll<M>([&](auto r) __attribute__((always_inline)) {
        whole[r] = has_loose_digits(FORMAT) ? first(r) : vdupq_n_s32(0);
    });
    add_lines<LINES_EACH>(whole, lines, [&](int r) { return record.numbers(ROW + r) + AT; });
    if constexpr (!has_loose_digits(FORMAT)) {
        unroll<M>([&](auto r) __attribute__((always_inline)) {
            whole[r] = vaddq_s32(vshlq_n_s32(whole[r], 8), first(r));
        });
        add_lines<LINES_EACH>(whole, lines, [&](int r) { return record.numbers(ROW + r) + INT8_GROUP + AT; });
    }
    unroll<M>([&](auto i) __attribute__((always_inline)) {
        constexpr int r = ROW + i;
        Floats& sum = sums[r];
        if constexpr (has_offsets(FORMAT) && DIGIT == 0) sum = add_product(sum, offset, all(record.sum(r, HALF)));
        sum = add_product(sum, as_floats<FORMAT>(whole[i]),
                          scale * (record.scale(r) * (digit_unit(DIGIT) * unit_of_part(UPPER))));
    });
}

// sums[row] += 32 inputs of N rows, for four outputs from `output` on, from their lines and factors. DIGIT, UPPER: see
// add_turn.
template <int64_t FORMAT, int DIGIT, bool UPPER, int N, typename Record>
inline __attribute__((always_inline)) void add_group(const Record& record, const uint8_t* from, int8x16_t table,
                                                     const GroupFactors& factors, int64_t output, Floats (&sums)[N]) {
    constexpr int SCALES = scales_of(FORMAT), LINES_EACH = INT8_LINES / SCALES;
    constexpr int M = N % INT8_TURN == 0 ? INT8_TURN : N;
    int8x16_t lines[INT8_LINES];
    unroll<INT8_LINES>([&](auto k) __attribute__((always_inline)) {
        lines[k] = signed_line<FORMAT, k, UPPER>(from, table);
    });
    unroll<SCALES>([&](auto half) __attribute__((always_inline)) {
        const Floats scale = factors.scale(half, output);
        Floats offset{};
        if constexpr (has_offsets(FORMAT)) offset = factors.offset(half, output);
        const int8x16_t* own = lines + half * LINES_EACH;
        unroll<N / M>([&](auto some) __attribute__((always_inline)) {
            constexpr int ROW = some * M;
            if (DIGIT == 1 && !record.has_low(ROW, M)) return;
            add_turn<FORMAT, DIGIT, UPPER, ROW, M, half>(record, own, scale, offset, sums);
        });
    });
}

// high and low sums of 16 outputs += one line x four high and four low digits of a row, those of LANE.
template <int LANE>
inline __attribute__((always_inline)) void add_line(int32x4_t (&high)[4], int32x4_t (&low)[4], const int8x16_t (&line)[4],
                                                    int8x16_t high_digits, int8x16_t low_digits) {
#define QUIRE_PART(high, low, line)                 \
    "sdot %" high ".4s, %" line ".16b, %12.4b[%14]\n" \
    "sdot %" low ".4s, %" line ".16b, %13.4b[%14]\n"
    asm(QUIRE_PART("0", "4", "8") QUIRE_PART("1", "5", "9") QUIRE_PART("2", "6", "10") QUIRE_PART("3", "7", "11")
        : "+&w"(high[0]), "+&w"(high[1]), "+&w"(high[2]), "+&w"(high[3]), "+&w"(low[0]), "+&w"(low[1]), "+&w"(low[2]),
          "+&w"(low[3])
        : "w"(line[0]), "w"(line[1]), "w"(line[2]), "w"(line[3]), "w"(high_digits), "w"(low_digits), "i"(LANE));
#undef QUIRE_PART
}

// The same for one kind of digit.
template <int LANE>
inline __attribute__((always_inline)) void add_line(int32x4_t (&sums)[4], const int8x16_t (&line)[4], int8x16_t digits) {
    asm("sdot %0.4s, %4.16b, %8.4b[%9]\n"
        "sdot %1.4s, %5.16b, %8.4b[%9]\n"
        "sdot %2.4s, %6.16b, %8.4b[%9]\n"
        "sdot %3.4s, %7.16b, %8.4b[%9]\n"
        : "+&w"(sums[0]), "+&w"(sums[1]), "+&w"(sums[2]), "+&w"(sums[3])
        : "w"(line[0]), "w"(line[1]), "w"(line[2]), "w"(line[3]), "w"(digits), "i"(LANE));
}

// sums += 32 inputs of one row, for 16 outputs. Lines are read sequentially from memory, and each is used at once.
// DIGIT: which loose digit, else 0.
template <int64_t FORMAT, int DIGIT, typename Record>
inline __attribute__((always_inline)) void add_digits_of_one(const Record& record, const uint8_t* from, int8x16_t table,
                                                             const GroupFactors& given, Floats (&sums)[PARTS]) {
    constexpr int SCALES = scales_of(FORMAT), LINES_EACH = INT8_LINES / SCALES;
    constexpr bool IS_LOOSE = has_loose_digits(FORMAT), IS_PAIRED = has_paired_outputs(FORMAT);
    constexpr int LOADED = IS_LOOSE ? 2 : 4;
    int8x16_t digits[LOADED];  // of inputs 0-15 and 16-31: high ones, then low ones
    unroll<LOADED>([&](auto i) __attribute__((always_inline)) {
        digits[i] = vreinterpretq_s8_u8(vld1q_u8(record.numbers(0) + DIGIT * INT8_GROUP + 16 * i));
    });
    unroll<SCALES>([&](auto half) __attribute__((always_inline)) {
        int32x4_t high[4], low[4];
        Floats factors[4];
        unroll<4>([&](auto part) __attribute__((always_inline)) {
            constexpr bool IS_WHOLE = IS_PAIRED && part >= HALF_OF_PARTS;  // sums of whole bytes, with lower nibbles
            low[part] = first_sums<FORMAT, DIGIT, IS_WHOLE && has_offsets(FORMAT)>(record, 0, half);
            high[part] = IS_LOOSE ? low[part] : vdupq_n_s32(0);
        });
        unroll<LINES_EACH>([&](auto i) __attribute__((always_inline)) {
            // with 5 and 6 bits, two lines share the same bytes
            constexpr int K = SCALES == 1 && bits_of(FORMAT) < 8 && !IS_PAIRED ? i % 2 * 4 + i / 2 : half * LINES_EACH + i;
            int8x16_t line[4];
            unroll<4>([&](auto part) __attribute__((always_inline)) {
                const uint8_t* own = from + place_of_part(FORMAT, part);
                if constexpr (IS_PAIRED && part >= HALF_OF_PARTS)
                    line[part] = vreinterpretq_s8_u8(vld1q_u8(own + K * PAIRED_BYTES));
                else line[part] = signed_line<FORMAT, K, false>(own, table);
            });
            if constexpr (IS_LOOSE) add_line<K % 4>(high, line, digits[K / 4]);
            else add_line<K % 4>(high, low, line, digits[K / 4], digits[2 + K / 4]);
            if constexpr (i < 4) {  // a conversion blocks one pipe for two cycles, so interleave it
                constexpr float UNIT = digit_unit(DIGIT) * unit_of_part(IS_PAIRED && i >= HALF_OF_PARTS);
                factors[i] = given.scale(half, i * LANES) * (record.scale(0) * UNIT);
                if constexpr (has_offsets(FORMAT) && DIGIT == 0)
                    sums[i] = add_product(sums[i], given.offset(half, i * LANES), all(record.sum(0, half)));
            }
        });
        unroll<4>([&](auto part) __attribute__((always_inline)) {
            if constexpr (!IS_LOOSE) high[part] = vaddq_s32(vshlq_n_s32(high[part], 8), low[part]);
        });
        unroll<4>([&](auto part) __attribute__((always_inline)) {
            Floats whole;
            if constexpr (IS_PAIRED && part >= HALF_OF_PARTS)
                whole = difference<FORMAT>(high[part], high[part - HALF_OF_PARTS]);
            else whole = as_floats<FORMAT>(high[part]);
            sums[part] = add_product(sums[part], whole, factors[part]);
        });
    });
}

// sums [N][PARTS] = N quantized rows (records) x one panel. A row's sums run over its groups in order, whatever the
// number of rows; loose low digits are added after all others, to keep them out of the main loop.
template <int64_t FORMAT, int N>
void multiply_int8_panel(uint8_t* rows, int64_t inputs, const PanelBytes& bytes, Floats* to) {
    const uint8_t *panel = bytes.begin, *decoded = bytes.factors;
    Floats sums[N][PARTS];
    constexpr bool IS_SUPER = has_super_blocks(FORMAT);
    constexpr int64_t SPAN = groups_of_span(FORMAT), GROUP_BYTES = int8_group_bytes(FORMAT);
    // strides of spans: lines, and factors, which are stored together except with super-blocks
    constexpr int64_t SPAN_BYTES = IS_SUPER ? GROUP_BYTES : int8_span_bytes(FORMAT);
    constexpr int64_t FACTOR_BYTES = IS_SUPER ? int8_factor_bytes(FORMAT) : SPAN_BYTES;
    constexpr int64_t SCALES = places_of(FORMAT, SPAN, 0).scales, OFFSETS = places_of(FORMAT, SPAN, 0).offsets;
    constexpr int64_t LINES = IS_SUPER ? 0 : places_of(FORMAT, SPAN, 0).lines;
    const int64_t groups = inputs / INT8_GROUP;
    const uint8_t* first_span = IS_SUPER ? panel + super_bytes(FORMAT, groups) : panel;
    const RecordOf<FORMAT, N> first{{}, {}, rows};
    int8x16_t table{};
    if constexpr (has_table(FORMAT)) table = vreinterpretq_s8_u8(vld1q_u8(panel));
    // digit(which, record, span, factors, group within the span): first the high digits of all groups, then the low
    // ones that exist
    const auto for_digits = [&](auto digit) __attribute__((always_inline)) {
        auto record = first;
        const uint8_t *span = first_span, *factors = decoded;
        for (int64_t group = 0; group < groups; group += SPAN, span += SPAN_BYTES, factors += FACTOR_BYTES)
            for (int64_t i = 0; i < SPAN; ++i, record = record.next())
                digit(std::integral_constant<int, 0>{}, record, span, GroupFactors{factors + SCALES, factors + OFFSETS}, i);
        if constexpr (has_loose_digits(FORMAT))
            for_low(first, groups, [&](int64_t group, const auto& low) __attribute__((always_inline)) {
                const uint8_t* own = decoded + group / SPAN * FACTOR_BYTES;
                digit(std::integral_constant<int, 1>{}, low, first_span + group / SPAN * SPAN_BYTES,
                      GroupFactors{own + SCALES, own + OFFSETS}, group % SPAN);
            });
    };
    if constexpr (N == 1) {
        Floats own[PARTS] = {};
        for_digits([&](auto digit, const auto& record, const uint8_t* span, const GroupFactors& factors,
                       int64_t i) __attribute__((always_inline)) {
            if constexpr (digit == 0)
                for (int64_t byte = 0; byte < SPAN_BYTES / SPAN; byte += LINE_BYTES) {
                    const uint8_t* from = span + i * GROUP_BYTES + byte;
                    __builtin_prefetch(from + bytes_ahead(FORMAT));
                    if constexpr (comes_early(FORMAT)) __builtin_prefetch(from + EARLY_BYTES, 0, 2);
                }
            add_digits_of_one<FORMAT, digit>(record, span + LINES + i * GROUP_BYTES, table, factors, own);
        });
        unroll<PARTS>([&](auto part) __attribute__((always_inline)) { sums[0][part] = own[part]; });
    } else {  // the sums of four outputs stay in registers, the panel stays in the L1 cache
        constexpr int64_t KINDS = has_paired_outputs(FORMAT) ? 2 : 1;
        unroll<KINDS>([&](auto kind) __attribute__((always_inline)) {
            for (int64_t part = kind * PARTS / KINDS; part < (kind + 1) * PARTS / KINDS; ++part) {
                const int64_t line = LINES + place_of_part(FORMAT, part);
                Floats own[N] = {};
                for_digits([&](auto digit, const auto& record, const uint8_t* span, const GroupFactors& factors,
                               int64_t i) __attribute__((always_inline)) {
                    add_group<FORMAT, digit, kind == 1>(record, span + line + i * GROUP_BYTES, table, factors, part * LANES,
                                                        own);
                });
                unroll<N>([&](auto r) __attribute__((always_inline)) { sums[r][part] = own[r]; });
            }
        });
    }
    std::memcpy(to, &sums, sizeof sums);
}

}  // namespace
