// Attention of bfloat16 on the tile units of x86 (AMX): keys are read in place as tiles of 16 positions; scores and
// sums are float32, softmax weights are rounded to bfloat16 before they meet the values.
#pragma once

#include "amx.h"
#include "attention.h"

#ifdef __AMX_BF16__

namespace {

constexpr int64_t KEYS_AT_ONCE = 128;  // positions whose scores are held at a time
constexpr int64_t QUERY_ROWS = 16;
static_assert(PIECE % KEYS_AT_ONCE == 0);

// 16 x 16 numbers, rows and columns swapped, times `scale`. In four steps, numbers 1, 2, 4, then 8 places apart meet.
inline void transpose_scaled(const float* from, float scale, float* to, int64_t to_stride) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_mul_ps(_mm512_load_ps(from + 16 * i), _mm512_set1_ps(scale));
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
            a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; ++i) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xDD);
    }
    for (int i = 0; i < 8; ++i) {
        _mm512_store_ps(to + i * to_stride, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        _mm512_store_ps(to + (i + 8) * to_stride, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xDD));
    }
}

// Where the entries of two woven lines come from: first, second, first, second, ... from entry `begin` of each.
constexpr std::array<int16_t, 32> weave(int begin) {
    std::array<int16_t, 32> places{};
    for (int i = 0; i < 32; ++i) places[i] = static_cast<int16_t>(begin + i / 2 + (i % 2 ? 32 : 0));
    return places;
}
alignas(64) constexpr std::array<int16_t, 32> WEAVE_LOW = weave(0), WEAVE_HIGH = weave(16);

class TiledAttention {
  public:
    static bool fits(const Shape& shape) {
        return shape.dim % 32 == 0 && shape.dim <= 256 && shape.block_tokens() * shape.group() <= QUERY_ROWS;
    }

    TiledAttention(const Shape& shape, Keys<bf16> keys, float scale, int64_t)
        : shape_(shape), keys_(keys), scale_(scale) {
        static thread_local std::vector<uint8_t> room;
        const int64_t dim = shape.dim;
        uint8_t* at = aligned_room(room, 2 * 1024 * 16 + KEYS_AT_ONCE * (2 * 64 + 32 + 4 * dim) + QUERY_ROWS * dim * 4);
        const auto next = [&](int64_t bytes) { return std::exchange(at, at + bytes); };
        query_ = reinterpret_cast<bf16*>(next(1024 * dim / 32));
        turned_ = reinterpret_cast<float*>(next(KEYS_AT_ONCE * 64));
        scores_ = reinterpret_cast<float*>(next(KEYS_AT_ONCE * 64));
        weights_ = reinterpret_cast<bf16*>(next(KEYS_AT_ONCE * 32));
        copies_ = reinterpret_cast<bf16*>(next(KEYS_AT_ONCE * 2 * dim));
        values_ = reinterpret_cast<bf16*>(next(KEYS_AT_ONCE * 2 * dim));
        added_ = reinterpret_cast<float*>(next(QUERY_ROWS * 4 * dim));
        request_tiles();
        const TileShapes shapes(16);
        _tile_loadconfig(&shapes);
    }
    ~TiledAttention() { _tile_release(); }

    // Query rows as columns of weight-like tiles: line r of tile c holds entries 32 c + 2 r and + 1 of every row.
    void take(const Group& group, const bf16* query, int64_t stride) {
        const int64_t dim = shape_.dim;
        std::memset(query_, 0, 1024 * dim / 32);
        for_rows(group, shape_, [&](int64_t row, int64_t token, int64_t head) {
            const bf16* from = query + token * stride + head * dim;
            for (int64_t i = 0; i < dim; i += 2) std::memcpy(query_ + i / 2 * 32 + row * 2, from + i, 4);
        });
    }

    void attend(const Group& group, int64_t begin, int64_t end, State state) {
        for (int64_t tile = begin; tile < end; tile += KEYS_AT_ONCE) {
            const auto attend = [&](const Work* work, const Run& run, int64_t row, int64_t there) {
                attend_run(work, run, group.head, row, tile, there, state);
            };
            for_runs(group, tile, std::min(KEYS_AT_ONCE, end - tile), keys_.tables, shape_, attend);
        }
    }

