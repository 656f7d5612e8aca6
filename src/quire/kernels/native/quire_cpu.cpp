// CPU kernels with a plain C interface: functions on raw memory, no torch headers, no engine types.
// Compiled on the machine that runs them (-march=native); threads are torch's own OpenMP pool.
// A result never depends on what else is in the batch: work is cut by position and sums run in a fixed order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

// ------------------------------------------------------------------------------------ one register at a time
// GCC's vector extension at the width of the machine's registers; wider ones would go through memory.

#if defined(__AVX512F__)
constexpr int64_t LANES = 16;
#elif defined(__AVX__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bf16 {
    uint16_t bits;
};

inline Floats all(float x) { return x - Floats{}; }

inline Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
inline Floats load(const bf16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }
inline void store(bf16* to, Floats value) {  // to nearest, ties to even; a NaN stays a NaN
    const Words bits = (Words)value;
    const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    const Words is_nan = (Words)((bits & 0x7FFFFFFFu) > 0x7F800000u);
    const Halves out = __builtin_convertvector((is_nan & ((bits >> 16) | 0x40u)) | (~is_nan & rounded), Halves);
    std::memcpy(to, &out, sizeof out);
}

template <typename T> inline Floats rounded(Floats value);
template <> inline Floats rounded<float>(Floats value) { return value; }
template <> inline Floats rounded<bf16>(Floats value) {
    bf16 line[LANES];
    store(line, value);
    return load(line);
}

// The first `count` lanes, zeros behind them; and back.
template <typename T> inline Floats load_some(const T* from, int64_t count) {
    T line[LANES] = {};
    std::memcpy(line, from, count * sizeof(T));
    return load(line);
}
template <typename T> inline void store_some(T* to, Floats value, int64_t count) {
    T line[LANES];
    store(line, value);
    std::memcpy(to, line, count * sizeof(T));
}

// body(offset, count) for pieces of a register, the last one shorter if need be.
template <typename Body> inline void in_pieces(int64_t size, Body body) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) body(i, LANES);
    if (i < size) body(i, size - i);
}
template <typename T> inline Floats fetch(const T* from, int64_t count) {
    return count == LANES ? load(from) : load_some(from, count);
}
template <typename T> inline void put(T* to, Floats value, int64_t count) {
    if (count == LANES)
        store(to, value);
    else
        store_some(to, value, count);
}

template <int64_t N, typename V> inline float halve(V x) {  // N numbers, folded in the middle until four are left
    if constexpr (N == 4) {
        return (x[0] + x[2]) + (x[1] + x[3]);
    } else {
        typedef float Half __attribute__((vector_size(2 * N)));
        Half parts[2];
        std::memcpy(parts, &x, sizeof parts);
        return halve<N / 2>(parts[0] + parts[1]);
    }
}
inline float sum(Floats x) { return halve<LANES>(x); }

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// e^x by 2^n * p(f), relative error below 2e-7 for x in [-87, 88]; smaller x give 0, larger ones e^88.
inline Floats exponential(Floats x) {
    const Floats clamped = smaller(larger(x, all(-87.0f)), all(88.0f));
    const Floats magic = all(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
    const Floats n = (clamped * 1.44269504088896341f + magic) - magic;
    Floats f = clamped - n * 0.693359375f;
    f = f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const Floats scale = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
    const Floats zero = {};
    return x < all(-87.0f) ? zero : p * scale;
}

// --------------------------------------------------------------------------------------- row-wise kernels

template <typename T>
void rms_norm(const T* x, int64_t stride, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 32768)
    for (int64_t row = 0; row < rows; ++row) {
        const T* in = x + row * stride;
        T* to = out + row * size;
        Floats squares = {};
        in_pieces(size, [&](int64_t i, int64_t count) {
            const Floats value = fetch(in + i, count);
            squares += value * value;
        });
        const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(size) + eps);
        in_pieces(size, [&](int64_t i, int64_t count) {
            put(to + i, rounded<T>(fetch(in + i, count) * scale) * fetch(weight + i, count), count);
        });
    }
}

