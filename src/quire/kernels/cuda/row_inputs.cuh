// The inputs of a gemv: waits for them, applies the norm, and stores them to shared memory in the form that its kind of
// weight needs.

// Scale of 32 inputs quantized to 15-bit integers: input = scale * integer.
struct __align__(8) Quarter { float scale, total; };  // total: sum of the inputs

struct Shared {
    // Inputs of the phase: bfloat16; float16 for 8-bit weights; bytes for 4-bit weights; scratch of attention.
    u8* vector;
    float* squares;      // [warps]: partial sums of squares
    u32* largest;        // [warps]: bits of the largest magnitudes
    Quarter* quarters;   // scales of the inputs, for 4-bit weights
    float* partial;      // [teams][TURNS][2 parts][16 outputs][warps of a team]
    u32 done, taken;     // mbarriers of each turn of each team: its sums are stored; they were read
};

// The power of two that float16 inputs were divided by. For infinite or NaN inputs, so that the results are NaN or
// infinite too.
__device__ __forceinline__ float scale_of_inputs(const Shared& shared) {
    u32 most = 0;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) most = max(most, shared.largest[warp]);
    const int exponent = max((int)(most >> 7) - 127 - 14, -100);
    return __uint_as_float((u32)(exponent + 127) << 23);
}

constexpr int HELD = 2;  // in units of 8 norm weights: loads in flight before the inputs are there

// Weights of the phase's norm, 8 at a time.
struct NormWeights { uint4 low[HELD], high[HELD]; };

__device__ __forceinline__ void ask_for_weights(const Phase& p, int i, uint4& low, uint4& high) {
    const uint4* at = reinterpret_cast<const uint4*>(p.norm) + (p.norm_is_wide ? 2 * i : i);
    low = __ldg(at);
    if (p.norm_is_wide) high = __ldg(at + 1);
}

// Start to load the first norm weights.
__device__ __forceinline__ void ask_for_norm(const Phase& p, NormWeights& held) {
    if (!p.norm) return;
#pragma unroll
    for (int turn = 0; turn < HELD; ++turn) {
        const int i = threadIdx.x + turn * THREADS;
        if (i * 8 < p.inputs) ask_for_weights(p, i, held.low[turn], held.high[turn]);
    }
}

// Multiply inputs 8 i .. 8 i + 7 by the norm's weights, if any, and add their squares to `squares`.
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

constexpr int LOOKED_AT = 4;  // in units of 8 inputs: loads in flight per thread

// Load inputs 8 i .. 8 i + 7 of the phase, for i = first, first + THREADS, ..., polling until they have the mark; zeros
// from `last` on.
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

// The largest magnitude of two bfloat16 values and of `most`, as bits; NaN is larger than all.
__device__ __forceinline__ u32 larger_bits(u32 pair, u32 most) {
    return max(most, max(pair & 0x7FFFu, pair >> 16 & 0x7FFFu));
}

// Convert the inputs in shared memory to float16 for gemvs with 8-bit weights, divided by a power of two such that the
// largest is at most 2**15. This keeps more bits than bfloat16 for all but very small values.
__device__ __forceinline__ void to_halves(const Phase& p, const Shared& shared) {
    uint4* vector = reinterpret_cast<uint4*>(shared.vector);
    u32 most = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i * 8 < p.inputs; i += THREADS) {  // elements that this thread has stored
        const uint4 x = vector[i];
        most = larger_bits(x.x, larger_bits(x.y, larger_bits(x.z, larger_bits(x.w, most))));
    }
    most = __reduce_max_sync(ALL_LANES, most);
    if (threadIdx.x % 32 == 0) shared.largest[threadIdx.x / 32] = most;
    __syncthreads();
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

// Pack the lower (place 0) or upper (1) bytes of four integers into a word.
__device__ __forceinline__ u32 bytes_of(const int (&numbers)[8], int first, int place) {
    const u32 pair = place ? 0x51 : 0x40;
    const u32 left = __byte_perm(numbers[first], numbers[first + 1], pair), right = __byte_perm(numbers[first + 2], numbers[first + 3], pair);
    return __byte_perm(left, right, 0x5410);
}

