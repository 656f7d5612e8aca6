// All layers of a one-row decode step in one launch: a persistent block on every multiprocessor runs all phases, and in
// each waits only for the values that it reads. Weights are loaded ahead of these waits; see row_ring.cuh.

constexpr int PHASE_WORDS = sizeof(Phase) / 8;

// Run one phase.
__device__ __forceinline__ void run_phase(
    const Phase& p, const Run& run, const Shared& shared, Ring& ring, int (&tiles)[TEAM_SIZES], u64 policy, u32 launch, int phase) {
    const int kind = p.kind;
    if (kind == ATTENTION) {
        ask_for_context(p, run);
        attend(p, run, reinterpret_cast<float*>(shared.vector), launch, phase);
        return;
    }
    if (first_tile(p.shift) * TILE >= p.outputs) return;
    if (HAS_DENSE && kind == BF16) multiply<BF16>(p, run, shared, ring, tiles, policy, launch, phase);
    if (HAS_FLOAT8 && kind == FLOAT8) multiply<FLOAT8>(p, run, shared, ring, tiles, policy, launch, phase);
    if (HAS_INT8 && kind == INT8) multiply<INT8>(p, run, shared, ring, tiles, policy, launch, phase);
    if (HAS_NIBBLES && kind == NIBBLES) multiply<NIBBLES>(p, run, shared, ring, tiles, policy, launch, phase);
}

// Run all phases. `held`: space for two phases, the first of which is loaded.
__device__ __forceinline__ void run_phases(
    const Run& run, const Shared& shared, Ring& ring, Phase* held, const u64* words, u64 policy, u32 launch) {
    int tiles[TEAM_SIZES] = {};
    for (int number = 0; number < run.num_phases; ++number) {
        u64 next = 0;  // a word of the next phase, prefetched
        const bool fetches = number + 1 < run.num_phases && threadIdx.x < PHASE_WORDS;
        if (fetches) next = __ldg(words + (number + 1) * PHASE_WORDS + threadIdx.x);
        run_phase(held[number % 2], run, shared, ring, tiles, policy, launch, number);
        if (fetches) reinterpret_cast<u64*>(&held[(number + 1) % 2])[threadIdx.x] = next;
        __syncthreads();
    }
    if (threadIdx.x == 0 && atomicAdd(run.counters, 1u) == gridDim.x - 1) {  // no block reads the counters any more
        run.counters[0] = 0;
        run.counters[1] = launch + run.num_phases;
    }
}

// The kernel: sets up shared memory and barriers, starts the rings, and runs all phases.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
run_program(const __grid_constant__ Run run, const Phase* __restrict__ phases) {
    extern __shared__ __align__(128) u8 memory[];
    __shared__ Phase held[2];
    __shared__ __align__(8) u64 turns[2][ALL_TEAMS * TURNS];
    __shared__ float squares[WARPS];
    __shared__ u32 largest[WARPS];
    __shared__ __align__(16) float partial[2 * TURNS * TILE * WARPS];
    u8* vector = memory + WARPS * SLOTS * run.slot_bytes;
    u64* sources = reinterpret_cast<u64*>(vector + run.vector_bytes + run.quarters_bytes);
    const Shared shared = {vector, squares, largest, reinterpret_cast<Quarter*>(vector + run.vector_bytes), partial,
                           shared_address(turns[0]), shared_address(turns[1])};
    if (threadIdx.x < ALL_TEAMS * TURNS) {
        init_barrier(shared_address(&turns[0][threadIdx.x]), WARPS);
        init_barrier(shared_address(&turns[1][threadIdx.x]), 1);
    }
    const u64* words = reinterpret_cast<const u64*>(phases);
    if (threadIdx.x < PHASE_WORDS) reinterpret_cast<u64*>(held)[threadIdx.x] = __ldg(words + threadIdx.x);
    for (int i = threadIdx.x; i < run.num_sources * (int)(sizeof(Source) / 8); i += THREADS) {
        sources[i] = __ldg(reinterpret_cast<const u64*>(run.sources) + i);
    }
    const u32 launch = *reinterpret_cast<volatile u32*>(run.counters + 1);
    const u64 policy = read_once();
    __syncthreads();
    Ring ring = start_ring(memory, run, reinterpret_cast<const Source*>(sources), policy);
    run_phases(run, shared, ring, held, words, policy, launch);
}
