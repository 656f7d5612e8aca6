// Parts of the kernels for Hopper GPUs: barriers in shared memory, wgmma descriptors, activations and rounding. Needs no
// CUDA header. The constants ACTIVATION and IS_HALF are prepended.

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

// With a programmatic dependent launch, wait for the previous kernel.
__device__ __forceinline__ void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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
