// Weight loading: every warp copies the weights that it will multiply ahead of time, through a ring of slots in shared
// memory (cp.async).
//
// A weight is cut into tiles of 16 outputs, distributed round-robin over the blocks; teams of a block's warps take
// turns at its tiles, and the warps of a team divide the inputs of a tile. Everything that a warp will multiply is
// known before the launch, so its copies run ahead of its computation, across phases: when it has read a slot it starts
// the copy of the piece SLOTS pieces later, and memory is read while it waits for other blocks. A ring belongs to one
// warp, which waits only for its own copies, without a barrier.

constexpr int TILE = 16;            // outputs
constexpr int UNIT = 64;            // bytes of a row of an 8- or 16-bit weight: 16 for each lane that reads it
constexpr int PIECE_UNITS = 4;      // of such a row, per slot
constexpr int PITCH = 256;          // bytes from row to row in a slot
constexpr int ROW_LANES = 4 * PIECE_UNITS;  // that copy one row; two rows at once
constexpr int STEP_BYTES = 1024;    // of 128 inputs of a tile of a 4-bit weight
constexpr int PANEL_BYTES = 4096;   // of four such tiles
constexpr int PIECE_STEPS = 4;
constexpr int PIECE_GROUPS = 4 * PIECE_STEPS / QUARTERS;  // groups of scales per piece, at most
constexpr int FACTORS_AT = PIECE_STEPS * STEP_BYTES;      // offset in a slot: scales of 4-bit weights
constexpr int OFFSETS_AT = FACTORS_AT + PIECE_GROUPS * TILE * 2;

// The parameters of a gemv's copies, all kept in shared memory.
struct Source {
    u64 weight, scale, offset;
    int outputs, stride;            // stride: bytes of a row, or for 4-bit weights the number of steps
    int factor_stride, shift;       // see Phase
    short group_shift, parts;       // log2 of the steps per group
    short is_dense, team_shift;
};

// The ring of one warp, and the state of its copies.
struct Ring {
    u32 data, slot_bytes;           // shared memory of SLOTS slots
    int slot;                       // the slot that is read next, and then refilled
    // State of the next copy:
    u64 from;                       // this lane's first bytes
    u64 weight, scale, offset;      // of the gemv
    const Source* sources;
    int source, num_sources;        // index of the gemv; past the last one, nothing is left
    int is_dense, outputs, parts, stride;  // stride: bytes of a row, or steps
    int factor_stride, group_shift, team_shift;
    int tile, part, left;           // left: units or steps of this part
    int begin, count;               // range of this warp within a part
};

// The range of inputs of this warp, out of `count` units or steps.
__device__ __forceinline__ void own_inputs(int count, int team_shift, int& begin, int& own) {
    const int warp = threadIdx.x / 32 & ((1 << team_shift) - 1);
    begin = warp * count >> team_shift;
    own = ((warp + 1) * count >> team_shift) - begin;
}

// The first tile of this block; that of this warp's team; the next tile of the team.
__device__ __forceinline__ int first_tile(int shift) {
    const int tile = blockIdx.x + shift;
    return tile < (int)gridDim.x ? tile : tile - (int)gridDim.x;
}

__device__ __forceinline__ int first_of_team(int shift, int team_shift) {
    return first_tile(shift) + (threadIdx.x / 32 >> team_shift) * gridDim.x;
}

__device__ __forceinline__ int next_of_team(int tile, int team_shift) { return tile + (WARPS >> team_shift) * gridDim.x; }

// Compute this lane's first address of a part of a tile.
__device__ __forceinline__ void enter_part(Ring& r) {
    const int lane = threadIdx.x % 32;
    r.left = r.count;
    if (r.is_dense) {
        const u64 row = r.tile * TILE + lane / ROW_LANES + (r.part ? r.outputs : 0);
        r.from = r.weight + row * r.stride + r.begin * UNIT + lane % ROW_LANES * 16;
    } else {
        const int tile = r.tile + (r.part ? r.outputs / TILE : 0);
        r.from = r.weight + ((u64)(tile / 4) * r.stride + r.begin) * PANEL_BYTES + tile % 4 * STEP_BYTES + lane * 16;
    }
}

// Move to the first gemv from r.source on in which this warp has anything to read.
__device__ __forceinline__ void enter_gemv(Ring& r) {
    for (; r.source < r.num_sources; ++r.source) {
        const Source& s = r.sources[r.source];
        r.is_dense = s.is_dense;
        r.stride = s.stride;
        r.team_shift = s.team_shift;
        own_inputs(r.is_dense ? r.stride / UNIT : r.stride, r.team_shift, r.begin, r.count);
        r.tile = first_of_team(s.shift, r.team_shift);
        r.outputs = s.outputs;
        if (r.tile * TILE >= r.outputs || r.count == 0) continue;
        r.parts = s.parts;
        r.weight = s.weight;
        if (HAS_NIBBLES) {
            r.scale = s.scale;
            r.offset = s.offset;
            r.factor_stride = s.factor_stride;
            r.group_shift = s.group_shift;
        }
        r.part = 0;
        enter_part(r);
        return;
    }
}

