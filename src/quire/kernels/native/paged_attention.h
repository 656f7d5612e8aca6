// Attention by the best method this machine has for the shape.
#pragma once

#include "attention_amx.h"
#include "attention_plain.h"

namespace {

template <typename T>
void paged_attention(const T* query, int64_t stride, const T* keys, const T* values, const int64_t* tables,
                     const Span* spans, int64_t num_spans, T* out, Shape shape, float scale) {
    const Keys<T> seen{keys, values, tables};
#ifdef __AMX_BF16__
    if constexpr (std::is_same_v<T, bf16>) {
        if (TiledAttention::fits(shape) && request_tiles()) {
            const Cut cut(spans, num_spans, tables, shape, QUERY_ROWS, 1);
            return attend_all<TiledAttention>(query, stride, seen, cut, out, shape, scale);
        }
    }
#endif
    const Cut cut(spans, num_spans, tables, shape, PlainAttention<T>::MAX_ROWS, shape.kv_heads);
    attend_all<PlainAttention<T>>(query, stride, seen, cut, out, shape, scale);
}

}  // namespace
