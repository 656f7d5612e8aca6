// Gemm of many rows on Hopper GPUs, with scales, bias, gate and residual in its epilogue: warp-specialized wgmma (see
// hopper_gemm.py, which prepends hopper.cuh, the constants of a kernel, and `multiply`, a wgmma of 64 rows by SLICE
// columns).
//
// A tile is ROWS rows by WIDTH rows of the weight, its columns; if GATED eight of gate, eight of up, and so on, so that
// a thread has both sums of an output. One producer warp copies rows and weights by TMA to a ring of STAGES stages;
// GROUPS consumer warpgroups each multiply 64 * HEIGHT rows of the tile. The thread blocks of a cluster either share
// copies (two blocks with adjacent tiles of the same rows or of the same columns each copy half of what both need, and
// multicast it) or divide K among them (split-K): then each adds up the sums of all, in the order of K, for its part
// of the columns.

enum Sharing { NOTHING = 0, SHARED_ROWS = 1, SHARED_COLUMNS = 2 };

constexpr int SHARERS = SHARING == NOTHING ? 1 : 2;
constexpr int CLUSTER = SPLITS > 1 ? SPLITS : SHARERS;
static_assert(SPLITS == 1 || SHARERS == 1, "the blocks of a cluster share copies, or divide K");
constexpr int STEP = LINE / ELEMENT_BYTES;     // elements of K per stage
constexpr int ROWS = 64 * GROUPS * HEIGHT;
constexpr int X_BYTES = ROWS * LINE;
constexpr int STAGE_BYTES = X_BYTES + WIDTH * LINE;
constexpr int X_PART = X_BYTES / (SHARING == SHARED_ROWS ? 2 : 1);  // bytes that a block copies
constexpr int WEIGHT_PART = WIDTH * LINE / (SHARING == SHARED_COLUMNS ? 2 : 1);
constexpr int THREADS = 128 * GROUPS;          // of the consumers
constexpr int PARTS = GATED ? 2 : 1;
constexpr int OUTPUTS = WIDTH / PARTS;         // of a tile
constexpr int OWN_OUTPUTS = OUTPUTS / SPLITS;  // that a block stores
constexpr int OWN_WIDTH = WIDTH / SPLITS;
constexpr int OCTETS = OWN_WIDTH / 8;          // groups of eight columns
constexpr int LANES = (OWN_WIDTH + 127) / 128; // columns of which a thread reads scale and bias

// Registers per thread: the producer warpgroup gives registers to the consumers (setmaxnreg).
constexpr int LOADING_REGISTERS = GROUPS == 3 ? 32 : 40;
constexpr int MULTIPLYING_REGISTERS = GROUPS == 3 ? 160 : 232;

// The arguments of a launch, written by hopper_gemm.py. Addresses: 0 for none.
struct Gemm {
    u64 out, residual, bias, x_scale, weight_scale;
    int rows, outputs, out_stride, residual_stride;
    int steps;       // of K
    int part_steps;  // of K, of one split
    int row_tiles;   // two with the same columns are one if they share these
    int units;       // tiles, or pairs of tiles that share something
    int together;    // row tiles that use the same weights one after the other
};

// The sums of a thread for 64 rows: of its rows r and r + 8, two columns of each of N / 4 octets.
template <int N> struct Sums { Sum of[N]; };

__device__ __forceinline__ int own_rank() { return blockIdx.x % CLUSTER; }

// Called when a warp has read a stage: lets all blocks that share it copy to it again.
__device__ __forceinline__ void release(u32 barrier) {
    const int lane = threadIdx.x % 32;
    if (SHARERS == 1) {
        if (lane == 0) arrive(barrier);
    } else if (lane < SHARERS) {
        arrive_there(address_at(barrier, lane));
    }
}

// A tile of a block: its first row, and its first octet of outputs.
struct Tile { int row, octet; };

// The order of tiles: `together` row tiles with one column of tiles, then with the next, for L2 reuse.
__device__ __forceinline__ Tile tile_of(int unit, const Gemm& p) {
    const int columns = p.units / p.row_tiles, band = unit / (columns * p.together), first = band * p.together;
    const int rest = unit - band * columns * p.together, height = min(p.together, p.row_tiles - first);
    int row = first + rest % height, column = rest / height;
    if (SHARING == SHARED_ROWS) column = 2 * column + own_rank();
    if (SHARING == SHARED_COLUMNS) row = 2 * row + own_rank();
    return {row * ROWS, column * (OUTPUTS / 8)};
}

