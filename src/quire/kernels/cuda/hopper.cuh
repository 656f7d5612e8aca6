// Parts of the kernels for Hopper GPUs: barriers, TMA copies, clusters, wgmma, activations and rounding. Needs no CUDA
// header. The constants ACTIVATION and IS_HALF are prepended.

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LINE = 128;  // bytes of a row in shared memory: the widest swizzle
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Initialize an mbarrier.
__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count));
}

// Make initialized mbarriers visible to TMA and to the cluster, before a barrier of the threads.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Wait for an mbarrier's phase.
__device__ __forceinline__ void await(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\nbra AGAIN;\nREADY:\n}" :: "r"(barrier), "r"(phase) : "memory");
}

// Arrive at an mbarrier, and expect `bytes` of TMA copies.
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Arrive at an mbarrier of a block of the cluster. Without ".release.cluster", which would wait for all of this block's
// global memory operations: for handing over memory that was only read.
__device__ __forceinline__ void arrive_there(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// The address in a block of the cluster of what is at an address of this block's shared memory.
__device__ __forceinline__ u32 address_at(u32 address, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Barrier of the cluster.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Barrier of a warpgroup, by its own number, from 1 on.
__device__ __forceinline__ void meet_warpgroup(int number) { asm volatile("bar.sync %0, 128;" :: "r"(number) : "memory"); }

// Store four sums in the shared memory of a block of the cluster, and load four from the own block's. Not as integers:
// ptxas would wait for every wgmma, so that the conversions can follow.
__device__ __forceinline__ void put(u32 to, const float* four) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" :: "r"(to), "f"(four[0]), "f"(four[1]), "f"(four[2]), "f"(four[3]) : "memory");
}

__device__ __forceinline__ void put(u32 to, const int* four) {
    asm volatile("st.shared::cluster.v4.s32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(four[0]), "r"(four[1]), "r"(four[2]), "r"(four[3]) : "memory");
}

__device__ __forceinline__ void get(u32 from, float* four) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(four[0]), "=f"(four[1]), "=f"(four[2]), "=f"(four[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void get(u32 from, int* four) {
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];" : "=r"(four[0]), "=r"(four[1]), "=r"(four[2]), "=r"(four[3]) : "r"(from) : "memory");
}

struct alignas(64) TensorMap { u64 words[16]; };

// Fetch a map, which the first copy would wait for.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// TMA copy of a box of a matrix, or of a tensor whose middle dimensions are copied whole; if MULTICAST to the first two
// blocks of the cluster.
template <bool MULTICAST>
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, int column, int row, u32 barrier) {
    if (MULTICAST)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3}], [%4], %5;"
            :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)3) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
            :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

template <bool MULTICAST>
__device__ __forceinline__ void copy_box_4d(u32 to, const TensorMap* map, int column, int last, u32 barrier) {
    if (MULTICAST)
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
            " [%0], [%1, {%2, %3, %3, %4}], [%5], %6;"
            :: "r"(to), "l"(map), "r"(column), "r"(0), "r"(last), "r"(barrier), "h"((u16)3) : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %4}], [%5];"
            :: "r"(to), "l"(map), "r"(column), "r"(0), "r"(last), "r"(barrier) : "memory");
}

// Before the wgmmas of a step, after them, and until at most PENDING steps are left.
__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void await_wgmma() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// Give registers to the other warpgroups of the block, or take some, and have NUMBER per thread then.
template <int NUMBER> __device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(NUMBER)); }
template <int NUMBER> __device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(NUMBER)); }

// With a programmatic dependent launch, wait for the previous kernel.
__device__ __forceinline__ void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// With a programmatic dependent launch, let the next kernel start; it waits for this one before it reads its results.
__device__ __forceinline__ void launch_kernel_after() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Read a number that the previous kernel may have written while this one was running, so not from the L1 cache.
__device__ __forceinline__ float read_fresh(u64 from) {
    float read;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(read) : "l"(from) : "memory");
    return read;
}

// Read numbers that no kernel writes. The reads stay where they are in the code.
__device__ __forceinline__ float read_float(u64 from) {
    float read;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(read) : "l"(from));
    return read;
}

__device__ __forceinline__ u32 read_short(u64 from) {
    u16 read;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(read) : "l"(from));
    return read;
}

// The wgmma descriptor of a matrix in shared memory with the 128-byte swizzle of TMA.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)(8 * LINE >> 4) << 32 | (u64)1 << 62;
}

// The activation selected by ACTIVATION.
__device__ __forceinline__ float activated(float x) {
    if (ACTIVATION == 0) return __fdividef(x, 1.0f + __expf(-x));
    if (ACTIVATION == 1) return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f));
    if (ACTIVATION == 2) return __fdividef(x, 1.0f + __expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    return x < 0.0f ? 0.0f : x;  // NaN stays NaN
}

// Round two floats to a pair of float16 or bfloat16.
__device__ __forceinline__ u32 to_pair(float first, float second) {
    u32 pair;
    if (IS_HALF) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    else asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// The numbers of a pair of float16 or bfloat16.
__device__ __forceinline__ float first_of(u32 pair) {
    float number;
    if (IS_HALF) asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"((u16)pair));
    else number = __uint_as_float(pair << 16);
    return number;
}

__device__ __forceinline__ float second_of(u32 pair) { return IS_HALF ? first_of(pair >> 16) : __uint_as_float(pair & 0xFFFF0000u); }
