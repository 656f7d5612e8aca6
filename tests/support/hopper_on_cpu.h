// Stands in for hopper.cuh on a CPU: runs the blocks of a kernel, one cluster after the other, with a fiber per thread.
// TMA copies and wgmmas are done when they are issued. What waits longer than anything happens is a deadlock.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

using std::max;
using std::min;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Index { int x; };
struct Mbarrier { int count = 0, pending = 0; long bytes = 0; u32 phase = 0; };
struct Meeting { int arrived = 0; u32 round = 0; };
constexpr int BARRIERS = 64, SHARED_BYTES = 256 << 10, STACK_BYTES = 64 << 10, MOST_WARPS = 32;

struct Block {
    std::vector<char> memory = std::vector<char>(SHARED_BYTES);
    Mbarrier barriers[BARRIERS];
    Meeting all, warpgroups[16], warps[MOST_WARPS];
    u32 passed[MOST_WARPS][32];
    int index, threads;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(STACK_BYTES);
    Block* block;
    Index thread;
    bool has_ended = false;
};

static ucontext_t scheduler;
static Fiber* now;
static std::vector<std::unique_ptr<Block>> blocks;  // of the cluster
static Meeting cluster_meeting;
static int cluster_threads;
static long events;  // anything that another thread may wait for
static Index gridDim;
#define threadIdx (now->thread)
#define blockIdx (Index{now->block->index})
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

static int fault;

static void pause() { swapcontext(&now->context, &scheduler); }
static void fail() {
    fault = 3;
    for (;;) pause();
}

static void meet(Meeting& meeting, int count) {
    const u32 round = meeting.round;
    events++;
    if (++meeting.arrived == count) meeting.arrived = 0, meeting.round++;
    while (meeting.round == round) pause();
}

static void __syncthreads() { meet(now->block->all, now->block->threads); }
static void __syncwarp() { meet(now->block->warps[threadIdx.x / 32], 32); }
static void meet_cluster() { meet(cluster_meeting, cluster_threads); }
static void meet_warpgroup(int number) { meet(now->block->warpgroups[number], 128); }

template <class T> static T __shfl_sync(u32, T value, int from) {
    u32* passed = now->block->passed[threadIdx.x / 32];
    memcpy(passed + threadIdx.x % 32, &value, sizeof value);
    __syncwarp();
    memcpy(&value, passed + from, sizeof value);
    __syncwarp();
    return value;
}
template <class T> static T __shfl_xor_sync(u32 lanes, T value, int by) { return __shfl_sync(lanes, value, threadIdx.x % 32 ^ by); }

// Addresses in shared memory: the upper byte is 0 in the own block, or the rank of a block of the cluster plus 1.
constexpr u32 OFFSET = 0xFFFFFF;
static Block& block_at(u32 address) { return address > OFFSET ? *blocks[(address >> 24) - 1] : *now->block; }
static char* place_of(u32 address) {
    if ((address & OFFSET) + 16 > SHARED_BYTES) fail();
    return block_at(address).memory.data() + (address & OFFSET);
}
static u32 address_at(u32 address, int rank) { return (u32)(rank + 1) << 24 | (address & OFFSET); }
static u32 shared_address(const void* at) { return (u32)((const char*)at - now->block->memory.data()); }

// An mbarrier is kept aside, by its place among those of the block, which are at the start of its memory.
static Mbarrier& barrier_at(u32 address) { return block_at(address).barriers[(address & OFFSET) / 8]; }
static void settle(Mbarrier& barrier) {
    if (barrier.pending < 0) fail();
    if (barrier.pending == 0 && barrier.bytes == 0) barrier.phase ^= 1, barrier.pending = barrier.count, events++;
}
static void init_barrier(u32 address, int count) { barrier_at(address).count = barrier_at(address).pending = count; }
static void publish_barriers() {}
static void await(u32 barrier, u32 phase) { while (barrier_at(barrier).phase == phase) pause(); }
static void arrive(u32 barrier) { barrier_at(barrier).pending--, settle(barrier_at(barrier)); }
static void arrive_there(u32 barrier) { arrive(barrier); }
static void expect(u32 barrier, int bytes) { barrier_at(barrier).bytes += bytes, arrive(barrier); }
template <class T> static void put(u32 to, const T* four) { memcpy(place_of(to), four, 16); }
template <class T> static void get(u32 from, T* four) { memcpy(four, place_of(from), 16); }

constexpr int LINE = 128;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;
static u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// A tensor of four dimensions, the innermost first: address, sizes, bytes from one to the next from the second on, box.
struct alignas(64) TensorMap { u64 words[16]; };
static void prefetch_map(const TensorMap*) {}