// Quantize this lane's 8 inputs to integers 256 * upper + lower: eight upper bytes, then eight lower bytes, all signed.
// A NaN or infinity makes the scale of all 32 inputs NaN.
__device__ __forceinline__ uint4 to_whole_numbers(const uint4& x, Quarter& quarter) {
    u32 most = larger_bits(x.x, larger_bits(x.y, larger_bits(x.z, larger_bits(x.w, 0))));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 1));
    most = max(most, __shfl_xor_sync(ALL_LANES, most, 2));
    const int exponent = max((int)(most >> 7) - 127, -100);  // the largest is below 2 ** (exponent + 1)
    const float enlarged = __uint_as_float((u32)(13 - exponent + 127) << 23);
    const u32 pairs[4] = {x.x, x.y, x.z, x.w};
    int numbers[8], sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float input = j % 2 ? high_half(pairs[j / 2]) : low_half(pairs[j / 2]);
        numbers[j] = __float_as_int(fmaf(input, enlarged, 12582912.0f)) - 0x4B400000;  // rounded by the addition
        sum += numbers[j];
    }
    sum += __shfl_xor_sync(ALL_LANES, sum, 1);
    sum += __shfl_xor_sync(ALL_LANES, sum, 2);
    quarter.scale = most < 0x7F80u ? __uint_as_float((u32)(exponent - 13 + 127) << 23) : __int_as_float(0x7FC00000);
    quarter.total = quarter.scale * sum;
    uint4 out;
    out.z = bytes_of(numbers, 0, 0);
    out.w = bytes_of(numbers, 4, 0);
#pragma unroll
    for (int j = 0; j < 8; ++j) numbers[j] += 128;
    out.x = bytes_of(numbers, 0, 1);
    out.y = bytes_of(numbers, 4, 1);
    return out;
}

// Wait for the phase's inputs, multiply them by the norm's weights, and store them to shared memory, zero-padded to
// whole steps; for 4-bit weights quantized, 32 inputs per scale.
template <int KIND>
__device__ __forceinline__ void load_vector(const Phase& p, const Run& run, const Shared& shared, const NormWeights& held, u32 launch) {
    const u32 mark = mark_of(launch, p.source_phase);
    const int inputs = p.inputs, padded = KIND == NIBBLES ? p.steps * 128 : inputs;
    const u64 norm = p.norm;
    uint4* vector = reinterpret_cast<uint4*>(shared.vector);
    float squares = 0.0f;
    if (!p.plain_source) {  // one lane polls first, to limit traffic
        const int middle = min(threadIdx.x / 32 * 32 + 16, inputs / 8 - 1);
        if (threadIdx.x % 32 == 0) await_word(p.source + (u64)middle * 32, mark);
        __syncwarp();
    }
#pragma unroll 1
    for (int begin = 0; begin < padded / 8; begin += LOOKED_AT * THREADS) {
        const int first = begin + threadIdx.x;
        uint4 x[LOOKED_AT];
        find_inputs(p, run, first, mark, x);
#pragma unroll
        for (int turn = 0; turn < LOOKED_AT; ++turn) {
            const int i = first + turn * THREADS;
            if (i / 32 * 32 >= padded / 8) break;  // the same for all lanes of a warp
            uint4 low = make_uint4(0, 0, 0, 0), high = low;
            if (turn < HELD && begin == 0) {
                low = held.low[turn < HELD ? turn : 0];
                high = held.high[turn < HELD ? turn : 0];
            } else if (norm && i * 8 < inputs) {
                ask_for_weights(p, i, low, high);
            }
            const uint4 y = i * 8 < inputs ? scaled_inputs(p, x[turn], low, high, squares) : make_uint4(0, 0, 0, 0);
            if constexpr (KIND == NIBBLES) {
                Quarter quarter;
                const uint4 numbers = to_whole_numbers(y, quarter);
                if (i * 8 < padded) {
                    vector[i] = numbers;
                    if (i % 4 == 0) shared.quarters[i / 4] = quarter;
                }
            } else if (i * 8 < padded) {
                vector[i] = y;
            }
        }
    }
    if (norm) {
        squares = sum_of_warp(squares);
        if (threadIdx.x % 32 == 0) shared.squares[threadIdx.x / 32] = squares;
    }
    if (KIND == FLOAT8 || KIND == INT8) to_halves(p, shared);
    __syncthreads();
}

// The factor that completes the norm: gemv results are multiplied by 1 / rms of the inputs.
__device__ __forceinline__ float inverse_norm(const Phase& p, const Shared& shared) {
    if (!p.norm) return 1.0f;
    float squares = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) squares += shared.squares[warp];
    return rsqrtf(squares / p.inputs + p.eps);
}
