// The inputs of a product: waited for, normed, and put into shared memory in the form that its weight is multiplied by.

struct Shared {
    u8* vector;          // the phase's inputs, bfloat16; attention's numbers
    float* squares;      // [warps]: of the inputs
    u32* largest;        // [warps]: the bits of their magnitudes
    float* sums;         // of 32 inputs each, for weights of 4 bits
    float* partial;      // [TURNS][2 parts][16 outputs][warps]
    u32 done, taken;     // barriers of each turn: all warps have left their sums; these were read
    const Source* sources;
};

// The power of two that float16 inputs were divided by. Infinite or NaN: so is what comes out.
__device__ __forceinline__ float scale_of_inputs(const Shared& shared) {
    u32 most = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = max(most, shared.largest[warp]);
    const int exponent = max((int)(most >> 7) - 127 - 14, -100);
    return __uint_as_float((u32)(exponent + 127) << 23);
}

constexpr int HELD = 2;  // times 8 weights of the norm that a thread asks for before the inputs are there

// Weights of the phase's norm, 8 at a time.
struct NormWeights { uint4 low[HELD], high[HELD]; };

__device__ __forceinline__ void ask_for_weights(const Phase& p, int i, uint4& low, uint4& high) {
    const uint4* at = reinterpret_cast<const uint4*>(p.norm) + (p.norm_is_wide ? 2 * i : i);
    low = __ldg(at);
    if (p.norm_is_wide) high = __ldg(at + 1);
}

__device__ __forceinline__ void ask_for_norm(const Phase& p, NormWeights& held) {
    if (!p.norm) return;
#pragma unroll
    for (int turn = 0; turn < HELD; ++turn) {
        const int i = threadIdx.x + turn * THREADS;
        if (i * 8 < p.inputs) ask_for_weights(p, i, held.low[turn], held.high[turn]);
    }
}

// Inputs 8 i .. 8 i + 7 as they were found, times the norm's weights if there are any; adds up their squares.
__device__ __forceinline__ uint4 scaled_inputs(
    const Phase& p, const uint4& x, const uint4& low, const uint4& high, float& squares) {
    if (!p.norm) return x;
    const u32 first[4] = {low.x, low.y, low.z, low.w}, second[4] = {high.x, high.y, high.z, high.w};
    u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float w[2] = {low_half(first[j]), high_half(first[j])};
        if (p.norm_is_wide) {
            w[0] = __uint_as_float(j < 2 ? first[2 * (j % 2)] : second[2 * (j % 2)]);
            w[1] = __uint_as_float(j < 2 ? first[2 * (j % 2) + 1] : second[2 * (j % 2) + 1]);
        }
        const float left = low_half(pairs[j]), right = high_half(pairs[j]);
        squares += left * left + right * right;
        pairs[j] = (u32)to_bf16(left * w[0]) | (u32)to_bf16(right * w[1]) << 16;
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

constexpr int LOOKED_AT = 4;  // times 8 inputs that a thread asks for at once

// Inputs 8 i .. 8 i + 7 of the phase, for i = first, first + THREADS, ...; zeros from `last` on.
__device__ __forceinline__ void find_inputs(const Phase& p, const Run& run, int first, u32 mark, uint4 (&x)[LOOKED_AT]) {
    const int last = p.inputs / 8;
    if (p.plain_source) {
#pragma unroll
        for (int turn = 0; turn < LOOKED_AT; ++turn) {
            const int i = first + turn * THREADS;
            x[turn] = make_uint4(0, 0, 0, 0);
            if (i < last) x[turn] = *(reinterpret_cast<const uint4*>(plain(p.plain_source, run)) + i);
        }
        return;
    }
    uint4 y[LOOKED_AT], z[LOOKED_AT];
    bool are_there;
    int looks = 0;
    do {
        are_there = true;
#pragma unroll
        for (int turn = 0; turn < LOOKED_AT; ++turn) {
            const int i = first + turn * THREADS;
            y[turn] = z[turn] = make_uint4(mark, mark, mark, mark);
            if (i < last) {
                y[turn] = look_at_words(p.source + (u64)i * 32);
                z[turn] = look_at_words(p.source + (u64)i * 32 + 16);
            }
        }
#pragma unroll
        for (int turn = 0; turn < LOOKED_AT; ++turn) are_there &= have_mark(y[turn], mark) && have_mark(z[turn], mark);
        if (++looks > MOST_LOOKS) __trap();
    } while (!are_there);
#pragma unroll
    for (int turn = 0; turn < LOOKED_AT; ++turn) {
        const uint4 a = y[turn], b = z[turn];
        x[turn] = make_uint4(a.x >> 16 | (a.y & 0xFFFF0000u), a.z >> 16 | (a.w & 0xFFFF0000u),
                             b.x >> 16 | (b.y & 0xFFFF0000u), b.z >> 16 | (b.w & 0xFFFF0000u));
    }
}

// The larger magnitude of two bfloat16 numbers, and of `most`, as bits; NaN is larger than all.
__device__ __forceinline__ u32 larger_bits(u32 pair, u32 most) {
    return max(most, max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu));
}

