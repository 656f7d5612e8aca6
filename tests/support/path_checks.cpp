// What the kernels of one instruction set compute, for machines that only an emulator has: products in whole numbers
// against sums in double precision, and tokens that must be the same on every path. Prints a line for each fault, then a
// digest of the tokens. Compiled together with quire_cpu.cpp, by test_emulated_paths.py.
#include "quire_cpu.cpp"

#include <unistd.h>

#include <cstdio>

namespace {

#ifdef __aarch64__
typedef __fp16 Half;
#else
typedef _Float16 Half;
#endif

struct Random {
    uint64_t state;
    uint32_t next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return static_cast<uint32_t>(state >> 20);
    }
    int32_t below(int32_t bound) { return static_cast<int32_t>(next() % bound); }
    float number() { return below(2000001) / 1e6f - 1.0f; }  // in [-1, 1]
};

uint16_t to_half(float value) {
    const Half half = static_cast<Half>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}
float from_half(uint16_t bits) {
    Half half;
    std::memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
}

// A weight of random levels: as the packing takes it, and as numbers.
struct Weight {
    static constexpr int64_t INPUTS = 256, OUTPUTS = 100;
    std::vector<uint8_t> panels;
    std::vector<double> numbers;

    Weight(int64_t format, Random& random) : panels(4 * INPUTS * OUTPUTS + 65536), numbers(INPUTS * OUTPUTS) {
        const int64_t bits = bits_of(format), group = format & WIDE ? 128 : format & BY_HALVES ? 16 : 32;
        const bool offset = has_offsets(format), table = has_table(format);
        const int32_t middle = offset || bits == 8 || table ? 0 : 1 << (bits - 1);
        std::vector<uint8_t> levels(INPUTS * OUTPUTS), entries(16);
        std::vector<uint16_t> scales(levels.size() / group), offsets(scales.size());
        std::vector<uint8_t> codes(scales.size());
        for (int32_t i = 0; i < 16; ++i) entries[i] = static_cast<uint8_t>(16 * i - 127 + random.below(16));
        for (uint16_t& scale : scales) scale = to_half(0.01f + 0.001f * random.below(10));
        for (uint16_t& each : offsets) each = to_half(offset ? 0.2f * random.number() : 0.0f);
        const auto shared_scales = scales, shared_offsets = offsets;  // of which the first ones are taken, one for an output
        if (has_super_blocks(format))
            for (size_t i = 0; i < codes.size(); ++i) {
                codes[i] = static_cast<uint8_t>(offset ? random.below(256) : random.below(64) - 32);
                const int32_t code = offset ? codes[i] & 15 : static_cast<int8_t>(codes[i]);
                scales[i] = to_half(from_half(shared_scales[i / (INPUTS / group)]) * static_cast<float>(code));
                offsets[i] = to_half(from_half(shared_offsets[i / (INPUTS / group)]) * static_cast<float>(codes[i] >> 4));
                if (!offset) offsets[i] = 0;
            }
        for (size_t i = 0; i < levels.size(); ++i) {
            int32_t level = bits == 8 ? random.below(255) - 127 : random.below(1 << bits) - middle;
            if (table) level = static_cast<int8_t>(entries[level]);
            levels[i] = static_cast<uint8_t>(level);
            numbers[i] = static_cast<double>(level) * from_half(scales[i / group]) + from_half(offsets[i / group]);
        }
        const bool is_super = has_super_blocks(format);
        quire_pack_int8(format, levels.data(), middle, (is_super ? shared_scales : scales).data(),
                        (is_super ? shared_offsets : offsets).data(), entries.data(), codes.data(), OUTPUTS, INPUTS,
                        panels.data());
    }
};

// The norm of the error over the norm of the result; infinite where there is no kernel.
double error_of(int64_t format, const Weight& weight, int64_t rows, Random& random) {
    std::vector<float> x(rows * Weight::INPUTS), y(rows * Weight::OUTPUTS, NAN);
    for (float& each : x) each = random.number();
    for (size_t i = 5; i < x.size(); i += 97) x[i] = 100.0f;  // outliers: rows of 8 bits keep a second digit there
    if (!quire_multiply(0, format, x.data(), weight.panels.data(), nullptr, y.data(), rows, Weight::INPUTS, Weight::OUTPUTS))
        return INFINITY;
    double error = 0, size = 0;
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t output = 0; output < Weight::OUTPUTS; ++output) {
            double sum = 0;
            for (int64_t i = 0; i < Weight::INPUTS; ++i)
                sum += x[row * Weight::INPUTS + i] * weight.numbers[output * Weight::INPUTS + i];
            error += std::pow(y[row * Weight::OUTPUTS + output] - sum, 2);
            size += sum * sum;
        }
    return std::sqrt(error / size);
}

int check_products(int64_t threads) {
    Random random{88172645463325252u};
    int faults = 0;
    for (const int64_t packed : {4, 5, 6, 8, 20, 21, 22, 24, 36, 38, 40, 52, 56, 7, 132, 148, 291, 306}) {
        const Weight weight(packed, random);
        for (const int64_t rows : {1, 2, 3, 5, 8, 13, 40, -1, -2, -3, -5, -8, -13, -40}) {
            const int64_t format = rows < 0 ? packed | BYTE_ROWS : packed;
            const double error = error_of(format, weight, std::abs(rows), random);
            if (error < (rows < 0 ? 1e-2 : 1e-4)) continue;
            std::printf("format %d, %d rows, %d threads: error %g\n", static_cast<int>(format), static_cast<int>(rows),
                        static_cast<int>(threads), error);
            ++faults;
        }
    }
    return faults;
}

uint64_t digest_of_tokens() {
    constexpr int64_t ROWS = 300, SIZE = 20011;
    Random random{12345};
    std::vector<float> logits(ROWS * SIZE), temperature(ROWS), log_min_p(ROWS);
    std::vector<int64_t> top_k(ROWS), rows(ROWS), lengths(ROWS, 9), num_prompt(ROWS, 3), tokens(ROWS);
    std::vector<double> top_p(ROWS);
    std::vector<uint64_t> start(ROWS);
    for (float& each : logits) each = 3.0f * random.number();
    for (int64_t row = 0; row < ROWS; ++row) {
        rows[row] = row;
        temperature[row] = row % 4 == 1 ? 1.0f : 0.3f * static_cast<float>(row % 4);
        log_min_p[row] = row % 5 == 0 ? std::log(0.02f) : -INFINITY;
        top_k[row] = row % 3 == 0 ? 40 : row % 3 == 1 ? 0 : 500;
        top_p[row] = row % 7 < 3 ? 1.0 : 0.9;
        start[row] = 7919 * row;
    }
    const ChoiceColumns columns{temperature.data(), log_min_p.data(), top_k.data(), top_p.data(), start.data()};
    quire_choose(logits.data(), ROWS, SIZE, &columns, rows.data(), lengths.data(), num_prompt.data(), tokens.data());
    uint64_t digest = 1469598103934665603u;
    for (const int64_t token : tokens) digest = (digest ^ static_cast<uint64_t>(token)) * 1099511628211u;
    return digest;
}

}  // namespace

int main() {
    int faults = 0;
    for (const int64_t threads : {1, 3}) {
        quire_prepare(0, threads);
        faults += check_products(threads);
        std::printf("%llx\n", static_cast<unsigned long long>(digest_of_tokens()));
    }
    std::fflush(stdout);
    _exit(faults > 0);  // the kernels' threads run on
}