// heads [rows, heads, dim] turned in place; cos and sin [rows, dim], the first half of sin carrying the minus sign.
template <typename T>
void rotate(T* x, int64_t stride, const T* cos, const T* sin, int64_t angle_stride, int64_t rows, int64_t heads,
            int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 65536)
    for (int64_t row = 0; row < rows; ++row) {
        const T* c = cos + row * angle_stride;
        const T* s = sin + row * angle_stride;
        for (int64_t head = 0; head < heads; ++head) {
            T* first = x + row * stride + head * dim;
            T* second = first + half;
            in_pieces(half, [&](int64_t i, int64_t count) {
                const Floats a = fetch(first + i, count), b = fetch(second + i, count);
                put(first + i, a * fetch(c + i, count) + b * fetch(s + i, count), count);
                put(second + i, b * fetch(c + half + i, count) + a * fetch(s + half + i, count), count);
            });
        }
    }
}

// gate_up [rows, 2 * size] -> silu(gate) * up [rows, size]
template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* to = out + row * size;
        in_pieces(size, [&](int64_t i, int64_t count) {
            const Floats g = fetch(gate + i, count);
            put(to + i, rounded<T>(g / (1.0f + exponential(-g))) * fetch(up + i, count), count);
        });
    }
}

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

// Keys and values [rows, heads, dim] to slots [rows, heads] of a cache seen as [slots, dim].
template <typename T>
void write_cache(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* key_cache, T* value_cache,
                 const int64_t* slots, int64_t rows, int64_t heads, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > 65536)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t to = slots[row * heads + head] * dim;
            std::memcpy(key_cache + to, key + row * key_stride + head * dim, dim * sizeof(T));
            std::memcpy(value_cache + to, value + row * value_stride + head * dim, dim * sizeof(T));
        }
}

// ---------------------------------------------------------------------------------------- paged attention
// A span is a run of tokens of one sequence: a decode row (one token) or a prompt chunk. Its i-th token sees the
// first `visible + i` keys. Tokens of a span are taken in blocks; a block's rows are its tokens x the heads that
// share a key head. Keys are read in pieces of PIECE positions, each summed by itself and then folded in order,
// whether by one thread or by several.

constexpr int64_t PIECE = 256;       // positions per partial result
constexpr int64_t TILE = 32;         // positions whose scores are held at a time; a multiple of LANES
constexpr int64_t BLOCK_ROWS = 16;   // query rows that share one reading of the keys
constexpr int64_t FUSED = 4;         // query rows per inner loop: their sums stay in registers

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

struct Buffers {
    std::vector<float> query, keys, values, scores, out, highest, total;
    explicit Buffers(const Shape& shape)
        : query(rows(shape) * shape.width()), keys(TILE * shape.width()), values(TILE * shape.width()),
          scores(rows(shape) * TILE), out(2 * rows(shape) * shape.width()), highest(2 * rows(shape)),
          total(2 * rows(shape)) {}
    static int64_t rows(const Shape& shape) { return shape.block_tokens() * shape.group(); }
    State state(int64_t which, const Shape& shape) {
        const int64_t n = rows(shape);
        return {out.data() + which * n * shape.width(), highest.data() + which * n, total.data() + which * n};
    }
};

// Where the keys (or values) of positions begin .. begin + count lie as padded floats: in the cache, or copied.
template <typename T>
void locate(const T* cache, const int64_t* table, int64_t head, const Shape& shape, int64_t begin, int64_t count,
            float* copies, const float** rows) {
    const int64_t dim = shape.dim, size = shape.block_size, width = shape.width();
    for (int64_t t = 0; t < count; ++t) {
        const int64_t position = begin + t;
        const T* from = cache + ((table[position / size] * shape.kv_heads + head) * size + position % size) * dim;
        if constexpr (std::is_same_v<T, float>) {
            if (dim == width) {
                rows[t] = from;
                continue;
            }
        }
        float* to = copies + t * width;
        in_pieces(dim, [&](int64_t i, int64_t n) { store(to + i, fetch(from + i, n)); });
        rows[t] = to;
    }
}

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

