// Gemv of one row, by tiles of 16 outputs on tensor cores (mma.sync). The row is repeated in all eight columns of the
// right operand, except for 4-bit weights (multiply_steps).
//
// For a tile, lane 4 g + t of a warp loads 16 bytes of output g and of output g + 8, and the corresponding inputs. The
// order of inputs within an instruction does not matter, so each lane loads contiguous bytes.

struct Lanes { float low, high; };  // sums of outputs g and g + 8

constexpr int TURNS = 4;  // tiles that the warps of a team may be ahead of its epilogue
constexpr int TEAM_SIZES = 3;  // as powers of 2, from 2 warps on
constexpr int ALL_TEAMS = WARPS / 2 + WARPS / 4 + WARPS / 8;  // each with its own barriers

__device__ __forceinline__ float activated(float x, int kind) {
    if (kind == 0) return x / (1.0f + __expf(-x));
    if (kind == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (kind == 2) return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    return x < 0.0f ? 0.0f : x;  // NaN stays NaN
}

// bfloat16 mma. sums[0], sums[2]: outputs g and g + 8; the other columns are equal.
__device__ __forceinline__ void add_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same in float16.
__device__ __forceinline__ void add_half_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Convert the first or the last two bytes of a word to float16: float8 (e4m3), or int8 as the lower byte of 1152 +
// value.
template <int KIND, int PLACE>
__device__ __forceinline__ u32 from_bytes(u32 word) {
    u32 out;
    if (KIND == FLOAT8) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"((u16)(PLACE ? word >> 16 : word)));
    } else {
        const u32 biased = __byte_perm(word ^ 0x80808080u, 0x64646464u, PLACE ? 0x4342 : 0x4140);
        asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(biased), "r"(0x64806480u));
    }
    return out;
}

constexpr int CHAINS = 4;  // independent accumulators

