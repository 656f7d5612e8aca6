// Attention of one row over a paged cache: norms and rotary positions of its heads, the write of its key and value,
// then split-KV attention, where each block reads its share of the context with all of its warps.
//
// Compile-time constants: HEAD_DIM, QUERIES (query heads per kv head), CACHE_KIND (BF16, FLOAT8 or INT8; the last two
// with a scale per head of a token).

constexpr int TOKEN_LANES = HEAD_DIM / LANE_NUMBERS;         // lanes that read one token
constexpr int TOKENS = 32 / TOKEN_LANES;                     // that a warp reads at once
constexpr int AHEAD = QUERIES > 4 ? 1 : 2;                  // in units of TOKENS: loads in flight
constexpr int LEAST_SHARE = 16;                              // tokens of a context that are worth a block
constexpr int PART = QUERIES * (HEAD_DIM + 2);               // values that a block stores: sums, maximum, total
constexpr float NOTHING = -1e30f;

// Online softmax state of a group of lanes, over the tokens that it has read.
struct Seen {
    float sums[QUERIES][LANE_NUMBERS], most[QUERIES], total[QUERIES];
};

// Online softmax step: fold AHEAD tokens per group of lanes, of which the first `num_there` exist, into the state.
__device__ __forceinline__ void take_in(
    Seen& seen, const Phase& p, const float (&query)[QUERIES][LANE_NUMBERS], const float (&keys)[AHEAD][LANE_NUMBERS],
    const float (&values)[AHEAD][LANE_NUMBERS], const float (&key_scales)[AHEAD], const float (&value_scales)[AHEAD],
    int num_there) {
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
        float scores[AHEAD], most = seen.most[q];
#pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn) {
            float score = 0.0f;
#pragma unroll
            for (int i = 0; i < LANE_NUMBERS; ++i) score = fmaf(query[q][i], keys[turn][i], score);
            scores[turn] = score;
        }
#pragma unroll
        for (int apart = TOKEN_LANES / 2; apart > 0; apart /= 2) {
#pragma unroll
            for (int turn = 0; turn < AHEAD; ++turn) scores[turn] += __shfl_xor_sync(ALL_LANES, scores[turn], apart);
        }
#pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn) {
            float score = scores[turn] * p.factor * key_scales[turn];  // an exponent of 2
            if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
            scores[turn] = turn < num_there ? score : NOTHING;
            most = fmaxf(most, scores[turn]);
        }
        const float shrink = power_of_2(seen.most[q] - most);
        seen.most[q] = most;
        seen.total[q] *= shrink;
#pragma unroll
        for (int i = 0; i < LANE_NUMBERS; ++i) seen.sums[q][i] *= shrink;
#pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn) {
            const float weight = turn < num_there ? power_of_2(scores[turn] - most) : 0.0f;
            seen.total[q] += weight;
#pragma unroll
            for (int i = 0; i < LANE_NUMBERS; ++i) {
                seen.sums[q][i] = fmaf(weight * value_scales[turn], values[turn][i], seen.sums[q][i]);
            }
        }
    }
}

// The scale of a token's head in a quantized cache, else 1.
__device__ __forceinline__ float cache_scale(u64 scales, long long at) {
    return CACHE_KIND == BF16 ? 1.0f : reinterpret_cast<const float*>(scales)[at];
}

// Raw keys and values of AHEAD tokens per group of lanes, in the format of the cache.
struct Tokens {
    CacheWord keys[AHEAD], values[AHEAD];
    float key_scales[AHEAD], value_scales[AHEAD];
};

