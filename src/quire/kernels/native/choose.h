// Sampling: from logits to one token per row by temperature, min_p, top_k and top_p. Returns the same tokens as the
// torch implementation in runtime/sampling. Softmax weights are scaled to integers (see weights.py there), so their
// sums are exact in any order. The exponential matches torch's vectorized one (Sleef) to the last bit on CPUs with FMA;
// on other CPUs, and where torch uses MKL, two nearly equal tokens may rank differently.
#pragma once

#include <functional>
#include <limits>

#include "simd.h"
#include "team.h"

namespace {

constexpr int64_t NOT_FINITE = -1, NOTHING_ALLOWED = -2;  // returned in place of a token, see choice.py
constexpr int64_t VOCABULARY_TILE = 64;
constexpr int64_t MANY_LOGITS = 1 << 15;

// Sampling parameters of each row; all arrays [num_rows].
struct ChoiceColumns {
    const float* temperature;  // 0: greedy
    const float* log_min_p;    // -infinity: off
    const int64_t* top_k;      // 0: off
    const double* top_p;       // 1: off
    const uint64_t* start;     // initial state of the row's random stream
};

// The samples of a step: the row of each, and how many tokens of its row each one knows.
struct ChoiceBatch {
    const int64_t *rows, *lengths;  // [samples]
    const int64_t* num_prompt;      // [num_rows]
};

// exp(x) for x <= 0 as Sleef computes it to 1 ULP, which is what torch uses.
inline Floats torch_exponential(Floats x) {
    const Floats n = (x * 1.44269504088896340736f + ROUNDING) - ROUNDING;
    Floats f = add_product(x, n, all(-0.693145751953125f));
    f = add_product(f, n, all(-1.428606765330187045e-06f));
    Floats p = all(0.000198527617612853646278381f);
    for (const float next : {0.00139304355252534151077271f, 0.00833336077630519866943359f,
                             0.0416664853692054748535156f, 0.166666671633720397949219f, 0.5f})
        p = add_product(all(next), p, f);
    p = all(1.0f) + add_product(f, f * f, p);
    const Words vanishes = (Words)(x < all(-104.0f));
    const Ints whole = __builtin_convertvector((Floats)((Words)n & ~vanishes), Ints), half = whole >> 1;
    p = p * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23);
    return (Floats)((Words)p & ~vanishes);
}

// A uniform value in (0, 1) with 52 random bits for the token after `count` generated ones (SplitMix64): see rng.py.
inline double uniform_of(uint64_t start, int64_t count) {
    uint64_t state = start + (static_cast<uint64_t>(count) + 1) * 0x9E3779B97F4A7C15u;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    state ^= state >> 31;
    return (static_cast<double>(state >> 12) + 0.5) * 0x1p-52;
}

struct Ranked {
    float value;
    int64_t id;
    bool operator<(const Ranked& other) const {  // descending by value, ties by ascending id
        return value != other.value ? value > other.value : id < other.id;
    }
};

// Samples the token of a row. One per thread: keeps its scratch memory from row to row.
class RowChooser {
   public:
    explicit RowChooser(int64_t size) : size_(size) {
        int64_t bits = 0;
        while (bits < 63 && (int64_t{1} << bits) < size) ++bits;
        units_ = std::ldexp(1.0f, static_cast<int>(53 - bits));
    }

    // Sample a token from logits [size], which are overwritten. Returns NOT_FINITE or NOTHING_ALLOWED if there is none.
    int64_t choose(float* logits, const ChoiceColumns& by, int64_t row, int64_t num_outputs) {
        const float temperature = by.temperature[row];
        const bool draws = temperature > 0.0f;
        if (draws && temperature != 1.0f)
            in_pieces(size_, [&](int64_t i, int64_t n) { put(logits + i, fetch(logits + i, n) / temperature, n); });
        find_tops(logits);
        if (!std::isfinite(best_)) return best_ == -INFINITY ? NOTHING_ALLOWED : NOT_FINITE;
        if (!draws) return find_best(logits);
        if (by.log_min_p[row] > -INFINITY) drop_below(logits, best_ + by.log_min_p[row]);
        const double uniform = uniform_of(by.start[row], num_outputs);
        if (by.top_k[row] > 0 && by.top_k[row] < size_) return draw_top_k(logits, by.top_k[row], by.top_p[row], uniform);
        return by.top_p[row] < 1.0 ? draw_top_p(logits, by.top_p[row], uniform) : draw_from_all(logits, uniform);
    }

   private:
    int64_t tiles() const { return (size_ + VOCABULARY_TILE - 1) / VOCABULARY_TILE; }
    int64_t end_of(int64_t tile) const { return std::min((tile + 1) * VOCABULARY_TILE, size_); }