// Make the inputs in shared memory float16, as tensor cores take them with numbers of 8 bits: over the power of two that
// takes the largest to at most 2**15. That keeps more digits than bfloat16 has of all but the very small ones.
__device__ __forceinline__ void to_halves(const Phase& p, const Shared& shared) {
    uint4* vector = reinterpret_cast<uint4*>(shared.vector);
    u32 most = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i * 8 < p.inputs; i += THREADS) {  // what this thread has put there
        const uint4 x = vector[i];
        most = larger_bits(x.x, larger_bits(x.y, larger_bits(x.z, larger_bits(x.w, most))));
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = most;
    sync_computing();
    const float shrink = 1.0f / scale_of_inputs(shared);
#pragma unroll 1
    for (int i = threadIdx.x; i * 8 < p.inputs; i += THREADS) {
        const uint4 x = vector[i];
        u32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pairs[j]) : "f"(high_half(pairs[j]) * shrink), "f"(low_half(pairs[j]) * shrink));
        }
        vector[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}

// Sums of 32 inputs each.
__device__ __forceinline__ void sum_inputs(const Shared& shared, int padded) {
    const uint4* vector = reinterpret_cast<const uint4*>(shared.vector);
    for (int i = threadIdx.x; i < padded / 32; i += THREADS) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4 x = vector[i * 4 + j];
            sum += low_half(x.x) + high_half(x.x) + low_half(x.y) + high_half(x.y);
            sum += low_half(x.z) + high_half(x.z) + low_half(x.w) + high_half(x.w);
        }
        shared.sums[i] = sum;
    }
}

// Put the phase's inputs, times the norm's weights, into shared memory, zeros behind them up to whole steps.
__device__ __forceinline__ void load_vector(const Phase& p, const Run& run, const Shared& shared, const NormWeights& held, u32 launch) {
    const u32 mark = mark_of(launch, p.source_phase);
    const int padded = p.kind == NIBBLES ? p.steps * 128 : p.inputs;
    uint4* vector = reinterpret_cast<uint4*>(shared.vector);
    float squares = 0.0f;
    if (!p.plain_source) {  // one lane looks until something is there, so that few look in vain
        const int middle = min(threadIdx.x / 32 * 32 + 16, p.inputs / 8 - 1);
        if (threadIdx.x % 32 == 0) await_word(p.source + (u64)middle * 32, mark);
        __syncwarp();
    }
#pragma unroll 1
    for (int first = threadIdx.x; first * 8 < padded; first += LOOKED_AT * THREADS) {
        uint4 x[LOOKED_AT];
        find_inputs(p, run, first, mark, x);
#pragma unroll
        for (int turn = 0; turn < LOOKED_AT; ++turn) {
            const int i = first + turn * THREADS;
            if (i * 8 >= padded) break;
            if (i * 8 >= p.inputs) {
                vector[i] = make_uint4(0, 0, 0, 0);
                continue;
            }
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (turn < HELD && first < THREADS) {
                low = held.low[turn < HELD ? turn : 0];
                high = held.high[turn < HELD ? turn : 0];
            } else if (p.norm) {
                ask_for_weights(p, i, low, high);
            }
            vector[i] = scaled_inputs(p, x[turn], low, high, squares);
        }
    }
    if (p.norm) {
        squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
    }
    if ((HAS_FLOAT8 && p.kind == FLOAT8) || (HAS_INT8 && p.kind == INT8)) {
        to_halves(p, shared);
    }
    sync_computing();
    if (p.kind == NIBBLES) {
        sum_inputs(shared, padded);
        sync_computing();
    }
}

// What sums over normed inputs are multiplied by.
__device__ __forceinline__ float inverse_norm(const Phase& p, const Shared& shared) {
    if (!p.norm) return 1.0f;
    float squares = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) squares += shared.squares[warp];
    return rsqrtf(squares / p.inputs + p.eps);
}
