// How attention work is partitioned. A span is a run of tokens of one sequence: a decode row (one token) or a prompt
// chunk. Its i-th token sees the first `visible + i` keys. A work is a block of a span's tokens; its query rows are its
// tokens x the query heads that share a kv head (GQA group). Works whose block tables begin with the same block are
// placed side by side in a group, which reads the shared prefix once. A decode row that shares nothing is one group
// with all kv heads, since these are adjacent in memory.
#pragma once

#include "cache_quantize.h"

namespace {

constexpr int64_t PIECE = 256;       // positions per partial result
constexpr int64_t BLOCK_ROWS = 16;   // query rows of a work

// Sizes of the heads and the cache of a layer.
struct Shape {
    int64_t query_heads, kv_heads, dim, block_size;
    int64_t value_dim;  // less than dim: values are the first elements of the keys (MLA)
    int64_t block_heads;  // stride of blocks in heads; more than kv_heads where layers share planes
    int64_t stored;       // see Stored
    int64_t head_bytes;   // of a head of a block, if the cache is quantized
    static int64_t padded(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
    int64_t group() const { return query_heads / kv_heads; }
    int64_t width() const { return padded(dim); }              // dim, padded with zeros
    int64_t value_width() const { return padded(value_dim); }  // the same of values
    bool is_latent() const { return value_dim < dim; }
    HeadFormat format() const { return {stored, dim}; }
    int64_t block_tokens() const { return std::max<int64_t>(1, BLOCK_ROWS / group()); }
};

// How scores are computed: see AttentionRule in attention_rule.py. 0 or null: not used. A negative window: texts are
// divided into chunks of -window tokens.
struct Rule {
    float scale, cap;
    int64_t window;
    const void* sinks;    // [query heads], of the queries' dtype
    const float* slopes;  // [query heads]: ALiBi
    // The first position that a token sees if `visible` positions are causally visible to it.
    int64_t first(int64_t visible) const {
        if (window < 0) return (visible - 1) / -window * -window;
        return window == 0 ? 0 : std::max<int64_t>(0, visible - window);
    }
};

// A run of tokens of one sequence, as the Python caller passes it.
struct Span {
    int64_t token, count, visible, table;  // first batch token, tokens, keys the first one sees, offset of its table
};

// A block of a span's tokens.
struct Work {
    int64_t token, count, visible, table;
    int64_t end() const { return visible + count - 1; }  // number of positions that its last token sees
};

// Adjacent works and one or more kv heads. `rows`: query rows of all works per kv head; `end`: the largest end() of the
// works.
struct Group {
    const Work* works;
    int64_t count, head, heads, rows, end;
    int64_t all_rows() const { return heads * rows; }  // rows of the first kv head, then of the second ...
    int64_t pieces() const { return (end + PIECE - 1) / PIECE; }
};

// Consecutive works of a group, from `first` on, that have the same blocks within a tile. `longest`: the work that sees
// most of it.
struct Run {
    int64_t count, rows;
    const Work* longest;
};

inline int64_t enough_tasks() { return 4 * num_threads(); }  // enough tasks per thread for load balance

// All works sorted by their block tables, so that works with a common prefix are adjacent, and the groups made of them.
class Cut {
  public:
    // `max_rows`: limit of query rows for a group with several works or several heads; `max_heads`: limit of kv heads
    // per group.
    Cut(const Span* spans, int64_t num_spans, const int64_t* tables, const Shape& shape, int64_t max_rows,
        int64_t max_heads)
        : shape_(shape), max_rows_(max_rows), max_heads_(std::min(max_heads, shape.kv_heads)) {
        std::vector<const Span*> order;
        for (int64_t i = 0; i < num_spans; ++i) order.push_back(spans + i);
        const auto begin = [&](const Span* span) { return tables + span->table; };
        const auto end = [&](const Span* span) {
            return begin(span) + (span->visible + span->count - 1 + shape.block_size - 1) / shape.block_size;
        };
        std::stable_sort(order.begin(), order.end(), [&](const Span* a, const Span* b) {
            return std::lexicographical_compare(begin(a), end(a), begin(b), end(b));
        });
        for (const Span* span : order)
            for (int64_t done = 0; done < span->count; done += shape.block_tokens())
                works_.push_back({span->token + done, std::min(shape.block_tokens(), span->count - done),
                                  span->visible + done, span->table});
        const int64_t count = static_cast<int64_t>(works_.size());
        for (int64_t first = 0, next = 0; first < count; first = next) {
            while (next < count && tables[works_[next].table] == tables[works_[first].table]) ++next;
            add_family(first, next);
        }
        for (const Group& group : groups_) most_rows_ = std::max(most_rows_, group.all_rows());
    }

    // The groups in an order in which groups of one kv head with a common prefix are adjacent, so that neighbouring
    // threads read the same keys.
    const std::vector<Group>& groups() const { return groups_; }
    int64_t most_rows() const { return most_rows_; }