    // Compute the maximum of each tile and of all logits; NaN if any logit is NaN.
    void find_tops(const float* x) {
        constexpr int64_t AT_ONCE = 256;  // tiles
        tops_.resize(tiles());
        bests_.resize((tiles() + AT_ONCE - 1) / AT_ONCE);
        for_each(static_cast<int64_t>(bests_.size()), size_ > MANY_LOGITS, [&](int64_t part) {
            bests_[part] = find_some_tops(x, part * AT_ONCE, std::min((part + 1) * AT_ONCE, tiles()));
        });
        best_ = -INFINITY;
        for (const float best : bests_) {
            if (best != best) {
                best_ = NAN;
                return;
            }
            best_ = std::max(best_, best);
        }
    }

    // Compute the maximum of tiles [begin, end) and return the largest.
    float find_some_tops(const float* x, int64_t begin, int64_t end) {
        Words odd = {};
        float best = -INFINITY;
        for (int64_t tile = begin; tile < end; ++tile) {
            const float* from = x + tile * VOCABULARY_TILE;
            Floats most = all(-INFINITY);
            const int64_t count = end_of(tile) - tile * VOCABULARY_TILE, whole = count / LANES * LANES;
            for (int64_t i = 0; i < whole; i += LANES) {
                const Floats some = load(from + i);
                odd |= (Words)(some != some);
                most = larger(most, some);
            }
            float top = largest(most);
            for (int64_t i = whole; i < count; ++i) {
                if (from[i] != from[i]) odd = ~Words{};
                top = std::max(top, from[i]);
            }
            tops_[tile] = top;
            best = std::max(best, top);
        }
        for (int64_t i = 0; i < LANES; ++i)
            if (odd[i]) best = NAN;
        return best;
    }

    // Argmax; ties go to the lowest id.
    int64_t find_best(const float* x) const {
        const int64_t tile = std::find(tops_.begin(), tops_.end(), best_) - tops_.begin();
        return std::find(x + tile * VOCABULARY_TILE, x + end_of(tile), best_) - x;
    }

    // Set logits below the cut to minus infinity (min_p).
    void drop_below(float* x, float cut) {
        in_pieces(size_, [&](int64_t i, int64_t n) {
            const Floats some = fetch(x + i, n);
            put(x + i, some >= all(cut) ? some : all(-INFINITY), n);
        });
        for (float& top : tops_)
            if (!(top >= cut)) top = -INFINITY;
    }

    // Softmax weights scaled to integers.
    Floats weigh(Floats x) const {
        const Floats wide = torch_exponential(x - all(best_)) * units_;
        const Floats whole = __builtin_convertvector(__builtin_convertvector(smaller(wide, all(8388608.0f)), Ints), Floats);
        return wide < all(8388608.0f) ? whole : wide;  // above 2**23 every float is an integer
    }

    // Compute the weights of all tokens, and return their sum.
    double weigh_all(const float* x) {
        weights_.resize(size_);
        sums_.resize(tiles());
        double total = 0;
        for (int64_t tile = 0; tile < tiles(); ++tile) {
            const int64_t first = tile * VOCABULARY_TILE, count = end_of(tile) - first;
            float* to = weights_.data() + first;
            in_pieces(count, [&](int64_t i, int64_t n) { put(to + i, weigh(fetch(x + first + i, n)), n); });
            double parts[8] = {};
            int64_t i = 0;
            for (; i + 8 <= count; i += 8)
                for (int64_t k = 0; k < 8; ++k) parts[k] += to[i + k];
            for (; i < count; ++i) parts[0] += to[i];
            sums_[tile] = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + ((parts[4] + parts[5]) + (parts[6] + parts[7]));
            total += sums_[tile];
        }
        return total;
    }

    // The point in [0, total) at which the uniform value falls.
    static double share(double uniform, double total) { return std::min(std::floor(uniform * total), total - 1); }

    // Draw a token from all weights, by cumulative sum in the order of ids.
    int64_t draw_from_all(const float* x, double uniform) {
        double left = share(uniform, weigh_all(x));
        int64_t tile = 0;
        for (; tile + 1 < tiles() && sums_[tile] <= left; ++tile) left -= sums_[tile];
        int64_t id = tile * VOCABULARY_TILE;
        for (; id + 1 < end_of(tile) && weights_[id] <= left; ++id) left -= weights_[id];
        return id;
    }

