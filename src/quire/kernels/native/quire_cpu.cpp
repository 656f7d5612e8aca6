// CPU kernels with a plain C interface: functions on raw memory, no torch headers, no engine types.
// Compiled once on the machine that runs them (-march=native); threads are torch's own OpenMP pool.
// Every result is independent of what else is in the batch: work is cut by position, sums run in a fixed order.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

template <typename T> inline T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even; a NaN stays a NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    return bf16{static_cast<uint16_t>(is_nan ? ((bits >> 16) | 0x40u) : (rounded >> 16))};
}

// e^x by 2^n * p(f), |relative error| < 2e-7 for x in [-87, 88]; smaller x give 0, larger ones e^88.
inline float exponential(float x) {
    const float clamped = std::min(std::max(x, -87.0f), 88.0f);
    const float n = std::nearbyint(clamped * 1.44269504088896341f);
    float f = clamped - n * 0.693359375f;
    f = f - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}

// ------------------------------------------------------------------------------------------- row-wise kernels

template <typename T>
void rms_norm(const T* x, int64_t x_stride, const T* weight, T* out, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for schedule(static) if (rows * size > 16384)
    for (int64_t row = 0; row < rows; ++row) {
        const T* in = x + row * x_stride;
        T* to = out + row * size;
        float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < size; ++i) {
            const float value = widen(in[i]);
            squares += value * value;
        }
        const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const T normed = narrow<T>(widen(in[i]) * scale);
            to[i] = narrow<T>(widen(normed) * widen(weight[i]));
        }
    }
}

// heads [rows, heads, dim] turned in place; cos and sin [rows, dim], the first half of sin carrying the minus sign.
template <typename T>
void rotate(T* x, int64_t stride, const T* cos, const T* sin, int64_t angle_stride, int64_t rows, int64_t heads,
            int64_t dim) {
    const int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows * heads * dim > 32768)
    for (int64_t row = 0; row < rows; ++row) {
        const T* c = cos + row * angle_stride;
        const T* s = sin + row * angle_stride;
        for (int64_t head = 0; head < heads; ++head) {
            T* first = x + row * stride + head * dim;
            T* second = first + half;
#pragma omp simd
            for (int64_t i = 0; i < half; ++i) {
                const float a = widen(first[i]), b = widen(second[i]);
                first[i] = narrow<T>(a * widen(c[i]) + b * widen(s[i]));
                second[i] = narrow<T>(b * widen(c[half + i]) + a * widen(s[half + i]));
            }
        }
    }
}

// gate_up [rows, 2 * size] -> silu(gate) * up [rows, size]
template <typename T>
void silu_mul(const T* gate_up, T* out, int64_t rows, int64_t size) {
#pragma omp parallel for schedule(static) if (rows * size > 8192)
    for (int64_t row = 0; row < rows; ++row) {
        const T* gate = gate_up + row * 2 * size;
        const T* up = gate + size;
        T* to = out + row * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
            const float g = widen(gate[i]);
            const T silu = narrow<T>(g / (1.0f + exponential(-g)));
            to[i] = narrow<T>(widen(silu) * widen(up[i]));
        }
    }
}

// Keys and values [rows, heads, dim] to slots [rows, heads] of a cache seen as [slots, dim].
template <typename T>
void write_cache(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* key_cache, T* value_cache,
                 const int64_t* slots, int64_t rows, int64_t heads, int64_t dim) {
#pragma omp parallel for schedule(static) if (rows * heads * dim > 65536)
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < heads; ++head) {
            const int64_t to = slots[row * heads + head] * dim;
            std::memcpy(key_cache + to, key + row * key_stride + head * dim, dim * sizeof(T));
            std::memcpy(value_cache + to, value + row * value_stride + head * dim, dim * sizeof(T));
        }
}

// ------------------------------------------------------------------------------------------ paged decode attention

constexpr int64_t SPAN = 256;  // positions one work item covers: fixed, so sums do not depend on the batch
constexpr int64_t TILE = 32;   // positions whose scores are held at a time

struct Shape {
    int64_t query_heads, kv_heads, dim, block_size;
    int64_t group() const { return query_heads / kv_heads; }
};

