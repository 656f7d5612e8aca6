// Dispatch: chooses the gemm kernel for a packed weight, by what this build and this CPU support.
#pragma once

#include "amx.h"
#include "bf16_dots.h"
#include "int8_panels.h"
#include "panels.h"

namespace {

// out [rows, outputs] = x [rows, inputs] @ weight.T + bias [outputs] (or null) for a packed weight.
template <typename T>
using Multiply = void (*)(const T* x, const uint8_t* weight, const T* bias, const GemmSizes& sizes, T* out);

// The integer gemm kernel for a format; ROWS: BYTE_ROWS, or 0.
template <typename T, int64_t ROWS> inline Multiply<T> multiply_int8_of(int64_t format) {
    switch (format) {
        case 4: return multiply_int8<4 | ROWS>;
        case 5: return multiply_int8<5 | ROWS>;
        case 6: return multiply_int8<6 | ROWS>;
        case 8: return multiply_int8<8 | ROWS>;
        case 4 | WITH_OFFSETS: return multiply_int8<4 | WITH_OFFSETS | ROWS>;
        case 5 | WITH_OFFSETS: return multiply_int8<5 | WITH_OFFSETS | ROWS>;
        case 6 | WITH_OFFSETS: return multiply_int8<6 | WITH_OFFSETS | ROWS>;
        case 8 | WITH_OFFSETS: return multiply_int8<8 | WITH_OFFSETS | ROWS>;
        case 4 | BY_HALVES: return multiply_int8<4 | BY_HALVES | ROWS>;
        case 6 | BY_HALVES: return multiply_int8<6 | BY_HALVES | ROWS>;
        case 8 | BY_HALVES: return multiply_int8<8 | BY_HALVES | ROWS>;
        case 4 | WITH_OFFSETS | BY_HALVES: return multiply_int8<4 | WITH_OFFSETS | BY_HALVES | ROWS>;
        case 8 | WITH_OFFSETS | BY_HALVES: return multiply_int8<8 | WITH_OFFSETS | BY_HALVES | ROWS>;
        case 3 | BY_HALVES | SUPER_BLOCKS: return multiply_int8<3 | BY_HALVES | SUPER_BLOCKS | ROWS>;
        case 2 | WITH_OFFSETS | BY_HALVES | SUPER_BLOCKS:
            return multiply_int8<2 | WITH_OFFSETS | BY_HALVES | SUPER_BLOCKS | ROWS>;
        case TABLE: return multiply_int8<TABLE | ROWS>;
        case 4 | WIDE: return multiply_int8<4 | WIDE | ROWS>;
        case 4 | WITH_OFFSETS | WIDE: return multiply_int8<4 | WITH_OFFSETS | WIDE | ROWS>;
        default: return nullptr;
    }
}

// The integer gemm kernel for a format, with or without BYTE_ROWS.
template <typename T> inline Multiply<T> multiply_int8_for(int64_t format) {
    if (format & BYTE_ROWS) return multiply_int8_of<T, BYTE_ROWS>(format & ~BYTE_ROWS);
    return multiply_int8_of<T, 0>(format);
}

// The kernel for activations of T and a weight of `format`, or null if there is none; any number is accepted.
template <typename T> Multiply<T> multiply_for(int64_t format);

template <> inline Multiply<float> multiply_for<float>(int64_t format) {  // all in panels
    switch (format) {
        case PLAIN: return multiply_panels<PLAIN>;
        case NIBBLES: return multiply_panels<NIBBLES>;
        case BYTES: return multiply_panels<BYTES>;
        case HALVES: return multiply_panels<HALVES>;
        default: break;
    }
    return multiply_int8_for<float>(format);
}

// PLAIN: AMX tiles where available, else panels for bfloat16 dot products. NIBBLES and BYTES: tiles on AMX, else
// panels.
template <> inline Multiply<bf16> multiply_for<bf16>(int64_t format) {
#ifdef __AMX_BF16__
    if (has_tiles) switch (format) {
            case PLAIN: return multiply_tiles<PLAIN>;
            case NIBBLES: return multiply_tiles<NIBBLES>;
            case BYTES: return multiply_tiles<BYTES>;
            case HALVES: return nullptr;
            default: return multiply_int8_for<bf16>(format);
        }
#endif
    switch (format) {
#ifdef QUIRE_BF16_DOTS
        case PLAIN: return multiply_dots;
#endif
        case NIBBLES: return multiply_panels<NIBBLES>;
        case BYTES: return multiply_panels<BYTES>;
        case HALVES: return multiply_panels<HALVES>;
        default: return multiply_int8_for<bf16>(format);
    }
}

}  // namespace
