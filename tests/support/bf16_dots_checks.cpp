// Products by dot products of bfloat16 against sums in double precision, and rows alone against rows among others.
// Compiled by test_emulated_paths.py for Arm with BF16; and with PLAIN_DOTS, where the instructions of AVX-512 BF16, which
// no emulator at hand knows, are functions in plain code with four numbers to a register. PLAIN_DOTS needs flags of a path
// with four lanes: the portable one.
#ifdef PLAIN_DOTS
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)  // the compiler's own declarations come first, and keep their names
#include <immintrin.h>
#define __m512 PlainFloats
#define __m512i PlainInts
#define __m512bh PlainHalves
#define _mm512_set1_epi32 plain_set1_epi32
#define _mm512_loadu_si512 plain_loadu_si512
#define _mm512_dpbf16_ps plain_dpbf16_ps
#define _mm512_cvtneps_pbh plain_cvtneps_pbh
#endif

typedef float __m512 __attribute__((vector_size(16)));
typedef int32_t __m512i __attribute__((vector_size(16)));
typedef uint16_t __m512bh __attribute__((vector_size(16)));

inline float widened(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}
inline __m512i _mm512_set1_epi32(int32_t value) { return __m512i{value, value, value, value}; }
inline __m512i _mm512_loadu_si512(const void* from) {
    __m512i found;
    std::memcpy(&found, from, sizeof found);
    return found;
}
inline __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    for (int i = 0; i < 4; ++i)
        for (int odd = 1; odd >= 0; --odd) sums[i] += widened(a[2 * i + odd]) * widened(b[2 * i + odd]);
    return sums;
}
typedef uint16_t FourHalves __attribute__((vector_size(8)));
inline FourHalves _mm512_cvtneps_pbh(__m512 value) {
    FourHalves rounded{};
    for (int i = 0; i < 4; ++i) {
        uint32_t bits;
        const float one = value[i];
        std::memcpy(&bits, &one, sizeof bits);
        rounded[i] = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
    return rounded;
}
#define __AVX512BF16__ 1
#endif

#include "bf16_dots.h"

#include <unistd.h>

#include <cstdio>

namespace {

struct Random {
    uint64_t state;
    float number() {  // in [-1, 1]
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<float>(state >> 20 & 0xFFFFF) / 524288.0f - 1.0f;
    }
};

bf16 to_bf16(float value) {
    bf16 rounded;
    store_some(&rounded, all(value), 1);
    return rounded;
}

struct DotCase {
    int64_t rows, inputs, outputs;
    std::vector<bf16> x, weight, bias, panels, y;

    DotCase(int64_t rows, int64_t inputs, int64_t outputs, Random& random)
        : rows(rows), inputs(inputs), outputs(outputs), x(rows * inputs), weight(outputs * inputs), bias(outputs),
          y(rows * outputs) {
        for (auto* each : {&x, &weight, &bias})
            for (bf16& number : *each) number = to_bf16(random.number());
        const int64_t groups = padded_inputs(inputs) / DOT_INPUTS, width = PANEL_OUTPUTS;
        panels.resize((outputs + width - 1) / width * width * groups * DOT_INPUTS);
        for (int64_t output = 0; output < outputs; ++output)
            for (int64_t i = 0; i < inputs; ++i) {
                const int64_t place = (output / width * groups + i / DOT_INPUTS) * width + output % width;
                panels[place * DOT_INPUTS + i % DOT_INPUTS] = weight[output * inputs + i];
            }
    }

    void multiply(int64_t first, int64_t count, bf16* to) const {
        multiply_dots(x.data() + first * inputs, reinterpret_cast<const uint8_t*>(panels.data()), bias.data(),
                      GemmSizes{count, inputs, outputs, outputs}, to);
    }

    bool is_right(int64_t row, int64_t output) const {
        double sum = 0, size = 0;
        for (int64_t i = 0; i < inputs; ++i) {
            const double product = as_float(x[row * inputs + i]) * as_float(weight[output * inputs + i]);
            sum += product;
            size += std::abs(product);
        }
        const double found = as_float(y[row * outputs + output]), exact = sum + as_float(bias[output]);
        return std::abs(found - exact) < (std::abs(sum) + std::abs(exact)) / 256 + 1e-6 * size;
    }

    bool holds() {
        multiply(0, rows, y.data());
        std::vector<bf16> alone(outputs);
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t output = 0; output < outputs; ++output)
                if (!is_right(row, output)) return false;
            multiply(row, 1, alone.data());
            if (std::memcmp(alone.data(), y.data() + row * outputs, outputs * sizeof(bf16)) != 0) return false;
        }
        return true;
    }
};

}  // namespace

int main() {
    int faults = 0;
    Random random{88172645463325252u};
    for (const int64_t threads : {1, 3}) {
        set_num_threads(threads);
        for (const int64_t inputs : {1, 2, 7, 64, 1300})
            for (const int64_t outputs : {1, 50, 100})
                for (const int64_t rows : {1, 2, 3, 5, 8, 13, 40, 259}) {
                    if (rows > 40 && inputs > 64) continue;
                    if (DotCase(rows, inputs, outputs, random).holds()) continue;
                    std::printf("[%d, %d] times %d rows, %d threads: wrong\n", static_cast<int>(outputs),
                                static_cast<int>(inputs), static_cast<int>(rows), static_cast<int>(threads));
                    ++faults;
                }
    }
    std::fflush(stdout);
    _exit(faults > 0);  // the kernels' threads run on
}
