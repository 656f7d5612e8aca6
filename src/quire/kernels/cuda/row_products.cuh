// Products of one row, by tiles of 16 outputs on tensor cores. The row stands in all eight columns of the right operand.
//
// Of a tile, lane 4 g + t of a warp holds 16 bytes of output g and of output g + 8, and the inputs that belong to them:
// which inputs an instruction takes together does not matter, so each lane reads what lies side by side.

struct Lanes { float low, high; };  // sums of outputs g and g + 8

constexpr int TURNS = 4;  // tiles that warps may be ahead of the one that ends them

__device__ __forceinline__ float activated(float x, int kind) {
    if (kind == 0) return x / (1.0f + __expf(-x));
    if (kind == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (kind == 2) return x / (1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    return fmaxf(x, 0.0f);
}

// sums[0], sums[2]: outputs g and g + 8; the other columns are the same.
__device__ __forceinline__ void add_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same in float16.
__device__ __forceinline__ void add_half_product(float (&sums)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two bytes of a word, the first or the last ones, as float16 numbers: float8 (e4m3), or int8 as the lower byte of 1152 +
// number.
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

constexpr int CHAINS = 4;  // of sums that do not wait for one another

template <int KIND>
__device__ __forceinline__ void multiply_unit(const uint4& low, const uint4& high, const uint4* inputs, float (&sums)[CHAINS][4], int chain) {
    const uint4 x = inputs[0];
    if (KIND == BF16) {
        add_product(sums[chain], low.x, high.x, low.y, high.y, x.x, x.y);
        add_product(sums[(chain + 1) % CHAINS], low.z, high.z, low.w, high.w, x.z, x.w);
        return;
    }
    const uint4 y = inputs[1];
    add_half_product(sums[0], from_bytes<KIND, 0>(low.x), from_bytes<KIND, 0>(high.x), from_bytes<KIND, 1>(low.x),
                     from_bytes<KIND, 1>(high.x), x.x, x.y);
    add_half_product(sums[1], from_bytes<KIND, 0>(low.y), from_bytes<KIND, 0>(high.y), from_bytes<KIND, 1>(low.y),
                     from_bytes<KIND, 1>(high.y), x.z, x.w);
    add_half_product(sums[2], from_bytes<KIND, 0>(low.z), from_bytes<KIND, 0>(high.z), from_bytes<KIND, 1>(low.z),
                     from_bytes<KIND, 1>(high.z), y.x, y.y);
    add_half_product(sums[3], from_bytes<KIND, 0>(low.w), from_bytes<KIND, 0>(high.w), from_bytes<KIND, 1>(low.w),
                     from_bytes<KIND, 1>(high.w), y.z, y.w);
}

// Sums of one slot's units of a dense weight; `vector`: the inputs of the first one.
template <int KIND>
__device__ __forceinline__ void multiply_units(u32 slot, const u8* vector, int count, float (&sums)[CHAINS][4]) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* rows = reinterpret_cast<const u8*>(__cvta_shared_to_generic(slot)) + g * PITCH + t * 16;
    const uint4* inputs = reinterpret_cast<const uint4*>(vector) + (KIND == BF16 ? t : 2 * t);
#pragma unroll
    for (int unit = 0; unit < PIECE_UNITS; ++unit) {
        if (unit >= count) break;
        const uint4 low = *reinterpret_cast<const uint4*>(rows + unit * UNIT);
        const uint4 high = *reinterpret_cast<const uint4*>(rows + 8 * PITCH + unit * UNIT);
        multiply_unit<KIND>(low, high, inputs + unit * (KIND == BF16 ? 4 : 8), sums, unit % 2 * 2);
    }
}

// The levels of a quarter in both halves of a word, as bfloat16 numbers 128 + level.
__device__ __forceinline__ u32 levels_of(u32 word, int quarter) {
    u32 out;
    asm("lop3.b32 %0, %1, 0x000F000F, 0x43004300, 0xEA;" : "=r"(out) : "r"(word >> (4 * quarter)));
    return out;
}

__device__ __forceinline__ float factor_at(const u8* factors, int line, int output) {
    const u16 bits = reinterpret_cast<const u16*>(factors)[line * TILE + output];
    return FACTORS_ARE_HALVES ? from_half(bits) : from_bf16(bits);
}

// Sums of one slot's steps of a weight of 4 bits, the first of which is step `first` of the weight.
__device__ __forceinline__ Lanes multiply_steps(
    const Phase& p, const Shared& shared, u32 slot, int first, int count, Lanes acc) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u8* data = reinterpret_cast<const u8*>(__cvta_shared_to_generic(slot));
    const bool has_offsets = p.offset != 0;
    int first_group;
    const int groups = groups_of(first, count, p.group_shift, first_group);
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; ++step) {
        if (step >= count) break;
        const uint4 low = *reinterpret_cast<const uint4*>(data + step * STEP_BYTES + lane * 16);
        const uint4 high = *reinterpret_cast<const uint4*>(data + step * STEP_BYTES + 512 + lane * 16);
        const float4 totals = reinterpret_cast<const float4*>(shared.sums)[first + step];
        const float inputs[4] = {totals.x, totals.y, totals.z, totals.w};
        float sums[4][4];
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
            const uint4 x = reinterpret_cast<const uint4*>(shared.vector)[((first + step) * 4 + quarter) * 4 + t];
            sums[quarter][0] = sums[quarter][1] = sums[quarter][2] = sums[quarter][3] = 0.0f;
            add_product(sums[quarter], levels_of(low.x, quarter), levels_of(high.x, quarter), levels_of(low.y, quarter),
                        levels_of(high.y, quarter), x.x, x.y);
            add_product(sums[quarter], levels_of(low.z, quarter), levels_of(high.z, quarter), levels_of(low.w, quarter),
                        levels_of(high.w, quarter), x.z, x.w);
        }
#pragma unroll
        for (int begin = 0; begin < 4; begin += QUARTERS) {  // the groups of the step
            float lower = 0.0f, upper = 0.0f, input = 0.0f;
#pragma unroll
            for (int quarter = begin; quarter < begin + QUARTERS; ++quarter) {
                lower += sums[quarter][0];
                upper += sums[quarter][2];
                input += inputs[quarter];
            }
            const int line = QUARTERS < 4 ? step * (4 / QUARTERS) + begin / QUARTERS : ((first + step) >> p.group_shift) - first_group;
            const u8* factors = data + FACTORS_AT;
            acc.low += (lower - 136.0f * input) * factor_at(factors, line, g);
            acc.high += (upper - 136.0f * input) * factor_at(factors, line, g + 8);
            if (has_offsets) {
                acc.low += input * factor_at(factors, groups + line, g);
                acc.high += input * factor_at(factors, groups + line, g + 8);
            }
        }
    }
    return acc;
}

