// Attention in float32 registers, for any machine, head size and block size.
#pragma once

#include "attention.h"

namespace {

constexpr int64_t TILE = 32;  // positions whose scores are held at a time; a multiple of LANES
constexpr int64_t FUSED = 4;  // query rows per inner loop: their sums stay in registers

// Two keys (or two pieces of the output) at a time: enough independent sums to keep the multipliers busy.
template <int ROWS>
void dot_rows(const float* query, const float* const* keys, int64_t count, int64_t width, float* scores) {
    for (int64_t t = 0; t < count; t += 2) {
        const float* one = keys[t];
        const float* two = keys[std::min(t + 1, count - 1)];
        Floats first[ROWS] = {}, second[ROWS] = {};
        for (int64_t i = 0; i < width; i += LANES) {
            const Floats a = load(one + i), b = load(two + i);
            for (int r = 0; r < ROWS; ++r) {
                const Floats q = load(query + r * width + i);
                first[r] += q * a;
                second[r] += q * b;
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            scores[r * TILE + t] = sum(first[r]);
            scores[r * TILE + t + 1] = sum(second[r]);  // TILE is even; past the last key it is hidden again
        }
    }
}

template <int ROWS, int PIECES>
void add_pieces(const float* weights, const float* const* values, int64_t count, int64_t width, float* out, int64_t i) {
    Floats sums[PIECES][ROWS];
    for (int p = 0; p < PIECES; ++p)
        for (int r = 0; r < ROWS; ++r) sums[p][r] = load(out + r * width + i + p * LANES);
    for (int64_t t = 0; t < count; ++t)
        for (int p = 0; p < PIECES; ++p) {
            const Floats value = load(values[t] + i + p * LANES);
            for (int r = 0; r < ROWS; ++r) sums[p][r] += weights[r * TILE + t] * value;
        }
    for (int p = 0; p < PIECES; ++p)
        for (int r = 0; r < ROWS; ++r) store(out + r * width + i + p * LANES, sums[p][r]);
}

template <int ROWS>
void add_rows(const float* weights, const float* const* values, int64_t count, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) add_pieces<ROWS, 4>(weights, values, count, width, out, i);
    for (; i < width; i += LANES) add_pieces<ROWS, 1>(weights, values, count, width, out, i);
}

// call<n>(row) for all rows, FUSED at a time. A row's sums are the same in whichever company it is computed.
#define BY_FUSED(rows, CALL)                                    \
    for (int64_t row = 0; row < (rows);) {                      \
        switch (std::min<int64_t>(FUSED, (rows)-row)) {         \
            case 4: { constexpr int N = 4; CALL; row += 4; break; } \
            case 3: { constexpr int N = 3; CALL; row += 3; break; } \
            case 2: { constexpr int N = 2; CALL; row += 2; break; } \
            default: { constexpr int N = 1; CALL; row += 1; break; } \
        }                                                       \
    }

template <typename T> class PlainAttention {
  public:
    PlainAttention(const Shape& shape, Keys<T> keys, float scale)
        : shape_(shape), keys_(keys), scale_(scale), query_(rows() * shape.width()), copies_(TILE * shape.width()),
          scores_(rows() * TILE) {}

    void take(const Work& work, const T* query, int64_t stride) {
        const int64_t group = shape_.group(), width = shape_.width();
        std::fill(query_.begin(), query_.end(), 0.0f);
        for (int64_t row = 0; row < work.count * group; ++row) {
            const int64_t head = work.head * group + row % group;
            const T* from = query + (work.token + row / group) * stride + head * shape_.dim;
            float* to = query_.data() + row * width;
            in_pieces(shape_.dim, [&](int64_t i, int64_t n) { store(to + i, fetch(from + i, n) * scale_); });
        }
    }

    void attend(const Work& work, int64_t begin, int64_t end, State state) {
        const int64_t group = shape_.group(), rows = work.count * group, width = shape_.width();
        const float* where[TILE];
        for (int64_t tile = begin; tile < end; tile += TILE) {
            const int64_t count = std::min(TILE, end - tile);
            locate(keys_.keys, work, tile, count, where);
            BY_FUSED(rows, dot_rows<N>(query_.data() + row * width, where, count, width, scores_.data() + row * TILE))
            for (int64_t row = 0; row < rows; ++row) {
                const int64_t seen = std::clamp<int64_t>(work.visible + row / group - tile, 0, count);
                soften<TILE>(scores_.data() + row * TILE, seen, state, row, width);
            }
            locate(keys_.values, work, tile, count, where);
            BY_FUSED(rows, add_rows<N>(scores_.data() + row * TILE, where, count, width, state.out + row * width))
        }
    }

  private:
    int64_t rows() const { return shape_.block_tokens() * shape_.group(); }

    // Where the keys (or values) of positions begin .. begin + count lie as padded floats: in the cache, or copied.
    void locate(const T* cache, const Work& work, int64_t begin, int64_t count, const float** rows) {
        const int64_t dim = shape_.dim, width = shape_.width();
        const T* stored[TILE];
        keys_.locate(cache, work, shape_, begin, count, stored);
        for (int64_t t = 0; t < count; ++t) {
            const T* from = stored[t];
            if constexpr (std::is_same_v<T, float>) {
                if (dim == width) {
                    rows[t] = from;
                    continue;
                }
            }
            float* to = copies_.data() + t * width;
            in_pieces(dim, [&](int64_t i, int64_t n) { store(to + i, fetch(from + i, n)); });
            rows[t] = to;
        }
    }

    const Shape shape_;
    const Keys<T> keys_;
    const float scale_;
    std::vector<float> query_, copies_, scores_;
};

}  // namespace
