// Grouped gemm of experts with e2m1 codes (MXFP4) on Hopper GPUs (see coded_experts.py, which prepends hopper.cuh, the
// constants of a kernel, `Wgmma<COLUMNS>`, and the macro WITH_COLUMNS, which selects one).
//
// Weight rows are the rows of the wgmmas, and the rows of x in a tile are their columns: as many as the tile has,
// rounded up to one of a few widths. A block multiplies a tile by GROUPS panels of 64 weight rows, one per consumer
// warpgroup; blocks are persistent. One producer thread copies codes, scales and x to a ring of STAGES stages of 64
// inputs. A consumer thread reads its codes of a stage in one load and converts them to bfloat16 in registers, which
// are the left operand of the wgmmas, while those of the stage before still run.

constexpr int STEP = LINE / 2;                 // inputs of a stage
constexpr int CODE_BYTES = 64 * STEP / 2;      // of a panel
constexpr int PANEL_BYTES = CODE_BYTES + 128;  // with its scales
constexpr int WEIGHT_BYTES = GROUPS * PANEL_BYTES;
constexpr int X_BYTES = TILE * LINE;
constexpr int WORDS = 16;                      // registers of a thread's left operand, for a stage
constexpr u32 IN_PLACE = 0x01C001C0u;          // exponent and mantissa of two codes as bfloat16
constexpr u32 SIGNS = 0x80008000u;

// The arguments of a launch, written by coded_experts.py.
struct Gemm {
    u64 x;        // [tiles, steps, TILE, 64]: of each row, chunk c of eight is at place c ^ row % 8
    u64 weight;   // [experts, panels, steps, PANEL_BYTES]
    u64 bias;     // [experts, weight rows]
    u64 out;      // GATED: laid out as x, for the next gemm; else [pairs, weight rows]
    u64 experts;  // [tiles]: expert, -1 for an unused tile
    u64 counts;   // [tiles]: rows
    u64 places;   // [tiles, TILE]: pair of each row
    int tiles, panels, steps, together;
    int never;  // 0
    float limit, alpha, shift;
};

// The work of a block at a time: a tile, and the first of its panels.
struct Work { int tile, panel, expert, count; };

// Position in the ring.
struct Place {
    int stage;
    u32 phase;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// `together` tiles with the same panels, then with the next, for L2 reuse. list: expert and count of each used tile.
__device__ __forceinline__ Work work_of(int number, int used, const u32* list, const Gemm& p) {
    const int columns = (p.panels + GROUPS - 1) / GROUPS, begin = number / (p.together * columns) * p.together;
    const int height = min(p.together, used - begin), rest = number - begin * columns, tile = begin + rest % height;
    return {tile, rest / height * GROUPS, (int)(list[tile] >> 16), (int)(list[tile] & 0xFFFF)};
}

// Copy contiguous bytes to shared memory.
__device__ __forceinline__ void copy_bytes(u32 to, u64 from, int bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Multiply two pairs of bfloat16.
__device__ __forceinline__ u32 times(u32 first, u32 second) {
    u32 out;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(first), "r"(second));
    return out;
}

// A pair of bfloat16 whose exponent is byte AT of `bytes`.
template <int AT> __device__ __forceinline__ u32 factor(u32 bytes) {
    return __byte_perm(bytes, 0, 0x0404 | AT << 4 | AT << 12) >> 1;
}

// Convert eight codes to four registers: weight rows g, g + 8, g, g + 8. The bits of a code, moved to the places of
// sign, lowest exponent bits and highest mantissa bit of bfloat16, are its value divided by 2**126.
__device__ __forceinline__ void convert(u32 codes, u32 first, u32 second, u32* to) {
    to[0] = times(codes & (SIGNS | IN_PLACE), first);
    to[1] = times(codes << 3 & (SIGNS | IN_PLACE), second);
    to[2] = times((codes << 6 & IN_PLACE) | (codes << 1 & SIGNS), first);
    to[3] = times((codes >> 3 & IN_PLACE) | (codes << 2 & SIGNS), second);
}

// Keep registers alive, by a store that is never executed: without it, ptxas would reuse the registers of the left
// operand while a wgmma still reads them.
__device__ __forceinline__ void hold(const u32 (&words)[WORDS], int never) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4)
        asm volatile(
            "{\n.reg .pred never;\nsetp.ne.s32 never, %0, 0;\n@never st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n}"
            :: "r"(never), "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3]));
}

// The last number of a used tile's list, plus one. Tiles are used from the first on.
__device__ __forceinline__ void read_tiles(u32* list, int* used, const Gemm& p) {
    for (int tile = threadIdx.x; tile < p.tiles; tile += blockDim.x) {
        const int expert = ((const int*)p.experts)[tile];
        if (expert < 0) continue;
        list[tile] = (u32)expert << 16 | (u32)((const int*)p.counts)[tile];
        atomicMax(used, tile + 1);
    }
}

