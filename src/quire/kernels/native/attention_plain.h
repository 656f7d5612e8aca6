// Attention in float32 vector registers (simd.h), for any CPU, head size and block size.
#pragma once

#include "attention.h"
#include "dots.h"

namespace {

constexpr int64_t TILE = 32;  // positions whose scores are computed together; a multiple of LANES
constexpr int64_t FEW_ROWS = 2 * FUSED;  // with so few rows, attention is bound by memory bandwidth, not by computing

// Add one of four positions, weighted, to PIECES vector registers of the output of each row. `values` below are padded
// to a multiple of four, like the keys of dot_rows; the weights past the last position are zero.
template <int AT, int ROWS, int PIECES>
inline void add_position(const Quad (&weights)[ROWS], const float* value, Floats (&sums)[PIECES][ROWS]) {
    for (int p = 0; p < PIECES; ++p) {
        const Floats entries = load(value + p * LANES);
        for (int r = 0; r < ROWS; ++r) sums[p][r] = add_scaled<AT>(sums[p][r], entries, weights[r]);
    }
}

// Accumulate PIECES registers of the output of ROWS rows over `count` values, four positions per iteration.
template <int ROWS, int PIECES>
void add_pieces(const float* weights, const float* const* values, int64_t count, int64_t width, float* out, int64_t i) {
    Floats sums[PIECES][ROWS];
    for (int p = 0; p < PIECES; ++p)
        for (int r = 0; r < ROWS; ++r) sums[p][r] = load(out + r * width + i + p * LANES);
    int64_t t = 0;
    do {
        Quad four[ROWS];
        for (int r = 0; r < ROWS; ++r) std::memcpy(&four[r], weights + r * TILE + t, sizeof four[r]);
        add_position<0>(four, values[t] + i, sums);
        add_position<1>(four, values[t + 1] + i, sums);
        add_position<2>(four, values[t + 2] + i, sums);
        add_position<3>(four, values[t + 3] + i, sums);
        t += 4;
    } while (t < count);
    for (int p = 0; p < PIECES; ++p)
        for (int r = 0; r < ROWS; ++r) store(out + r * width + i + p * LANES, sums[p][r]);
}

// out [ROWS, width] += weights [ROWS, TILE] x `count` values of `width` floats.
template <int ROWS>
void add_rows(const float* weights, const float* const* values, int64_t count, int64_t width, float* out) {
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) add_pieces<ROWS, 4>(weights, values, count, width, out, i);
    for (; i < width; i += LANES) add_pieces<ROWS, 1>(weights, values, count, width, out, i);
}

// The same sums in the same order for values that are not in cache, four whole values at a time, so that memory is read
// sequentially. `ahead`: see dot_rows.
template <int ROWS>
void add_rows_from_memory(const float* weights, const float* const* values, int64_t count, int64_t width,
                          const float* const* ahead, float* out) {
    for (int64_t t = 0; t < count; t += 4) {
        Quad four[ROWS];
        for (int r = 0; r < ROWS; ++r) std::memcpy(&four[r], weights + r * TILE + t, sizeof four[r]);
        for (int64_t i = 0; i < width; i += LANES) {
            if (ahead != nullptr && i % LINE == 0)
                for (int k = 0; k < 4; ++k) __builtin_prefetch(ahead[t + k] + i);
            Floats entries[4];
            for (int k = 0; k < 4; ++k) entries[k] = load(values[t + k] + i);
            for (int r = 0; r < ROWS; ++r) {
                Floats sum = load(out + r * width + i);
                sum = add_scaled<0>(sum, entries[0], four[r]);
                sum = add_scaled<1>(sum, entries[1], four[r]);
                sum = add_scaled<2>(sum, entries[2], four[r]);
                store(out + r * width + i, add_scaled<3>(sum, entries[3], four[r]));
            }
        }
    }
}