// One row, one kv head, positions begin .. end: unnormalised output per query head, with its maximum and sum.
template <typename T, int64_t DIM>
void attend_span(const float* query, const T* keys, const T* values, const int64_t* table, int64_t head,
                 const Shape& shape, int64_t begin, int64_t end, float* out, float* maxima, float* sums) {
    const int64_t dim = DIM ? DIM : shape.dim, group = shape.group(), size = shape.block_size;
    std::vector<float> kept(group * TILE);
    std::fill(out, out + group * dim, 0.0f);
    std::fill(maxima, maxima + group, -INFINITY);
    std::fill(sums, sums + group, 0.0f);
    for (int64_t tile = begin; tile < end; tile += TILE) {
        const int64_t count = std::min(TILE, end - tile);
        for (int64_t t = 0; t < count; ++t) {
            const int64_t position = tile + t;
            const T* key = keys + ((table[position / size] * shape.kv_heads + head) * size + position % size) * dim;
            for (int64_t g = 0; g < group; ++g) {
                const float* q = query + g * dim;
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < dim; ++i) sum += q[i] * widen(key[i]);
                kept[g * TILE + t] = sum;
            }
        }
        for (int64_t g = 0; g < group; ++g) {
            float* s = kept.data() + g * TILE;
            float highest = maxima[g];
            for (int64_t t = 0; t < count; ++t) highest = std::max(highest, s[t]);
            const float shrink = exponential(maxima[g] - highest);
            float total = 0.0f;
#pragma omp simd reduction(+ : total)
            for (int64_t t = 0; t < count; ++t) {
                s[t] = exponential(s[t] - highest);
                total += s[t];
            }
            sums[g] = sums[g] * shrink + total;
            if (highest != maxima[g]) {
                float* o = out + g * dim;
#pragma omp simd
                for (int64_t i = 0; i < dim; ++i) o[i] *= shrink;
                maxima[g] = highest;
            }
        }
        for (int64_t t = 0; t < count; ++t) {
            const int64_t position = tile + t;
            const T* value = values + ((table[position / size] * shape.kv_heads + head) * size + position % size) * dim;
            for (int64_t g = 0; g < group; ++g) {
                float* o = out + g * dim;
                const float p = kept[g * TILE + t];
#pragma omp simd
                for (int64_t i = 0; i < dim; ++i) o[i] += p * widen(value[i]);
            }
        }
    }
}

template <typename T>
void attend_any(const float* query, const T* keys, const T* values, const int64_t* table, int64_t head,
                const Shape& shape, int64_t begin, int64_t end, float* out, float* maxima, float* sums) {
    if (shape.dim == 64)
        attend_span<T, 64>(query, keys, values, table, head, shape, begin, end, out, maxima, sums);
    else if (shape.dim == 128)
        attend_span<T, 128>(query, keys, values, table, head, shape, begin, end, out, maxima, sums);
    else
        attend_span<T, 0>(query, keys, values, table, head, shape, begin, end, out, maxima, sums);
}

struct Item {
    int64_t row, head, begin, end, place;  // place: index of its partial result
};

template <typename T>
void paged_decode(const T* query, int64_t query_stride, const T* keys, const T* values, const int64_t* tables,
                  int64_t table_width, const int64_t* lengths, T* out, int64_t rows, Shape shape, float scale) {
    const int64_t group = shape.group(), dim = shape.dim, head_out = group * dim;
    std::vector<Item> items;
    std::vector<int64_t> first(rows * shape.kv_heads + 1);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t head = 0; head < shape.kv_heads; ++head) {
            first[row * shape.kv_heads + head] = static_cast<int64_t>(items.size());
            for (int64_t begin = 0; begin < lengths[row]; begin += SPAN)
                items.push_back({row, head, begin, std::min(begin + SPAN, lengths[row]),
                                 static_cast<int64_t>(items.size())});
        }
    const int64_t count = static_cast<int64_t>(items.size());
    first[rows * shape.kv_heads] = count;
    std::vector<float> partial(count * head_out), maxima(count * group), sums(count * group);
