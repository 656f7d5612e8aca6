// Mamba layers (the first Mamba), see kernels/selective.py. Each channel of a run is computed token by token, so the
// result does not depend on how a prompt is cut into chunks. Registers hold one element of the states of LANES
// channels: a state [channels, state size] is transposed when a run begins, and back when a segment ends.
#pragma once

#include "recurrent.h"

namespace {

constexpr int64_t MOST_STATE_SIZE = 256;

// The parameters of a Mamba layer.
struct PackedSelective {
    int64_t channels, state_size;
    int64_t keys, gates;               // buffers whose rows end with B and C, and with the gates
    const float *rate, *bias, *skip;  // [channels, state size], [channels], [channels]
};

// Rows of inputs, `stride` elements apart.
template <typename T> struct Rows {
    const T* first;
    int64_t stride;

    const T* at(int64_t row) const { return first + row * stride; }
};

// Exchange the lanes of `a` whose index has the bit WIDTH with the lanes of `b` that lack it.
#if defined(__clang__) || __GNUC__ >= 12
template <int WIDTH, int... I> void exchange(Floats& a, Floats& b, std::integer_sequence<int, I...>) {
    constexpr int LAST = static_cast<int>(LANES);
    const Floats old = a;
    a = __builtin_shufflevector(old, b, (I & WIDTH ? LAST + I - WIDTH : I)...);
    b = __builtin_shufflevector(old, b, (I & WIDTH ? LAST + I : I + WIDTH)...);
}
#else
template <int WIDTH, int... I> void exchange(Floats& a, Floats& b, std::integer_sequence<int, I...>) {
    constexpr int LAST = static_cast<int>(LANES);
    const Floats old = a;
    a = __builtin_shuffle(old, b, Ints{(I & WIDTH ? LAST + I - WIDTH : I)...});
    b = __builtin_shuffle(old, b, Ints{(I & WIDTH ? LAST + I : I + WIDTH)...});
}
#endif

// Transpose a matrix [LANES, LANES].
template <int WIDTH = LANES / 2> inline void transpose(Floats (&rows)[LANES]) {
    for (int64_t i = 0; i < LANES; ++i)
        if ((i & WIDTH) == 0) exchange<WIDTH>(rows[i], rows[i + WIDTH], std::make_integer_sequence<int, LANES>{});
    if constexpr (WIDTH > 1) transpose<WIDTH / 2>(rows);
}

// Transpose x [count, size] into lines [size], and back; count is at most LANES.
inline void load_transposed(const float* x, int64_t count, int64_t size, Floats* lines) {
    in_pieces(size, [&](int64_t begin, int64_t width) {
        Floats rows[LANES] = {};
        for (int64_t i = 0; i < count; ++i) rows[i] = fetch(x + i * size + begin, width);
        transpose(rows);
        std::copy(rows, rows + width, lines + begin);
    });
}
inline void store_transposed(const Floats* lines, int64_t count, int64_t size, float* x) {
    in_pieces(size, [&](int64_t begin, int64_t width) {
        Floats rows[LANES] = {};
        std::copy(lines + begin, lines + begin + width, rows);
        transpose(rows);
        for (int64_t i = 0; i < count; ++i) put(x + i * size + begin, rows[i], width);
    });
}

// log(1 + exp(x)), relative error below 4e-7: max(x, 0) + log1p(u) with u = exp(-|x|), by the series of atanh at
// u / (2 + u), whose coefficients were fitted to squares of 0 to 1/9.
inline Floats softplus(Floats x) {
    constexpr float SERIES[] = {0.28174657f, 0.27961418f, 0.40024853f, 0.66666317f, 2.0f};
    const Floats u = exponential(smaller(x, -x)), part = u / (u + 2.0f), square = part * part;
    Floats series = all(SERIES[0]);
    for (int i = 1; i < 5; ++i) series = add_product(all(SERIES[i]), series, square);
    return add_product(larger(x, Floats{}), part, series);
}

// The states of LANES channels.
struct SelectiveStates {
    Floats lines[MOST_STATE_SIZE], rates[MOST_STATE_SIZE];

