// Gated gemm, activation(gate) * up, of many rows on Hopper GPUs: warp-specialized wgmma (see gated_gemm.py, which
// prepends hopper.cuh, the constants of a tile, and `multiply`, a wgmma of 64 rows by SLICE columns).
//
// A tile is ROWS rows by WIDTH rows of the weight: eight of gate, eight of up, and so on, so that a thread has both
// sums of an output. One producer warp copies rows and weights by TMA to a ring of STAGES stages; GROUPS consumer
// warpgroups each multiply 64 * HEIGHT rows of the tile, and store the results. The two thread blocks of a cluster take
// adjacent tiles of the same rows: each copies half of these rows and multicasts them to both.

constexpr int CLUSTER = 2;
constexpr int STEP = LINE / 2;          // elements of K per stage
constexpr int ROWS = 64 * GROUPS * HEIGHT;
constexpr int X_BYTES = ROWS * LINE;
constexpr int STAGE_BYTES = X_BYTES + WIDTH * LINE;
constexpr int SUMS = WIDTH / 2;         // per thread, for 64 rows
constexpr int EIGHTS = WIDTH / 16;      // groups of eight outputs
// Registers per thread: the producer warpgroup gives registers to the consumers (setmaxnreg).
constexpr int LOADING_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int MULTIPLYING_REGISTERS = GROUPS == 3 ? 160 : 232;

struct alignas(64) TensorMap { u64 words[16]; };

// The arguments of a launch, written by gated_gemm.py.
struct Gemm {
    u64 out;
    int rows, outputs, out_stride;
    int steps;             // of K
    int row_tiles, pairs;  // pairs: of adjacent tiles, over all rows
    int together;          // row tiles that use the same weights one after the other
};

// Arrive at the mbarrier at the same offset in another block of the cluster. Without ".release.cluster", since only
// memory that was read is handed over, and such a release would wait for all of this block's global memory operations.
__device__ __forceinline__ void arrive_at(u32 barrier, int program) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" :: "r"(barrier), "r"(program) : "memory");
}

// TMA copy of WIDTH rows of the weight, starting at group `first` of eight rows of gate and of up.
__device__ __forceinline__ void copy_weights(u32 to, const TensorMap* map, int column, int first, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
        :: "r"(to), "l"(map), "r"(column), "r"(0), "r"(first), "r"(barrier) : "memory");
}

// TMA copy of half of a tile's rows, multicast to both blocks of the cluster.
__device__ __forceinline__ void copy_rows(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3) : "memory");
}

// Barrier of the cluster.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The tile of a block: `together` row tiles with one pair of weight tiles, then with the next, for L2 reuse.
struct Tile { int row, eight; };

__device__ __forceinline__ Tile tile_of(int pair, const Gemm& p) {
    const int runs = p.pairs / p.row_tiles, band = pair / (runs * p.together), first = band * p.together;
    const int rest = pair - band * runs * p.together, height = min(p.together, p.row_tiles - first);
    return {(first + rest % height) * ROWS, (rest / height * CLUSTER + (int)blockIdx.x % CLUSTER) * EIGHTS};
}

// Transpose four words in each of four lanes: afterwards lane q has word q of all four.
__device__ __forceinline__ void turn(u32 (&w)[4], int q) {
    const u32 a = __shfl_xor_sync(ALL_LANES, q & 1 ? w[0] : w[1], 1), b = __shfl_xor_sync(ALL_LANES, q & 1 ? w[2] : w[3], 1);
    if (q & 1) w[0] = a, w[2] = b;
    else w[1] = a, w[3] = b;
    const u32 c = __shfl_xor_sync(ALL_LANES, q & 2 ? w[0] : w[2], 2), d = __shfl_xor_sync(ALL_LANES, q & 2 ? w[1] : w[3], 2);
    if (q & 2) w[0] = c, w[1] = d;
    else w[2] = c, w[3] = d;
}

// Two outputs of group `eight`, in the first (0) or second (1) row of a thread: activation(gate) * up.
__device__ __forceinline__ u32 outputs_of(const float (&sums)[SUMS], int eight, int half) {
    const float* gate = sums + 8 * eight + 2 * half;
    return to_pair(activated(gate[0]) * gate[4], activated(gate[1]) * gate[5]);
}