#pragma omp parallel
    {
        std::vector<float> q(head_out);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[i];
            const T* from = query + item.row * query_stride + item.head * head_out;
            for (int64_t j = 0; j < head_out; ++j) q[j] = widen(from[j]) * scale;
            attend_any<T>(q.data(), keys, values, tables + item.row * table_width, item.head, shape, item.begin,
                          item.end, partial.data() + item.place * head_out, maxima.data() + item.place * group,
                          sums.data() + item.place * group);
        }
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < rows * shape.kv_heads; ++pair) {
            T* to = out + pair * head_out;
            for (int64_t g = 0; g < group; ++g) {
                float highest = -INFINITY, total = 0.0f;
                for (int64_t i = first[pair]; i < first[pair + 1]; ++i) highest = std::max(highest, maxima[i * group + g]);
                for (int64_t j = 0; j < dim; ++j) q[g * dim + j] = 0.0f;
                for (int64_t i = first[pair]; i < first[pair + 1]; ++i) {
                    const float weight = exponential(maxima[i * group + g] - highest);
                    const float* part = partial.data() + i * head_out + g * dim;
                    total += weight * sums[i * group + g];
#pragma omp simd
                    for (int64_t j = 0; j < dim; ++j) q[g * dim + j] += weight * part[j];
                }
                for (int64_t j = 0; j < dim; ++j) to[g * dim + j] = narrow<T>(q[g * dim + j] / total);
            }
        }
    }
}

}  // namespace

// ------------------------------------------------------------------------------------------------- C interface
// `type`: 0 float32, 1 bfloat16. All pointers are to memory of that type unless said otherwise.

#define DISPATCH(type, CALL)   \
    if ((type) == 0) {         \
        using T = float;       \
        CALL;                  \
    } else {                   \
        using T = bf16;        \
        CALL;                  \
    }

extern "C" {

// The instruction sets this file was compiled for, by their /proc/cpuinfo names: a CPU without one must not run it.
const char* quire_isa() {
    return ""
#ifdef __AVX2__
           "avx2 fma "
#endif
#ifdef __AVX512F__
           "avx512f "
#endif
#ifdef __AVX512BW__
           "avx512bw avx512dq avx512vl "
#endif
#ifdef __AVX512BF16__
           "avx512_bf16 "
#endif
#ifdef __AMX_BF16__
           "amx_bf16 "
#endif
#ifdef __ARM_NEON
           "asimd "
#endif
#ifdef __ARM_FEATURE_FP16_VECTOR_ARITHMETIC
           "asimdhp "
#endif
#ifdef __ARM_FEATURE_SVE
           "sve "
#endif
#ifdef __ARM_FEATURE_BF16
           "bf16 "
#endif
        ;
}

void quire_rms_norm(int64_t type, const void* x, int64_t x_stride, const void* weight, void* out, int64_t rows,
                    int64_t size, double eps) {
    DISPATCH(type, rms_norm<T>(static_cast<const T*>(x), x_stride, static_cast<const T*>(weight), static_cast<T*>(out),
                               rows, size, static_cast<float>(eps)))
}

void quire_rotate(int64_t type, void* x, int64_t stride, const void* cos, const void* sin, int64_t angle_stride,
                  int64_t rows, int64_t heads, int64_t dim) {
    DISPATCH(type, rotate<T>(static_cast<T*>(x), stride, static_cast<const T*>(cos), static_cast<const T*>(sin),
                             angle_stride, rows, heads, dim))
}

void quire_silu_mul(int64_t type, const void* gate_up, void* out, int64_t rows, int64_t size) {
    DISPATCH(type, silu_mul<T>(static_cast<const T*>(gate_up), static_cast<T*>(out), rows, size))
}

void quire_write_cache(int64_t type, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                       void* key_cache, void* value_cache, const int64_t* slots, int64_t rows, int64_t heads,
                       int64_t dim) {
    DISPATCH(type, write_cache<T>(static_cast<const T*>(key), key_stride, static_cast<const T*>(value), value_stride,
                                  static_cast<T*>(key_cache), static_cast<T*>(value_cache), slots, rows, heads, dim))
}

void quire_paged_decode(int64_t type, const void* query, int64_t query_stride, const void* keys, const void* values,
                        const int64_t* tables, int64_t table_width, const int64_t* lengths, void* out, int64_t rows,
                        int64_t query_heads, int64_t kv_heads, int64_t dim, int64_t block_size, double scale) {
    const Shape shape{query_heads, kv_heads, dim, block_size};
    DISPATCH(type, paged_decode<T>(static_cast<const T*>(query), query_stride, static_cast<const T*>(keys),
                                   static_cast<const T*>(values), tables, table_width, lengths, static_cast<T*>(out),
                                   rows, shape, static_cast<float>(scale)))
}
}
