// What all recurrent layers share, see kernels/recurrent.py: the states and segments of a step, and the causal convolution.
#pragma once

#include "rowwise.h"

namespace {

constexpr int64_t NO_STATE = -1, SAME_RUN = -2;
constexpr int64_t MOST_WIDTH = 8;  // limit of the convolution width

// A segment of a step: tokens, the state to read and the state to write.
struct StateSegment {
    int64_t first, count;
    int64_t read, written;  // slots, or one of the constants above
};

// The states of one layer and the segments of a step, grouped into runs.
struct StateMemory {
    float* states;
    int64_t stride;  // elements from one slot to the next
    const StateSegment* segments;
    std::vector<std::pair<int64_t, int64_t>> runs;  // first segment and end of each run

    StateMemory(float* states, int64_t stride, const StateSegment* segments, int64_t count)
        : states(states), stride(stride), segments(segments) {
        for (int64_t i = 0; i < count; ++i) {
            if (segments[i].written < 0) continue;
            if (segments[i].read == SAME_RUN) runs.back().second = i + 1;
            else runs.emplace_back(i, i + 1);
        }
    }

    float* at(int64_t slot) const { return states + slot * stride; }
};

// A causal convolution over `width` tokens.
struct PackedConvolution {
    int64_t channels, width;
    int64_t tail;   // where a state keeps the last inputs [width - 1, channels]
    int64_t gated;  // rows hold a gate of the inputs, a gate of the outputs, and the inputs; no silu
    const float *weight, *bias;  // [width, channels]; [channels] or null
};

// The convolution of `count` channels over one run. Starts from the inputs in the state, and writes the last inputs
// back.
template <bool GATED, typename T>
void convolve_piece(const T* x, int64_t stride, const PackedConvolution& by, const StateMemory& memory, int64_t run,
                    int64_t channel, int64_t count, T* out) {
    const int64_t channels = by.channels, kept = by.width - 1, tail = by.tail + channel;
    const Floats bias = by.bias == nullptr ? Floats{} : fetch(by.bias + channel, count);
    Floats weight[MOST_WIDTH], before[MOST_WIDTH] = {};
    for (int64_t i = 0; i < by.width; ++i) weight[i] = fetch(by.weight + i * channels + channel, count);
    const auto [begin, end] = memory.runs[run];
    if (memory.segments[begin].read >= 0)
        for (int64_t i = 0; i < kept; ++i)
            before[i] = fetch(memory.at(memory.segments[begin].read) + tail + i * channels, count);
    for (int64_t each = begin; each < end; ++each) {
        const StateSegment& segment = memory.segments[each];
        for (int64_t token = segment.first; token < segment.first + segment.count; ++token) {
            const T* row = x + token * stride + channel;
            const Floats value =
                GATED ? rounded<T>(fetch(row, count) * fetch(row + 2 * channels, count)) : fetch(row, count);
            Floats mixed = before[0] * weight[0];
            for (int64_t i = 1; i < kept; ++i) mixed = add_product(mixed, before[i], weight[i]);
            mixed = rounded<T>(add_product(mixed, value, weight[kept]) + bias);
            put(out + token * channels + channel,
                GATED ? mixed * fetch(row + channels, count) : activated<SILU>(mixed), count);
            for (int64_t i = 1; i < kept; ++i) before[i - 1] = before[i];
            before[kept - 1] = value;
        }
        for (int64_t i = 0; i < kept; ++i)
            put(memory.at(segment.written) + tail + i * channels, before[i], count);
    }
}

// The convolution of x [tokens, channels or more] -> out [tokens, channels], with silu or gates, in parallel over runs
// and channels.
template <typename T>
void convolve(const T* x, int64_t stride, const PackedConvolution& by, const StateMemory& memory, T* out) {
    const int64_t pieces = (by.channels + LANES - 1) / LANES, count = memory.runs.size() * pieces;
    for_each(count, count > 64, [&](int64_t i) {
        const int64_t channel = i % pieces * LANES, size = std::min(LANES, by.channels - channel);
        if (by.gated) convolve_piece<true>(x, stride, by, memory, i / pieces, channel, size, out);
        else convolve_piece<false>(x, stride, by, memory, i / pieces, channel, size, out);
    });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
