// Integer gemm with panels of int8_panels.h, by x86 instructions or plain code: two or four activation values are
// broadcast to a register and multiplied by a line of weights.
#pragma once

#include "int8_rows.h"

namespace {

typedef uint8_t Bytes __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef Bytes LooseBytes __attribute__((aligned(1), may_alias));
inline Bytes load_line(const uint8_t* from) { return *reinterpret_cast<const LooseBytes*>(from); }

// Broadcast the table of 16 bytes to every 128-bit lane.
inline Bytes load_table(const uint8_t* from) {
    Bytes table;
    for (int64_t i = 0; i < 4 * LANES; i += 16) std::memcpy(reinterpret_cast<uint8_t*>(&table) + i, from, 16);
    return table;
}

// Look up entries of a table of 16.
inline Bytes look_up(Bytes table, Bytes places) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)places);
#elif defined(__AVX2__)
    return (Bytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)places);
#elif defined(__aarch64__)
    return (Bytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places);
#else
    for (int64_t i = 0; i < 4 * LANES; ++i) places[i] = table[places[i]];
    return places;
#endif
}

// Move bits AT .. AT + COUNT - 1 of every byte to bits TO and on.
template <int AT, int COUNT, int TO> inline Bytes moved_bits(Bytes line) {
    Shorts moved = (Shorts)line;
    if constexpr (AT < TO) moved = moved << (TO - AT);
    if constexpr (AT > TO) moved = moved >> (AT - TO);
    return (Bytes)moved & static_cast<uint8_t>(((1 << COUNT) - 1) << TO);
}

// Unpack 2-bit lines of one register's outputs: a byte of each of two byte lines holds four values.
inline void load_two_bit_lines(const uint8_t* from, Bytes (&lines)[INT8_LINES]) {
    unroll<8>([&](auto k) { lines[k] = moved_bits<2 * (k % 4), 2, 0>(load_line(from + k / 4 * LINE_BYTES)); });
}

// Unpack 3-bit lines: a byte of each of three byte lines holds two whole values; the leftover bits of the three hold
// lines 6 and 7.
inline void load_three_bit_lines(const uint8_t* from, Bytes (&lines)[INT8_LINES]) {
    Bytes stored[3];
    unroll<3>([&](auto j) {
        stored[j] = load_line(from + j * LINE_BYTES);
        lines[2 * j] = moved_bits<0, 3, 0>(stored[j]);
        lines[2 * j + 1] = moved_bits<3, 3, 0>(stored[j]);
    });
    lines[6] = moved_bits<6, 2, 0>(stored[0]) | moved_bits<6, 1, 2>(stored[2]);
    lines[7] = moved_bits<6, 2, 0>(stored[1]) | moved_bits<7, 1, 2>(stored[2]);
}

// Unpack the lines of 32 inputs for one register's outputs.
template <int64_t FORMAT>
inline void load_lines(const uint8_t* from, [[maybe_unused]] const Bytes& table, Bytes (&lines)[INT8_LINES]) {
    constexpr int64_t BITS = bits_of(FORMAT);
    if constexpr (BITS == 8) {
        unroll<8>([&](auto k) {
            lines[k] = load_line(from + k * LINE_BYTES);
            if constexpr (UNSIGNED_LEVELS) lines[k] ^= static_cast<uint8_t>(0x80);
        });
        return;
    }
    if constexpr (BITS == 2) return load_two_bit_lines(from, lines);
    if constexpr (BITS == 3) return load_three_bit_lines(from, lines);
    unroll<4>([&](auto k) {
        const Bytes both = load_line(from + k * LINE_BYTES);
        lines[k] = both & static_cast<uint8_t>(15);
        lines[k + 4] = moved_bits<4, 4, 0>(both);
    });
    if constexpr (has_table(FORMAT))
        unroll<8>([&](auto k) {
            lines[k] = look_up(table, lines[k]);
            if constexpr (UNSIGNED_LEVELS) lines[k] ^= static_cast<uint8_t>(0x80);
        });
    if constexpr (BITS == 5) {
        const Bytes high = load_line(from + 4 * LINE_BYTES);
        unroll<8>([&](auto k) { lines[k] |= moved_bits<k, 1, 4>(high); });
    }
    if constexpr (BITS == 6)
        unroll<8>([&](auto k) { lines[k] |= moved_bits<2 * (k % 4), 2, 4>(load_line(from + (4 + k / 4) * LINE_BYTES)); });
}