// Store the outputs of 64 rows: this thread has those of `row` and of `row + 8`.
__device__ __forceinline__ void write_outputs(const float (&sums)[SUMS], int row, int first, const Gemm& p) {
    const int q = threadIdx.x % 4;
    for (int half = 0; half < 2; half++) {
        const int at = row + 8 * half;
        const bool is_row = at < p.rows;
        const u64 out = p.out + 2 * ((u64)at * p.out_stride);
#pragma unroll
        for (int i = 0; i + 4 <= EIGHTS; i += 4) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) words[j] = outputs_of(sums, i + j, half);
            turn(words, q);
            const int output = 8 * (first + i + q);
            if (is_row && output < p.outputs) *(uint4*)(out + 2 * output) = make_uint4(words[0], words[1], words[2], words[3]);
        }
#pragma unroll
        for (int i = EIGHTS / 4 * 4; i < EIGHTS; i++) {
            const int output = 8 * (first + i) + 2 * q;
            const u32 word = outputs_of(sums, i, half);
            if (is_row && output < p.outputs) *(u32*)(out + 2 * output) = word;
        }
    }
}

// The code of the producer thread. Weights are loaded before the previous kernel has ended, since no kernel writes
// them.
__device__ __forceinline__ void load(const TensorMap* x, const TensorMap* weight, const Gemm& p, u32 ring, u32 full, u32 empty) {
    const int half = blockIdx.x % CLUSTER, clusters = gridDim.x / CLUSTER;
    int ahead = 0, stage = 0;
    for (const Tile tile = tile_of(blockIdx.x / CLUSTER, p); ahead < min(STAGES, p.steps); ahead++) {
        expect(full + 8 * ahead, STAGE_BYTES);
        copy_weights(ring + ahead * STAGE_BYTES + X_BYTES, weight, ahead * STEP, tile.eight, full + 8 * ahead);
    }
    await_kernel_before();
    u32 phase = 1;
    for (int pair = blockIdx.x / CLUSTER; pair < p.pairs; pair += clusters) {
        const Tile tile = tile_of(pair, p);
        for (int k = 0; k < p.steps; k++) {
            const u32 to = ring + stage * STAGE_BYTES, ready = full + 8 * stage;
            await(empty + 8 * stage, phase);
            if (ahead > 0) ahead--;
            else {
                expect(ready, STAGE_BYTES);
                copy_weights(to + X_BYTES, weight, k * STEP, tile.eight, ready);
            }
            copy_rows(to + half * X_BYTES / 2, x, k * STEP, tile.row + half * ROWS / 2, ready);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// Called when a warp has read a stage: lets both blocks of the cluster copy to it again.
__device__ __forceinline__ void release(u32 barrier) {
    const int lane = threadIdx.x % 32;
    if (lane < CLUSTER) arrive_at(barrier, lane);
}

// The code of a consumer warpgroup: its rows of all tiles of this block.
__device__ __forceinline__ void multiply_tiles(const Gemm& p, u32 ring, u32 full, u32 empty) {
    const int clusters = gridDim.x / CLUSTER, group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;
    const int own_row = group * HEIGHT * 64 + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    int stage = 0;
    u32 phase = 0;
    for (int pair = blockIdx.x / CLUSTER; pair < p.pairs; pair += clusters) {
        const Tile tile = tile_of(pair, p);
        float sums[HEIGHT][SUMS];
        int used = 0;
        for (int k = 0; k < p.steps; k++) {
            const u32 rows = ring + stage * STAGE_BYTES + group * HEIGHT * 64 * LINE, weights = ring + stage * STAGE_BYTES + X_BYTES;
            await(full + 8 * stage, phase);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int i = 0; i < LINE; i += 32)
#pragma unroll
                for (int h = 0; h < HEIGHT; h++)
#pragma unroll
                    for (int s = 0; s < WIDTH; s += SLICE)
                        multiply(*(float(*)[SLICE / 2])&sums[h][s / 2], matrix_at(rows + h * 64 * LINE + i), matrix_at(weights + s * LINE + i), k + i > 0);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (k > 0) release(empty + 8 * used);  // the wgmmas of the previous step are done
            used = stage;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        release(empty + 8 * used);
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) write_outputs(sums[h], tile.row + own_row + 64 * h, tile.eight, p);
    }
}

// The kernel: warpgroup 0 has the producer thread, the others are consumers. Clusters are persistent over pairs of
// tiles.
extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1) __cluster_dims__(CLUSTER, 1, 1) gated_gemm(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ Gemm p) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, ring = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 4 * GROUPS * CLUSTER);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    meet_cluster();
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(LOADING_REGISTERS));
        if (threadIdx.x == 0) load(&x, &weight, p, ring, full, empty);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(MULTIPLYING_REGISTERS));
        await_kernel_before();  // the previous kernel may still read the old contents of `out`
        multiply_tiles(p, ring, full, empty);
    }
    meet_cluster();  // no block exits while the other may still copy to its shared memory
}
