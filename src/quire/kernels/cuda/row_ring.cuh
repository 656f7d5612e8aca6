// Other warps copy the weights of those that compute ahead, through rings of slots in shared memory.
//
// A weight is cut into tiles of 16 outputs; a program takes whole tiles, and its warps share the inputs of a tile. All
// that a warp multiplies by is known before the launch, so copies run ahead of the products, across phases: memory is read
// while others wait. What the cursor asks for is in the order in which products take it.

constexpr int TILE = 16;            // outputs
constexpr int UNIT = 64;            // bytes of a dense row: 16 for each of the four lanes that read it
constexpr int PIECE_UNITS = 4;      // of a dense row, that a slot holds
constexpr int PITCH = 320;          // bytes from row to row of a slot: two rows lie in different banks
constexpr int STEP_BYTES = 1024;    // of 128 inputs of a tile of 4 bits
constexpr int PANEL_BYTES = 4096;   // of four such tiles
constexpr int PIECE_STEPS = 4;
constexpr int COPYING = 4;          // warps
constexpr int SERVED = WARPS / COPYING;
constexpr int FACTORS_AT = PIECE_STEPS * STEP_BYTES;  // in a slot: scales, then offsets, of 4-bit weights

// What copies need to know of a product; all of them are kept in shared memory.
struct Source {
    u64 weight, scale, offset;
    int outputs, row_bytes;         // of a dense weight
    int steps, factor_stride;       // of 4 bits
    short group_shift, parts;       // steps of a group as a power of 2; 2 parts: gate and up
    short is_dense, shift;          // see Phase
};

// Where a copying warp is, in registers.
struct Cursor {
    u64 from;                       // this lane's first bytes of the next piece
    u64 weight;                     // of the product
    int source;                     // number of the product; past the last one: nothing is left
    int is_dense, outputs, parts, stride;  // stride: bytes of a dense row, or steps
    int tile, part, left;           // units or steps that are left of this part
    int begin, count;               // that the warp takes of a part
};

struct Ring {
    u32 data, full, empty;          // SLOTS of each: memory, and barriers
    int slot;
    u32 parity;                     // of `full`; that of `empty` is the other one
};

// What a warp takes of `count` units or steps of the inputs.
__device__ __forceinline__ void own_inputs(int warp, int count, int& begin, int& own) {
    begin = warp * count / WARPS;
    own = (warp + 1) * count / WARPS - begin;
}

__device__ __forceinline__ int first_tile(int shift) { return (blockIdx.x + shift) % gridDim.x; }

// This lane's first bytes of a part of a tile.
__device__ __forceinline__ void enter_part(Cursor& c) {
    const int lane = threadIdx.x % 32;
    c.left = c.count;
    if (c.is_dense) {
        const u64 row = c.tile * TILE + lane / 16 + (c.part ? c.outputs : 0);
        c.from = c.weight + row * c.stride + c.begin * UNIT + lane % 16 * 16;
    } else {
        const int tile = c.tile + (c.part ? c.outputs / TILE : 0);
        c.from = c.weight + ((u64)(tile / 4) * c.stride + c.begin) * PANEL_BYTES + tile % 4 * STEP_BYTES + lane * 16;
    }
}

// Move to the first product from c.source on in which this warp has something to read.
__device__ __forceinline__ void enter_product(Cursor& c, int warp, const Source* sources, int num_sources) {
    for (; c.source < num_sources; ++c.source) {
        const Source& s = sources[c.source];
        c.is_dense = s.is_dense;
        c.stride = c.is_dense ? s.row_bytes : s.steps;
        own_inputs(warp, c.is_dense ? c.stride / UNIT : c.stride, c.begin, c.count);
        c.tile = first_tile(s.shift);
        c.outputs = s.outputs;
        if (c.tile * TILE >= c.outputs || c.count == 0) continue;
        c.parts = s.parts;
        c.weight = s.weight;
        c.part = 0;
        enter_part(c);
        return;
    }
}

__device__ __forceinline__ void advance(Cursor& c, int warp, const Source* sources, int num_sources) {
    c.left -= c.is_dense ? PIECE_UNITS : PIECE_STEPS;
    if (c.left > 0) {
        c.from += c.is_dense ? PIECE_UNITS * UNIT : PIECE_STEPS * PANEL_BYTES;
        return;
    }
    if (++c.part == c.parts) {
        c.part = 0;
        c.tile += gridDim.x;
        if (c.tile * TILE >= c.outputs) {
            ++c.source;
            enter_product(c, warp, sources, num_sources);
            return;
        }
    }
    enter_part(c);
}