// Broadcast an int32.
inline Ints all_ints(int32_t x) { return x - Ints{}; }

// Broadcast four bytes.
inline Bytes all_fours(const uint8_t* from) {
    int32_t four;
    std::memcpy(&four, from, sizeof four);
    return (Bytes)all_ints(four);
}

// sums += dot products of adjacent pairs of 16-bit values (pmaddwd).
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

// sums += dot products of adjacent fours of bytes of `line` with signed bytes of x (VNNI dpbusd, NEON, or plain).
inline Ints add_fours(Ints sums, Bytes line, Bytes x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)line, (__m512i)x);
#elif defined(__AVXVNNI__)
    return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)line, (__m256i)x);
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

// 16-bit sums += dot products of adjacent pairs of bytes of `line` with signed bytes of x (maddubs).
inline Shorts add_byte_pairs(Shorts sums, Bytes line, Bytes x) {
#if defined(__AVX512BW__)
    return sums + (Shorts)_mm512_maddubs_epi16((__m512i)line, (__m512i)x);
#elif defined(__AVX2__)
    return sums + (Shorts)_mm256_maddubs_epi16((__m256i)line, (__m256i)x);
#else
    return sums;  // not used
#endif
}
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && !defined(__AVXVNNI__)
constexpr bool BY_BYTE_PAIRS = true;  // where rows have one digit and weights fewer than 8 bits
#else
constexpr bool BY_BYTE_PAIRS = false;
#endif

// Rows multiplied by a line before the next line is loaded. With 4 bits, all lines add up in one register per row, and
// 32 registers have room for eight rows.
constexpr int turn_of(int64_t format) {
    const bool adds_all = has_loose_digits(format) && level_bits_of(format) == 4 && scales_of(format) == 1;
    return BY_BYTE_PAIRS && LANES == 16 && adds_all ? 8 : 4;
}

// Keep the sums in a register as they are: compilers would reorder the additions and spill the sums to memory.
inline __attribute__((always_inline)) void keep_here([[maybe_unused]] Shorts& sums) {
#ifdef __x86_64__
    asm("" : "+v"(sums));
#endif
}

// The same as add_lines below, with 16-bit sums for as many lines as they can hold without overflow.
template <int64_t FORMAT, int DIGIT, int N, int FIRST, int ROW, int M, typename Record>
inline __attribute__((always_inline)) void add_short_lines(Ints (&sums)[M], const Bytes (&lines)[INT8_LINES],
                                                           const Record& rows) {
    constexpr int32_t MOST = INT16_MAX / (2 * ((1 << level_bits_of(FORMAT)) - 1) * 128);
    constexpr int RUN = std::min<int>(N, MOST >= 8 ? 8 : MOST >= 4 ? 4 : 2);
    static_assert(MOST >= 2);
    unroll<N / RUN>([&](int run) __attribute__((always_inline)) {
        Shorts some[M] = {};
        unroll<RUN * M>([&](int i) __attribute__((always_inline)) {
            const int line = FIRST + run * RUN + i / M, r = i % M;
            const uint8_t* digits = rows.numbers(ROW + r) + DIGIT * INT8_GROUP;
            some[r] = add_byte_pairs(some[r], lines[line], all_fours(digits + 4 * line));
            if constexpr (M > 1 && LANES == 16) keep_here(some[r]);
        });
        unroll<M>([&](int r) __attribute__((always_inline)) {
            sums[r] = add_pairs(sums[r], some[r], (Bytes)(Shorts{} + static_cast<uint16_t>(1)));
        });
    });
}