// The portable method of attend_all: queries and copies of keys as padded floats, 32 positions at a time.
template <typename T> class PlainAttention {
  public:
    static constexpr int64_t MAX_ROWS = 32;  // of a group; with a tile of keys and values they stay in the L1 cache

    static constexpr int64_t STEP = TILE;

    PlainAttention(const Shape& shape, Keys<T> keys, const Rule& rule, int64_t rows)
        : shape_(shape), keys_(keys), rule_(rule), query_(rows * shape.width()), copies_(TILE * shape.width()),
          scores_(rows * TILE), zeros_(shape.width()), seen_(rows) {}

    // Copy the queries of a group to float32, padded with zeros and multiplied by the score scale.
    void take(const Group& group, const T* query, int64_t stride) {
        std::fill(query_.begin(), query_.end(), 0.0f);
        for_rows(group, shape_, [&](int64_t row, int64_t token, int64_t head) {
            const T* from = query + token * stride + head * shape_.dim;
            float* to = query_.data() + row * shape_.width();
            in_pieces(shape_.dim, [&](int64_t i, int64_t n) { store(to + i, fetch(from + i, n) * rule_.scale); });
        });
    }

    // Attend to positions [begin, end) and update the state of all rows.
    void attend(const Group& group, int64_t begin, int64_t end, State state) {
        for (int64_t tile = begin; tile < end; tile += TILE)
            for (int64_t head = 0; head < group.heads; ++head)
                attend_tile(group, head, tile, std::min(TILE, end - tile), state);
    }

  private:
    // Attend the rows of one key head to one tile of positions.
    void attend_tile(const Group& group, int64_t head, int64_t tile, int64_t count, State state) {
        const auto attend = [&](const Work* work, const Run& run, int64_t row, int64_t there) {
            see(work, run, tile, there, shape_, rule_, seen_.data());
            attend_run(work, run, group.head + head, head * group.rows + row, tile, there, state);
        };
        for_runs(group, tile, count, keys_.tables, shape_, attend);
    }

    // Attend rows `from` and on, those of the run, to `count` positions from `tile` on.
    void attend_run(const Work* work, const Run& run, int64_t head, int64_t from, int64_t tile, int64_t count,
                    State state) {
        const int64_t width = shape_.width(), value_width = shape_.value_width();
        const float *where[TILE], *next[TILE], *query = query_.data() + from * width;
        float *scores = scores_.data(), *out = state.out + from * value_width;
        locate(keys_.keys, shape_.dim, *run.longest, head, tile, count, where);
        const float* const* ahead = look_ahead(keys_.values, run, head, tile, next);
        by_rows<FUSED>(0, run.rows, [&](auto n, int64_t row) {
            dot_rows<n>(query + row * width, where, count, width, ahead, scores + row * TILE, TILE);
        });
        if (rule_.cap > 0.0f) cap_scores(scores, run.rows * TILE, 1.0f, rule_.cap);
        if (rule_.slopes != nullptr) add_biases<TILE>(scores, 1.0f, work, run, head, tile, shape_, rule_.slopes);
        soften<TILE>(scores, 1.0f, scores, seen_.data(), state, from, run.rows, value_width);
        if (!shape_.is_latent()) locate(keys_.values, shape_.dim, *run.longest, head, tile, count, where);
        if (rule_.window != 0) hide(run.rows, count, where);
        ahead = look_ahead(keys_.keys, run, head, tile + TILE, next);
        by_rows<FUSED>(0, run.rows, [&](auto n, int64_t row) {
            const float* weights = scores + row * TILE;
            float* to = out + row * value_width;
            if (run.rows <= FEW_ROWS) add_rows_from_memory<n>(weights, where, count, value_width, ahead, to);
            else add_rows<n>(weights, where, count, value_width, to);
        });
    }

    // Return pointers to a tile of keys (or values) to prefetch, the last position repeated. Returns null where
    // prefetching does not help: after the last tile, for many rows (bound by computing), and where keys are copied
    // first.
    const float* const* look_ahead(const T* cache, const Run& run, int64_t head, int64_t begin,
                                   const float** rows) const {
        if constexpr (std::is_same_v<T, float>) {
            const bool in_place = shape_.dim == shape_.width() && shape_.stored == AS_ROWS;
            const int64_t count = std::min(TILE, run.longest->end() - begin);
            if (in_place && count > 0 && run.rows <= FEW_ROWS) {
                keys_.locate(cache, *run.longest, head, shape_, begin, count, rows);
                std::fill(rows + count, rows + TILE, rows[count - 1]);
                return rows;
            }
        }
        return nullptr;
    }

    // Store pointers to positions begin .. begin + count of the keys (or values) as padded floats of `dim` elements: in
    // place in the cache if possible, else in copies_. The last pointer is repeated up to a multiple of four.
    void locate(const T* cache, int64_t dim, const Work& work, int64_t head, int64_t begin, int64_t count,
                const float** rows) {
        const int64_t width = Shape::padded(dim);
        if (shape_.stored != AS_ROWS) {
            keys_.read(cache, work, head, shape_, begin, count, width, copies_.data());
            for (int64_t t = 0; t < (count + 3) / 4 * 4; ++t) rows[t] = copies_.data() + std::min(t, count - 1) * width;
            return;
        }
        const T* stored[TILE];
        keys_.locate(cache, work, head, shape_, begin, count, stored);
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
        for (int64_t t = count; t % 4; ++t) rows[t] = rows[count - 1];
    }

    // Replace positions that none of the rows sees by zeros, including repeats of the last position.
    void hide(int64_t rows, int64_t count, const float** where) const {
        bool seen[TILE];
        mark_seen(seen_.data(), rows, count, seen);
        for (int64_t t = 0; t < (count + 3) / 4 * 4; ++t)
            if (!seen[std::min(t, count - 1)]) where[t] = zeros_.data();
    }

    const Shape shape_;
    const Keys<T> keys_;
    const Rule rule_;
    std::vector<float> query_, copies_, scores_, zeros_;
    std::vector<Sight> seen_;
};

}  // namespace