  private:
    // The state's rows from `from` on, those of the run, look at `count` positions from `tile` on. The tile units compute
    // all rows of the group; only the run's are used.
    void attend_run(const Work* work, const Run& run, int64_t head, int64_t from, int64_t tile, int64_t count,
                    State state) {
        const int64_t dim = shape_.dim, first = from * KEYS_AT_ONCE, last = (from + run.rows) * KEYS_AT_ONCE;
        int64_t seen[QUERY_ROWS];
        see(work, run, tile, count, shape_, seen);
        score(*run.longest, head, tile, count);
        for (int64_t g = 0; g < (count + 15) / 16; ++g)
            transpose_scaled(turned_ + g * 256, scale_, scores_ + g * 16, KEYS_AT_ONCE);
        soften<KEYS_AT_ONCE>(scores_ + first, seen, state, from, run.rows, dim);
        for (int64_t i = first; i < last; i += LANES) store(weights_ + i, load(scores_ + i));
        weave_values(*run.longest, head, tile, count);
        weigh((count + 31) / 32);
        for (int64_t i = from * dim; i < (from + run.rows) * dim; i += LANES)
            store(state.out + i, load(state.out + i) + load(added_ + i));
    }

    // Scores of all query rows, positions first: turned_ [positions][16 rows].
    void score(const Work& work, int64_t head, int64_t begin, int64_t count) {
        const bf16* rows[KEYS_AT_ONCE];
        keys_.locate(keys_.keys, work, head, shape_, begin, count, rows);
        for (int64_t g = 0; g < count; g += 16) {
            const bf16* keys = sixteen(rows + g, std::min<int64_t>(16, count - g));
            _tile_zero(0);
            for (int64_t c = 0; c < shape_.dim / 32; ++c) {
                _tile_loadd(4, keys + c * 32, shape_.dim * 2);
                _tile_loadd(6, query_ + c * 512, 64);
                _tile_dpbf16ps(0, 4, 6);
            }
            _tile_stored(0, turned_ + g * 16, 64);
        }
    }

    // 16 positions, one behind the other: as they lie in the cache, or copied, with zeros past the last.
    const bf16* sixteen(const bf16** rows, int64_t count) {
        if (shape_.block_size % 16 == 0) return rows[0];
        std::memset(copies_, 0, 16 * 2 * shape_.dim);
        for (int64_t t = 0; t < count; ++t) std::memcpy(copies_ + t * shape_.dim, rows[t], 2 * shape_.dim);
        return copies_;
    }

    // Values of two positions side by side, entry by entry: values_ [positions / 2][dim][2], zeros past the last.
    void weave_values(const Work& work, int64_t head, int64_t begin, int64_t count) {
        const __m512i low = _mm512_load_si512(WEAVE_LOW.data()), high = _mm512_load_si512(WEAVE_HIGH.data());
        const int64_t dim = shape_.dim, padded = (count + 31) / 32 * 32;
        const bf16* rows[KEYS_AT_ONCE];
        keys_.locate(keys_.values, work, head, shape_, begin, count, rows);
        for (int64_t t = 0; t < padded; t += 2) {
            const __mmask32 has_one = t < count ? ~0u : 0u, has_two = t + 1 < count ? ~0u : 0u;
            const bf16 *one = rows[std::min(t, count - 1)], *two = rows[std::min(t + 1, count - 1)];
            for (int64_t i = 0; i < dim; i += 32) {
                const __m512i a = _mm512_maskz_loadu_epi16(has_one, one + i);
                const __m512i b = _mm512_maskz_loadu_epi16(has_two, two + i);
                _mm512_store_si512(values_ + t * dim + 2 * i, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(values_ + t * dim + 2 * i + 32, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }

    // added_ [16 rows, dim]: softmax weights times values, 32 positions at a time.
    void weigh(int64_t steps) {
        const int64_t dim = shape_.dim;
        for (int64_t column = 0; column < dim; column += 32) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t s = 0; s < steps; ++s) {
                const bf16* values = values_ + s * 32 * dim + 2 * column;
                _tile_loadd(4, weights_ + s * 32, KEYS_AT_ONCE * 2);
                _tile_loadd(6, values, dim * 4);
                _tile_loadd(7, values + 32, dim * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, added_ + column, dim * 4);
            _tile_stored(1, added_ + column + 16, dim * 4);
        }
    }

    const Shape shape_;
    const Keys<bf16> keys_;
    const float scale_;
    bf16 *query_, *weights_, *copies_, *values_;
    float *turned_, *scores_, *added_;
};

}  // namespace
#endif