// Copy the weights of a stage of existing panels.
__device__ __forceinline__ void copy_weights(u32 to, const Work& work, int step, u32 ready, const Gemm& p) {
    u64 from = p.weight + PANEL_BYTES * (((u64)work.expert * p.panels + work.panel) * p.steps + step);
    for (int panel = work.panel; panel < min(work.panel + GROUPS, p.panels); panel++) {
        copy_bytes(to, from, PANEL_BYTES, ready);
        to += PANEL_BYTES, from += (u64)PANEL_BYTES * p.steps;
    }
}

// Bytes of a stage.
__device__ __forceinline__ int bytes_of(const Work& work, int columns, const Gemm& p) {
    return min(GROUPS, p.panels - work.panel) * PANEL_BYTES + columns * LINE;
}

// The code of the producer thread. Weights are copied before the previous kernel has ended, since only x comes from it.
__device__ __forceinline__ void load(const Gemm& p, int used, const u32* list, u32 ring, u32 full, u32 empty) {
    const int numbers = used * ((p.panels + GROUPS - 1) / GROUPS);
    const u32 x_ring = ring, w_ring = ring + STAGES * X_BYTES;
    int ahead = 0;
    if ((int)blockIdx.x < numbers) {
        const Work work = work_of(blockIdx.x, used, list, p);
        for (; ahead < min(STAGES, p.steps); ahead++) {
            expect(full + 8 * ahead, bytes_of(work, width_of(work.count), p));
            copy_weights(w_ring + ahead * WEIGHT_BYTES, work, ahead, full + 8 * ahead, p);
        }
    }
    await_kernel_before();
    Place place = {0, 1};
    for (int number = blockIdx.x; number < numbers; number += gridDim.x) {
        const Work work = work_of(number, used, list, p);
        const int columns = width_of(work.count);
        u64 x = p.x + (u64)work.tile * p.steps * X_BYTES;
        for (int k = 0; k < p.steps; k++, x += X_BYTES) {
            const u32 ready = full + 8 * place.stage;
            await(empty + 8 * place.stage, place.phase);
            if (ahead > 0) ahead--;
            else {
                expect(ready, bytes_of(work, columns, p));
                copy_weights(w_ring + place.stage * WEIGHT_BYTES, work, k, ready, p);
            }
            copy_bytes(x_ring + place.stage * X_BYTES, x, columns * LINE, ready);
            place.next();
        }
    }
}

// Multiply one stage. mine: registers for its left operand; other: those of the stage before.
template <int COLUMNS>
__device__ __forceinline__ void add_step(
    float (&sums)[COLUMNS / 2], u32 (&mine)[WORDS], const u32 (&other)[WORDS], Place& place, u32& release, u32 x_ring,
    u32 codes_at, u32 scales_at, u32 full, u32 empty, int never) {
    await(full + 8 * place.stage, place.phase);
    uint4 codes;
    u32 scales;
    const u32 skipped = place.stage * WEIGHT_BYTES;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
        : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w) : "r"(codes_at + skipped) : "memory");
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(scales) : "r"(scales_at + skipped) : "memory");
    convert(codes.x, factor<0>(scales), factor<2>(scales), mine);
    convert(codes.y, factor<0>(scales), factor<2>(scales), mine + 4);
    convert(codes.z, factor<1>(scales), factor<3>(scales), mine + 8);
    convert(codes.w, factor<1>(scales), factor<3>(scales), mine + 12);
    const u64 x = matrix_at(x_ring + place.stage * X_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++) Wgmma<COLUMNS>::add(sums, mine + 4 * i, x + 2 * i);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    hold(other, never);
    if (release != 0 && threadIdx.x % 32 == 0) arrive(release);
    release = empty + 8 * place.stage;
    place.next();
}

// Sums of two rows of x with one output in this lane -> two outputs of one row: of column 2 * (lane % 4) + lane / 4 % 2.
__device__ __forceinline__ u32 joined(float first, float second) {
    const bool is_odd = threadIdx.x / 4 % 2;
    const float got = __shfl_xor_sync(ALL_LANES, is_odd ? first : second, 4);
    return is_odd ? to_pair(got, second) : to_pair(first, got);
}

__device__ __forceinline__ float gated(float gate, float up, const Gemm& p) {
    if (!CLAMPED) return activated(gate) * up;
    const float kept = gate > p.limit ? p.limit : gate, bounded = up > p.limit ? p.limit : up < -p.limit ? -p.limit : up;
    return __fdividef(kept, 1.0f + __expf(-kept * p.alpha)) * (bounded + p.shift);
}

__device__ __forceinline__ float bias_of(const Gemm& p, int expert, int row) {
    if (!HAS_BIAS) return 0.0f;
    return __uint_as_float((u32)((const u16*)p.bias)[(u64)expert * p.panels * 64 + row] << 16);
}

