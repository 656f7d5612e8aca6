// bfloat16 attention on AMX tile units. Keys and values are repacked into tiles once for all query rows of a group.
// Scores and sums are float32; softmax weights are rounded to bfloat16 before the second gemm.
#pragma once

#include "amx.h"
#include "attention.h"

#ifdef __AMX_BF16__

namespace {

constexpr int64_t KEYS_AT_ONCE = 128;  // positions whose scores are computed together
constexpr int64_t TILE_ROWS = 16;
static_assert(PIECE % KEYS_AT_ONCE == 0 && KEYS_AT_ONCE % 64 == 0);

// Transpose 16 lines of 16 32-bit elements (pairs of bfloat16) with AVX-512 shuffles, in four butterfly steps of
// distance 1, 2, 4 and 8.
inline void transpose(const bf16* const* lines, int64_t offset, bf16* to) {
    __m512 a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(lines[i] + offset);
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
        _mm512_store_ps(to + i * 32, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        _mm512_store_ps(to + (i + 8) * 32, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xDD));
    }
}

// Permutation indices that interleave two vectors: first, second, first, second, ... from entry `begin` of each.
constexpr std::array<int16_t, 32> weave(int begin) {
    std::array<int16_t, 32> places{};
    for (int i = 0; i < 32; ++i) places[i] = static_cast<int16_t>(begin + i / 2 + (i % 2 ? 32 : 0));
    return places;
}
alignas(64) constexpr std::array<int16_t, 32> WEAVE_LOW = weave(0), WEAVE_HIGH = weave(16);

// The AMX method of attend_all: query rows in tiles of 16, 128 positions at a time.
class TiledAttention {
  public:
    static constexpr int64_t MAX_ROWS = 4 * TILE_ROWS;  // of a group, which reads keys and values once for all of them

    static constexpr int64_t STEP = KEYS_AT_ONCE;
    static constexpr int64_t MAX_DIM = 640;  // keys and values of a step stay in the L2 cache

    // Whether this method supports the head size and group size.
    static bool fits(const Shape& shape) {
        return shape.dim % 32 == 0 && shape.value_dim % 32 == 0 && shape.dim <= MAX_DIM &&
               shape.block_tokens() * shape.group() <= TILE_ROWS;
    }

    TiledAttention(const Shape& shape, Keys<bf16> keys, const Rule& rule, int64_t)
        : shape_(shape), keys_(keys), rule_(rule) {
        static thread_local std::vector<uint8_t> room;
        const int64_t dim = shape.dim, query = MAX_ROWS * 2 * dim, positions = KEYS_AT_ONCE * 2 * dim;
        const int64_t square = MAX_ROWS * KEYS_AT_ONCE, added = TILE_ROWS * 4 * shape.value_dim;
        uint8_t* at = aligned_room(room, query + 6 * square + 2 * positions + added);
        const auto next = [&](int64_t bytes) { return std::exchange(at, at + bytes); };
        query_ = reinterpret_cast<bf16*>(next(query));
        scores_ = reinterpret_cast<float*>(next(4 * square));
        weights_ = reinterpret_cast<bf16*>(next(2 * square));
        turned_ = reinterpret_cast<bf16*>(next(positions));
        values_ = reinterpret_cast<bf16*>(next(positions));
        added_ = reinterpret_cast<float*>(next(added));
        configure_tiles(TileShapes(TILE_ROWS));
    }
    ~TiledAttention() { _tile_release(); }

    // Copy the queries of a group to query_ [rows, dim].
    void take(const Group& group, const bf16* query, int64_t stride) {
        const int64_t dim = shape_.dim;
        for_rows(group, shape_, [&](int64_t row, int64_t token, int64_t head) {
            std::memcpy(query_ + row * dim, query + token * stride + head * dim, 2 * dim);
        });
    }

    // Attend to positions [begin, end) and update the state of all rows.
    void attend(const Group& group, int64_t begin, int64_t end, State state) {
        for (int64_t tile = begin; tile < end; tile += KEYS_AT_ONCE) {
            const auto attend = [&](const Work* work, const Run& run, int64_t row, int64_t there) {
                if (run.rows <= TILE_ROWS) ask_for(keys_.values, *run.longest, group.head, tile, there);
                attend_run(work, run, group.head, row, tile, there, state);
            };
            for_runs(group, tile, std::min(KEYS_AT_ONCE, end - tile), keys_.tables, shape_, attend);
        }
    }

  private:
    // Prefetch positions that will be read once. Only worthwhile for few rows, where reading takes longer than
    // computing.
    void ask_for(const bf16* cache, const Work& work, int64_t head, int64_t begin, int64_t count) const {
        const bf16* rows[KEYS_AT_ONCE];
        keys_.locate(cache, work, head, shape_, begin, count, rows);
        for (int64_t t = 0; t < count; ++t)
            for (int64_t i = 0; i < shape_.dim; i += 32) _mm_prefetch(rows[t] + i, _MM_HINT_T0);
    }

