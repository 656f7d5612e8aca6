// Broadcast messages between processes of one machine in shared memory: a ring of slots with one writer and several
// readers, each of which gets every message. A message is copied into its slot once for all readers, and one system
// call wakes them all.
//
// The memory of a ring must be zero before its first message. It is 64 bytes with the number of messages so far, 64
// bytes for each reader with the number it has read, then the slots. A slot is the length and the kind of its message,
// 4 bytes each, and its bytes. Waiting processes sleep on a doorbell of 64 bytes (a futex). The readers of one ring
// share a doorbell, and so do the rings of several writers that have the same reader.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#endif

namespace {

// A futex in shared memory. Unlike Bell in parking.h, which is for the threads of one process.
struct Doorbell {
    std::atomic<uint32_t> number;    // counts messages
    std::atomic<uint32_t> wanted;    // sleepers are not woken before this count
    std::atomic<uint32_t> sleepers;  // processes that wait or are about to

    // Call after a message was published: count it and wake the sleepers if they have waited long enough.
    void ring() {
        const uint32_t now = number.fetch_add(1, std::memory_order_seq_cst) + 1;
        if (!sleepers.load(std::memory_order_seq_cst)) return;
        if (static_cast<int32_t>(now - wanted.load(std::memory_order_seq_cst)) < 0) return;
#ifdef __linux__
        syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

    // Wait until nothing is missing; `missing` returns the minimum number of messages still to come. Returns false on
    // timeout. No wake-up is lost: the count is read before `missing` looks, and the futex sleeps only while the count
    // is unchanged. A process that waits for one message stores the count that it saw in `wanted`, which lets any later
    // message wake everybody: a larger value would delay other readers that went to sleep at an earlier count. Only the
    // single reader of several rings waits for more than one message.
    template <typename Missing> bool wait(Missing missing, int64_t microseconds) {
        const int64_t end = now() + microseconds * 1000;
        for (;;) {
            const uint32_t seen = number.load(std::memory_order_seq_cst);
            const uint32_t count = missing();
            if (!count) return true;
            const int64_t left = end - now();
            if (left <= 0) return false;
            wanted.store(count > 1 ? seen + count : seen, std::memory_order_seq_cst);
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            sleep(seen, left);
            sleepers.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

   private:
    static int64_t now() {
        timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return static_cast<int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
    }

    // Sleep until woken, until the count differs from `seen`, until the timeout, or spuriously.
    void sleep(uint32_t seen, int64_t nanoseconds) {
#ifdef __linux__
        const timespec time{static_cast<time_t>(nanoseconds / 1'000'000'000), static_cast<long>(nanoseconds % 1'000'000'000)};
        syscall(SYS_futex, &number, FUTEX_WAIT, seen, &time, nullptr, 0);
#else
        const timespec time{0, static_cast<long>(std::min<int64_t>(nanoseconds, 50'000))};
        if (number.load(std::memory_order_seq_cst) == seen) nanosleep(&time, nullptr);
#endif
    }
};

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);

// One ring in shared memory; see the layout at the top.
struct MessageRing {
    uint8_t* base;
    Doorbell* doorbell;
    int64_t readers, slots, slot_bytes;

    std::atomic<uint32_t>& published() const { return *reinterpret_cast<std::atomic<uint32_t>*>(base); }
    std::atomic<uint32_t>& taken(int64_t reader) const {
        return *reinterpret_cast<std::atomic<uint32_t>*>(base + 64 * (1 + reader));
    }
    uint8_t* slot(uint32_t number) const { return base + 64 * (1 + readers) + number % slots * slot_bytes; }
};

// Post a message. `stored` is the size of `data`; `length` and `kind` go to the slot's header. Returns 0, and does
// nothing, if some reader has not read the message that is still in the slot.
inline int64_t post_message(const MessageRing& ring, int64_t length, int64_t kind, const void* data, int64_t stored) {
    const uint32_t number = ring.published().load(std::memory_order_relaxed);
    for (int64_t reader = 0; reader < ring.readers; ++reader) {
        if (number - ring.taken(reader).load(std::memory_order_acquire) >= ring.slots) return 0;
    }
    const uint32_t head[2] = {static_cast<uint32_t>(length), static_cast<uint32_t>(kind)};
    std::memcpy(ring.slot(number), head, sizeof head);
    if (stored) std::memcpy(ring.slot(number) + sizeof head, data, stored);
    ring.published().store(number + 1, std::memory_order_release);
    ring.doorbell->ring();
    return 1;
}

// Publish that this reader has read `taken` messages, and wait for the next one. Returns 0 on timeout.
inline int64_t await_message(const MessageRing& ring, int64_t reader, uint32_t taken, int64_t microseconds) {
    ring.taken(reader).store(taken, std::memory_order_release);
    const auto missing = [&] { return ring.published().load(std::memory_order_acquire) == taken ? 1u : 0u; };
    return ring.doorbell->wait(missing, microseconds);
}

// For the single reader of `count` rings that share a doorbell, which has read `taken` messages of each: wait for the
// next message of all of them. It is woken once, by the last one. Returns 0 on timeout.
inline int64_t await_all(const MessageRing* rings, int64_t count, uint32_t taken, int64_t microseconds) {
    for (int64_t i = 0; i < count; ++i) rings[i].taken(0).store(taken, std::memory_order_release);
    const auto missing = [&] {
        uint32_t found = 0;
        for (int64_t i = 0; i < count; ++i) found += rings[i].published().load(std::memory_order_acquire) == taken;
        return found;
    };
    return rings->doorbell->wait(missing, microseconds);
}

}  // namespace