// Load the tokens from `begin` on, none at or past `last`.
__device__ __forceinline__ void ask_for_tokens(Tokens& tokens, const Phase& p, const int* table, int head, int begin, int last) {
    const int lane = threadIdx.x % 32, column = lane % TOKEN_LANES * LANE_NUMBERS, bytes = CACHE_KIND == BF16 ? 2 : 1;
    if (begin >= last) return;
#pragma unroll
    for (int turn = 0; turn < AHEAD; ++turn) {
        const int token = min(begin + turn * TOKENS + lane / TOKEN_LANES, last - 1);
        const Place place = place_of(p, table, head, token);
        tokens.keys[turn] = *reinterpret_cast<const CacheWord*>(p.keys + (place.at + column) * bytes);
        tokens.values[turn] = *reinterpret_cast<const CacheWord*>(p.values + (place.at + column) * bytes);
        tokens.key_scales[turn] = cache_scale(p.key_scales, place.of_scale);
        tokens.value_scales[turn] = cache_scale(p.value_scales, place.of_scale);
    }
}

constexpr int FETCHED = 4;  // distance of the L2 prefetch, in rounds of all warps

// Prefetch tokens from `begin` on to L2: one lane per 128 bytes of keys and values.
__device__ __forceinline__ void fetch_tokens(const Phase& p, const int* table, int head, int begin, int last) {
    constexpr int BYTES = CACHE_KIND == BF16 ? 2 : 1, LINES = (HEAD_DIM * BYTES + 127) / 128;
    const int lane = threadIdx.x % 32, token = begin + lane / LINES;
    if (lane >= LINES * TOKENS * AHEAD || token >= last) return;
    const long long at = place_of(p, table, head, token).at * BYTES + lane % LINES * 128;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.keys + at));
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p.values + at));
}

// The first token of this warp.
__device__ __forceinline__ int first_token(int first) { return first + threadIdx.x / 32 * TOKENS * AHEAD; }

// Attend to tokens first .. last - 1 of a context, divided among the warps, and then, if `own` is given, to the current
// token, whose key and value it holds; the last warp handles that. `tokens`: the first ones of this warp, already being
// loaded.
__device__ __forceinline__ void read_context(
    Seen& seen, const Phase& p, const float (&query)[QUERIES][LANE_NUMBERS], Tokens& tokens, const int* table, int head,
    int first, int last, const float* own) {
    const int lane = threadIdx.x % 32, column = lane % TOKEN_LANES * LANE_NUMBERS;
    bool is_own = false, has_own = own && threadIdx.x / 32 == WARPS - 1;
#pragma unroll 1
    for (int begin = first_token(first);; begin += WARPS * TOKENS * AHEAD) {
        if (begin >= last) {
            if (!has_own) break;
            is_own = true;
            has_own = false;
        }
        float key[AHEAD][LANE_NUMBERS], value[AHEAD][LANE_NUMBERS], key_scales[AHEAD], value_scales[AHEAD];
#pragma unroll
        for (int turn = 0; turn < AHEAD; ++turn) {
            if (is_own) {
                key_scales[turn] = value_scales[turn] = 1.0f;
#pragma unroll
                for (int i = 0; i < LANE_NUMBERS; ++i) {
                    key[turn][i] = own[column + i];
                    value[turn][i] = own[HEAD_DIM + column + i];
                }
            } else {
                key_scales[turn] = tokens.key_scales[turn];
                value_scales[turn] = tokens.value_scales[turn];
                numbers_of_word(tokens.keys[turn], key[turn]);
                numbers_of_word(tokens.values[turn], value[turn]);
            }
        }
        const int left = last - begin - lane / TOKEN_LANES;  // for this group of lanes, whose tokens are TOKENS apart
        const int num_there = is_own ? (lane < TOKEN_LANES ? 1 : 0) : (left + TOKENS - 1) / TOKENS;
        if (!is_own) {
            ask_for_tokens(tokens, p, table, head, begin + WARPS * TOKENS * AHEAD, last);
            fetch_tokens(p, table, head, begin + FETCHED * WARPS * TOKENS * AHEAD, last);
        }
        take_in(seen, p, query, key, value, key_scales, value_scales, num_there);
    }
}