// This warp's sums of one part of a tile.
template <int KIND>
__device__ __forceinline__ Lanes multiply_part(const Phase& p, const Run& run, const Shared& shared, Ring& ring, int begin, int count) {
    Lanes acc = {0.0f, 0.0f};
    float sums[CHAINS][4] = {};
    const int each = KIND == NIBBLES ? PIECE_STEPS : PIECE_UNITS;
#pragma unroll 1
    for (int done = 0; done < count; done += each) {
        const u32 slot = await_slot(ring, run);
        const int some = min(each, count - done);
        const u8* vector = shared.vector + (begin + done) * (KIND == BF16 ? UNIT : 2 * UNIT);
        if (KIND == NIBBLES) {
            acc = multiply_steps(p, shared, slot, begin + done, some, acc);
        } else {
            multiply_units<KIND>(slot, vector, some, sums);
        }
        release_slot(ring);
    }
    if (KIND != NIBBLES) {
        acc.low = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
        acc.high = (sums[0][2] + sums[1][2]) + (sums[2][2] + sums[3][2]);
    }
    return acc;
}

// The factors of an output, and what its target holds: asked for before they are needed.
struct Ending {
    float scale[2];
    u16 bias[2], plain;
    u32 before;
};

__device__ __forceinline__ void ask_for_ending(const Phase& p, const Run& run, int n, int parts, Ending& ending) {
    for (int part = 0; part < parts; ++part) {
        const int row = n + part * p.outputs;
        if (p.kind == FLOAT8 || p.kind == INT8) ending.scale[part] = __ldg(reinterpret_cast<const float*>(p.scale) + row);
        if (p.bias) ending.bias[part] = __ldg(reinterpret_cast<const u16*>(p.bias) + row);
    }
    if (!p.adds) return;
    if (p.plain_before) ending.plain = reinterpret_cast<const u16*>(plain(p.plain_before, run))[n];
    else asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(ending.before) : "l"(p.target + 4ull * n) : "memory");
}

