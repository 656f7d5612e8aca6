// The layers of a step of one row in one launch: a program on every multiprocessor goes through the phases, and waits in
// each of them for the numbers that it reads. Weights are read ahead of these waits; see row_ring.cuh.

constexpr int PHASE_WORDS = sizeof(Phase) / 8;

__device__ __forceinline__ void run_phase(
    const Phase& p, const Run& run, const Shared& shared, Ring& ring, int& tiles, u32 launch, int phase) {
    if (p.kind == ATTENTION) {
        ask_for_context(p, run);
        attend(p, run, reinterpret_cast<float*>(shared.vector), launch, phase);
        return;
    }
    if (first_tile(p.shift) * TILE >= p.outputs) return;
    NormWeights norm;
    ask_for_norm(p, norm);
    load_vector(p, run, shared, norm, launch);
    if (HAS_DENSE && p.kind == BF16) multiply<BF16>(p, run, shared, ring, tiles, launch, phase);
    if (HAS_FLOAT8 && p.kind == FLOAT8) multiply<FLOAT8>(p, run, shared, ring, tiles, launch, phase);
    if (HAS_INT8 && p.kind == INT8) multiply<INT8>(p, run, shared, ring, tiles, launch, phase);
    if (HAS_NIBBLES && p.kind == NIBBLES) multiply<NIBBLES>(p, run, shared, ring, tiles, launch, phase);
}

// All that the computing warps do. `held`: room for two phases, the first of which is there.
__device__ __forceinline__ void run_phases(
    const Run& run, const Shared& shared, Ring ring, Phase* held, const u64* words, u32 launch) {
    int tiles = 0;
    for (int number = 0; number < run.num_phases; ++number) {
        u64 next = 0;  // a word of the next phase, on its way
        const bool fetches = number + 1 < run.num_phases && threadIdx.x < PHASE_WORDS;
        if (fetches) next = __ldg(words + (number + 1) * PHASE_WORDS + threadIdx.x);
        run_phase(held[number % 2], run, shared, ring, tiles, launch, number);
        if (fetches) reinterpret_cast<u64*>(&held[(number + 1) % 2])[threadIdx.x] = next;
        sync_computing();
    }
    if (threadIdx.x == 0 && atomicAdd(run.counters, 1u) == gridDim.x - 1) {  // nobody reads the counters any more
        run.counters[0] = 0;
        run.counters[1] = launch + run.num_phases;
    }
}

constexpr int ALL_THREADS = THREADS + 32 * COPYING;

__device__ __forceinline__ Ring ring_of(int warp, const u8* memory, u64 (*barriers)[WARPS][SLOTS], const Run& run) {
    return {shared_address(memory) + warp * SLOTS * run.slot_bytes, shared_address(barriers[0][warp]),
            shared_address(barriers[1][warp]), 0, 0};
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
run_program(const __grid_constant__ Run run, const Phase* __restrict__ phases) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ __align__(8) u64 barriers[2][WARPS][SLOTS];
    __shared__ Phase held[2];
    __shared__ __align__(8) u64 turns[2][TURNS];
    __shared__ float squares[WARPS];
    __shared__ u32 largest[WARPS];
    __shared__ __align__(16) float partial[2 * TURNS * TILE * WARPS];
    const int warp = threadIdx.x / 32;
    u8* vector = memory + WARPS * SLOTS * run.slot_bytes;
    u64* sources = reinterpret_cast<u64*>(vector + run.vector_bytes + run.sums_bytes);
    const Shared shared = {vector, squares, largest, reinterpret_cast<float*>(vector + run.vector_bytes), partial,
                           shared_address(turns[0]), shared_address(turns[1]), reinterpret_cast<const Source*>(sources)};
    if (threadIdx.x < WARPS * SLOTS) {
        init_barrier(shared_address(&barriers[0][0][threadIdx.x]), 32);
        init_barrier(shared_address(&barriers[1][0][threadIdx.x]), 1);
    }
    if (threadIdx.x < TURNS) {
        init_barrier(shared_address(&turns[0][threadIdx.x]), WARPS);
        init_barrier(shared_address(&turns[1][threadIdx.x]), 1);
    }
    const u64* words = reinterpret_cast<const u64*>(phases);
    if (threadIdx.x < PHASE_WORDS) reinterpret_cast<u64*>(held)[threadIdx.x] = __ldg(words + threadIdx.x);
    for (int i = threadIdx.x; i < run.num_sources * (int)(sizeof(Source) / 8); i += ALL_THREADS) {
        sources[i] = __ldg(reinterpret_cast<const u64*>(run.sources) + i);
    }
    const u32 launch = *reinterpret_cast<volatile u32*>(run.counters + 1);
    __syncthreads();
    if (warp >= WARPS) {
        Ring rings[SERVED];
        int warps[SERVED];
#pragma unroll
        for (int i = 0; i < SERVED; ++i) {
            warps[i] = warp - WARPS + i * COPYING;
            rings[i] = ring_of(warps[i], memory, barriers, run);
        }
        copy_weights(rings, warps, run, shared.sources);
    } else {
        run_phases(run, shared, ring_of(warp, memory, barriers, run), held, words, launch);
    }
}