// Merge the parts of WARPS warps in shared memory for one element of one query. Returns the unnormalized sum.
__device__ __forceinline__ float joined(const float* parts, int query, int number, float& most, float& total) {
    const float* ends = parts + QUERIES * HEAD_DIM + 2 * query;
    most = NOTHING;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) most = fmaxf(most, ends[i * PART]);
    float sum = 0.0f;
    total = 0.0f;
#pragma unroll 4
    for (int i = 0; i < WARPS; ++i) {
        const float weight = power_of_2(ends[i * PART] - most);
        total += ends[i * PART + 1] * weight;
        sum += parts[i * PART + query * HEAD_DIM + number] * weight;
    }
    return sum;
}

// Normalize an element of a head's output, including the head's sink, and store it.
__device__ __forceinline__ void write_result(
    const Phase& p, int head, int i, float sum, float most, float total, u32 launch, int phase) {
    const int number = head * QUERIES + i / HEAD_DIM;
    if (p.sinks) {
        const float sink = from_bf16(reinterpret_cast<const u16*>(p.sinks)[number]) * 1.4426950408889634f;
        const float higher = fmaxf(most, sink), shrink = power_of_2(most - higher);
        total = total * shrink + power_of_2(sink - higher);
        sum *= shrink;
    }
    const int at = head * QUERIES * HEAD_DIM + i;
    leave_word(p.target + 4ull * at, sum / total * p.value_scale, mark_of(launch, phase));
    if (p.plain_target) write_number(p.plain_target + 2ull * at, sum / total * p.value_scale);
}

constexpr int JOINING = 8;  // lanes that merge the parts of one element

// Merge the parts of all blocks of a head; each block handles its share of the elements. Waits until the parts are
// there.
__device__ __forceinline__ void join_shares(
    const Phase& p, const u64* parts, int head, int share, int shares, u32 launch, int phase) {
    const u32 mark = launch + phase;
    const int each = (QUERIES * HEAD_DIM + shares - 1) / shares, last = min(QUERIES * HEAD_DIM, (share + 1) * each);
#pragma unroll 1
    for (int begin = share * each; begin < last; begin += THREADS / JOINING) {
        if (begin + threadIdx.x / 32 * (32 / JOINING) >= last) break;  // the other warps need not wait for this one
        const int place = begin + threadIdx.x / JOINING, i = min(place, last - 1);
        const int ends = QUERIES * HEAD_DIM + 2 * (i / HEAD_DIM);
        float most = NOTHING, total = 0.0f, sum = 0.0f;
#pragma unroll 1
        for (int number = threadIdx.x % JOINING; number < shares; number += 2 * JOINING) {
            u64 pairs[2][3];  // of two parts, loaded together
            const bool has_second = number + JOINING < shares;
            bool are_there;
            int looks = 0;
            do {
                are_there = true;
#pragma unroll
                for (int each = 0; each < 2; ++each) {
                    const u64* part = parts + (number + (has_second ? each * JOINING : 0)) * PART;
                    pairs[each][0] = look_at_pair(part + ends);
                    pairs[each][1] = look_at_pair(part + ends + 1);
                    pairs[each][2] = look_at_pair(part + i);
                }
#pragma unroll
                for (int each = 0; each < 6; ++each) are_there &= (u32)(pairs[each / 3][each % 3] >> 32) == mark;
                if (++looks > MOST_LOOKS) __trap();
            } while (!are_there);
#pragma unroll
            for (int each = 0; each < 2; ++each) {
                if (each && !has_second) break;
                const float own = __uint_as_float((u32)pairs[each][0]), higher = fmaxf(most, own);
                const float mine = power_of_2(most - higher), theirs = power_of_2(own - higher);
                total = total * mine + __uint_as_float((u32)pairs[each][1]) * theirs;
                sum = sum * mine + __uint_as_float((u32)pairs[each][2]) * theirs;
                most = higher;
            }
        }
        __syncwarp();
#pragma unroll
        for (int apart = JOINING / 2; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, most, apart), higher = fmaxf(most, other);
            const float mine = power_of_2(most - higher), theirs = power_of_2(other - higher);
            total = total * mine + __shfl_xor_sync(ALL_LANES, total, apart) * theirs;
            sum = sum * mine + __shfl_xor_sync(ALL_LANES, sum, apart) * theirs;
            most = higher;
        }
        if (threadIdx.x % JOINING == 0 && place < last) write_result(p, head, i, sum, most, total, launch, phase);
    }
}