// Write an output, of sums over the inputs of each part.
__device__ __forceinline__ void finish(
    const Phase& p, const Run& run, int n, int parts, const float (&sums)[2], float inverse, const Ending& ending, u32 launch, int phase) {
    float results[2] = {0.0f, 0.0f};
    for (int part = 0; part < parts; ++part) {
        float factor = inverse;
        if (p.kind == FLOAT8 || p.kind == INT8) factor *= ending.scale[part];
        results[part] = sums[part] * factor + (p.bias ? from_bf16(ending.bias[part]) : 0.0f);
    }
    float result = parts == 2 ? activated(results[0], p.activation) * results[1] : results[0];
    if (p.adds && p.plain_before) result += from_bf16(ending.plain);
    else if (p.adds) {
        const u32 mark = mark_of(launch, p.before_phase);
        const u32 word = (ending.before & 0xFFFFu) == mark ? ending.before : await_word(p.target + 4ull * n, mark);
        result += high_half(word);
    }
    leave_word(p.target + 4ull * n, result, mark_of(launch, phase));
    if (p.plain_target) write_number(plain(p.plain_target, run) + 2ull * n, result);
}

// What a phase's tiles are ended with: by how much sums are multiplied, and what tells their results apart.
struct End { float factor; u32 launch; int phase; };

// End a tile: by the first lanes of one warp, when all warps have left their sums.
__device__ __forceinline__ void end_tile(
    const Phase& p, const Run& run, const Shared& shared, int n, int parts, int turn, u32 parity, const Ending& ending, const End& end) {
    await_barrier(shared.done + turn * 8, parity);
    const int lane = threadIdx.x % 32;
    const float* partial = shared.partial + turn * 2 * TILE * WARPS;
    if (lane < TILE && n < p.outputs) {
        float sums[2] = {0.0f, 0.0f};
        for (int part = 0; part < parts; ++part) {
            const float4* mine = reinterpret_cast<const float4*>(partial + (part * TILE + lane) * WARPS);
            const float4 first = mine[0], second = mine[1];
            sums[part] = ((first.x + first.y) + (first.z + first.w)) + ((second.x + second.y) + (second.z + second.w));
        }
        finish(p, run, n, parts, sums, end.factor, ending, end.launch, end.phase);
    }
    __syncwarp();
    if (lane == 0) arrive(shared.taken + turn * 8);
}

// `tiles`: how many this program has multiplied before; they take turns at the memory for sums.
template <int KIND>
__device__ __forceinline__ void multiply(
    const Phase& p, const Run& run, const Shared& shared, Ring& ring, int& tiles, u32 launch, int phase) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, parts = p.activation >= 0 ? 2 : 1;
    End end = {inverse_norm(p, shared), launch, phase};
    if (KIND == FLOAT8 || KIND == INT8) end.factor *= scale_of_inputs(shared);
    int begin, count;
    own_inputs(warp, KIND == NIBBLES ? p.steps : p.row_bytes / UNIT, begin, count);
#pragma unroll 1
    for (int tile = first_tile(p.shift); tile * TILE < p.outputs; tile += gridDim.x, ++tiles) {
        const int turn = tiles % TURNS, n = tile * TILE + lane;
        const u32 parity = tiles / TURNS % 2;
        float* partial = shared.partial + turn * 2 * TILE * WARPS;
        const bool ends = warp == tiles % WARPS;  // warps take turns at ending tiles
        Ending ending;
        if (ends && lane < TILE && n < p.outputs) ask_for_ending(p, run, n, parts, ending);
        await_barrier(shared.taken + turn * 8, parity ^ 1);
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const Lanes acc = multiply_part<KIND>(p, run, shared, ring, begin, count);
            if (lane % 4 == 0) {
                partial[(part * TILE + lane / 4) * WARPS + warp] = acc.low;
                partial[(part * TILE + lane / 4 + 8) * WARPS + warp] = acc.high;
            }
        }
        __syncwarp();
        if (lane == 0) arrive(shared.done + turn * 8);
        if (ends) end_tile(p, run, shared, n, parts, turn, parity, ending, end);
    }
}
