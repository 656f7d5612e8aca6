// Types and basic device functions of the row program (see row_program.py). Needs no CUDA header.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
constexpr int MOST_TABLES = 4;
constexpr u32 ALL_LANES = 0xFFFFFFFFu;

template <bool IS_FIRST, class First, class Second> struct Choice { typedef First type; };
template <class First, class Second> struct Choice<false, First, Second> { typedef Second type; };

enum Kind { BF16 = 0, FLOAT8 = 1, INT8 = 2, NIBBLES = 3, ATTENTION = 4 };

// One phase. row_records.py writes the fields, in this order. Address 0: none.
//
// Vectors are passed between phases as 32-bit words: a bfloat16 value in the upper half, and in the lower half the
// number of the phase that wrote it (its mark), counted over all launches modulo 2**16. A reader polls a word until it
// has the expected mark, so it waits only for what it needs, and no fence is needed, since value and mark arrive in one
// word.
struct Phase {
    u64 weight, scale, offset, bias, norm;
    u64 source, target;      // words
    u64 plain_source;        // replaces `source`: plain bfloat16 values from before the launch; 1: the stream
    u64 plain_before;        // replaces `target` as what is added to
    u64 plain_target;        // written besides `target`, by the last phase that writes a vector
    u64 keys, values, key_scales, value_scales, angles, sinks, query_norm, key_norm;
    long long block_stride;  // elements from one block of the cache to the next
    int head_stride, block_size;
    int kind, outputs, inputs, row_bytes;
    int activation, adds, norm_is_wide, steps;
    int group_shift, factor_stride, num_query;
    int num_kv, rotated, table, window;
    int shift;               // tile that block 0 starts with, so that all blocks get equally many in total
    int team_shift, parts;   // log2 of the warps that multiply a tile together; 2 parts: gate and up
    int source_phase, before_phase;  // phases that wrote the source, and what is added to
    float eps, factor, softcap, value_scale;
};

// The arguments of a launch.
struct Run {
    u64 stream;             // [hidden], bfloat16
    const long long* positions;
    const int* rows;
    u64 tables[MOST_TABLES];
    int table_strides[MOST_TABLES];
    int table_widths[MOST_TABLES];  // blocks per row of a table
    u32* counters;          // [0] blocks of this launch that have ended, [1] phases of all launches before
    u64* parts;             // of attention: [kv heads, shares, PART] pairs of a float32 value and a mark
    u64 sources;            // of all gemv phases: Source, see row_ring.cuh
    int num_phases, num_sources, slot_bytes, vector_bytes, quarters_bytes;
};

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

__device__ __forceinline__ float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_half(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float from_bf16(u16 x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ u16 to_bf16(float x) {
    u16 out;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(x));
    return out;
}

// Round to bfloat16.
__device__ __forceinline__ float rounded(float x) { return from_bf16(to_bf16(x)); }

__device__ __forceinline__ float from_half(u16 x) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x));
    return out;
}

// Convert two float8 (e4m3) values to float32.
__device__ __forceinline__ void from_float8(u16 pair, float& first, float& second) {
    u32 halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
    first = from_half((u16)halves);
    second = from_half((u16)(halves >> 16));
}

__device__ __forceinline__ u8 to_float8(float x) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
    return (u8)pair;
}

__device__ __forceinline__ float power_of_2(float x) {
    float out;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
    return out;
}

// --- words that other multiprocessors write during this launch

constexpr int MOST_LOOKS = 1 << 26;  // about 30 s; then trap, so that the process cannot hang

// The address of a plain vector; 1 stands for the stream.
__device__ __forceinline__ u64 plain(u64 at, const Run& run) { return at == 1 ? run.stream : at; }

// The mark of a phase's results.
__device__ __forceinline__ u32 mark_of(u32 launch, int phase) { return (launch + (u32)phase) & 0xFFFFu; }

// Poll a word until it has the mark.
__device__ __forceinline__ u32 await_word(u64 at, u32 mark) {
    u32 word;
    int looks = 0;
    do {
        asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(word) : "l"(at) : "memory");
        if (++looks > MOST_LOOKS) __trap();
    } while ((word & 0xFFFFu) != mark);
    return word;
}

// Load four words, 16 bytes.
__device__ __forceinline__ uint4 look_at_words(u64 at) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
    return v;
}

__device__ __forceinline__ bool have_mark(const uint4& v, u32 mark) {
    return (((v.x ^ mark) | (v.y ^ mark) | (v.z ^ mark) | (v.w ^ mark)) & 0xFFFFu) == 0;
}

// Poll four words until all have the mark.
__device__ __forceinline__ uint4 await_words(u64 at, u32 mark) {
    uint4 v = look_at_words(at);
    for (int looks = 0; !have_mark(v, mark); ++looks) {
        if (looks > MOST_LOOKS) __trap();
        v = look_at_words(at);
    }
    return v;
}

// Store a value and its mark as one word.
__device__ __forceinline__ void leave_word(u64 at, float x, u32 mark) {
    const u32 word = (u32)to_bf16(x) << 16 | mark;
    asm volatile("st.volatile.global.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

__device__ __forceinline__ void write_number(u64 at, float x) { *reinterpret_cast<u16*>(at) = to_bf16(x); }

// Store a float32 value and its mark as one 64-bit word.
__device__ __forceinline__ void leave_pair(u64* at, float x, u32 mark) {
    const u64 pair = (u64)mark << 32 | __float_as_uint(x);
    asm volatile("st.volatile.global.u64 [%0], %1;" ::"l"(at), "l"(pair) : "memory");
}

__device__ __forceinline__ u64 look_at_pair(const u64* at) {
    u64 pair;
    asm volatile("ld.volatile.global.u64 %0, [%1];" : "=l"(pair) : "l"(at) : "memory");
    return pair;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) x += __shfl_xor_sync(ALL_LANES, x, apart);
    return x;
}

// --- copies of 16 bytes into shared memory, and barriers there

__device__ __forceinline__ void copy_to_shared(u32 to, u64 from, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(policy) : "memory");
}

// An L2 policy for data that is read once (evict first).
__device__ __forceinline__ u64 read_once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier, u32 count = 1) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void await_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}\n" ::"r"(barrier), "r"(parity)
        : "memory");
}