// Finish a panel's sums with a tile's rows. INTERLEAVED: eight weight rows of gate, eight of up, and so on.
template <int COLUMNS>
__device__ __forceinline__ void finish(const float (&sums)[COLUMNS / 2], const Work& work, int panel, const Gemm& p) {
    const int lane = threadIdx.x % 32, g = lane / 4, own = 2 * (lane % 4) + g % 2, half = p.panels * 32;
    const int first = INTERLEAVED ? panel * 32 + threadIdx.x / 32 % 4 * 8 + g : panel * 64 + threadIdx.x / 32 % 4 * 16 + g;
    const int second = INTERLEAVED ? first + half : first + 8;
    const float bias = bias_of(p, work.expert, first), other_bias = bias_of(p, work.expert, second);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; i++) {
        const float* s = sums + 4 * i;
        const int column = 8 * i + own;
        if (GATED) {
            const u32 both = joined(gated(s[0] + bias, s[2] + other_bias, p), gated(s[1] + bias, s[3] + other_bias, p));
            const u64 line = ((u64)work.tile * (p.panels / 2) + first / STEP) * TILE + column;
            const u64 at = p.out + line * LINE + (first % STEP / 8 ^ column % 8) * 16 + g / 2 * 4;
            if (column < work.count) *(u32*)at = both;
        } else {
            const u32 low = joined(s[0] + bias, s[1] + bias), high = joined(s[2] + other_bias, s[3] + other_bias);
            if (column < work.count) {
                const int pair = ((const int*)p.places)[work.tile * TILE + column];
                const u64 at = p.out + 2 * ((u64)pair * p.panels * 64 - g % 2);
                *(u32*)(at + 2 * first) = low;
                *(u32*)(at + 2 * second) = high;
            }
        }
    }
}

// Multiply a tile by the panel of this warpgroup.
template <int COLUMNS>
__device__ __forceinline__ void multiply_tile(
    const Gemm& p, const Work& work, int group, Place& place, u32 ring, u32 full, u32 empty) {
    const u32 panel_at = ring + STAGES * X_BYTES + group * PANEL_BYTES, thread = threadIdx.x % 128;
    const u32 codes_at = panel_at + 16 * thread, scales_at = panel_at + CODE_BYTES + thread / 4 * 4;
    float sums[COLUMNS / 2];
    u32 even[WORDS] = {}, odd[WORDS] = {}, release = 0;
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
    int k = 0;
#pragma unroll 1
    for (; k + 1 < p.steps; k += 2) {
        add_step<COLUMNS>(sums, even, odd, place, release, ring, codes_at, scales_at, full, empty, p.never);
        add_step<COLUMNS>(sums, odd, even, place, release, ring, codes_at, scales_at, full, empty, p.never);
    }
    if (k < p.steps)
        add_step<COLUMNS>(sums, even, odd, place, release, ring, codes_at, scales_at, full, empty, p.never);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(even, p.never);
    hold(odd, p.never);
    if (threadIdx.x % 32 == 0) arrive(release);
    finish<COLUMNS>(sums, work, work.panel + group, p);
}

// The code of a consumer warpgroup: its panels of all work of this block.
__device__ __forceinline__ void multiply_tiles(
    const Gemm& p, int used, const u32* list, u32 ring, u32 full, u32 empty) {
    const int numbers = used * ((p.panels + GROUPS - 1) / GROUPS), group = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);
    Place place = {0, 0};
    for (int number = blockIdx.x; number < numbers; number += gridDim.x) {
        const Work work = work_of(number, used, list, p);
        if (work.panel + group >= p.panels) {
            for (int k = 0; k < p.steps; k++, place.next()) {
                await(full + 8 * place.stage, place.phase);
                if (threadIdx.x % 32 == 0) arrive(empty + 8 * place.stage);
            }
            continue;
        }
        switch (width_of(work.count)) { WITH_COLUMNS }
    }
}

// The kernel: the last warp has the producer thread, the warpgroups before it are consumers. A kernel whose tiles were
// placed by an earlier one than the previous (EARLY) copies weights before that has ended.
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 32, 1) coded_experts(const __grid_constant__ Gemm p) {
    extern __shared__ char memory[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    __shared__ u32 list[MOST_TILES];
    __shared__ int used;
    const u32 full = shared_address(barriers), empty = full + 8 * STAGES, ring = (shared_address(memory) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        used = 0;
        for (int i = 0; i < STAGES; i++) {
            init_barrier(full + 8 * i, 1);
            init_barrier(empty + 8 * i, 4 * GROUPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (!EARLY) await_kernel_before();
    __syncthreads();
    read_tiles(list, &used, p);
    __syncthreads();
    if (threadIdx.x >= 128 * GROUPS) {
        if (threadIdx.x == 128 * GROUPS) load(p, used, list, ring, full, empty);
    } else {
        await_kernel_before();
        asm volatile("griddepcontrol.launch_dependents;");
        multiply_tiles(p, used, list, ring, full, empty);
    }
}