// sums of M rows from ROW on += quantized weights of N lines from FIRST on x the activations of the same inputs. Each
// line is applied to all rows before the next line, so that instructions do not wait for each other. DIGIT: which loose
// digit, else 0.
template <int64_t FORMAT, int DIGIT, int N, int FIRST, int ROW, int M, typename Record>
inline __attribute__((always_inline)) void add_lines(Ints (&sums)[M], const Bytes (&lines)[INT8_LINES],
                                                     const Record& rows) {
    if constexpr (BY_BYTE_PAIRS && has_loose_digits(FORMAT)) {
        add_short_lines<FORMAT, DIGIT, N, FIRST, ROW>(sums, lines, rows);
    } else if constexpr (by_pairs(FORMAT)) {
        unroll<N * M>([&](int i) __attribute__((always_inline)) {
            const int line = FIRST + i / M, r = i % M;
            const uint8_t* numbers = rows.numbers(ROW + r) + 8 * line;
            const Shorts both = (Shorts)lines[line];
            sums[r] = add_pairs(sums[r], both & static_cast<uint16_t>(255), all_fours(numbers));
            sums[r] = add_pairs(sums[r], both >> 8, all_fours(numbers + 4));
        });
    } else {
        constexpr int64_t AT = has_loose_digits(FORMAT) ? DIGIT * INT8_GROUP : INT8_GROUP;
        Ints high[M] = {};
        unroll<N * M>([&](int i) __attribute__((always_inline)) {
            const int line = FIRST + i / M, r = i % M;
            const uint8_t* digits = rows.numbers(ROW + r) + 4 * line;
            if constexpr (!has_loose_digits(FORMAT)) high[r] = add_fours(high[r], lines[line], all_fours(digits));
            sums[r] = add_fours(sums[r], lines[line], all_fours(digits + AT));
        });
        if constexpr (!has_loose_digits(FORMAT))
            unroll<M>([&](int r) __attribute__((always_inline)) { sums[r] += high[r] * 256; });
    }
}

// body(part) for the registers of a line. With four lanes the sums of several rows do not fit in registers; there a
// loop is a quarter of the code and faster.
template <int N, typename Body> inline __attribute__((always_inline)) void for_parts(Body body) {
    if constexpr (LANES == 4 && N > 1)
        for (int64_t part = 0; part < PARTS; ++part) body(part);
    else
        unroll<PARTS>(body);
}

// sums[row] += 32 inputs of N rows; lines, factors: those of these inputs. DIGIT: see add_lines.
template <int64_t FORMAT, int DIGIT, int N, typename Record>
inline __attribute__((always_inline)) void add_group(const Record& record, const uint8_t* lines, const Bytes& table,
                                                     const GroupFactors& factors, Floats (&sums)[N][PARTS]) {
    constexpr int64_t SCALES = scales_of(FORMAT), LINES_EACH = INT8_LINES / SCALES;
    constexpr float UNIT = DIGIT == 0 ? 1.0f : 1.0f / 256;
    for_parts<N>([&](auto part) __attribute__((always_inline)) {
        Bytes own[INT8_LINES];
        load_lines<FORMAT>(lines + part * 4 * LANES, table, own);
        unroll<SCALES>([&](auto half) {
            const Floats scale = factors.scale(half, part * LANES);
            Floats offset{};
            if constexpr (has_offsets(FORMAT) && DIGIT == 0) offset = factors.offset(half, part * LANES);
            constexpr int M = std::min(N, N % 4 == 0 ? turn_of(FORMAT) : N);
            unroll<N / M>([&](auto some) __attribute__((always_inline)) {
                constexpr int ROW = some * M;
                Ints whole[M] = {};
                if constexpr (zero_of(FORMAT) != 0)
                    unroll<M>([&](int r) __attribute__((always_inline)) {
                        whole[r] = all_ints(record.begin(ROW + r, half, DIGIT));
                    });
                add_lines<FORMAT, DIGIT, LINES_EACH, half * LINES_EACH, ROW>(whole, own, record);
                unroll<M>([&](int i) __attribute__((always_inline)) {
                    const int r = ROW + i;
                    Floats& sum = sums[r][part];
                    const Floats factor = scale * (record.scale(r) * UNIT);
                    sum = add_product(sum, __builtin_convertvector(whole[i], Floats), factor);
                    if constexpr (has_offsets(FORMAT) && DIGIT == 0)
                        sum = add_product(sum, offset, all(record.sum(r, half)));
                });
            });
        });
    });
}