// Multiply one unit (64 bytes of a row of the tile) by its inputs.
template <int KIND>
__device__ __forceinline__ void multiply_unit(const uint4& low, const uint4& high, const uint4* inputs, float (&sums)[CHAINS][4], int chain) {
    const uint4 x = inputs[0];
    if (KIND == BF16) {
        add_product(sums[chain], low.x, high.x, low.y, high.y, x.x, x.y);
        add_product(sums[(chain + 1) % CHAINS], low.z, high.z, low.w, high.w, x.z, x.w);
        return;
    }
    const uint4 y = inputs[1];
    const u32 lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
    const u32 xs[8] = {x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#pragma unroll
    for (int word = 0; word < 4; ++word) {
        const u32 first = from_bytes<KIND, 0>(lows[word]), second = from_bytes<KIND, 1>(lows[word]);
        const u32 third = from_bytes<KIND, 0>(highs[word]), fourth = from_bytes<KIND, 1>(highs[word]);
        add_half_product(sums[word], first, third, second, fourth, xs[2 * word], xs[2 * word + 1]);
    }
}

// Multiply one slot's units of a weight that is not 4-bit; `vector`: the inputs of the first unit. IS_WHOLE: there are
// PIECE_UNITS.
template <int KIND, bool IS_WHOLE>
__device__ __forceinline__ void multiply_units(u32 slot, const u8* vector, int count, float (&sums)[CHAINS][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* row = reinterpret_cast<const u8*>(__cvta_shared_to_generic(slot)) + g * PITCH + t * 16;
    const u8* rows[2] = {row + g % 2 * UNIT, row - g % 2 * UNIT};  // for even and odd units, see copy_rows
    const uint4* inputs = reinterpret_cast<const uint4*>(vector) + (KIND == BF16 ? t : 2 * t);
#pragma unroll
    for (int unit = 0; unit < PIECE_UNITS; ++unit) {
        if (!IS_WHOLE && unit >= count) break;
        const uint4 low = *reinterpret_cast<const uint4*>(rows[unit % 2] + unit * UNIT);
        const uint4 high = *reinterpret_cast<const uint4*>(rows[unit % 2] + 8 * PITCH + unit * UNIT);
        multiply_unit<KIND>(low, high, inputs + unit * (KIND == BF16 ? 4 : 8), sums, unit % 2 * 2);
    }
}

// Integer mma of unsigned bytes by signed bytes.
__device__ __forceinline__ void add_whole_product(int (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The 4-bit values of quarters 0 and 2 of a step alternating, or of 1 and 3, as bytes.
__device__ __forceinline__ u32 levels_of(u32 word, int odd) { return (odd ? word >> 4 : word) & 0x0F0F0F0Fu; }

// A scale or offset of a 4-bit weight, from the slot.
__device__ __forceinline__ float factor_at(const u8* factors, int line, int output) {
    const u16 bits = reinterpret_cast<const u16*>(factors)[line * TILE + output];
    return FACTORS_ARE_HALVES ? from_half(bits) : from_bf16(bits);
}

// Multiply one slot's steps of a 4-bit weight, the first of which is step `first` of the weight; IS_WHOLE: there are
// PIECE_STEPS. Of the eight columns of the right operand, two hold the upper and the lower bytes of each quarter's
// inputs, with zeros for the other quarters: a lane gets sums over quarter t only, and the four lanes of an output
// divide the work of applying its scales.
template <bool IS_WHOLE>
__device__ __forceinline__ Lanes multiply_steps(
    const Shared& shared, u32 slot, int first, int count, int group_shift, bool has_offsets, Lanes acc) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, quarter = g / 2;
    const u8* data = reinterpret_cast<const u8*>(__cvta_shared_to_generic(slot));
    const uint2* inputs = reinterpret_cast<const uint2*>(shared.vector) + (first * 16 + quarter * 4 + t) * 2 + g % 2;
    const Quarter* quarters = shared.quarters + first * 4 + t;
    const u32 places[2] = {quarter < 2 ? 0x4140u : 0x1404u, quarter < 2 ? 0x4342u : 0x3424u};  // byte selectors
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; ++step) {
        if (!IS_WHOLE && step >= count) break;
        const uint4 low = *reinterpret_cast<const uint4*>(data + step * STEP_BYTES + lane * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(data + step * STEP_BYTES + 512 + lane * 16);
        const uint2 x = inputs[step * 32];
        const Quarter own = quarters[step * 4];
        int sums[2][4] = {};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const u32 left = quarter % 2 == odd ? places[0] : 0x4444u, right = quarter % 2 == odd ? places[1] : 0x4444u;
            add_whole_product(sums[0], levels_of(low.x, odd), levels_of(high.x, odd), levels_of(low.y, odd), levels_of(high.y, odd),
                              __byte_perm(x.x, 0, left), __byte_perm(x.x, 0, right));
            add_whole_product(sums[1], levels_of(low.z, odd), levels_of(high.z, odd), levels_of(low.w, odd), levels_of(high.w, odd),
                              __byte_perm(x.y, 0, left), __byte_perm(x.y, 0, right));
        }
        const float lower = (sums[0][0] + sums[1][0]) * 256 + (sums[0][1] + sums[1][1]);
        const float upper = (sums[0][2] + sums[1][2]) * 256 + (sums[0][3] + sums[1][3]);
        const int line = QUARTERS < 4 ? step * (4 / QUARTERS) + t / QUARTERS
                                      : group_of(first + step, group_shift) - group_of(first, group_shift);
        const float middle = -8.0f * own.total;
        acc.low = fmaf(fmaf(lower, own.scale, middle), factor_at(data + FACTORS_AT, line, g), acc.low);
        acc.high = fmaf(fmaf(upper, own.scale, middle), factor_at(data + FACTORS_AT, line, g + 8), acc.high);
        if (has_offsets) {
            acc.low = fmaf(own.total, factor_at(data + OFFSETS_AT, line, g), acc.low);
            acc.high = fmaf(own.total, factor_at(data + OFFSETS_AT, line, g + 8), acc.high);
        }
    }
    return acc;
}

// The epilogue's parameters, kept in registers, since shared memory is slow to read.
struct Epilogue {
    u64 scale, bias, target, plain_before, plain_target;
    int outputs, activation, adds;
    u32 mark, mark_before;  // of the results, and of what they are added to
    float factor;           // multiplied into all sums
};

__device__ __forceinline__ Epilogue epilogue_of(const Phase& p, const Run& run, u32 launch, int phase) {
    return {p.scale, p.bias, p.target, plain(p.plain_before, run), plain(p.plain_target, run),
            p.outputs, p.activation, p.adds, mark_of(launch, phase), mark_of(launch, p.before_phase), 1.0f};
}

// The range of inputs that a warp multiplies, and the format of its weight.
struct WarpInputs { int begin, count, group_shift; bool has_offsets; };

// Compute this warp's sums of one part (gate or up) of a tile.
template <int KIND>
__device__ __forceinline__ Lanes multiply_part(const Shared& shared, Ring& ring, const WarpInputs& share, u64 policy) {
    Lanes acc = {0.0f, 0.0f};
    float sums[CHAINS][4] = {};
    const int each = KIND == NIBBLES ? PIECE_STEPS : PIECE_UNITS;
#pragma unroll 1
    for (int done = 0; done < share.count; done += each) {
        const u32 slot = await_slot(ring);
        const int some = min(each, share.count - done);
        const u8* vector = shared.vector + (share.begin + done) * (KIND == BF16 ? UNIT : 2 * UNIT);
        if constexpr (KIND == NIBBLES) {
            const int first = share.begin + done;
            acc = some == each ? multiply_steps<true>(shared, slot, first, some, share.group_shift, share.has_offsets, acc)
                               : multiply_steps<false>(shared, slot, first, some, share.group_shift, share.has_offsets, acc);
        } else if (some == each) {
            multiply_units<KIND, true>(slot, vector, some, sums);
        } else {
            multiply_units<KIND, false>(slot, vector, some, sums);
        }
        release_slot(ring, policy);
    }
    if constexpr (KIND == NIBBLES) {
#pragma unroll
        for (int apart = 1; apart < 4; apart *= 2) {
            acc.low += __shfl_xor_sync(ALL_LANES, acc.low, apart);
            acc.high += __shfl_xor_sync(ALL_LANES, acc.high, apart);
        }
    } else {
        acc.low = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
        acc.high = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
    }
    return acc;
}

// Scale, bias and addend of an output: loaded before they are needed.
struct Operands {
    float scale[2];
    u16 bias[2], plain;
    u32 before;
};

// Start to load the operands of the epilogue of a tile.
template <int KIND>
__device__ __forceinline__ void ask_for_operands(const Epilogue& e, int tile, bool is_ending, Operands& operands) {
    const int lane = threadIdx.x % 32, n = tile * TILE + lane;
    if (!is_ending || lane >= TILE || n >= e.outputs) return;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        if (part && e.activation < 0) break;
        const int row = n + part * e.outputs;
        if (KIND == FLOAT8 || KIND == INT8) operands.scale[part] = __ldg(reinterpret_cast<const float*>(e.scale) + row);
        if (e.bias) operands.bias[part] = __ldg(reinterpret_cast<const u16*>(e.bias) + row);
    }
    if (!e.adds) return;
    if (e.plain_before) operands.plain = reinterpret_cast<const u16*>(e.plain_before)[n];
    else asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(operands.before) : "l"(e.target + 4ull * n) : "memory");
}