  private:
    int64_t rows(const Work& work) const { return work.count * shape_.group(); }

    // Add the groups for works [first, end), which begin with the same block.
    void add_family(int64_t first, int64_t end) {
        const bool lonely = end - first == 1 && static_cast<int64_t>(works_.size()) >= enough_tasks();
        const int64_t fitting = max_rows_ / rows(works_[first]);
        const int64_t joined = lonely ? std::clamp<int64_t>(fitting, 1, max_heads_) : 1;
        const int64_t fair = fair_rows(first, end);
        for (int64_t head = 0; head < shape_.kv_heads; head += joined)
            for (int64_t i = first; i < end; i += groups_.back().count)
                groups_.push_back(group_from(i, end, head, std::min(joined, shape_.kv_heads - head), fair));
    }

    // Rows per group if works [first, end) are divided evenly among the fewest groups that hold them.
    int64_t fair_rows(int64_t first, int64_t end) const {
        int64_t all = 0, groups = 0;
        for (int64_t i = first; i < end; ++groups) {
            const Group group = group_from(i, end, 0, 1, max_rows_);
            all += group.rows;
            i += group.count;
        }
        return (all + groups - 1) / groups;
    }

    // A group of the works from `first` on, at least one, until it has `enough` rows.
    Group group_from(int64_t first, int64_t end, int64_t head, int64_t heads, int64_t enough) const {
        Group group{&works_[first], 1, head, heads, rows(works_[first]), works_[first].end()};
        for (int64_t i = first + 1; i < end && group.rows < enough; ++i, ++group.count) {
            if (group.rows + rows(works_[i]) > max_rows_) break;
            group.rows += rows(works_[i]);
            group.end = std::max(group.end, works_[i].end());
        }
        return group;
    }

    const Shape shape_;
    const int64_t max_rows_, max_heads_;
    std::vector<Work> works_;
    std::vector<Group> groups_;
    int64_t most_rows_ = 0;
};

// The longest run from work `first` on over positions [begin, begin + count), of which that work must see at least one.
inline Run run_from(const Group& group, int64_t first, int64_t begin, int64_t count, const int64_t* tables,
                    const Shape& shape) {
    const int64_t size = shape.block_size, block = begin / size;
    const auto blocks = [&](const Work& work) {
        return (std::min(work.end(), begin + count) + size - 1) / size - block;
    };
    const Work* longest = group.works + first;
    int64_t rows = longest->count * shape.group(), next = first + 1;
    for (; next < group.count && group.works[next].end() > begin; ++next) {
        const Work& work = group.works[next];
        const int64_t *one = tables + longest->table + block, *two = tables + work.table + block;
        if (one != two && !std::equal(one, one + std::min(blocks(work), blocks(*longest)), two)) break;
        if (work.end() > longest->end()) longest = &work;
        rows += work.count * shape.group();
    }
    return {next - first, rows, longest};
}

// Call each(first work, run, first row, number of positions) for the runs of a group over positions [begin, begin +
// count).
template <typename Each>
inline void for_runs(const Group& group, int64_t begin, int64_t count, const int64_t* tables, const Shape& shape,
                     Each each) {
    int64_t row = 0;
    for (int64_t first = 0; first < group.count;) {
        const Work* work = group.works + first;
        if (work->end() <= begin) {
            row += work->count * shape.group();
            ++first;
            continue;
        }
        const Run run = run_from(group, first, begin, count, tables, shape);
        each(work, run, row, std::min(count, run.longest->end() - begin));
        first += run.count;
        row += run.rows;
    }
}

// The positions of a tile that a row sees: [first, end).
struct Sight {
    int64_t first, end;
};

// Compute what each row of a run sees of `count` positions from `begin` on; `work` is the first work of the run.
inline void see(const Work* work, const Run& run, int64_t begin, int64_t count, const Shape& shape, const Rule& rule,
                Sight* sights) {
    const auto inside = [&](int64_t position) { return std::clamp<int64_t>(position - begin, 0, count); };
    for (const Work* end = work + run.count; work < end; ++work)
        for (int64_t i = 0; i < work->count; ++i, sights += shape.group()) {
            const int64_t visible = work->visible + i;
            std::fill(sights, sights + shape.group(), Sight{inside(rule.first(visible)), inside(visible)});
        }
}

// Mark which of `count` positions any of the rows sees. With a window, unseen positions may hold another sequence's
// data or NaN: their weight is zero, but zero times NaN is not.
inline void mark_seen(const Sight* sights, int64_t rows, int64_t count, bool* seen) {
    std::fill(seen, seen + count, false);
    for (int64_t row = 0; row < rows; ++row) std::fill(seen + sights[row].first, seen + sights[row].end, true);
}

// The first position that any token of a group sees.
inline int64_t first_seen(const Group& group, const Rule& rule) {
    int64_t first = group.end;
    for (const Work* work = group.works; work < group.works + group.count; ++work)
        first = std::min(first, rule.first(work->visible));
    return first;
}

}  // namespace