static void copy(u32 to, const TensorMap* map, const long (&first)[4], u32 barrier) {
    const u64 *sizes = map->words + 1, *strides = map->words + 5, *box = map->words + 8;
    u32 line = 0;
    for (u64 c = 0; c < box[3]; c++) for (u64 b = 0; b < box[2]; b++) for (u64 a = 0; a < box[1]; a++, line++)
        for (int byte = 0; byte < LINE; byte++) {
            const u64 at[4] = {first[0] + byte / ELEMENT_BYTES, first[1] + a, first[2] + b, first[3] + c};
            const bool exists = at[0] < sizes[0] && at[1] < sizes[1] && at[2] < sizes[2] && at[3] < sizes[3];
            const char* from = (const char*)map->words[0] + at[0] * ELEMENT_BYTES + byte % ELEMENT_BYTES + at[1] * strides[0] + at[2] * strides[1] + at[3] * strides[2];
            *place_of(swizzled(to + line * LINE + byte)) = exists ? *from : 0;
        }
    barrier_at(barrier).bytes -= (long)line * LINE;
    settle(barrier_at(barrier));
}
template <bool MULTICAST> static void copy_box_4d(u32 to, const TensorMap* map, int column, int last, u32 barrier) {
    for (int rank = 0; rank < 2; rank++)
        if (MULTICAST) copy(address_at(to, rank), map, {column, 0, 0, last}, address_at(barrier, rank));
    if (!MULTICAST) copy(to, map, {column, 0, 0, last}, barrier);
}
template <bool MULTICAST> static void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    for (int rank = 0; rank < 2; rank++)
        if (MULTICAST) copy(address_at(to, rank), map, {column, row, 0, 0}, address_at(barrier, rank));
    if (!MULTICAST) copy(to, map, {column, row, 0, 0}, barrier);
}

static float bits(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 rounded(float x) { u32 y; memcpy(&y, &x, 4); return (y + 0x7FFF + (y >> 16 & 1)) >> 16; }
static float first_of(u32 pair) { return bits(pair << 16); }
static float second_of(u32 pair) { return bits(pair & 0xFFFF0000u); }
static u32 to_pair(float first, float second) { return rounded(first) | rounded(second) << 16; }
static float activated(float x) { return ACTIVATION == 0 ? x / (1.0f + expf(-x)) : max(x, 0.0f); }
static float read_float(u64 from) { return *(const float*)from; }
static float read_fresh(u64 from) { return *(const float*)from; }
static u32 read_short(u64 from) { return *(const u16*)from; }
static void await_kernel_before() {}
static void launch_kernel_after() {}

// wgmma: a thread computes its own sums.
static u64 matrix_at(u32 address) { return address; }
static void begin_wgmma() {}
static void end_wgmma() {}
template <int PENDING> static void await_wgmma() {}
template <int NUMBER> static void give_registers() {}
template <int NUMBER> static void take_registers() {}
static float number_at(const char* at, float) {
    if (ELEMENT_BYTES == 2) return first_of(*(const u16*)at);
    const int byte = (unsigned char)*at, exponent = byte >> 3 & 15;
    const float value = exponent ? ldexpf(8 + byte % 8, exponent - 10) : ldexpf(byte % 8, -9);
    return byte & 128 ? -value : value;
}
static int number_at(const char* at, int) { return (signed char)*at; }
template <int N> static void multiply(Sum (&sums)[N], u64 a, u64 b, bool adds) {
    const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < N; i++) {
        Sum sum = adds ? sums[i] : 0;
        for (int byte = 0; byte < 32; byte += ELEMENT_BYTES)
            sum += number_at(place_of(swizzled(a + (row + i / 2 % 2 * 8) * LINE + byte)), sum) * number_at(place_of(swizzled(b + (i / 4 * 8 + column + i % 2) * LINE + byte)), sum);
        sums[i] = sum;
    }
}

// Run a kernel. Returns 0, or what went wrong, see hopper_on_cpu.py.
template <class Body> static int run_blocks(int num_blocks, int cluster, int threads, u32 seed, Body body) {
    static Body* kernel;
    kernel = &body;
    gridDim = {num_blocks};
    srand(seed);
    for (int first = 0; first < num_blocks; first += cluster) {
        std::vector<std::unique_ptr<Fiber>> fibers;
        blocks.clear(), cluster_meeting = Meeting(), cluster_threads = threads * cluster;
        for (int rank = 0; rank < cluster; rank++) {
            blocks.push_back(std::make_unique<Block>());
            blocks.back()->index = first + rank, blocks.back()->threads = threads;
            for (int thread = 0; thread < threads; thread++) {
                fibers.push_back(std::make_unique<Fiber>());
                Fiber& fiber = *fibers.back();
                fiber.block = blocks.back().get(), fiber.thread = {thread};
                getcontext(&fiber.context);
                fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
                makecontext(&fiber.context, +[] { (*kernel)(), now->has_ended = true, events++, pause(); }, 0);
            }
        }
        for (size_t left = fibers.size(), ended = 0; ended < left;) {
            const long before = events;
            const size_t start = rand() % left;  // a turn begins anywhere: some blocks and warps run ahead
            for (size_t i = 0; i < left; i++) {
                Fiber& fiber = *fibers[(start + i) % left];
                if (fiber.has_ended) continue;
                now = &fiber;
                swapcontext(&scheduler, &fiber.context);
                if (fault) return fault;
                ended += fiber.has_ended;
            }
            if (events == before) return 1;
        }
        for (const auto& block : blocks)
            for (const Mbarrier& barrier : block->barriers)
                if (barrier.bytes != 0) return 2;
    }
    return 0;
}