// Epilogue of one output: scale, bias, gate and addition, from the sums of each part.
template <int KIND>
__device__ __forceinline__ void finish(const Epilogue& e, int n, const float (&sums)[2], const Operands& operands) {
    float results[2] = {0.0f, 0.0f};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const float factor = KIND == FLOAT8 || KIND == INT8 ? e.factor * operands.scale[part] : e.factor;
        results[part] = sums[part] * factor + (e.bias ? from_bf16(operands.bias[part]) : 0.0f);
    }
    float result = e.activation >= 0 ? activated(results[0], e.activation) * results[1] : results[0];
    if (e.adds && e.plain_before) result += from_bf16(operands.plain);
    else if (e.adds) {
        const u32 word = (operands.before & 0xFFFFu) == e.mark_before ? operands.before : await_word(e.target + 4ull * n, e.mark_before);
        result += high_half(word);
    }
    leave_word(e.target + 4ull * n, result, e.mark);
    if (e.plain_target) write_number(e.plain_target + 2ull * n, result);
}

// The warps that multiply a tile together in one phase.
struct Team {
    int shift, warp;     // log2 of its size; index of this warp in it
    int number;          // index among the teams of all sizes
    int tiles;           // tiles that it has multiplied before in this launch, which select the memory for its sums
    __device__ __forceinline__ bool is_ending() const { return (tiles & ((1 << shift) - 1)) == warp; }
    __device__ __forceinline__ int turn() const { return number * TURNS + tiles % TURNS; }
    __device__ __forceinline__ u32 parity() const { return tiles / TURNS % 2; }
};