// The code of the producer thread. Weights are loaded before the previous kernel has ended, since no kernel writes
// them.
__device__ __forceinline__ void load(const TensorMap* x, const TensorMap* weight, const Gemm& p, u32 ring, u32 full, u32 empty) {
    const int clusters = gridDim.x / CLUSTER, rank = own_rank();
    const int begin = SPLITS > 1 ? rank * p.part_steps : 0, end = min(p.steps, begin + p.part_steps);
    const int x_part = SHARING == SHARED_ROWS ? rank : 0, weight_part = SHARING == SHARED_COLUMNS ? rank : 0;
    const int part_octets = weight_part * (OUTPUTS / 16);
    int ahead = 0, stage = 0;
    for (const Tile tile = tile_of(blockIdx.x / CLUSTER, p); ahead < min(STAGES, end - begin); ahead++) {
        expect(full + 8 * ahead, STAGE_BYTES);
        const u32 to = ring + ahead * STAGE_BYTES + X_BYTES + weight_part * WEIGHT_PART;
        copy_box_4d<SHARING == SHARED_COLUMNS>(to, weight, (begin + ahead) * STEP, tile.octet + part_octets, full + 8 * ahead);
    }
    await_kernel_before();
    launch_kernel_after();
    u32 phase = 1;
    for (int unit = blockIdx.x / CLUSTER; unit < p.units; unit += clusters) {
        const Tile tile = tile_of(unit, p);
        for (int k = begin; k < end; k++) {
            const u32 to = ring + stage * STAGE_BYTES, ready = full + 8 * stage;
            await(empty + 8 * stage, phase);
            if (ahead > 0) ahead--;
            else {
                expect(ready, STAGE_BYTES);
                copy_box_4d<SHARING == SHARED_COLUMNS>(to + X_BYTES + weight_part * WEIGHT_PART, weight, k * STEP, tile.octet + part_octets, ready);
            }
            copy_box<SHARING == SHARED_ROWS>(to + x_part * X_PART, x, k * STEP, tile.row + x_part * (ROWS / 2), ready);
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
    }
}

// Position of a consumer in the ring.
struct Place { int stage; u32 phase; };

// Add up `steps` steps of K.
__device__ __forceinline__ void sum_steps(Sums<WIDTH / 2> (&sums)[HEIGHT], int steps, int group, Place& at, u32 ring, u32 full, u32 empty) {
    int used = 0;
    for (int k = 0; k < steps; k++) {
        const u32 weights = ring + at.stage * STAGE_BYTES + X_BYTES, rows = weights - X_BYTES + group * HEIGHT * 64 * LINE;
        await(full + 8 * at.stage, at.phase);
        begin_wgmma();
#pragma unroll
        for (int i = 0; i < LINE; i += 32)
#pragma unroll
            for (int h = 0; h < HEIGHT; h++)
#pragma unroll
                for (int s = 0; s < WIDTH; s += SLICE)
                    multiply(*(Sum(*)[SLICE / 2])&sums[h].of[s / 2], matrix_at(rows + h * 64 * LINE + i), matrix_at(weights + s * LINE + i), k + i > 0);
        end_wgmma();
        await_wgmma<1>();
        if (k > 0) release(empty + 8 * used);  // the wgmmas of the previous step are done
        used = at.stage;
        if (++at.stage == STAGES) at.stage = 0, at.phase ^= 1;
    }
    await_wgmma<0>();
    release(empty + 8 * used);
}

// Split-K: give the other blocks of the cluster their parts of the columns, and add up the own part in the order of K.
// The ring is reused, so all blocks must have read their last stage. Without split-K, copy the sums.
__device__ __forceinline__ void join_splits(const Sums<WIDTH / 2> (&sums)[HEIGHT], Sums<OWN_WIDTH / 2> (&own)[HEIGHT], u32 ring) {
    if (SPLITS == 1) {
#pragma unroll
        for (int h = 0; h < HEIGHT; h++)
#pragma unroll
            for (int i = 0; i < OWN_WIDTH / 2; i++) own[h].of[i] = sums[h].of[i];
        return;
    }
    const u32 mine = ring + 16 * (own_rank() * HEIGHT * OCTETS * THREADS + (int)threadIdx.x - 128);
    meet_cluster();
#pragma unroll
    for (int split = 0; split < SPLITS; split++) {
        const u32 there = address_at(mine, split);
#pragma unroll
        for (int i = 0; i < HEIGHT * OCTETS; i++)
            put(there + 16 * i * THREADS, sums[i / OCTETS].of + 4 * (split * OCTETS + i % OCTETS));
    }
    meet_cluster();
#pragma unroll
    for (int i = 0; i < HEIGHT * OCTETS; i++) {
        Sum* four = own[i / OCTETS].of + 4 * (i % OCTETS);
#pragma unroll
        for (int split = 0; split < SPLITS; split++) {
            Sum part[4];
            get(ring + 16 * ((split * HEIGHT * OCTETS + i) * THREADS + (int)threadIdx.x - 128), part);
#pragma unroll
            for (int j = 0; j < 4; j++) four[j] = split == 0 ? part[j] : four[j] + part[j];
        }
    }
}

// What the epilogue of a warpgroup needs besides sums, in shared memory: scales and bias of the columns that the block
// stores, and scales of the warpgroup's rows.
struct Factors { float scale[SCALED ? OWN_WIDTH : 1], bias[HAS_BIAS ? OWN_WIDTH : 1], row[SCALED ? 64 * HEIGHT : 1]; };

// A thread's share of the factors, read before the sums are there.
struct Read { float scale[LANES], bias[LANES], row; };

__device__ __forceinline__ Read read_factors(int octet, int row, const Gemm& p) {
    const int thread = threadIdx.x % 128;
    Read read;
#pragma unroll
    for (int i = 0; i < LANES; i++) {
        const int column = 128 * i + thread, output = 8 * (octet + column / (8 * PARTS)) + column % 8;
        const bool exists = output < p.outputs && column < OWN_WIDTH;
        const u64 place = output + (GATED && column & 8 ? p.outputs : 0);
        read.scale[i] = SCALED && exists ? read_float(p.weight_scale + 4 * place) : 0.0f;
        read.bias[i] = !HAS_BIAS || !exists ? 0.0f : IS_FLOAT ? read_float(p.bias + 4 * place) : first_of(read_short(p.bias + 2 * place));
    }
    await_kernel_before();  // it may have written the scales of the rows
    read.row = SCALED && thread < 64 * HEIGHT && row + thread < p.rows ? read_fresh(p.x_scale + 4 * (u64)(row + thread)) : 1.0f;
    return read;
}

__device__ __forceinline__ void keep_factors(Factors& factors, const Read& read, int group) {
    const int thread = threadIdx.x % 128;
    meet_warpgroup(group + 1);  // those of the tile before are not needed any more
#pragma unroll
    for (int i = 0; i < LANES; i++) {
        if (128 * i + thread >= OWN_WIDTH) continue;
        if (SCALED) factors.scale[128 * i + thread] = read.scale[i];
        if (HAS_BIAS) factors.bias[128 * i + thread] = read.bias[i];
    }
    if (SCALED && thread < 64 * HEIGHT) factors.row[thread] = read.row;
    meet_warpgroup(group + 1);
}

// Two columns of an octet, in the first and in the second row of a thread.
struct Four { float of[2][2]; };

// Sums of an octet, scaled and with bias. row: the first row, within those of the warpgroup.
__device__ __forceinline__ Four scaled(const Sums<OWN_WIDTH / 2>& sums, int octet, int row, const Factors& factors) {
    const int column = 8 * octet + threadIdx.x % 4 * 2;
    Four made;
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            float value = (float)sums.of[4 * octet + 2 * half + c];
            if (SCALED) value = value * factors.row[row + 8 * half] * factors.scale[column + c];
            made.of[half][c] = HAS_BIAS ? value + factors.bias[column + c] : value;
        }
    return made;
}