// Groups of factors that `count` steps from `first` on touch: the first group, and how many. QUARTERS of a step share a
// factor, known when this is compiled; 4: one or more whole steps do.
__device__ __forceinline__ int groups_of(int first, int count, int group_shift, int& group) {
    if (QUARTERS < 4) {
        group = first * (4 / QUARTERS);
        return count * (4 / QUARTERS);
    }
    group = first >> group_shift;
    return ((first + count - 1) >> group_shift) - group + 1;
}

// Steps of a weight of 4 bits, then scales and, if there are any, offsets of their groups.
__device__ __forceinline__ void copy_steps(const Cursor& c, const Source& s, u32 to, u64 policy) {
    const int lane = threadIdx.x % 32;
    const int first = c.begin + c.count - c.left, count = min(PIECE_STEPS, c.left);
    const int tile = c.tile + (c.part ? c.outputs / TILE : 0);
    u32 at = to + lane * 16;
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; ++step, at += STEP_BYTES) {
        if (step < count) {
            copy_to_shared(at, c.from + step * PANEL_BYTES, policy);
            copy_to_shared(at + 512, c.from + step * PANEL_BYTES + 512, policy);
        }
    }
    int group;
    const int groups = groups_of(first, count, s.group_shift, group), lines = groups * (s.offset ? 2 : 1);
#pragma unroll 1
    for (int half = lane; half < 2 * lines; half += 32) {
        const int line = half / 2;
        const bool is_offset = line >= groups;
        const u64 place = (u64)(group + line - (is_offset ? groups : 0)) * s.factor_stride + tile * TILE;
        copy_to_shared(to + FACTORS_AT + half * 16, (is_offset ? s.offset : s.scale) + place * 2 + half % 2 * 16, policy);
    }
}

// A part of 16 rows of a dense weight.
__device__ __forceinline__ void copy_rows(const Cursor& c, u32 to, u64 policy) {
    const int lane = threadIdx.x % 32, rows = c.outputs - c.tile * TILE - lane / 16;
    if (lane % 16 >= 4 * c.left) return;
    to += lane / 16 * PITCH + lane % 16 * 16;
    u64 from = c.from;
#pragma unroll
    for (int pair = 0; pair < TILE / 2; ++pair, from += 2 * c.stride) {
        if (2 * pair < rows) copy_to_shared(to + 2 * pair * PITCH, from, policy);
    }
}

__device__ __forceinline__ void next_slot(Ring& ring) {
    if (++ring.slot == SLOTS) {
        ring.slot = 0;
        ring.parity ^= 1;
    }
}

__device__ __forceinline__ bool is_empty(const Ring& ring) {
    u32 done;
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
                 : "=r"(done) : "r"(ring.empty + ring.slot * 8), "r"(ring.parity ^ 1) : "memory");
    return done;
}

// All that a copying warp does: it serves the rings of SERVED warps in turn, whichever has an empty slot.
__device__ __forceinline__ void copy_weights(Ring (&rings)[SERVED], const int (&warps)[SERVED], const Run& run, const Source* sources) {
    const u64 policy = read_once();
    Cursor cursors[SERVED];
    int left = 0;
#pragma unroll
    for (int i = 0; i < SERVED; ++i) {
        cursors[i].source = 0;
        enter_product(cursors[i], warps[i], sources, run.num_sources);
        left += cursors[i].source < run.num_sources;
    }
    while (left > 0) {
#pragma unroll
        for (int i = 0; i < SERVED; ++i) {
            Cursor& c = cursors[i];
            Ring& ring = rings[i];
            if (c.source >= run.num_sources || !is_empty(ring)) continue;
            const u32 to = ring.data + ring.slot * run.slot_bytes;
            if (HAS_NIBBLES && !c.is_dense) copy_steps(c, sources[c.source], to, policy);
            else copy_rows(c, to, policy);
            arrive_after_copies(ring.full + ring.slot * 8);
            advance(c, warps[i], sources, run.num_sources);
            next_slot(ring);
            left -= c.source >= run.num_sources;
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
}

// Wait for the slot that is next; returns where it is.
__device__ __forceinline__ u32 await_slot(const Ring& ring, const Run& run) {
    await_barrier(ring.full + ring.slot * 8, ring.parity);
    return ring.data + ring.slot * run.slot_bytes;
}

// The slot was read by all lanes: it may be filled again.
__device__ __forceinline__ void release_slot(Ring& ring) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(ring.empty + ring.slot * 8);
    next_slot(ring);
}