__device__ __forceinline__ Team team_of(int shift, const int (&tiles)[TEAM_SIZES]) {
    const int warp = threadIdx.x / 32, before = shift == 1 ? 0 : shift == 2 ? WARPS / 2 : WARPS / 2 + WARPS / 4;
    return {shift, warp & ((1 << shift) - 1), before + (warp >> shift), shift == 1 ? tiles[0] : shift == 2 ? tiles[1] : tiles[2]};
}

// Finish a tile by the first lanes of one warp, once its team has stored its sums.
template <int KIND>
__device__ __forceinline__ void end_tile(
    const Epilogue& e, const Shared& shared, const Team& team, const float* partial, int n, const Operands& operands) {
    const int lane = threadIdx.x % 32;
    await_barrier(shared.done + team.turn() * 8, team.parity());
    float sums[2] = {0.0f, 0.0f};
    if (lane < TILE) {
#pragma unroll
        for (int part = 0; part < 2; ++part) {
            if (part && e.activation < 0) break;
            const float2* mine = reinterpret_cast<const float2*>(partial + ((part * TILE + lane) << team.shift));
#pragma unroll
            for (int i = 0; i < WARPS / 2; ++i) {
                if (2 * i >= 1 << team.shift) break;
                sums[part] += mine[i].x + mine[i].y;
            }
        }
    }
    __syncwarp();
    if (lane == 0) arrive(shared.taken + team.turn() * 8);
    if (lane < TILE && n < e.outputs) finish<KIND>(e, n, sums, operands);
}

// A gemv phase: wait for the inputs, and multiply. `tiles`: tiles that this warp's teams of each size have multiplied
// before.
template <int KIND>
__device__ __forceinline__ void multiply(
    const Phase& p, const Run& run, const Shared& shared, Ring& ring, int (&tiles)[TEAM_SIZES], u64 policy, u32 launch, int phase) {
    const int lane = threadIdx.x % 32, parts = p.parts;
    Team team = team_of(p.team_shift, tiles);
    const int first = first_of_team(p.shift, team.shift), partials = (threadIdx.x / 32 >> team.shift) * TURNS;
    Epilogue e = epilogue_of(p, run, launch, phase);
    WarpInputs share = {0, 0, p.group_shift, p.offset != 0};
    own_inputs(KIND == NIBBLES ? p.steps : p.row_bytes / UNIT, team.shift, share.begin, share.count);
    NormWeights norm;
    ask_for_norm(p, norm);
    Operands operands;
    ask_for_operands<KIND>(e, first, team.is_ending(), operands);
    load_vector<KIND>(p, run, shared, norm, launch);
    e.factor = inverse_norm(p, shared);
    if (KIND == FLOAT8 || KIND == INT8) e.factor *= scale_of_inputs(shared);
#pragma unroll 1
    for (int tile = first; tile * TILE < e.outputs; tile = next_of_team(tile, team.shift), ++team.tiles) {
        float* partial = shared.partial + ((partials + team.tiles % TURNS) * 2 * TILE << team.shift);
        if (tile != first) ask_for_operands<KIND>(e, tile, team.is_ending(), operands);
        await_barrier(shared.taken + team.turn() * 8, team.parity() ^ 1);
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const Lanes acc = multiply_part<KIND>(shared, ring, share, policy);
            if (lane % 4 == 0) {
                partial[((part * TILE + lane / 4) << team.shift) + team.warp] = acc.low;
                partial[((part * TILE + lane / 4 + 8) << team.shift) + team.warp] = acc.high;
            }
        }
        __syncwarp();
        if (lane == 0) arrive(shared.done + team.turn() * 8, WARPS >> team.shift);
        if (team.is_ending()) end_tile<KIND>(e, shared, team, partial, tile * TILE + lane, operands);
    }
    if (team.shift == 1) tiles[0] = team.tiles;
    else if (team.shift == 2) tiles[1] = team.tiles;
    else tiles[2] = team.tiles;
}
