// Products of float32 or bfloat16 rows with a weight [outputs, inputs] cut into panels of PANEL_OUTPUTS outputs, padded
// with zeros. An output is summed over its inputs in order, in float32, however many rows there are. In memory a panel is
//   PLAIN    for each input, PANEL_OUTPUTS float32 numbers;
//   HALVES   likewise, bfloat16 numbers: a shift makes floats of them, so they cost half the bytes and nothing else;
//   NIBBLES  for each group of 32 inputs, PANEL_OUTPUTS scales, as many offsets (float16), then 16 lines of PANEL_OUTPUTS
//            bytes: line i has the levels of input i in the low halves and of input i + 16 in the high ones;
//   BYTES    the same with 32 lines of signed bytes, one per input.
// Levels become numbers a piece of a panel at a time, for all rows. Behind the last panel 16 more bytes can be read.
#pragma once

#include "product.h"

namespace {

constexpr int64_t PANEL_PIECES = 3, PANEL_OUTPUTS = PANEL_PIECES * LANES;
constexpr int64_t GROUP_INPUTS = 32, HALF_GROUP = GROUP_INPUTS / 2;
constexpr int MOST_ROWS = LANES == 8 ? 4 : 8;              // rows whose sums fit in the registers
// Inputs of a panel at a time: they stay in the first cache, of which rows need their share.
constexpr int64_t MOST_INPUTS = (LANES == 16 ? 6144 : 7680) / PANEL_OUTPUTS;
constexpr int INPUTS_IN_TURN = LANES == 16 ? 2 : 1;        // of a loop: fewer instructions for as many products
constexpr int64_t ROWS_AT_ONCE = 256;                      // woven, with their sums in the second cache
#ifdef __AVX2__
constexpr bool LEVELS_PAY = true;
#else
constexpr bool LEVELS_PAY = false;  // with four lanes, unpacking takes longer than reading the numbers themselves
#endif
static_assert(MOST_INPUTS % GROUP_INPUTS == 0);

constexpr int64_t group_bytes(Format format) {
    return PANEL_OUTPUTS * (4 + (format == NIBBLES ? HALF_GROUP : GROUP_INPUTS));
}
constexpr int64_t panel_bytes(Format format, int64_t inputs) {
    if (format == PLAIN || format == HALVES) return inputs * PANEL_OUTPUTS * (format == PLAIN ? 4 : 2);
    return inputs / GROUP_INPUTS * group_bytes(format);
}

// The first PANEL_OUTPUTS bytes of a line as numbers. 16 bytes are read.
typedef Floats Pieces[PANEL_PIECES];
#ifdef __aarch64__
inline void widen(int8x16_t bytes, Pieces& levels) {
    const int16x8_t first = vmovl_s8(vget_low_s8(bytes)), second = vmovl_high_s8(bytes);
    levels[0] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(first)));
    levels[1] = (Floats)vcvtq_f32_s32(vmovl_high_s16(first));
    levels[2] = (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(second)));
}
inline void load_bytes(const uint8_t* line, Pieces& levels) { widen(vreinterpretq_s8_u8(vld1q_u8(line)), levels); }