    // Update N elements from `n` on by one token, and add them, times C, to the sums.
    template <int N>
    void update(int64_t n, Floats step, Floats change, const float* key, const float* query, Floats* sums) {
        Floats decays[N];
        for (int i = 0; i < N; ++i) decays[i] = step * rates[n + i];
        exponentials<N>(decays);
        for (int i = 0; i < N; ++i) {
            const Floats line = add_product(lines[n + i] * decays[i], change, all(key[n + i]));
            lines[n + i] = line;
            sums[i] = add_product(sums[i], line, all(query[n + i]));
        }
    }

    // Update all elements by one token with B `key` and C `query`. Returns their products with C.
    Floats update_all(int64_t size, Floats step, Floats change, const float* key, const float* query) {
        Floats sums[4] = {};
        int64_t n = 0;
        for (; n + 4 <= size; n += 4) update<4>(n, step, change, key, query, sums);
        for (; n < size; ++n) update<1>(n, step, change, key, query, sums);
        return (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
};

// Scan `count` channels of one run, from `channel` on -> out [tokens, channels]. keys: B, then C of each token.
template <typename T>
void scan_channels(const T* mixed, const T* pace, const Rows<float>& keys, const Rows<T>& gates,
                   const PackedSelective& layer, const StateMemory& memory, int64_t run, int64_t channel, int64_t count,
                   T* out) {
    const int64_t channels = layer.channels, size = layer.state_size, at = channel * size;
    const Floats bias = fetch(layer.bias + channel, count), skip = fetch(layer.skip + channel, count);
    SelectiveStates states;
    load_transposed(layer.rate + at, count, size, states.rates);
    const auto [begin, end] = memory.runs[run];
    const int64_t read = memory.segments[begin].read;
    if (read >= 0) load_transposed(memory.at(read) + at, count, size, states.lines);
    else std::fill(states.lines, states.lines + size, Floats{});
    for (int64_t each = begin; each < end; ++each) {
        const StateSegment& segment = memory.segments[each];
        for (int64_t token = segment.first; token < segment.first + segment.count; ++token) {
            const int64_t place = token * channels + channel;
            const Floats x = fetch(mixed + place, count), step = softplus(fetch(pace + place, count) + bias);
            const float* key = keys.at(token);
            const Floats sum = states.update_all(size, step, x * step, key, key + size);
            const Floats gate = activated<SILU>(fetch(gates.at(token) + channel, count));
            put(out + place, add_product(sum, x, skip) * gate, count);
        }
        store_transposed(states.lines, count, size, memory.at(segment.written) + at);
    }
}

// Rows of the last `size` columns of x [rows, stride] in float32: of x itself, or of a copy in `room`.
inline Rows<float> widened_rows(const float* x, int64_t stride, int64_t, int64_t size, std::vector<float>&) {
    return {x + stride - size, stride};
}
inline Rows<float> widened_rows(const bf16* x, int64_t stride, int64_t rows, int64_t size, std::vector<float>& room) {
    room.resize(rows * size);
    for (int64_t row = 0; row < rows; ++row)
        in_pieces(size, [&](int64_t i, int64_t n) {
            put(&room[row * size + i], fetch(x + (row + 1) * stride - size + i, n), n);
        });
    return {room.data(), size};
}

// A Mamba layer for all runs and channels, in parallel: mixed (inputs after the convolution) and pace [rows, channels];
// `low` and `both` hold rows that end with B and C, and with gates -> out [rows, channels].
template <typename T>
void selective_scan(const T* mixed, const T* pace, const Rows<T>& low, const Rows<T>& both,
                    const PackedSelective& layer, const StateMemory& memory, int64_t rows, T* out) {
    std::vector<float> room;
    const Rows<float> keys = widened_rows(low.first, low.stride, rows, 2 * layer.state_size, room);
    const Rows<T> gates{both.first + both.stride - layer.channels, both.stride};
    const int64_t pieces = (layer.channels + LANES - 1) / LANES, count = memory.runs.size() * pieces;
    for_each(count, count > 8, [&](int64_t i) {
        const int64_t channel = i % pieces * LANES, size = std::min(LANES, layer.channels - channel);
        scan_channels(mixed, pace, keys, gates, layer, memory, i / pieces, channel, size, out);
    });
}

}  // namespace