// Scores of one row to weights e^(s - highest); what the row has so far shrinks when the maximum grows.
inline void soften(float* scores, int64_t seen, State state, int64_t row, int64_t width) {
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

// One piece of the keys for one block of queries, into a fresh state.
template <typename T>
void attend_piece(const Work& work, int64_t begin, int64_t end, const T* keys, const T* values, const int64_t* tables,
                  const Shape& shape, Buffers& buffers, State state) {
    const int64_t group = shape.group(), rows = work.count * group, width = shape.width();
    const int64_t* table = tables + work.table;
    std::fill(state.out, state.out + rows * width, 0.0f);
    std::fill(state.highest, state.highest + rows, -INFINITY);
    std::fill(state.total, state.total + rows, 0.0f);
    const float* where[TILE];
    for (int64_t tile = begin; tile < end; tile += TILE) {
        const int64_t count = std::min(TILE, end - tile);
        locate(keys, table, work.head, shape, tile, count, buffers.keys.data(), where);
        BY_FUSED(rows, dot_rows<N>(buffers.query.data() + row * width, where, count, width,
                                   buffers.scores.data() + row * TILE))
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t seen = std::clamp<int64_t>(work.visible + row / group - tile, 0, count);
            soften(buffers.scores.data() + row * TILE, seen, state, row, width);
        }
        locate(values, table, work.head, shape, tile, count, buffers.values.data(), where);
        BY_FUSED(rows, add_rows<N>(buffers.scores.data() + row * TILE, where, count, width, state.out + row * width))
    }
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
void take_query(const Work& work, const T* query, int64_t stride, float scale, const Shape& shape, float* to) {
    const int64_t group = shape.group(), width = shape.width();
    std::fill(to, to + work.count * group * width, 0.0f);
    for (int64_t row = 0; row < work.count * group; ++row) {
        const T* from = query + (work.token + row / group) * stride + (work.head * group + row % group) * shape.dim;
        in_pieces(shape.dim, [&](int64_t i, int64_t n) { store(to + row * width + i, fetch(from + i, n) * scale); });
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

template <typename T>
void paged_attention(const T* query, int64_t stride, const T* keys, const T* values, const int64_t* tables,
                     const Span* spans, int64_t num_spans, T* out, Shape shape, float scale) {
    std::vector<Work> works;
    for (int64_t i = 0; i < num_spans; ++i)
        for (int64_t done = 0; done < spans[i].count; done += shape.block_tokens())
            for (int64_t head = 0; head < shape.kv_heads; ++head)
                works.push_back({spans[i].token + done, std::min(shape.block_tokens(), spans[i].count - done),
                                 spans[i].visible + done, spans[i].table, head});
    const int64_t count = static_cast<int64_t>(works.size());
    const int64_t block = Buffers::rows(shape), width = shape.width();
    std::vector<int64_t> first(count + 1);
    for (int64_t i = 0; i < count; ++i) first[i + 1] = first[i] + works[i].pieces();
    const bool split = count < 16 && first[count] > count;  // few blocks, long keys: pieces go to different threads
    std::vector<float> partial(split ? first[count] * block * (width + 2) : 0);
    const auto part = [&](int64_t piece) {
        float* base = partial.data() + piece * block * (width + 2);
        return State{base, base + block * width, base + block * (width + 1)};
    };
#pragma omp parallel
    {
        Buffers buffers(shape);
        const auto attend = [&](const Work& work, int64_t piece, State state) {
            const int64_t seen = work.visible + work.count - 1;
            attend_piece(work, piece * PIECE, std::min((piece + 1) * PIECE, seen), keys, values, tables, shape, buffers,
                         state);
        };
        if (split) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t place = 0; place < first[count]; ++place) {
                const int64_t i = std::upper_bound(first.begin(), first.end(), place) - first.begin() - 1;
                take_query(works[i], query, stride, scale, shape, buffers.query.data());
                attend(works[i], place - first[i], part(place));
            }
#pragma omp for schedule(static)
            for (int64_t i = 0; i < count; ++i) {
                for (int64_t place = first[i] + 1; place < first[i + 1]; ++place)
                    fold(part(first[i]), part(place), works[i].count * shape.group(), width);
                give_output(works[i], part(first[i]), shape, out);
            }
        } else {
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < count; ++i) {
                take_query(works[i], query, stride, scale, shape, buffers.query.data());
                attend(works[i], 0, buffers.state(0, shape));
                for (int64_t piece = 1; piece < works[i].pieces(); ++piece) {
                    attend(works[i], piece, buffers.state(1, shape));
                    fold(buffers.state(0, shape), buffers.state(1, shape), works[i].count * shape.group(), width);
                }
                give_output(works[i], buffers.state(0, shape), shape, out);
            }
        }
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------- C interface
// `type`: 0 float32, 1 bfloat16. All pointers are to memory of that type unless said otherwise.

#define DISPATCH(type, CALL)   \
    if ((type) == 0) {         \
        using T = float;       \
        CALL;                  \
    } else {                   \
        using T = bf16;        \
        CALL;                  \
    }

#ifndef QUIRE_SOURCE
#define QUIRE_SOURCE "unknown"
#endif

extern "C" {

// A digest of this file, given by the build: tells a library that was built from other sources.
const char* quire_source() { return QUIRE_SOURCE; }

// The instruction sets this file was compiled for, by their /proc/cpuinfo names: a CPU without one must not run it.
const char* quire_isa() {
    return ""
#ifdef __AVX2__
           "avx2 fma "
#endif
#ifdef __AVX512F__
           "avx512f "
#endif
#ifdef __AVX512BW__
           "avx512bw avx512dq avx512vl "
#endif
#ifdef __AVX512BF16__
           "avx512_bf16 "
#endif
#ifdef __ARM_NEON
           "asimd "
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
           "asimdhp "
#endif
#ifdef __ARM_FEATURE_SVE
           "sve "
#endif
#ifdef __ARM_FEATURE_BF16
           "bf16 "
#endif
        ;
}

void quire_rms_norm(int64_t type, const void* x, int64_t x_stride, const void* weight, void* out, int64_t rows,
                    int64_t size, double eps) {
    DISPATCH(type, rms_norm<T>(static_cast<const T*>(x), x_stride, static_cast<const T*>(weight), static_cast<T*>(out),
                               rows, size, static_cast<float>(eps)))
}

void quire_rotate(int64_t type, void* x, int64_t stride, const void* cos, const void* sin, int64_t angle_stride,
                  int64_t rows, int64_t heads, int64_t dim) {
    DISPATCH(type, rotate<T>(static_cast<T*>(x), stride, static_cast<const T*>(cos), static_cast<const T*>(sin),
                             angle_stride, rows, heads, dim))
}

// All float32.
void quire_vector_product(const float* x, const float* weight, float* out, int64_t inputs, int64_t outputs) {
    vector_product(x, weight, out, inputs, outputs);
}

void quire_silu_mul(int64_t type, const void* gate_up, void* out, int64_t rows, int64_t size) {
    DISPATCH(type, silu_mul<T>(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, size))
}

void quire_write_cache(int64_t type, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                       void* key_cache, void* value_cache, const int64_t* slots, int64_t rows, int64_t heads,
                       int64_t dim) {
    DISPATCH(type, write_cache<T>(static_cast<const T*>(key), key_stride, static_cast<const T*>(value), value_stride,
                                  static_cast<T*>(key_cache), static_cast<T*>(value_cache), slots, rows, heads, dim))
}

// spans: [num_spans, 4] of int64, see Span; tables: all block tables, one behind the other; out [tokens, heads * dim].
void quire_paged_attention(int64_t type, const void* query, int64_t query_stride, const void* keys, const void* values,
                           const int64_t* tables, const int64_t* spans, int64_t num_spans, void* out,
                           int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t block_size, double scale) {
    const Shape shape{query_heads, kv_heads, dim, block_size};
    DISPATCH(type, paged_attention<T>(static_cast<const T*>(query), query_stride, static_cast<const T*>(keys),
                                      static_cast<const T*>(values), tables, reinterpret_cast<const Span*>(spans),
                                      num_spans, static_cast<T*>(out), shape, static_cast<float>(scale)))
}
}
