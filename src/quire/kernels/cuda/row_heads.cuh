// One head of the current token: norm, rotary positions and the write to the paged cache; conversions of cache
// elements.

constexpr int LANE_NUMBERS = 8;                              // elements of a head per lane
typedef typename Choice<CACHE_KIND == BF16, uint4, uint2>::type CacheWord;  // LANE_NUMBERS elements of the cache

// Convert a word of a bfloat16 cache to floats.
__device__ __forceinline__ void numbers_of_word(const uint4& word, float (&x)[LANE_NUMBERS]) {
    const u32 pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[2 * i] = low_half(pairs[i]);
        x[2 * i + 1] = high_half(pairs[i]);
    }
}

// Convert four elements of a quantized cache to unscaled floats.
__device__ __forceinline__ void numbers_of(u32 word, float (&numbers)[4]) {
    if (CACHE_KIND == INT8) {  // as the low bytes of the float 2**23 + 128 + value
        const u32 biased = word ^ 0x80808080u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            numbers[i] = __uint_as_float(__byte_perm(biased, 0x4B000000u, 0x7440 | i)) - 8388736.0f;
        }
    } else {
        from_float8((u16)word, numbers[0], numbers[1]);
        from_float8((u16)(word >> 16), numbers[2], numbers[3]);
    }
}

// Convert a word of a quantized cache to unscaled floats.
__device__ __forceinline__ void numbers_of_word(const uint2& word, float (&x)[LANE_NUMBERS]) {
    float first[4], second[4];
    numbers_of(word.x, first);
    numbers_of(word.y, second);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = first[i];
        x[i + 4] = second[i];
    }
}

// Offsets of a token of the context in the cache: its elements, and its scale.
struct Place { long long at, of_scale; };

__device__ __forceinline__ Place place_of(const Phase& p, const int* table, int head, int token) {
    const long long block = table[token / p.block_size];
    const int inside = token % p.block_size;
    const long long begin = block * p.block_stride + (long long)head * p.head_stride;
    return {begin + (long long)inside * HEAD_DIM, begin / 4 + inside};
}

// The row's block table; for padding that of another row, which is not read.
__device__ __forceinline__ const int* table_of(const Phase& p, const Run& run) {
    const long long row = max(0, run.rows[0]);
    return reinterpret_cast<const int*>(run.tables[p.table]) + row * run.table_strides[p.table];
}

// What a lane needs of a head's norm weights and angles, unconverted: loaded before the head is ready.
struct HeadFactors { u32 weights[HEAD_DIM / 32]; u16 cosines[HEAD_DIM / 64], sines[HEAD_DIM / 64]; };

// Start to load the norm weights and angles of a head.
__device__ __forceinline__ void ask_for_factors(const Phase& p, u64 norm, bool rotates, long long position, HeadFactors& f) {
    const int lane = threadIdx.x % 32, half = p.rotated / 2;
    if (norm) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) {
            f.weights[i] = p.norm_is_wide ? __ldg(reinterpret_cast<const u32*>(norm) + lane + 32 * i)
                                          : __ldg(reinterpret_cast<const u16*>(norm) + lane + 32 * i);
        }
    }
    if (!rotates || !p.angles) return;
    const u16* angles = reinterpret_cast<const u16*>(p.angles) + position * p.rotated;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; ++i) {
        if (lane + 32 * i >= half) break;
        f.cosines[i] = __ldg(angles + lane + 32 * i);
        f.sines[i] = __ldg(angles + half + lane + 32 * i);
    }
}

// Prepare one head of the current token by one warp: norm and rotary positions; `out` gets float32 values rounded to
// bfloat16.
__device__ __forceinline__ void prepare_head(
    const Phase& p, int number, u32 mark, u64 norm, bool rotates, long long position, float* out) {
    const int lane = threadIdx.x % 32, half = rotates && p.angles ? p.rotated / 2 : 0;
    const int is_wide = p.norm_is_wide;
    const float eps = p.eps;
    HeadFactors f;
    ask_for_factors(p, norm, rotates, position, f);
    float squares = 0.0f;
    for (int i = lane * 4; i < HEAD_DIM; i += 128) {
        const int at = number * HEAD_DIM + i;
        float x[4];
        if (p.plain_source) {
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = from_bf16(reinterpret_cast<const u16*>(p.plain_source)[at + j]);
        } else {
            const uint4 words = await_words(p.source + 4ull * at, mark);
            x[0] = high_half(words.x), x[1] = high_half(words.y), x[2] = high_half(words.z), x[3] = high_half(words.w);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            squares += x[j] * x[j];
            out[i + j] = x[j];
        }
    }
    __syncwarp();
    if (norm) {
        const float inverse = rsqrtf(sum_of_warp(squares) / HEAD_DIM + eps);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 32; ++i) {
            float& x = out[lane + 32 * i];
            x = rounded(rounded(x * inverse) * (is_wide ? __uint_as_float(f.weights[i]) : from_bf16((u16)f.weights[i])));
        }
        __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 64; ++i) {
        const int at = lane + 32 * i;
        if (at >= half) break;
        const float first = out[at], second = out[half + at];
        const float cosine = from_bf16(f.cosines[i]), sine = from_bf16(f.sines[i]);
        out[at] = rounded(first * cosine - second * sine);
        out[half + at] = rounded(second * cosine + first * sine);
    }
    __syncwarp();
}

// Store a head to the cache by one warp, quantized if the cache is; `head` then holds the values as read back.
__device__ __forceinline__ void store_head(u64 cache, u64 scales, const Place& place, float* head) {
    const int lane = threadIdx.x % 32;
    if (CACHE_KIND == BF16) {
        for (int i = lane; i < HEAD_DIM; i += 32) write_number(cache + (place.at + i) * 2, head[i]);
        return;
    }
    const float most = CACHE_KIND == INT8 ? 127.0f : 448.0f;
    float largest = 0.0f;
    bool is_finite = true;
    for (int i = lane; i < HEAD_DIM; i += 32) {
        is_finite &= fabsf(head[i]) <= 3.4e38f;
        largest = fmaxf(largest, fabsf(head[i]));
    }
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, apart));
    largest = __all_sync(ALL_LANES, is_finite) ? fmaxf(largest, 1e-12f) : __int_as_float(0x7FC00000);
    const float scale = __fdiv_rn(largest, most), inverse = __fdiv_rn(most, largest);
    for (int i = lane; i < HEAD_DIM; i += 32) {
        const float x = head[i] * inverse;
        float kept;
        if (CACHE_KIND == INT8) {
            kept = fminf(fmaxf(rintf(x), -127.0f), 127.0f);
            *reinterpret_cast<signed char*>(cache + place.at + i) = (signed char)(int)kept;
        } else {
            const u8 bits = to_float8(x);
            float unused;
            from_float8(bits, kept, unused);
            *reinterpret_cast<u8*>(cache + place.at + i) = bits;
        }
        head[i] = kept * scale;
    }
    if (lane == 0) *(reinterpret_cast<float*>(scales) + place.of_scale) = scale;
    __syncwarp();
}