// The outputs of an octet, before the residual is added.
__device__ __forceinline__ Four outputs_of(const Sums<OWN_WIDTH / 2>& sums, int octet, int row, const Factors& factors) {
    if (!GATED) return scaled(sums, octet, row, factors);
    Four gate = scaled(sums, 2 * octet, row, factors), up = scaled(sums, 2 * octet + 1, row, factors);
#pragma unroll
    for (int i = 0; i < 4; i++) gate.of[i / 2][i % 2] = activated(gate.of[i / 2][i % 2]) * up.of[i / 2][i % 2];
    return gate;
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

// Add the residual to outputs of an octet that starts at output `first`.
__device__ __forceinline__ void add_residual(Four& values, int at, int first, const Gemm& p) {
    const int output = first + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        if (at + 8 * half >= p.rows || output >= p.outputs) continue;
        const u64 place = (u64)(at + 8 * half) * p.residual_stride + output;
        if (IS_FLOAT) {
            const float2 pair = *(const float2*)(p.residual + 4 * place);
            values.of[half][0] += pair.x, values.of[half][1] += pair.y;
        } else {
            const u32 pair = *(const u32*)(p.residual + 2 * place);
            values.of[half][0] += first_of(pair), values.of[half][1] += second_of(pair);
        }
    }
}

