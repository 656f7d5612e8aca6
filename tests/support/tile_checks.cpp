// Integer products by emulated tile units give the bits that they give without: formats with one scale for 32 inputs and with
// two, with offsets and a table, few rows behind whole tiles, rows with numbers that stick out.
#include "emulated_tiles.h"

#include "int8_panels.h"

#include <cstdio>
#include <random>
#include <vector>

namespace {

constexpr int64_t INPUTS = 512, OUTPUTS = 40;
std::mt19937 random_numbers(7);

void put_float16(uint8_t* to, float value) {
    const __m128i half = _mm_cvtps_ph(_mm_set_ss(value), _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &half, 2);
}

// Levels of any bits; scales and offsets that are small numbers.
std::vector<uint8_t> random_weight(int64_t format) {
    const int64_t panels = (OUTPUTS + INT8_OUTPUTS - 1) / INT8_OUTPUTS, groups = INPUTS / INT8_GROUP;
    std::vector<uint8_t> weight(panels * int8_panel_bytes(format, INPUTS));
    for (uint8_t& byte : weight) byte = static_cast<uint8_t>(random_numbers());
    std::uniform_real_distribution<float> small(0.001f, 0.01f);
    for (int64_t panel = 0; panel < panels; ++panel)
        for (int64_t group = 0; group < groups; ++group) {
            const GroupPlaces places = places_of(format, groups, group);
            uint8_t* begin = weight.data() + panel * int8_panel_bytes(format, INPUTS);
            for (int64_t i = 0; i < scales_of(format) * INT8_OUTPUTS; ++i) {
                put_float16(begin + places.scales + 2 * i, small(random_numbers));
                if (has_offsets(format)) put_float16(begin + places.offsets + 2 * i, -small(random_numbers));
            }
        }
    return weight;
}

template <int64_t FORMAT> bool check() {
    const std::vector<uint8_t> weight = random_weight(FORMAT);
    for (const int64_t rows : {16, 17, 31, 32, 45, 130}) {
        std::normal_distribution<float> normal;
        std::vector<float> x(rows * INPUTS), plain(rows * OUTPUTS), tiled(rows * OUTPUTS);
        for (float& each : x) each = normal(random_numbers);
        for (int64_t row = 0; row < rows; row += 3) x[row * INPUTS + 40] = -1000.0f;
        const GemmSizes sizes{rows, INPUTS, OUTPUTS, OUTPUTS};
        has_tiles = false;
        multiply_int8<FORMAT>(x.data(), weight.data(), static_cast<const float*>(nullptr), sizes, plain.data());
        has_tiles = true;
        const int64_t before = emulated::num_products;
        multiply_int8<FORMAT>(x.data(), weight.data(), static_cast<const float*>(nullptr), sizes, tiled.data());
        if (emulated::num_products == before || std::memcmp(plain.data(), tiled.data(), 4 * plain.size()) != 0) {
            std::printf("format %d, %d rows: %d products by tiles\n", static_cast<int>(FORMAT), static_cast<int>(rows),
                        static_cast<int>(emulated::num_products - before));
            return false;
        }
    }
    return true;
}

}  // namespace

int main() {
    set_num_threads(1);
    const bool is_equal = check<4 | BYTE_ROWS>() && check<4 | WITH_OFFSETS | BYTE_ROWS>() && check<8 | BYTE_ROWS>() &&
                          check<6 | BY_HALVES | BYTE_ROWS>() && check<5 | WITH_OFFSETS | BYTE_ROWS>() &&
                          check<7 | BYTE_ROWS>();
    return is_equal ? 0 : 1;
}
