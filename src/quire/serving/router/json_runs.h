// Finds and copies runs of unescaped characters in JSON strings, 16 bytes at a time with SSE2 or NEON.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>

#if defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quire {

// Thrown for invalid JSON and for valid but rare forms: the caller then has msgspec parse the whole text.
struct Unsure {};

using Byte = uint8_t;

// An output buffer that counts all added bytes and stores only the first `limit` of them.
class Writer {
  public:
    void begin(size_t limit) {
        if (limit > limit_) bytes_.reset(new Byte[limit]);  // not initialized: pages are touched when written to
        limit_ = limit;
        restart();
    }
    void restart() { total_ = kept_ = 0; }

    void add(const Byte* data, size_t size) {
        total_ += size;
        const size_t room = limit_ - kept_;
        if (size > room) size = room;
        if (size > 0) std::memcpy(bytes_.get() + kept_, data, size);
        kept_ += size;
    }
    void add(char byte) {
        ++total_;
        if (kept_ < limit_) bytes_[kept_++] = static_cast<Byte>(byte);
    }
    void add(std::string_view text) { add(reinterpret_cast<const Byte*>(text.data()), text.size()); }
    const Byte* data() const { return bytes_.get(); }
    size_t kept() const { return kept_; }
    size_t total() const { return total_; }

    // Return where 16 bytes may be stored before `keep` says how many of them count; null if there is no space left.
    Byte* block() { return limit_ - kept_ >= 16 ? bytes_.get() + kept_ : nullptr; }
    void keep(size_t size) {
        total_ += size;
        kept_ += size;
    }

  private:
    size_t limit_ = 0, total_ = 0, kept_ = 0;
    std::unique_ptr<Byte[]> bytes_;
};

#if defined(__SSE2__)
#define QUIRE_BLOCKS 1
using Block = __m128i;
inline Block load_block(const Byte* at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at)); }
inline void store_block(Byte* at, Block data) { _mm_storeu_si128(reinterpret_cast<__m128i*>(at), data); }

template <bool ASCII_ONLY>
inline int first_special(Block data) {
    const __m128i quote = _mm_cmpeq_epi8(data, _mm_set1_epi8('"')), escape = _mm_cmpeq_epi8(data, _mm_set1_epi8('\\'));
    const __m128i control = ASCII_ONLY ? _mm_cmplt_epi8(data, _mm_set1_epi8(0x20))  // signed: bytes >= 0x80 are below 0
                                       : _mm_cmpeq_epi8(_mm_min_epu8(data, _mm_set1_epi8(0x1f)), data);
    const int mask = _mm_movemask_epi8(_mm_or_si128(_mm_or_si128(quote, escape), control));
    return mask == 0 ? 16 : __builtin_ctz(static_cast<unsigned>(mask));
}
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define QUIRE_BLOCKS 1
using Block = uint8x16_t;
inline Block load_block(const Byte* at) { return vld1q_u8(at); }
inline void store_block(Byte* at, Block data) { vst1q_u8(at, data); }

template <bool ASCII_ONLY>
inline int first_special(Block data) {
    const uint8x16_t quote = vceqq_u8(data, vdupq_n_u8('"')), escape = vceqq_u8(data, vdupq_n_u8('\\'));
    const uint8x16_t control = ASCII_ONLY ? vcltq_s8(vreinterpretq_s8_u8(data), vdupq_n_s8(0x20))
                                          : vcltq_u8(data, vdupq_n_u8(0x20));
    const uint16x8_t found = vreinterpretq_u16_u8(vorrq_u8(vorrq_u8(quote, escape), control));
    const uint64_t mask = vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(found, 4)), 0);  // four bits for each byte
    return mask == 0 ? 16 : __builtin_ctzll(mask) / 4;
}
#endif

// Return the first quote, backslash or control character, or, if `ASCII_ONLY`, the first byte outside ASCII. Throws
// Unsure if there is none.
template <bool ASCII_ONLY>
inline const Byte* find_special(const Byte* at, const Byte* end) {
#if defined(QUIRE_BLOCKS)
    for (; end - at >= 16; at += 16)
        if (const int place = first_special<ASCII_ONLY>(load_block(at)); place < 16) return at + place;
#endif
    for (; at < end; ++at)
        if (*at == '"' || *at == '\\' || *at < 0x20 || (ASCII_ONLY && *at >= 0x80)) return at;
    throw Unsure{};
}

// Write the bytes up to the first quote, backslash or control character. Returns its position.
inline const Byte* put_plain(const Byte* at, const Byte* end, Writer& out) {
#if defined(QUIRE_BLOCKS)
    while (end - at >= 16) {
        Byte* into = out.block();
        if (into == nullptr) break;
        const Block data = load_block(at);
        store_block(into, data);
        const int place = first_special<false>(data);
        out.keep(static_cast<size_t>(place));
        at += place;
        if (place < 16) return at;
    }
#endif
    const Byte* stop = find_special<false>(at, end);
    out.add(at, static_cast<size_t>(stop - at));
    return stop;
}

}  // namespace quire
