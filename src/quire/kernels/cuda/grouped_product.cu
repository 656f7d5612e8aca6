// Grouped gemm of a mixture of experts on Hopper GPUs: warp-specialized wgmma (see grouped_product.py). Needs no CUDA
// header. grouped_product.py prepends the constants of a tile, and `multiply`, wgmmas of 64 by ROWS or some quarters of them.
//
// A tile is WIDTH = 64 * GROUPS * HEIGHT rows of one expert's weight by ROWS pairs of that expert (swap_ab: the weight is
// the operand with 64 rows, so that few pairs need few columns). Of a gated weight it has eight rows of gate, eight of up,
// and so on, so that a thread has both sums of an output. One producer warpgroup copies weights by TMA, and the rows of x
// that the pairs name by cp.async, to a ring of STAGES stages; each of GROUPS consumer warpgroups multiplies 64 * HEIGHT
// rows of the weight, and stores the results. Thread blocks are persistent over the tiles that pairs use.

constexpr int WIDTH = 64 * GROUPS * HEIGHT;
constexpr int WEIGHT_BYTES = WIDTH * LINE;
constexpr int STAGE_BYTES = WEIGHT_BYTES + ROWS * LINE;
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int SUMS = ROWS / 2;          // per thread, for 64 rows of the weight
constexpr int EIGHTS = ROWS / 8;        // groups of eight pairs
constexpr int QUARTERS = ROWS % 32 == 0 ? 4 : 1, QUARTER = ROWS / QUARTERS;  // multiplied only if pairs reach into them
constexpr int PARTS = GATED ? 1 : 2;    // groups of eight outputs per 16 rows of the weight
constexpr int WIDTH_EIGHTS = WIDTH / 16 * PARTS;  // groups of eight outputs per tile
constexpr int LAG = STAGES / 2;         // steps after which a copy of rows must have ended; at most STAGES - 2
constexpr int COPIED = (ROWS + 15) / 16;  // rows per stage of which a producer thread copies 16 bytes
constexpr u32 NO_ROW = 0xFFFFFFFFu;
// Registers per thread: the producer warpgroup gives registers to the consumers (setmaxnreg).
constexpr int LOADING_REGISTERS = 40, MULTIPLYING_REGISTERS = 232;

// The arguments of a launch, written by grouped_product.py.
struct Product {
    u64 x, bias, out, places, tile_experts;
    int tiles;       // in `tile_experts`, of which those that pairs use come first
    int columns;     // tiles over the rows of a weight
    int rows;        // of an expert's weight
    int outputs, inputs, steps;
    int x_stride;    // in 16 bytes
    int used;        // pairs per row of x
    int together;    // tiles of pairs that use the same weights one after the other
    float limit, alpha, shift;
};

// TMA copy of a tile's rows of an expert's weight, starting at group `first` of eight outputs.
__device__ __forceinline__ void copy_weights(u32 to, const TensorMap* map, int column, int first, int expert, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3, %3, %4, %5}], [%6];"
        :: "r"(to), "l"(map), "r"(column), "r"(0), "r"(first), "r"(expert), "r"(barrier) : "memory");
}

// Copy 16 bytes, or write zeros.
__device__ __forceinline__ void copy_piece(u32 to, u64 from, bool inside) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Arrive at an mbarrier.
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// A tile of work: tile `pairs` of the pairs, tile `column` over the rows of their expert's weight.
struct Unit { int pairs, column; };

// The units of a band of `together` tiles of pairs go over all columns before the next band begins, for L2 reuse.
__device__ __forceinline__ Unit unit_of(int number, int tiles, const Product& p) {
    const int begin = number / (p.together * p.columns) * p.together, height = min(tiles - begin, p.together);
    const int rest = number - begin * p.columns;
    return {begin + rest % height, rest / height};
}

// The number of tiles that pairs use. Called by all threads.
__device__ __forceinline__ int count_tiles(const Product& p, int* total) {
    int mine = 0;
    for (int at = threadIdx.x; at < p.tiles; at += THREADS) mine += ((const int*)p.tile_experts)[at] >= 0;
    mine = __reduce_add_sync(ALL_LANES, mine);
    if (threadIdx.x % 32 == 0) atomicAdd(total, mine);
    __syncthreads();
    return *total;
}