    // Select the `count` largest of x that are at least `least`, and sort them in descending order into ranked_. tops:
    // the maximum of each tile.
    void rank(const float* x, const std::vector<float>& tops, int64_t count, float least) {
        ranked_.clear();
        if (count < tiles()) {  // the largest `count` values lie in at most `count` tiles
            order_ = tops;
            std::nth_element(order_.begin(), order_.begin() + (count - 1), order_.end(), std::greater<float>());
            least = std::max(least, order_[count - 1]);
        }
        for (int64_t tile = 0; tile < tiles(); ++tile) {
            if (tops[tile] < least) continue;
            for (int64_t id = tile * VOCABULARY_TILE; id < end_of(tile); ++id)
                if (x[id] >= least) ranked_.push_back({x[id], id});
        }
        if (count < static_cast<int64_t>(ranked_.size())) {
            std::nth_element(ranked_.begin(), ranked_.begin() + count, ranked_.end());
            ranked_.resize(count);
        }
        std::sort(ranked_.begin(), ranked_.end());
    }

    // Draw from the shortest prefix of ranked_, whose values are weights by now, that sums to at least `needed`
    // (top_p). Returns -1 if all of ranked_ together sum to less.
    int64_t draw_ranked(double needed, double uniform) const {
        double kept = 0;
        size_t end = 0;
        while (end < ranked_.size() && (kept < needed || end == 0)) kept += ranked_[end++].value;
        if (kept < needed) return -1;
        double left = share(uniform, kept);
        size_t place = 0;
        for (; place + 1 < end && ranked_[place].value <= left; ++place) left -= ranked_[place].value;
        return ranked_[place].id;
    }

    // Draw from the top_k logits, cut further by top_p.
    int64_t draw_top_k(const float* x, int64_t top_k, double top_p, double uniform) {
        rank(x, tops_, top_k, std::numeric_limits<float>::lowest());  // weights of zero are never drawn
        double total = 0;
        for (Ranked& each : ranked_) total += each.value = weigh(all(each.value))[0];
        return draw_ranked(std::ceil(total * top_p), uniform);
    }

    // Draw by top_p alone. Tokens are ranked by weight, and weights may be equal where logits are not.
    int64_t draw_top_p(const float* x, double top_p, double uniform) {
        const double needed = std::ceil(weigh_all(x) * top_p);
        weight_tops_.resize(tiles());
        for (int64_t tile = 0; tile < tiles(); ++tile)
            weight_tops_[tile] =
                *std::max_element(weights_.begin() + tile * VOCABULARY_TILE, weights_.begin() + end_of(tile));
        for (int64_t count = 128;; count *= 8) {  // most nuclei are small
            rank(weights_.data(), weight_tops_, count, 1.0f);
            const int64_t id = draw_ranked(needed, uniform);
            if (id >= 0) return id;
        }
    }

    const int64_t size_;
    float units_ = 0, best_ = 0;
    std::vector<float> tops_, bests_, weights_, weight_tops_, order_;
    std::vector<double> sums_;
    std::vector<Ranked> ranked_;
};

// Sample a token for each sample, or a negative code, from logits [samples, size], which are overwritten.
inline void choose_tokens(float* logits, int64_t samples, int64_t size, const ChoiceColumns& by, const ChoiceBatch& batch,
                          int64_t* tokens) {
    share_out(samples, 4, samples * size > MANY_LOGITS, [&] {
        return [&, chooser = RowChooser(size)](int64_t i) mutable {
            const int64_t row = batch.rows[i];
            tokens[i] = chooser.choose(logits + i * size, by, row, batch.lengths[i] - batch.num_prompt[row]);
        };
    });
}

// Add minus infinity to disallowed tokens. Row i of bits [masked, words] applies to row places[i] of logits [.., size].
// Tokens past the bits are disallowed.
inline void mask_logits(float* logits, int64_t size, const int64_t* places, const uint32_t* bits, int64_t masked,
                        int64_t words) {
    for_each(masked, masked * size > MANY_LOGITS, [&](int64_t i) {
        float* line = logits + places[i] * size;
        const uint32_t* own = bits + i * words;
        const int64_t known = std::min(size, 32 * words);
        for (int64_t word = 0; 32 * word < known; ++word) {
            if (own[word] == ~0u) continue;
            const int64_t end = std::min(known, 32 * (word + 1));
            if (own[word] == 0) {
                for (int64_t id = 32 * word; id < end; ++id) line[id] += -INFINITY;
                continue;
            }
            for (int64_t id = 32 * word; id < end; ++id) line[id] += own[word] >> (id % 32) & 1 ? 0.0f : -INFINITY;
        }
        std::fill(line + known, line + size, -INFINITY);
    });
}

}  // namespace
