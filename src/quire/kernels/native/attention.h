// Paged attention with online softmax. Keys are processed in pieces of PIECE positions; each piece gets its own softmax
// state, and the states are merged in order, by one thread or several. A row's result does not depend on the group it
// is in.
#pragma once

#include "attention_work.h"

namespace {

// Online softmax state of a group's rows: unnormalized output [rows, width], running maximum and running sum per row.
struct State {
    float* out;
    float* highest;
    float* total;
};

// Reset a state to no keys seen.
inline void begin(State state, int64_t rows, int64_t width) {
    std::fill(state.out, state.out + rows * width, 0.0f);
    std::fill(state.highest, state.highest + rows, -INFINITY);
    std::fill(state.total, state.total + rows, 0.0f);
}

// Soft-cap `count` scores in place, a multiple of LANES, to cap * tanh(score * scale / cap). NaN is preserved, which
// `smaller` would not do.
inline void cap_scores(float* scores, int64_t count, float scale, float cap) {
    const float twice = 2.0f * scale / cap;
    for (int64_t i = 0; i < count; i += LANES) {
        const Floats x = load(scores + i) * twice, most = all(LARGEST_EXPONENT);
        store(scores + i, all(cap) - all(2.0f * cap) / (exponential(x > most ? most : x) + all(1.0f)));
    }
}

// ALiBi: multiply scores [rows, TILE] of a run by `scale` and add slope * (key position - query position). `work` is the
// first work of the run, `head` its kv head, `begin` the first position. Distances are whole numbers, exact in float32.
template <int64_t TILE>
inline void add_biases(float* scores, float scale, const Work* work, const Run& run, int64_t head, int64_t begin,
                       const Shape& shape, const float* slopes) {
    Floats lanes;
    for (int64_t i = 0; i < LANES; ++i) lanes[i] = static_cast<float>(i);
    for (const Work* end = work + run.count; work < end; ++work)
        for (int64_t i = 0; i < work->count; ++i) {
            const int64_t distance = begin - (work->visible + i - 1);
            for (int64_t own = 0; own < shape.group(); ++own, scores += TILE) {
                const Floats slope = all(slopes[head * shape.group() + own]);
                for (int64_t t = 0; t < TILE; t += LANES) {
                    const Floats steps = lanes + all(static_cast<float>(distance + t));
                    store(scores + t, add_product(load(scores + t) * all(scale), slope, steps));
                }
            }
        }
}

// Mask the positions that a row does not see with -inf, and compute each row's running maximum over scores [rows, TILE]
// times `scale`, including the maximum `before`.
template <int64_t TILE>
inline void find_highest(float* scores, float scale, const Sight* seen, const float* before, int64_t rows,
                         float* highest) {
    for (int64_t row = 0; row < rows; ++row, scores += TILE) {
        std::fill(scores, scores + seen[row].first, -INFINITY);
        std::fill(scores + seen[row].end, scores + TILE, -INFINITY);
        Floats most = load(scores);
        for (int64_t t = LANES; t < TILE; t += LANES) most = larger(most, load(scores + t));
        highest[row] = std::max(before[row], largest(most) * scale);
    }
}

// Online softmax step: turn scores [rows, TILE] into weights exp(s * scale - maximum) for rows `from` and on of the
// state. Where a row's maximum grows, its output and sum so far are rescaled. `weights` may alias the scores.
template <int64_t TILE, typename T>
inline void soften(float* scores, float scale, T* weights, const Sight* seen, State state, int64_t from, int64_t rows,
                   int64_t width) {
    constexpr int64_t CHUNK = 32, STEP = std::min<int64_t>(TILE / LANES, 4);
    float highest[CHUNK], shrink[CHUNK];
    for (; rows > 0; rows -= CHUNK, scores += CHUNK * TILE, weights += CHUNK * TILE, seen += CHUNK, from += CHUNK) {
        const int64_t count = std::min(CHUNK, rows);
        find_highest<TILE>(scores, scale, seen, state.highest + from, count, highest);
        in_pieces(count, [&](int64_t i, int64_t n) {
            put(shrink + i, exponential(fetch(state.highest + from + i, n) - fetch(highest + i, n)), n);
        });
        for (int64_t i = 0; i < count; ++i) {
            const float* line = scores + i * TILE;
            T* to = weights + i * TILE;
            const int64_t row = from + i;
            if (highest[i] == -INFINITY) {  // no key seen yet, or only NaN: weights are zero, and NaN goes to the sum
                if (std::any_of(line + seen[i].first, line + seen[i].end, [](float x) { return x != x; }))
                    state.total[row] = NAN;
                std::fill(to, to + TILE, T{});
                continue;
            }
            if (highest[i] > state.highest[row]) {
                state.total[row] *= shrink[i];
                float* out = state.out + row * width;
                for (int64_t j = 0; j < width; j += LANES) store(out + j, load(out + j) * shrink[i]);
                state.highest[row] = highest[i];
            }
            const Floats below = all(-highest[i]);
            Floats total = {};
            for (int64_t t = 0; t < TILE; t += STEP * LANES) {
                Floats some[STEP];
                for (int64_t j = 0; j < STEP; ++j) some[j] = add_product(below, load(line + t + j * LANES), all(scale));
                exponentials<STEP>(some);
                for (int64_t j = 0; j < STEP; ++j) {
                    store(to + t + j * LANES, some[j]);
                    total += some[j];
                }
            }
            state.total[row] += sum(total);
        }
    }
}

// Merge the state of the next piece into `into` (split-KV reduction).
inline void fold(State into, const State& next, int64_t rows, int64_t width) {
    for (int64_t row = 0; row < rows; ++row) {
        if (next.total[row] == 0.0f) continue;  // no key seen; a row with only NaN has no maximum but a NaN sum
        const float highest = std::max(into.highest[row], next.highest[row]);
        const float keep = exponential(all(into.highest[row] - highest))[0];
        const float take = exponential(all(next.highest[row] - highest))[0];
        into.total[row] = into.total[row] * keep + next.total[row] * take;
        into.highest[row] = highest;
        float* to = into.out + row * width;
        const float* from = next.out + row * width;
        for (int64_t i = 0; i < width; i += LANES)
            store(to + i, add_product(load(to + i) * keep, load(from + i), all(take)));
    }
}

// Call each(row, token, query head) for all rows of a group.
template <typename Each> inline void for_rows(const Group& group, const Shape& shape, Each each) {
    int64_t row = 0;
    for (int64_t head = group.head; head < group.head + group.heads; ++head)
        for (const Work* work = group.works; work < group.works + group.count; ++work)
            for (int64_t token = work->token; token < work->token + work->count; ++token)
                for (int64_t own = 0; own < shape.group(); ++own) each(row++, token, head * shape.group() + own);
}

// Return the factor that normalizes a row's output: 1 / sum of weights, including the sink of the head if there is one.
template <typename T> float last_scale(const State& state, int64_t row, const T* sinks, int64_t head) {
    if (sinks == nullptr) return 1.0f / state.total[row];
    const float sink = load_some(sinks + head, 1)[0], highest = std::max(state.highest[row], sink);
    const float keep = exponential(all(state.highest[row] - highest))[0];
    return keep / (state.total[row] * keep + exponential(all(sink - highest))[0]);
}

// Normalize the output of all rows of a group and store it to out [tokens, query heads, value_dim].
template <typename T>
void give_output(const Group& group, const State& state, const Shape& shape, const Rule& rule, T* out) {
    for_rows(group, shape, [&](int64_t row, int64_t token, int64_t head) {
        T* to = out + (token * shape.query_heads + head) * shape.value_dim;
        const float scale = last_scale(state, row, static_cast<const T*>(rule.sinks), head);
        const float* from = state.out + row * shape.value_width();
        in_pieces(shape.value_dim, [&](int64_t i, int64_t n) { put(to + i, load(from + i) * scale, n); });
    });
}

// The keys and values of one layer's paged cache, and the block tables of the sequences.
template <typename T> struct Keys {
    const T *keys, *values;  // raw bytes if the cache is quantized
    const int64_t* tables;
    // Store pointers to `count` positions from `begin` on, one per position, in `cache` (the keys or the values).
    void locate(const T* cache, const Work& work, int64_t head, const Shape& shape, int64_t begin, int64_t count,
                const T** rows) const {
        const int64_t size = shape.block_size, *table = tables + work.table + begin / size;
        for (int64_t t = 0, slot = begin % size; t < count; ++table, slot = 0) {
            const T* row = cache + ((*table * shape.block_heads + head) * size + slot) * shape.dim;
            for (; slot < size && t < count; ++slot, ++t, row += shape.dim) rows[t] = row;
        }
    }
    // Dequantize the same positions of a quantized cache to floats, `width` elements apart, starting at `to`.
    void read(const T* cache, const Work& work, int64_t head, const Shape& shape, int64_t begin, int64_t count,
              int64_t width, float* to) const {
        const HeadFormat format = shape.format();
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(cache);
        const int64_t size = shape.block_size, *table = tables + work.table + begin / size;
        for (int64_t t = 0, slot = begin % size; t < count; ++table, slot = 0) {
            const uint8_t* base = bytes + (*table * shape.block_heads + head) * shape.head_bytes;
            const uint8_t* scales = base + size * format.number_bytes();
            for (; slot < size && t < count; ++slot, ++t)
                read_quantized(base + slot * format.number_bytes(), scales + slot * format.scale_bytes(), format,
                               to + t * width);
        }
    }
};

// Attention of all groups of `cut` over a paged cache, written to out [tokens, query heads, value_dim]. `Method`
// computes one group over one piece of keys (TiledAttention or PlainAttention):
//   Method(shape, keys, rule, rows); take(group, query, stride) copies the queries; attend(group, begin, end, state) fills
//   a fresh state.
template <typename Method, typename T>
void attend_all(const T* query, int64_t stride, Keys<T> keys, const Cut& cut, T* out, Shape shape, Rule rule) {
    const std::vector<Group>& groups = cut.groups();
    const int64_t count = static_cast<int64_t>(groups.size()), block = cut.most_rows();
    const int64_t width = shape.value_width();
    // first: index of each group's first piece; skipped: leading pieces that no row of the group sees
    std::vector<int64_t> first(count + 1), skipped(count);
    for (int64_t i = 0; i < count; ++i) {
        skipped[i] = first_seen(groups[i], rule) / PIECE;
        first[i + 1] = first[i] + groups[i].pieces() - skipped[i];
    }
    // split-KV: with few groups and long keys, pieces of one group go to different threads
    const bool split = count < enough_tasks() && first[count] > count;
    const auto floats = [&](int64_t states) {  // uninitialized: `begin` resets the states
        return std::unique_ptr<float[]>(new float[states * block * (width + 2)]);
    };
    const std::unique_ptr<float[]> partial = floats(split ? first[count] : 0);
    const auto part = [&](float* memory, int64_t piece) {
        float* base = memory + piece * block * (width + 2);
        return State{base, base + block * width, base + block * (width + 1)};
    };
    const auto attend = [&](Method& method, const Group& group, int64_t piece, State state) {
        begin(state, group.all_rows(), width);
        const int64_t seen = first_seen(group, rule) / Method::STEP * Method::STEP;
        method.attend(group, std::max(piece * PIECE, seen), std::min((piece + 1) * PIECE, group.end), state);
    };
    int64_t work = 0;  // query rows times key positions
    for (const Group& group : groups) work += group.all_rows() * group.end;
    const bool is_large = work * width > 65536;
    if (!split) {
        share_out(count, 1, is_large, [&] {
            return [&, method = Method(shape, keys, rule, block), own = floats(2)](int64_t i) mutable {
                const State whole = part(own.get(), 0), next = part(own.get(), 1);
                method.take(groups[i], query, stride);
                attend(method, groups[i], skipped[i], whole);
                for (int64_t piece = skipped[i] + 1; piece < groups[i].pieces(); ++piece) {
                    attend(method, groups[i], piece, next);
                    fold(whole, next, groups[i].all_rows(), width);
                }
                give_output(groups[i], whole, shape, rule, out);
            };
        });
        return;
    }
    share_out(first[count], 1, is_large, [&] {
        return [&, method = Method(shape, keys, rule, block)](int64_t place) mutable {
            const int64_t i = std::upper_bound(first.begin(), first.end(), place) - first.begin() - 1;
            method.take(groups[i], query, stride);
            attend(method, groups[i], place - first[i] + skipped[i], part(partial.get(), place));
        };
    });
    for_each(count, first[count] * block * width > MANY_NUMBERS, [&](int64_t i) {
        const State whole = part(partial.get(), first[i]);
        for (int64_t place = first[i] + 1; place < first[i + 1]; ++place)
            fold(whole, part(partial.get(), place), groups[i].all_rows(), width);
        give_output(groups[i], whole, shape, rule, out);
    });
}

}  // namespace
