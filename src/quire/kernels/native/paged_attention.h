// Attention by the fastest method that this machine has for the shape.
#pragma once

#include "attention_amx.h"
#include "attention_plain.h"

namespace {

// Whether attention of this shape runs on AMX tile units.
template <typename T> bool on_tile_units([[maybe_unused]] const Shape& shape) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bf16>) return shape.stored == AS_ROWS && TiledAttention::fits(shape) && has_tiles;
#endif
    return false;
}

// Partition the spans for the method that this shape uses. The same for all layers of a step.
template <typename T> Cut cut_for(const Span* spans, int64_t num_spans, const int64_t* tables, const Shape& shape) {
#ifdef __AMX_BF16__
    if (on_tile_units<T>(shape)) return Cut(spans, num_spans, tables, shape, TiledAttention::MAX_ROWS, 1);
#endif
    return Cut(spans, num_spans, tables, shape, PlainAttention<T>::MAX_ROWS, shape.kv_heads);
}

// Paged attention of all groups of `cut`, which must come from cut_for<T> of the same tables and shape.
template <typename T>
void paged_attention(const T* query, int64_t stride, Keys<T> keys, const Cut& cut, T* out, const Shape& shape,
                     const Rule& rule) {
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bf16>)
        if (on_tile_units<T>(shape)) return attend_all<TiledAttention>(query, stride, keys, cut, out, shape, rule);
#endif
    attend_all<PlainAttention<T>>(query, stride, keys, cut, out, shape, rule);
}

}  // namespace