// Merge the lanes of a warp that hold the same elements of different tokens, and store the part in shared memory.
__device__ __forceinline__ void leave_part(Seen& seen, float* part) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
#pragma unroll
        for (int apart = TOKEN_LANES; apart < 32; apart *= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, seen.most[q], apart);
            const float most = fmaxf(seen.most[q], other);
            const float mine = power_of_2(seen.most[q] - most), theirs = power_of_2(other - most);
            seen.total[q] = seen.total[q] * mine + __shfl_xor_sync(ALL_LANES, seen.total[q], apart) * theirs;
#pragma unroll
            for (int i = 0; i < LANE_NUMBERS; ++i) {
                seen.sums[q][i] = seen.sums[q][i] * mine + __shfl_xor_sync(ALL_LANES, seen.sums[q][i], apart) * theirs;
            }
            seen.most[q] = most;
        }
        if (lane < TOKEN_LANES) {
#pragma unroll
            for (int i = 0; i < LANE_NUMBERS; ++i) part[q * HEAD_DIM + lane * LANE_NUMBERS + i] = seen.sums[q][i];
        }
        if (lane == 0) {
            part[QUERIES * HEAD_DIM + 2 * q] = seen.most[q];
            part[QUERIES * HEAD_DIM + 2 * q + 1] = seen.total[q];
        }
    }
}

// One block's share of one kv head: prepare the heads, store the new key and value, attend, and merge the parts.
__device__ __forceinline__ void attend_share(
    const Phase& p, const Run& run, float* memory, int head, int share, int shares, int first, int last, int position,
    u32 launch, int phase) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool has_own = share == shares - 1;  // the last block also handles the current token
    float* heads = memory;                                  // [queries + 2][HEAD_DIM]
    float* parts = memory + (QUERIES + 2) * HEAD_DIM;       // [warps][PART]
    const int* table = table_of(p, run);
    const int room = run.table_widths[p.table] * p.block_size;  // a row that ran ahead may be past the end of its table
    const bool stores = run.rows[0] >= 0 && position < room;
    Place own = {0, 0};
    if (stores) own = place_of(p, table, head, position);
    Tokens tokens;
    ask_for_tokens(tokens, p, table, head, first_token(first), last);
#pragma unroll 1
    for (int task = warp; task < QUERIES + (has_own ? 2 : 0); task += WARPS) {
        const int kind = task < QUERIES ? 0 : task - QUERIES + 1;  // query, key, value
        const int number = kind == 0 ? head * QUERIES + task : p.num_query + (kind == 2 ? p.num_kv : 0) + head;
        const u64 norm = kind == 0 ? p.query_norm : kind == 1 ? p.key_norm : 0;
        float* mine = heads + task * HEAD_DIM;
        prepare_head(p, number, mark_of(launch, p.source_phase), norm, kind < 2, min(position, room - 1), mine);
        if (kind > 0 && stores) store_head(kind == 1 ? p.keys : p.values, kind == 1 ? p.key_scales : p.value_scales, own, mine);
    }
    __syncthreads();
    const int column = lane % TOKEN_LANES * LANE_NUMBERS;
    float query[QUERIES][LANE_NUMBERS];
    Seen seen;
#pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
        seen.most[q] = NOTHING;
        seen.total[q] = 0.0f;
#pragma unroll
        for (int i = 0; i < LANE_NUMBERS; ++i) {
            query[q][i] = heads[q * HEAD_DIM + column + i];
            seen.sums[q][i] = 0.0f;
        }
    }
    read_context(seen, p, query, tokens, table, head, first, last, has_own ? heads + QUERIES * HEAD_DIM : nullptr);
    leave_part(seen, parts + warp * PART);
    __syncthreads();
    u64* left = run.parts + (long long)(head * shares) * PART;
