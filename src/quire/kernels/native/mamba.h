// Mamba-2, see kernels/mamba.py. Each head of a run is computed token by token, so the result does not depend on how a
// prompt is cut into chunks.
#pragma once

#include "recurrent.h"

namespace {

// The parameters of a Mamba-2 layer. Rows of inputs hold gates [size], x, B and C before the convolution, and the paces
// [heads].
struct PackedMamba {
    int64_t groups, heads, key_dim, value_dim;
    int64_t normed;      // elements of an output that are normed together; 0: no norm
    int64_t norm_first;  // norm before the gate
    const float *rate, *bias, *skip, *norm;  // [heads] three times, [size]
    double eps;

    int64_t size() const { return heads * value_dim; }
    int64_t channels() const { return 2 * groups * key_dim + size(); }
    int64_t matrix() const { return key_dim * value_dim; }
};

// x [size] in float32: x itself, or a copy in `room`.
inline const float* widened(const float* x, int64_t, std::vector<float>&) { return x; }
inline const float* widened(const bf16* x, int64_t size, std::vector<float>& room) {
    room.resize(size);
    in_pieces(size, [&](int64_t i, int64_t n) { put(&room[i], fetch(x + i, n), n); });
    return room.data();
}

// One token and one head: reads the state matrix [key_dim, value_dim] at `from`, writes the updated one to `to` (may be
// the same), and computes the token's output.
struct ScanStep {
    const float *key, *query;  // B and C
    float decay, step, skip;
    int64_t key_dim, value_dim;

    // N vector registers of columns of the state matrix. The output is summed over even and odd rows apart, which
    // doubles the sums that are in flight.
    template <int N, typename T>
    void columns(const T* x, const float* from, float* to, int64_t count, float* read) const {
        Floats value[N], sums[2][N] = {};
        const auto width = [&](int) { return N == 1 ? count : LANES; };
        for (int i = 0; i < N; ++i) value[i] = fetch(x + i * LANES, width(i)) * step;
        const auto row = [&](int64_t k, Floats (&into)[N]) {
            for (int i = 0; i < N; ++i) {
                const int64_t at = k * value_dim + i * LANES;
                const Floats line = add_product(fetch(from + at, width(i)) * decay, value[i], all(key[k]));
                put(to + at, line, width(i));
                into[i] = add_product(into[i], line, all(query[k]));
            }
        };
        int64_t k = 0;
        for (; k + 2 <= key_dim; k += 2) {
            row(k, sums[0]);
            row(k + 1, sums[1]);
        }
        if (k < key_dim) row(k, sums[0]);
        for (int i = 0; i < N; ++i)
            put(read + i * LANES, add_product(sums[0][i] + sums[1][i], fetch(x + i * LANES, width(i)), all(skip)),
                width(i));
    }

    // All columns: updates the state and stores the output `read` [value_dim].
    template <typename T> void go(const T* x, const float* from, float* to, float* read) const {
        int64_t i = 0;
        for (; i + 4 * LANES <= value_dim; i += 4 * LANES) columns<4>(x + i, from + i, to + i, LANES, read + i);
        for (; i + 2 * LANES <= value_dim; i += 2 * LANES) columns<2>(x + i, from + i, to + i, LANES, read + i);
        for (; i < value_dim; i += LANES)
            columns<1>(x + i, from + i, to + i, std::min(LANES, value_dim - i), read + i);
    }
};

// Scan one head over one run: mixed [tokens, channels] and paces whose rows are `stride` apart -> read [tokens, size].
template <typename T>
void scan_run(const T* mixed, const T* pace, int64_t stride, const PackedMamba& mamba, const StateMemory& memory,
              int64_t run, int64_t head, float* read) {
    const int64_t size = mamba.size(), key_dim = mamba.key_dim, group = head / (mamba.heads / mamba.groups);
    std::vector<float> key, query;
    const auto [begin, end] = memory.runs[run];
    const float* from = nullptr;
    for (int64_t each = begin; each < end; ++each) {
        const StateSegment& segment = memory.segments[each];
        float* to = memory.at(segment.written) + head * mamba.matrix();
        if (segment.read >= 0) {
            from = memory.at(segment.read) + head * mamba.matrix();
        } else if (from == nullptr) {
            std::fill(to, to + mamba.matrix(), 0.0f);
            from = to;
        }
        for (int64_t token = segment.first; token < segment.first + segment.count; ++token) {
            const T *line = mixed + token * mamba.channels(), *keys = line + size + group * key_dim;
            const float step = softplus(fetch(pace + token * stride + head, 1)[0] + mamba.bias[head]);
            const ScanStep scan{widened(keys, key_dim, key), widened(keys + mamba.groups * key_dim, key_dim, query),
                                std::exp(step * mamba.rate[head]), step, mamba.skip[head], key_dim, mamba.value_dim};
            scan.go(line + head * mamba.value_dim, from, to, read + token * size + head * mamba.value_dim);
            from = to;
        }
    }
}

// out [size] = read * silu(z) * norm weight, normed in groups before or after the gate. Overwrites `read`.
template <typename T> void gate_and_norm(float* read, const T* z, const PackedMamba& mamba, T* out) {
    const int64_t size = mamba.size(), normed = mamba.normed > 0 ? mamba.normed : size;
    for (int64_t begin = 0; begin < size; begin += normed) {
        Floats squares = {};
        in_pieces(normed, [&](int64_t i, int64_t n) {
            const Floats gate = mamba.norm_first ? all(1.0f) : activated<SILU>(fetch(z + begin + i, n));
            const Floats value = fetch(read + begin + i, n) * gate;
            squares = add_product(squares, value, value);
            put(read + begin + i, value, n);
        });
        const float mean = sum(squares) / static_cast<float>(normed);
        const float scale = mamba.normed > 0 ? 1.0f / std::sqrt(mean + static_cast<float>(mamba.eps)) : 1.0f;
        in_pieces(normed, [&](int64_t i, int64_t n) {
            const Floats gate = mamba.norm_first ? activated<SILU>(fetch(z + begin + i, n)) : all(1.0f);
            put(out + begin + i, fetch(read + begin + i, n) * scale * gate * fetch(mamba.norm + begin + i, n), n);
        });
    }
}

// Mamba-2 for all runs and heads, in parallel: mixed [tokens, channels] is the convolution of inputs [rows, .. `stride`]
// -> out [rows, size].
template <typename T>
void mamba_scan(const T* mixed, const T* inputs, int64_t stride, const PackedMamba& mamba, const StateMemory& memory,
                int64_t rows, T* out) {
    const int64_t size = mamba.size(), count = memory.runs.size() * mamba.heads;
    const std::unique_ptr<float[]> read(new float[rows * size]);
    const T* pace = inputs + size + mamba.channels();
    for_each(count, count > 1, [&](int64_t i) {
        scan_run(mixed, pace, stride, mamba, memory, i / mamba.heads, i % mamba.heads, read.get());
    });
    for_each(rows, rows * size > 16384, [&](int64_t row) {
        gate_and_norm(&read[row * size], inputs + row * stride, mamba, out + row * size);
    });
}

}  // namespace