// Tell the consumers that a stage's rows have been copied. Each thread orders its own copies before reads by wgmma.
__device__ __forceinline__ void hand_over(u32 barrier) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// The code of the producer warpgroup.
__device__ __forceinline__ void load(const TensorMap* weight, const Product& p, int tiles, u32 ring, u32 full, u32 empty) {
    const int piece = threadIdx.x % 8, first_row = threadIdx.x / 8;
    const u32 own = WEIGHT_BYTES + first_row * LINE + (piece ^ first_row % 8) * 16;  // swizzled as by TMA
    int stage = 0, ready = 0, begun = 0;  // ready: the next stage to hand over; begun: stages before that, at most LAG
    u32 phase = 1;
    for (int number = blockIdx.x; number < tiles * p.columns; number += gridDim.x) {
        const Unit unit = unit_of(number, tiles, p);
        const int expert = ((const int*)p.tile_experts)[unit.pairs];
        u32 rows[COPIED];
#pragma unroll
        for (int i = 0; i < COPIED; i++) {
            const int at = first_row + 16 * i;
            const int pair = at < ROWS ? ((const int*)p.places)[unit.pairs * ROWS + at] : -1;
            rows[i] = pair < 0 ? NO_ROW : (u32)(pair / p.used) * (u32)p.x_stride + piece;
        }
        for (int k = 0; k < p.steps; k++) {
            const u32 to = ring + stage * STAGE_BYTES;
            await(empty + 8 * stage, phase);
            if (threadIdx.x == 0) {
                expect(full + 8 * stage, WEIGHT_BYTES);
                copy_weights(to, weight, k * STEP, unit.column * WIDTH_EIGHTS, expert, full + 8 * stage);
            }
            const bool inside = k * STEP + piece * 8 < p.inputs;
#pragma unroll
            for (int i = 0; i < COPIED; i++)
                if (rows[i] != NO_ROW) copy_piece(to + own + i * 16 * LINE, p.x + 16 * ((u64)rows[i] + k * (STEP / 8)), inside);
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (begun < LAG) begun++;
            else {
                asm volatile("cp.async.wait_group %0;" :: "n"(LAG) : "memory");
                hand_over(full + 8 * ready);
                if (++ready == STAGES) ready = 0;
            }
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    for (; begun > 0; begun--) {
        hand_over(full + 8 * ready);
        if (++ready == STAGES) ready = 0;
    }
}

// A number of the bias.
__device__ __forceinline__ float bias_at(const Product& p, u64 at) {
    const u16 bits = ((const u16*)p.bias)[at];
    if (!IS_HALF) return __uint_as_float((u32)bits << 16);
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// activation(gate) * up, or the clamped gate (see Clamp).
__device__ __forceinline__ float gated(float gate, float up, const Product& p) {
    if (!CLAMPED) return activated(gate) * up;
    const float kept = gate > p.limit ? p.limit : gate;
    const float bounded = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    return __fdividef(kept, 1.0f + __expf(-kept * p.alpha)) * (bounded + p.shift);
}

// Transpose a matrix of 8 by 8 16-bit numbers, of which each lane has two.
__device__ __forceinline__ u32 transposed(u32 pair) {
    u32 turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

// Two pairs' results of the output of this lane: of group `i` of eight pairs, and of part `part` of the outputs.
__device__ __forceinline__ u32 results_of(const float (&sums)[SUMS], int i, int part, float first, float second, const Product& p) {
    const float* at = sums + 4 * i;
    if (!GATED) return to_pair(at[2 * part] + first, at[2 * part + 1] + first);
    return to_pair(gated(at[0] + first, at[2] + second, p), gated(at[1] + first, at[3] + second, p));
}

// Store the results of 64 rows of the weight, of which this warp has 16: the outputs from group `eight` of eight on.
// whole: the pairs of which this lane stores 16 bytes; rest: those of the last groups, of which it stores four bytes.
__device__ __forceinline__ void write_results(
    const float (&sums)[SUMS], const int (&whole)[EIGHTS / 4 + 1], const int (&rest)[4], int eight, int expert, const Product& p) {
    const int lane = threadIdx.x % 32, q = lane % 4;
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const int begin = 8 * (eight + part);
        const bool inside = begin < p.outputs;  // the same for all lanes: outputs are a multiple of eight
        float first = 0.0f, second = 0.0f;
        if (HAS_BIAS && inside) {
            const u64 at = (u64)expert * (p.outputs * (GATED ? 2 : 1)) + begin + lane / 4;
            first = bias_at(p, at);
            if (GATED) second = bias_at(p, at + p.outputs);
        }
#pragma unroll
        for (int i = 0; i + 4 <= EIGHTS; i += 4) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = transposed(results_of(sums, i + j, part, first, second, p));
            turn(words, q);
            const u64 out = p.out + 2 * ((u64)whole[i / 4] * p.outputs + begin);
            if (inside && whole[i / 4] >= 0) *(uint4*)out = make_uint4(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (int i = EIGHTS / 4 * 4; i < EIGHTS; i++) {
            const u32 word = transposed(results_of(sums, i, part, first, second, p));
            const u64 out = p.out + 2 * ((u64)rest[i % 4] * p.outputs + begin + 2 * q);
            if (inside && rest[i % 4] >= 0) *(u32*)out = word;
        }
    }
}

// Called when a warp has read a stage: lets the producer copy to it again.
__device__ __forceinline__ void release(u32 barrier) {
    if (threadIdx.x % 32 == 0) arrive(barrier);
}

// Where a consumer is in the ring.
struct Position { int stage; u32 phase; };

__device__ __forceinline__ void advance(Position& at) {
    if (++at.stage == STAGES) at.stage = 0, at.phase ^= 1;
}

// Multiply all steps of a unit, whose pairs fill `COLUMNS` of its ROWS places.
template <int COLUMNS>
__device__ __forceinline__ void multiply_steps(
    float (&sums)[HEIGHT][SUMS], int steps, int group, Position& at, u32 ring, u32 full, u32 empty) {
    int used = 0;
    for (int k = 0; k < steps; k++) {
        const u32 weights = ring + at.stage * STAGE_BYTES + group * HEIGHT * 64 * LINE, rows = ring + at.stage * STAGE_BYTES + WEIGHT_BYTES;
        await(full + 8 * at.stage, at.phase);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int i = 0; i < LINE; i += 32)
#pragma unroll
            for (int h = 0; h < HEIGHT; h++)
                multiply(*(float(*)[COLUMNS / 2])&sums[h][0], matrix_at(weights + h * 64 * LINE + i), matrix_at(rows + i), k + i > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (k > 0) release(empty + 8 * used);  // the wgmmas of the previous step are done
        used = at.stage;
        advance(at);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(empty + 8 * used);
}

// Skip the steps of a unit.
__device__ __forceinline__ void pass_steps(int steps, Position& at, u32 full, u32 empty) {
    for (int k = 0; k < steps; k++) {
        await(full + 8 * at.stage, at.phase);
        release(empty + 8 * at.stage);
        advance(at);
    }
}

// The quarters of a tile's places that its pairs reach into. Pairs fill a tile from its first place on.
__device__ __forceinline__ int count_quarters(const int* places) {
    int count = 1;
#pragma unroll
    for (int i = 1; i < QUARTERS; i++) count += places[QUARTER * i] >= 0;
    return count;
}

// The code of a consumer warpgroup: its rows of the weight, of all units of this block.
__device__ __forceinline__ void multiply_units(const Product& p, int tiles, u32 ring, u32 full, u32 empty) {
    const int group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1, lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    Position at = {0, 0};
    for (int number = blockIdx.x; number < tiles * p.columns; number += gridDim.x) {
        const Unit unit = unit_of(number, tiles, p);
        const int* places = (const int*)p.places + unit.pairs * ROWS;
        const int expert = HAS_BIAS ? ((const int*)p.tile_experts)[unit.pairs] : 0;
        int whole[EIGHTS / 4 + 1], rest[4];
#pragma unroll
        for (int i = 0; i < EIGHTS / 4; i++) whole[i] = places[8 * (4 * i + lane % 4) + lane / 4];
#pragma unroll
        for (int i = EIGHTS / 4 * 4; i < EIGHTS; i++) rest[i % 4] = places[8 * i + lane / 4];
        const bool idle = unit.column * WIDTH + group * HEIGHT * 64 >= p.rows;
        float sums[HEIGHT][SUMS];
        const int quarters = idle ? 0 : count_quarters(places);
        if (quarters == 0) pass_steps(p.steps, at, full, empty);
        else if (quarters == QUARTERS) multiply_steps<ROWS>(sums, p.steps, group, at, ring, full, empty);
        else if (quarters == 1) multiply_steps<QUARTER>(sums, p.steps, group, at, ring, full, empty);
        else if (quarters == 2) multiply_steps<QUARTER * (QUARTERS == 4 ? 2 : 1)>(sums, p.steps, group, at, ring, full, empty);
        else multiply_steps<QUARTER * (QUARTERS == 4 ? 3 : 1)>(sums, p.steps, group, at, ring, full, empty);
        if (idle) continue;
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) {
            const int sixteen = (group * HEIGHT + h) * 4 + warp;  // of the tile's rows
            write_results(sums[h], whole, rest, unit.column * WIDTH_EIGHTS + sixteen * PARTS, expert, p);
        }
    }
}

// The kernel: warpgroup 0 is the producer, the others are consumers.
extern "C" __global__ void __launch_bounds__(THREADS, 1) grouped_product(
    const __grid_constant__ TensorMap weight, const __grid_constant__ Product p) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    __shared__ int total;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, ring = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(full + 8 * i, 1 + 4);  // the weights, and the rows of four producer warps
            init_barrier(empty + 8 * i, 4 * GROUPS);
        }
        total = 0;
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    await_kernel_before();
    const int tiles = count_tiles(p, &total);
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(LOADING_REGISTERS));
        load(&weight, p, tiles, ring, full, empty);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(MULTIPLYING_REGISTERS));
        multiply_units(p, tiles, ring, full, empty);
    }
}