#pragma unroll 1
    for (int i = threadIdx.x; i < QUERIES * HEAD_DIM; i += THREADS) {
        float most, total;
        const int query_number = i / HEAD_DIM;
        const float sum = joined(parts, query_number, i % HEAD_DIM, most, total);
        if (shares == 1) {
            write_result(p, head, i, sum, most, total, launch, phase);
            continue;
        }
        u64* mine = left + share * PART;
        leave_pair(mine + i, sum, launch + phase);
        if (i % HEAD_DIM == 0) {
            leave_pair(mine + QUERIES * HEAD_DIM + 2 * query_number, most, launch + phase);
            leave_pair(mine + QUERIES * HEAD_DIM + 2 * query_number + 1, total, launch + phase);
        }
    }
    if (shares > 1) join_shares(p, left, head, share, shares, launch, phase);
}

// How a context is divided among blocks: the tokens before the current one, from `begin` on. A padding row has none.
struct Context { int position, begin, count, shares, each; };

// Divide the context of the current token among the blocks of each kv head.
__device__ __forceinline__ Context context_of(const Phase& p, const Run& run) {
    Context c;
    c.position = run.rows[0] < 0 ? 0 : (int)run.positions[0];
    c.begin = p.window > 0 ? max(0, c.position + 1 - p.window) : 0;
    c.count = max(0, min(c.position, run.table_widths[p.table] * p.block_size) - c.begin);
    c.shares = max(1, min((int)gridDim.x / p.num_kv, (c.count + LEAST_SHARE) / LEAST_SHARE));
    c.each = (c.count + c.shares - 1) / c.shares;
    return c;
}

// Prefetch what does not depend on other phases: the first keys and values of this block's share, angles and norm
// weights.
__device__ __forceinline__ void ask_for_context(const Phase& p, const Run& run) {
    if (run.rows[0] < 0) return;
    const Context c = context_of(p, run);
    const int head = blockIdx.x / c.shares, share = blockIdx.x % c.shares;
    if (head >= p.num_kv) return;
    const int* table = table_of(p, run);
    const int bytes = HEAD_DIM * (CACHE_KIND == BF16 ? 2 : 1), lines = (bytes + 127) / 128;
    const int token = c.begin + share * c.each + threadIdx.x / (2 * lines);
    if (token < min(c.begin + c.count, c.begin + (share + 1) * c.each)) {
        const Place place = place_of(p, table, head, token);
        const int line = threadIdx.x % lines;
        const u64 at = (threadIdx.x / lines % 2 ? p.values : p.keys) + place.at * (CACHE_KIND == BF16 ? 2 : 1);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(at + line * 128));
    }
    if (p.angles && threadIdx.x * 128 < p.rotated * 2) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p.angles + ((u64)c.position * p.rotated) * 2 + threadIdx.x * 128));
    }
    if (p.query_norm && threadIdx.x < 8) {
        const int line = threadIdx.x % 4;
        if (line * 128 < HEAD_DIM * (p.norm_is_wide ? 4 : 2)) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"((threadIdx.x < 4 ? p.query_norm : p.key_norm) + line * 128));
        }
    }
}

// An attention phase: all (head, share) units of this block.
__device__ __forceinline__ void attend(const Phase& p, const Run& run, float* memory, u32 launch, int phase) {
    const Context c = context_of(p, run);
#pragma unroll 1
    for (int unit = blockIdx.x; unit < p.num_kv * c.shares; unit += gridDim.x) {
        const int head = unit / c.shares, share = unit % c.shares;
        const int first = c.begin + min(c.count, share * c.each), last = c.begin + min(c.count, (share + 1) * c.each);
        attend_share(p, run, memory, head, share, c.shares, first, last, c.position, launch, phase);
        __syncthreads();  // before the next unit overwrites shared memory
    }
}
