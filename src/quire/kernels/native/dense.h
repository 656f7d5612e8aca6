// Products of a few rows with a float32 weight held as [inputs, outputs].
#pragma once

#include "simd.h"

namespace {

// One row x [inputs] times a weight [inputs, outputs], read once from end to end, eight rows side by side.
// The parts are the same for any number of threads and are added in order.
void vector_product(const float* x, const float* weight, float* out, int64_t inputs, int64_t outputs) {
    constexpr int64_t PARTS = 4, STREAMS = 8;
    std::vector<float> partial(PARTS * outputs);
#pragma omp parallel for schedule(static)
    for (int64_t part = 0; part < PARTS; ++part) {
        float* sums = partial.data() + part * outputs;
        const int64_t end = inputs * (part + 1) / PARTS;
        for (int64_t i = inputs * part / PARTS; i < end; i += STREAMS) {
            const int64_t streams = std::min(STREAMS, end - i);
            const float* rows[STREAMS];
            Floats scales[STREAMS];
            for (int64_t s = 0; s < STREAMS; ++s) {  // past the end: any row, times nothing
                rows[s] = weight + (s < streams ? i + s : i) * outputs;
                scales[s] = all(s < streams ? x[i + s] : 0.0f);
            }
            in_pieces(outputs, [&](int64_t j, int64_t count) {
                Floats even = fetch(sums + j, count), odd = {};
                for (int64_t s = 0; s < STREAMS; s += 2) {
                    even += scales[s] * fetch(rows[s] + j, count);
                    odd += scales[s + 1] * fetch(rows[s + 1] + j, count);
                }
                put(sums + j, even + odd, count);
            });
        }
    }
    in_pieces(outputs, [&](int64_t j, int64_t count) {
        Floats total = {};
        for (int64_t part = 0; part < PARTS; ++part) total += fetch(partial.data() + part * outputs + j, count);
        put(out + j, total, count);
    });
}

}  // namespace