// Advance to the next piece: of this part, of the next part or tile, or of the next gemv.
__device__ __forceinline__ void advance(Ring& r) {
    r.left -= r.is_dense ? PIECE_UNITS : PIECE_STEPS;
    if (r.left > 0) {
        r.from += r.is_dense ? PIECE_UNITS * UNIT : PIECE_STEPS * PANEL_BYTES;
        return;
    }
    if (++r.part == r.parts) {
        r.part = 0;
        r.tile = next_of_team(r.tile, r.team_shift);
        if (r.tile * TILE >= r.outputs) {
            ++r.source;
            enter_gemv(r);
            return;
        }
    }
    enter_part(r);
}

// The index of a step's group of scales.
__device__ __forceinline__ int group_of(int step, int group_shift) {
    return QUARTERS < 4 ? step * (4 / QUARTERS) : step >> group_shift;
}

// Copy steps of a 4-bit weight, then scales and, if there are any, offsets of their groups.
__device__ __forceinline__ void copy_steps(const Ring& r, u32 to, u64 policy) {
    const int lane = threadIdx.x % 32;
    const int first = r.begin + r.count - r.left, count = min(PIECE_STEPS, r.left);
    const int tile = r.tile + (r.part ? r.outputs / TILE : 0);
    const u32 at = to + lane * 16;
#pragma unroll
    for (int step = 0; step < PIECE_STEPS; ++step) {
        if (step < count) {
            copy_to_shared(at + step * STEP_BYTES, r.from + step * PANEL_BYTES, policy);
            copy_to_shared(at + step * STEP_BYTES + 512, r.from + step * PANEL_BYTES + 512, policy);
        }
    }
    const int group = group_of(first, r.group_shift), last = group_of(first + count - 1, r.group_shift);
    const int groups = last - group + (QUARTERS < 4 ? 4 / QUARTERS : 1);
#pragma unroll
    for (int begin = 0; begin < 4 * PIECE_GROUPS; begin += 32) {  // 16 bytes per lane: half of a group's scales
        const int half = begin + lane, line = half / 2 % PIECE_GROUPS;
        const u64 factors = half < 2 * PIECE_GROUPS ? r.scale : half < 4 * PIECE_GROUPS ? r.offset : 0;
        if (factors && line < groups) {
            const u64 place = (u64)(group + line) * r.factor_stride + tile * TILE;
            copy_to_shared(to + FACTORS_AT + half * 16, factors + place * 2 + half % 2 * 16, policy);
        }
    }
}

// Copy a piece of 16 rows of an 8- or 16-bit weight. Units of odd rows are swapped in pairs (swizzle), so that lanes
// that read two rows at once access different banks.
__device__ __forceinline__ void copy_rows(const Ring& r, u32 to, u64 policy) {
    const int lane = threadIdx.x % 32, odd = lane / ROW_LANES, rows = r.outputs - r.tile * TILE - odd, stride = 2 * r.stride;
    u64 from = r.from;
    to += odd * PITCH + (lane % ROW_LANES * 16 ^ odd * UNIT);
    if (rows >= TILE - 1 && r.left >= PIECE_UNITS) {
#pragma unroll
        for (int row = 0; row < TILE; row += 2, from += stride) copy_to_shared(to + row * PITCH, from, policy);
        return;
    }
    if (lane % ROW_LANES >= 4 * r.left) return;
#pragma unroll 1
    for (int row = 0; row < min(rows, TILE); row += 2, from += stride) copy_to_shared(to + row * PITCH, from, policy);
}

// Start the copy of the next piece, if one is left, to the current slot, and advance to the next slot.
__device__ __forceinline__ void fill_slot(Ring& r, u64 policy) {
    if (r.source < r.num_sources) {
        const u32 to = r.data + r.slot * r.slot_bytes;
        if (HAS_NIBBLES && !r.is_dense) copy_steps(r, to, policy);
        else copy_rows(r, to, policy);
        advance(r);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    r.slot = r.slot + 1 == SLOTS ? 0 : r.slot + 1;
}

// Create the ring of this warp, and start the copies of all slots.
__device__ __forceinline__ Ring start_ring(const u8* memory, const Run& run, const Source* sources, u64 policy) {
    Ring r;
    r.slot_bytes = run.slot_bytes;
    r.data = shared_address(memory) + threadIdx.x / 32 * SLOTS * r.slot_bytes;
    r.slot = 0;
    r.sources = sources;
    r.source = 0;
    r.num_sources = run.num_sources;
    enter_gemv(r);
#pragma unroll 1
    for (int slot = 0; slot < SLOTS; ++slot) fill_slot(r, policy);
    return r;
}

// Wait for the copy of the next slot; returns its address.
__device__ __forceinline__ u32 await_slot(const Ring& r) {
    asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS - 1) : "memory");
    __syncwarp();
    return r.data + r.slot * r.slot_bytes;
}

// Called when the slot was read: refill it.
__device__ __forceinline__ void release_slot(Ring& r, u64 policy) {
    __syncwarp();
    fill_slot(r, policy);
}