    // Attend rows `from` and on, those of the run, to `count` positions from `tile` on. The tile units take 16 rows of
    // the group at a time; rows that belong to another run are computed but not used.
    void attend_run(const Work* work, const Run& run, int64_t head, int64_t from, int64_t tile, int64_t count,
                    State state) {
        const int64_t dim = shape_.value_dim, place = from * KEYS_AT_ONCE, end = from + run.rows;
        Sight seen[MAX_ROWS];
        see(work, run, tile, count, shape_, rule_, seen);
        turn_keys(*run.longest, head, tile, count);
        bool some[KEYS_AT_ONCE];
        if (rule_.window != 0) mark_seen(seen, run.rows, count, some);
        else std::fill(some, some + count, true);
        weave_values(*run.longest, head, tile, count, some);
        const int64_t first = from / TILE_ROWS * TILE_ROWS;
        for (int64_t row = first; row < end; row += TILE_ROWS) score(row, count);
        const bool capped = rule_.cap > 0.0f, biased = rule_.slopes != nullptr;
        float* scores = scores_ + place;
        if (capped) cap_scores(scores, run.rows * KEYS_AT_ONCE, rule_.scale, rule_.cap);
        if (biased)
            add_biases<KEYS_AT_ONCE>(scores, rule_.scale, work, run, head, tile, shape_, rule_.slopes);
        const float scale = capped || biased ? 1.0f : rule_.scale;
        soften<KEYS_AT_ONCE>(scores, scale, weights_ + place, seen, state, from, run.rows, dim);
        for (int64_t row = first; row < end; row += TILE_ROWS) {
            weigh(row, (count + 31) / 32);
            const int64_t own = std::max(from, row), own_end = std::min(end, row + TILE_ROWS);
            for (int64_t i = own * dim; i < own_end * dim; i += LANES)
                store(state.out + i, load(state.out + i) + load(added_ + i - row * dim));
        }
    }

    // Transpose keys to turned_: 16 positions as the columns of tiles, one tile per 32 elements of the head, then the
    // next 16 positions. Past the last position the contents, and the scores made from them, are not used.
    void turn_keys(const Work& work, int64_t head, int64_t begin, int64_t count) {
        const int64_t dim = shape_.dim;
        const bf16* rows[KEYS_AT_ONCE];
        keys_.locate(keys_.keys, work, head, shape_, begin, count, rows);
        for (int64_t t = count; t % 16; ++t) rows[t] = rows[count - 1];
        for (int64_t t = 0; t < count; t += 16)
            for (int64_t i = 0; i < dim; i += 32) transpose(rows + t, i, turned_ + t * dim + i * 16);
    }

    // Gemm query x keys: scores_ of 16 query rows from `row` on, [16, count].
    void score(int64_t row, int64_t count) {
        const int64_t dim = shape_.dim;
        finish_stores();
        for (int64_t t = 0; t < count; t += 64) {
            const bf16* keys = turned_ + t * dim;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t i = 0; i < dim; i += 32) {
                const bf16* part = keys + i * 16;
                _tile_loadd(4, query_ + row * dim + i, 2 * dim);
                _tile_loadd(6, part, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, part + 16 * dim, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(6, part + 32 * dim, 64);
                _tile_dpbf16ps(2, 4, 6);
                _tile_loadd(7, part + 48 * dim, 64);
                _tile_dpbf16ps(3, 4, 7);
            }
            float* to = scores_ + row * KEYS_AT_ONCE + t;
            _tile_stored(0, to, KEYS_AT_ONCE * 4);
            _tile_stored(1, to + 16, KEYS_AT_ONCE * 4);
            _tile_stored(2, to + 32, KEYS_AT_ONCE * 4);
            _tile_stored(3, to + 48, KEYS_AT_ONCE * 4);
        }
    }

    // Interleave the values of two positions element by element, the tile layout of the second gemm: values_ [positions
    // / 2][dim][2], zeros past the last position and where no row sees a position.
    void weave_values(const Work& work, int64_t head, int64_t begin, int64_t count, const bool* seen) {
        const __m512i low = _mm512_load_si512(WEAVE_LOW.data()), high = _mm512_load_si512(WEAVE_HIGH.data());
        const int64_t dim = shape_.value_dim, padded = (count + 31) / 32 * 32;
        const bf16* rows[KEYS_AT_ONCE];
        keys_.locate(keys_.values, work, head, shape_, begin, count, rows);
        for (int64_t t = 0; t < padded; t += 2) {
            const __mmask32 has_one = t < count && seen[t] ? ~0u : 0u;
            const __mmask32 has_two = t + 1 < count && seen[t + 1] ? ~0u : 0u;
            const bf16 *one = rows[std::min(t, count - 1)], *two = rows[std::min(t + 1, count - 1)];
            for (int64_t i = 0; i < dim; i += 32) {
                const __m512i a = _mm512_maskz_loadu_epi16(has_one, one + i);
                const __m512i b = _mm512_maskz_loadu_epi16(has_two, two + i);
                _mm512_store_si512(values_ + t * dim + 2 * i, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(values_ + t * dim + 2 * i + 32, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }

    // Gemm softmax weights x values: added_ [16 rows, dim] for the rows from `row` on, 32 positions at a time.
    void weigh(int64_t row, int64_t steps) {
        const int64_t dim = shape_.value_dim;
        finish_stores();
        for (int64_t column = 0; column < dim; column += 32) {
            _tile_zero(0);
            _tile_zero(1);
            for (int64_t s = 0; s < steps; ++s) {
                const bf16* values = values_ + s * 32 * dim + 2 * column;
                _tile_loadd(4, weights_ + row * KEYS_AT_ONCE + s * 32, KEYS_AT_ONCE * 2);
                _tile_loadd(6, values, dim * 4);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, values + 32, dim * 4);
                _tile_dpbf16ps(1, 4, 7);
            }
            _tile_stored(0, added_ + column, dim * 4);
            _tile_stored(1, added_ + column + 16, dim * 4);
        }
    }

    const Shape shape_;
    const Keys<bf16> keys_;
    const Rule rule_;
    bf16 *query_, *weights_, *turned_, *values_;
    float *scores_, *added_;
};

}  // namespace
#endif