// Store the outputs of 64 rows, which start at row `row` of the tile. Four octets at a time are transposed, so that a lane
// stores eight outputs of a row.
__device__ __forceinline__ void write_outputs(
    const Sums<OWN_WIDTH / 2>& sums, int at, int row, int octet, const Factors& factors, const Gemm& p) {
    constexpr int NUMBER = OWN_OUTPUTS / 8;
    const int q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < NUMBER; i += 4) {
        u32 words[2][4];
#pragma unroll
        for (int j = 0; j < 4 && i + j < NUMBER; j++) {
            const int output = 8 * (octet + i + j) + 2 * q;
            Four values = outputs_of(sums, i + j, row, factors);
            if (HAS_RESIDUAL) add_residual(values, at, 8 * (octet + i + j), p);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const bool exists = at + 8 * half < p.rows && output < p.outputs;
                const u64 place = (u64)(at + 8 * half) * p.out_stride + output;
                if (IS_FLOAT) {
                    if (exists) *(float2*)(p.out + 4 * place) = make_float2(values.of[half][0], values.of[half][1]);
                    continue;
                }
                words[half][j] = to_pair(values.of[half][0], values.of[half][1]);
                if (i + 4 > NUMBER && exists) *(u32*)(p.out + 2 * place) = words[half][j];
            }
        }
        if (IS_FLOAT || i + 4 > NUMBER) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            turn(words[half], q);
            const int output = 8 * (octet + i + q);
            const u64 place = (u64)(at + 8 * half) * p.out_stride + output;
            if (at + 8 * half < p.rows && output < p.outputs)
                *(uint4*)(p.out + 2 * place) = make_uint4(words[half][0], words[half][1], words[half][2], words[half][3]);
        }
    }
}

// The code of a consumer warpgroup: its rows of all tiles of this block.
__device__ __forceinline__ void multiply_tiles(const Gemm& p, Factors* all_factors, u32 ring, u32 full, u32 empty) {
    const int clusters = gridDim.x / CLUSTER, group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0) - 1;
    const int own_row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
    const int split = SPLITS > 1 ? own_rank() : 0, begin = split * p.part_steps;
    Factors& factors = all_factors[group];
    Place place = {0, 0};
    for (int unit = blockIdx.x / CLUSTER; unit < p.units; unit += clusters) {
        const Tile tile = tile_of(unit, p);
        const int row = tile.row + group * HEIGHT * 64, octet = tile.octet + split * (OWN_OUTPUTS / 8);
        const Read read = read_factors(octet, row, p);
        Sums<WIDTH / 2> sums[HEIGHT];
        sum_steps(sums, min(p.part_steps, p.steps - begin), group, place, ring, full, empty);
        Sums<OWN_WIDTH / 2> own[HEIGHT];
        join_splits(sums, own, ring);
        if (SCALED || HAS_BIAS) keep_factors(factors, read, group);
#pragma unroll
        for (int h = 0; h < HEIGHT; h++) write_outputs(own[h], row + 64 * h + own_row, 64 * h + own_row, octet, factors, p);
    }
}

// The kernel: warpgroup 0 has the producer thread, the others are consumers. Clusters are persistent over tiles, or
// have one tile each with split-K.
extern "C" __global__ void __launch_bounds__(THREADS + 128, 1) __cluster_dims__(CLUSTER, 1, 1) hopper_gemm(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const __grid_constant__ Gemm p) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    __shared__ Factors factors[GROUPS];
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, ring = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        prefetch_map(&weight), prefetch_map(&x);
        for (int i = 0; i < STAGES; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 4 * GROUPS * SHARERS);
        }
        publish_barriers();
    }
    __syncthreads();
    if (SHARERS > 1) meet_cluster();
    if (threadIdx.x < 128) {
        give_registers<LOADING_REGISTERS>();
        if (threadIdx.x == 0) load(&x, &weight, p, ring, full, empty);
        __syncwarp();
        if (SPLITS > 1) meet_cluster(), meet_cluster();  // as the consumers do in join_splits
    } else {
        take_registers<MULTIPLYING_REGISTERS>();
        multiply_tiles(p, factors, ring, full, empty);
    }
    if (SHARERS > 1) meet_cluster();  // no block exits while the other may still copy to its shared memory
}
