// Paged attention. A span is a run of tokens of one sequence: a decode row (one token) or a prompt chunk. Its i-th
// token sees the first `visible + i` keys. Tokens of a span are taken in blocks; a block's rows are its tokens x the
// heads that share a key head. Keys are read in pieces of PIECE positions, each summed by itself and then folded in
// order, whether by one thread or by several.
#pragma once

#include "simd.h"

namespace {

constexpr int64_t PIECE = 256;       // positions per partial result
constexpr int64_t BLOCK_ROWS = 16;   // query rows that share one reading of the keys

struct Shape {
    int64_t query_heads, kv_heads, dim, block_size;
    int64_t group() const { return query_heads / kv_heads; }
    int64_t width() const { return (dim + LANES - 1) / LANES * LANES; }  // dim, padded with zeros
    int64_t block_tokens() const { return std::max<int64_t>(1, BLOCK_ROWS / group()); }
};

struct Span {
    int64_t token, count, visible, table;  // first batch token, tokens, keys the first one sees, offset of its table
};

struct Work {
    int64_t token, count, visible, table, head;
    int64_t pieces() const { return (visible + count - 1 + PIECE - 1) / PIECE; }
};

// Softmax state of a block: unnormalised output [rows, width], running maximum and sum per row.
struct State {
    float* out;
    float* highest;
    float* total;
};

inline void begin(State state, int64_t rows, int64_t width) {
    std::fill(state.out, state.out + rows * width, 0.0f);
    std::fill(state.highest, state.highest + rows, -INFINITY);
    std::fill(state.total, state.total + rows, 0.0f);
}

// Scores of one row to weights e^(s - highest); what the row has so far shrinks when the maximum grows.
template <int64_t TILE> inline void soften(float* scores, int64_t seen, State state, int64_t row, int64_t width) {
    for (int64_t t = seen; t < TILE; ++t) scores[t] = -INFINITY;
    Floats most = load(scores);
    for (int64_t t = LANES; t < TILE; t += LANES) most = larger(most, load(scores + t));
    float highest = state.highest[row];
    for (int64_t i = 0; i < LANES; ++i) highest = std::max(highest, most[i]);
    if (highest == -INFINITY) {  // nothing seen yet: no weight at all
        std::fill(scores, scores + TILE, 0.0f);
        return;
    }
    if (highest > state.highest[row]) {
        const float shrink = exponential(all(state.highest[row] - highest))[0];
        state.total[row] *= shrink;
        float* out = state.out + row * width;
        for (int64_t i = 0; i < width; i += LANES) store(out + i, load(out + i) * shrink);
        state.highest[row] = highest;
    }
    Floats total = {};
    for (int64_t t = 0; t < TILE; t += LANES) {
        const Floats weights = exponential(load(scores + t) - highest);
        store(scores + t, weights);
        total += weights;
    }
    state.total[row] += sum(total);
}

// Fold the state of the next piece into the one before it.
inline void fold(State into, const State& next, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        if (next.highest[row] == -INFINITY) continue;
        const float highest = std::max(into.highest[row], next.highest[row]);
        const float keep = exponential(all(into.highest[row] - highest))[0];
        const float take = exponential(all(next.highest[row] - highest))[0];
        into.total[row] = into.total[row] * keep + next.total[row] * take;
        into.highest[row] = highest;
        float* to = into.out + row * width;
        const float* from = next.out + row * width;
        for (int64_t i = 0; i < width; i += LANES) store(to + i, load(to + i) * keep + load(from + i) * take);
    }
}

template <typename T>
void give_output(const Work& work, const State& state, const Shape& shape, T* out) {
    const int64_t group = shape.group(), width = shape.width();
    for (int64_t row = 0; row < work.count * group; ++row) {
        T* to = out + ((work.token + row / group) * shape.query_heads + work.head * group + row % group) * shape.dim;
        const float scale = 1.0f / state.total[row];
        const float* from = state.out + row * width;
        in_pieces(shape.dim, [&](int64_t i, int64_t n) { put(to + i, load(from + i) * scale, n); });
    }
}

// What the queries look at: one layer's cache, and where each sequence's blocks are.
template <typename T> struct Keys {
    const T *keys, *values;
    const int64_t* tables;
    // Where each of `count` positions from `begin` lies in `cache` (the keys or the values).
    void locate(const T* cache, const Work& work, const Shape& shape, int64_t begin, int64_t count,
                const T** rows) const {
        const int64_t size = shape.block_size, *table = tables + work.table + begin / size;
        for (int64_t t = 0, slot = begin % size; t < count; ++table, slot = 0) {
            const T* row = cache + ((*table * shape.kv_heads + work.head) * size + slot) * shape.dim;
            for (; slot < size && t < count; ++slot, ++t, row += shape.dim) rows[t] = row;
        }
    }
};

inline std::vector<Work> cut(const Span* spans, int64_t num_spans, const Shape& shape) {
    std::vector<Work> works;
    for (int64_t i = 0; i < num_spans; ++i)
        for (int64_t done = 0; done < spans[i].count; done += shape.block_tokens())
            for (int64_t head = 0; head < shape.kv_heads; ++head)
                works.push_back({spans[i].token + done, std::min(shape.block_tokens(), spans[i].count - done),
                                 spans[i].visible + done, spans[i].table, head});
    return works;
}

// Method: how one block of queries looks at one piece of the keys.
//   Method(shape, keys, scale); take(work, query, stride); attend(work, begin, end, state), which fills a fresh state.
template <typename Method, typename T>
void attend_all(const T* query, int64_t stride, Keys<T> keys, const std::vector<Work>& works, T* out, Shape shape,
                float scale) {
    const int64_t count = static_cast<int64_t>(works.size());
    const int64_t block = shape.block_tokens() * shape.group(), width = shape.width();
    std::vector<int64_t> first(count + 1);
    for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + works[i].pieces();
    const bool split = count < 16 && first[count] > count;  // few blocks, long keys: pieces go to different threads
    std::vector<float> partial(split ? first[count] * block * (width + 2) : 0);
    const auto part = [&](float* memory, int64_t piece) {
        float* base = memory + piece * block * (width + 2);
        return State{base, base + block * width, base + block * (width + 1)};
    };
#pragma omp parallel
    {
        Method method(shape, keys, scale);
        std::vector<float> own(2 * block * (width + 2));
        const auto attend = [&](const Work& work, int64_t piece, State state) {
            begin(state, work.count * shape.group(), width);
            method.attend(work, piece * PIECE, std::min((piece + 1) * PIECE, work.visible + work.count - 1), state);
        };
        if (split) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t place = 0; place < first[count]; ++place) {
                const int64_t i = std::upper_bound(first.begin(), first.end(), place) - first.begin() - 1;
                method.take(works[i], query, stride);
                attend(works[i], place - first[i], part(partial.data(), place));
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; ++i) {
                const State whole = part(partial.data(), first[i]);
                for (int64_t place = first[i] + 1; place < first[i + 1]; ++place)
                    fold(whole, part(partial.data(), place), works[i].count * shape.group(), width);
                give_output(works[i], whole, shape, out);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; ++i) {
                const State whole = part(own.data(), 0), next = part(own.data(), 1);
                method.take(works[i], query, stride);
                attend(works[i], 0, whole);
                for (int64_t piece = 1; piece < works[i].pieces(); ++piece) {
                    attend(works[i], piece, next);
                    fold(whole, next, works[i].count * shape.group(), width);
                }
                give_output(works[i], whole, shape, out);
            }
        }
    }
}

}  // namespace