// Bytes below 16: of such numbers a float has only its two upper bytes, which are looked up. Cheaper than conversions.
inline void look_up(uint8x16_t bytes, Pieces& levels) {
    alignas(16) static constexpr uint8_t FOURTH[] = {0x00, 0x3F, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
                                                     0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41};
    alignas(16) static constexpr uint8_t THIRD[] = {0x00, 0x80, 0x00, 0x40, 0x80, 0xA0, 0xC0, 0xE0,
                                                    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70};
    const uint8x16_t fourth = vqtbl1q_u8(vld1q_u8(FOURTH), bytes), third = vqtbl1q_u8(vld1q_u8(THIRD), bytes);
    const uint16x8_t zero = vdupq_n_u16(0), first = vreinterpretq_u16_u8(vzip1q_u8(third, fourth));
    levels[0] = (Floats)vzip1q_u16(zero, first);
    levels[1] = (Floats)vzip2q_u16(zero, first);
    levels[2] = (Floats)vzip1q_u16(zero, vreinterpretq_u16_u8(vzip2q_u8(third, fourth)));
}
inline void load_nibbles(const uint8_t* line, Pieces& low, Pieces& high) {
    const uint8x16_t bytes = vld1q_u8(line);
    look_up(vandq_u8(bytes, vdupq_n_u8(15)), low);
    look_up(vshrq_n_u8(bytes, 4), high);
}
#else
// LANES bytes, with a sign or without. By name where it can be: compilers take them apart one by one.
inline Ints widen_signed(const uint8_t* bytes) {
#if defined(__AVX512F__)
    return (Ints)_mm512_maskz_cvtepi8_epi32(0xFFFF, _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
#else
    Ints wide;
    for (int64_t i = 0; i < LANES; ++i) wide[i] = static_cast<int8_t>(bytes[i]);
    return wide;
#endif
}
inline Ints widen(const uint8_t* bytes) { return widen_signed(bytes) & 0xFF; }

inline void load_bytes(const uint8_t* line, Pieces& levels) {
    for (int64_t p = 0; p < PANEL_PIECES; ++p)
        levels[p] = __builtin_convertvector(widen_signed(line + p * LANES), Floats);
}
inline void load_nibbles(const uint8_t* line, Pieces& low, Pieces& high) {
    for (int64_t p = 0; p < PANEL_PIECES; ++p) {
        const Ints both = widen(line + p * LANES);
        low[p] = __builtin_convertvector(both & 15, Floats);
        high[p] = __builtin_convertvector(both >> 4, Floats);
    }
}
#endif

// A group of levels to numbers [GROUP_INPUTS][PANEL_OUTPUTS]: one rounding, as a level times a scale is exact.
template <Format FORMAT> inline void unpack_group(const uint8_t* group, float* to) {
    Pieces scales, offsets;
    for (int64_t p = 0; p < PANEL_PIECES; ++p) {
        scales[p] = load_float16(group + 2 * p * LANES);
        offsets[p] = load_float16(group + 2 * (PANEL_OUTPUTS + p * LANES));
    }
    const auto give = [&](int64_t input, const Pieces& levels) {
        for (int64_t p = 0; p < PANEL_PIECES; ++p)
            store(to + input * PANEL_OUTPUTS + p * LANES, add_product(offsets[p], levels[p], scales[p]));
    };
    const uint8_t* line = group + 4 * PANEL_OUTPUTS;
    Pieces low, high;
    for (int64_t i = 0; i < (FORMAT == NIBBLES ? HALF_GROUP : GROUP_INPUTS); ++i, line += PANEL_OUTPUTS) {
        if constexpr (FORMAT == NIBBLES) {
            load_nibbles(line, low, high);
            give(HALF_GROUP + i, high);
        } else {
            load_bytes(line, low);
        }
        give(i, low);
    }
}

// Inputs [from, from + count) of a panel as numbers: where they lie, or unpacked into `room`. `from` begins a group.
inline const float* plain_inputs(Format format, const uint8_t* panel, int64_t from, int64_t count, float* room) {
    if (format == PLAIN) return reinterpret_cast<const float*>(panel) + from * PANEL_OUTPUTS;
    if (format == HALVES) {
        const bf16* halves = reinterpret_cast<const bf16*>(panel) + from * PANEL_OUTPUTS;
        for (int64_t i = 0; i < count * PANEL_OUTPUTS; i += LANES) store(room + i, load(halves + i));
        return room;
    }
    panel += from / GROUP_INPUTS * group_bytes(format);
    const auto unpack = format == NIBBLES ? unpack_group<NIBBLES> : unpack_group<BYTES>;
    for (int64_t i = 0; i < count; i += GROUP_INPUTS, panel += group_bytes(format)) unpack(panel, room + i * PANEL_OUTPUTS);
    return room;
}

// One input: `weights` of all outputs of the panel, `x` of ROWS rows.
template <int ROWS, typename W>
inline void add_input(const W* weights, const float* x, Floats (&sums)[ROWS][PANEL_PIECES]) {
    Pieces entries;
    unroll<PANEL_PIECES>([&](auto p) { entries[p] = load(weights + p * LANES); });
    if constexpr (ROWS >= 4 && LANES == 4) {  // four factors by one load
        unroll<ROWS / 4>([&](auto quarter) {
            const Quad four = load(x + 4 * quarter);
            unroll<4>([&](auto lane) {
                unroll<PANEL_PIECES>([&](auto p) {
                    Floats& own = sums[4 * quarter + lane][p];
                    own = add_scaled<lane>(own, entries[p], four);
                });
            });
        });
    } else {
        unroll<ROWS>([&](auto r) {
            const Floats factor = all(x[r]);
            unroll<PANEL_PIECES>([&](auto p) { sums[r][p] = add_product(sums[r][p], entries[p], factor); });
        });
    }
}

// x [inputs][ROWS] times weights [inputs][PANEL_OUTPUTS], on top of what `sums` [ROWS][PANEL_OUTPUTS] holds, or, where
// they are the first inputs, in its place.
template <int ROWS, typename W>
void add_inputs(const float* x, const W* weights, int64_t inputs, bool is_first, float* sums) {
    Floats own[ROWS][PANEL_PIECES] = {};
    const auto each = [&](auto body) {
        unroll<ROWS * PANEL_PIECES>([&](auto i) { body(own[i / PANEL_PIECES][i % PANEL_PIECES], sums + i * LANES); });
    };
    if (!is_first) each([](Floats& sum, const float* from) { sum = load(from); });
#pragma GCC unroll INPUTS_IN_TURN
    for (const W* end = weights + inputs * PANEL_OUTPUTS; weights < end; weights += PANEL_OUTPUTS, x += ROWS)
        add_input<ROWS>(weights, x, own);
    each([](const Floats& sum, float* to) { store(to, sum); });
}

inline float as_float(float x) { return x; }
inline float as_float(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Rows [begin, end) of x [rows, inputs], n of them together: [inputs][n], at row * inputs.
template <typename T> inline void weave_rows(const T* x, int64_t begin, int64_t end, int64_t inputs, float* woven) {
    by_rows<MOST_ROWS>(begin, end, [&](auto n, int64_t row) {
        float* to = woven + row * inputs;
        for (int64_t i = 0; i < inputs; ++i)
            for (int r = 0; r < n; ++r) *to++ = as_float(x[(row + r) * inputs + i]);
    });
}

// All rows, woven, times one panel -> sums [rows, PANEL_OUTPUTS]. `room`: for MOST_INPUTS inputs of a panel.
inline void multiply_panel(Format format, const float* woven, const uint8_t* panel, const Product& product, float* room,
                           float* sums) {
    for (int64_t from = 0; from < product.inputs; from += MOST_INPUTS) {
        const int64_t count = std::min(MOST_INPUTS, product.inputs - from);
        const auto add = [&](const auto* weights) {
            by_rows<MOST_ROWS>(0, product.rows, [&](auto n, int64_t row) {
                add_inputs<n>(woven + row * product.inputs + from * n, weights, count, from == 0,
                              sums + row * PANEL_OUTPUTS);
            });
        };
        if (format == HALVES && product.rows <= MOST_ROWS)  // each number is used once: it need not be stored as a float
            add(reinterpret_cast<const bf16*>(panel) + from * PANEL_OUTPUTS);
        else
            add(plain_inputs(format, panel, from, count, room));
    }
}

// Up to ROWS_AT_ONCE rows; `woven` is room for them.
template <typename T>
void multiply_some(Format format, const T* x, const uint8_t* weight, const T* bias, const Product& product, float* woven,
                   T* out) {
    const int64_t panels = (product.outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    for_each((product.rows + MOST_ROWS - 1) / MOST_ROWS, product.rows * product.inputs > MANY_NUMBERS, [&](int64_t i) {
        weave_rows(x, i * MOST_ROWS, std::min((i + 1) * MOST_ROWS, product.rows), product.inputs, woven);
    });
    share_out(panels, product.panels_in_turn(panel_bytes(format, product.inputs)), product.is_large(), [&] {
        std::vector<float> room(format == PLAIN ? 0 : MOST_INPUTS * PANEL_OUTPUTS), sums(product.rows * PANEL_OUTPUTS);
        return [&, room = std::move(room), sums = std::move(sums)](int64_t panel) mutable {
            multiply_panel(format, woven, weight + panel * panel_bytes(format, product.inputs), product, room.data(),
                           sums.data());
            const int64_t begin = panel * PANEL_OUTPUTS, count = std::min(PANEL_OUTPUTS, product.outputs - begin);
            for (int64_t row = 0; row < product.rows; ++row)
                in_pieces(count, [&](int64_t i, int64_t n) {
                    const Floats value = load(sums.data() + row * PANEL_OUTPUTS + i);
                    put(out + row * product.out_stride + begin + i,
                        bias == nullptr ? value : rounded<T>(value) + fetch(bias + begin + i, n), n);
                });
        };
    });
}

// x [rows, inputs] times the weight, transposed, plus a bias [outputs] or null -> out [rows, outputs].
template <typename T>
void multiply_panels_of(Format format, const T* x, const uint8_t* weight, const T* bias, const Product& product, T* out) {
    static thread_local std::vector<float> room;
    room.resize(std::max<size_t>(room.size(), std::min(ROWS_AT_ONCE, product.rows) * product.inputs));
    for (int64_t row = 0; row < product.rows; row += ROWS_AT_ONCE) {
        Product some = product;
        some.rows = std::min(ROWS_AT_ONCE, product.rows - row);
        multiply_some(format, x + row * product.inputs, weight, bias, some, room.data(), out + row * product.out_stride);
    }
}

template <Format FORMAT, typename T>
void multiply_panels(const T* x, const uint8_t* weight, const T* bias, const Product& product, T* out) {
    multiply_panels_of(FORMAT, x, weight, bias, product, out);
}

}  // namespace