// One row of a record with several rows, seen as a record with one row.
template <int64_t FORMAT> struct OneOfRecord {
    RowRecord<std::integral_constant<int64_t, FORMAT>, int64_t> record;
    int64_t row;

    uint8_t* numbers(int64_t) const { return record.numbers(row); }
    float scale(int64_t) const { return record.scale(row); }
    float sum(int64_t, int64_t part) const { return record.sum(row, part); }
    int32_t begin(int64_t, int64_t part, int64_t digit) const { return record.begin(row, part, digit); }
};

// sums[row] += group `group` of 32 inputs of a panel.
template <int64_t FORMAT, int DIGIT, int N, typename Record>
inline __attribute__((always_inline)) void add_group_of(const Record& record, int64_t group, int64_t groups,
                                                        const PanelBytes& panel, const Bytes& table,
                                                        Floats (&sums)[N][PARTS]) {
    const GroupPlaces places = places_of(FORMAT, groups, group);
    const GroupFactors factors{panel.factors + places.scales, panel.factors + places.offsets};
    add_group<FORMAT, DIGIT>(record, panel.begin + places.lines, table, factors, sums);
}

template <int64_t FORMAT> inline Bytes table_of([[maybe_unused]] const PanelBytes& panel) {
    if constexpr (has_table(FORMAT)) return load_table(panel.begin);
    return Bytes{};
}

// sums [N][PARTS] = N quantized rows (records) x one panel. A row's sums run over its groups in order, whatever the
// number of rows. Loose low digits are left to add_low_digits.
template <int64_t FORMAT, int N>
void multiply_int8_panel(uint8_t* rows, int64_t inputs, const PanelBytes& panel, Floats* sums) {
    const int64_t groups = inputs / INT8_GROUP;
    const Bytes table = table_of<FORMAT>(panel);
    Floats own[N][PARTS] = {};
    RecordOf<FORMAT, N> record{{}, {}, rows};
    for (int64_t group = 0; group < groups; ++group, record = record.next())
        add_group_of<FORMAT, 0>(record, group, groups, panel, table, own);
    std::memcpy(sums, &own, sizeof own);
}

// sums [count][PARTS] += the loose low digits of `count` rows x one panel. One row at a time: few rows have such
// digits, and one function serves records of any size.
template <int64_t FORMAT>
void add_low_digits(uint8_t* rows, int64_t count, int64_t inputs, const PanelBytes& panel, Floats* sums) {
    const int64_t groups = inputs / INT8_GROUP;
    const Bytes table = table_of<FORMAT>(panel);
    const RowRecord<std::integral_constant<int64_t, FORMAT>, int64_t> first{{}, count, rows};
    for_low(first, groups, [&](int64_t group, const auto& record) __attribute__((always_inline)) {
        for (int64_t r = 0; r < count; ++r) {
            if ((record.mark(r) & 1) == 0) continue;
            Floats own[1][PARTS];
            std::memcpy(&own, sums + r * PARTS, sizeof own);
            add_group_of<FORMAT, 1>(OneOfRecord<FORMAT>{record, r}, group, groups, panel, table, own);
            std::memcpy(sums + r * PARTS, &own, sizeof own);
        }
    });
}

}  // namespace
