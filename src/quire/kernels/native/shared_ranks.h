// Collectives between the ranks of one machine in shared memory: an all-reduce takes microseconds, without sockets.
//
// Every rank has a page: a counter of barriers (meetings) and two slots for its data. A meeting uses the slot of its
// number's parity. A rank that begins meeting n + 2 has seen all others at meeting n + 1, so they have read its data of
// meeting n: two slots are enough, and one barrier per collective.
#pragma once

#include <sched.h>
#include <time.h>

#include "parking.h"
#include "simd.h"

namespace {

// The shared memory of the ranks, as seen by one of them.
struct RankPages {
    uint8_t* base;
    int64_t slot_bytes;  // of each of the two slots, a multiple of 64
    int64_t size;        // number of ranks
    int64_t index;       // of this rank
    double seconds;      // timeout of a meeting
    int64_t missing;     // the rank that missed a meeting, or -1; after that no meeting succeeds

    int64_t stride() const { return 64 + 2 * slot_bytes; }
    std::atomic<uint64_t>& meetings(int64_t rank) const {
        return *reinterpret_cast<std::atomic<uint64_t>*>(base + rank * stride());
    }
    uint8_t* slot(int64_t rank, uint64_t meeting) const {
        return base + rank * stride() + 64 + (meeting & 1) * slot_bytes;
    }
};

inline double now_seconds() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Wait until a rank has reached a meeting: spin for microseconds, then yield, as there may be more ranks than cores;
// after 2 ms, sleep in between. Returns false on timeout.
inline bool has_come(const std::atomic<uint64_t>& meetings, uint64_t meeting, double seconds) {
    for (int spin = 0; spin < 4000; ++spin) {
        if (meetings.load(std::memory_order_acquire) >= meeting) return true;
        relax();
    }
    const double begin = now_seconds();
    while (meetings.load(std::memory_order_acquire) < meeting) {
        const double waited = now_seconds() - begin;
        if (waited > seconds) return false;
        if (waited < 2e-3) {
            sched_yield();
        } else {
            const timespec pause{0, 50'000};
            nanosleep(&pause, nullptr);
        }
    }
    return true;
}

// Store data in this rank's slot and wait for the others (a barrier). Returns the number of the meeting. If a rank is
// missing afterwards, the meeting failed.
inline uint64_t give_and_meet(RankPages& pages, const void* data, int64_t bytes) {
    auto& own = pages.meetings(pages.index);
    const uint64_t meeting = own.load(std::memory_order_relaxed) + 1;
    if (bytes) std::memcpy(pages.slot(pages.index, meeting), data, bytes);
    own.store(meeting, std::memory_order_release);
    for (int64_t rank = 0; rank < pages.size && pages.missing < 0; ++rank) {
        if (rank != pages.index && !has_come(pages.meetings(rank), meeting, pages.seconds)) pages.missing = rank;
    }
    return meeting;
}

// x [count] = sum over all ranks, added in the order of ranks in float32: bitwise the same on every rank.
template <typename T> void all_reduce(RankPages& pages, T* x, int64_t count) {
    const int64_t most = pages.slot_bytes / static_cast<int64_t>(sizeof(T)) / LANES * LANES;
    for (int64_t begin = 0; begin < count && pages.missing < 0; begin += most) {
        const int64_t piece = std::min(most, count - begin);
        const uint64_t meeting = give_and_meet(pages, x + begin, piece * sizeof(T));
        if (pages.missing >= 0) return;
        const int64_t whole = piece / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats sum = load(reinterpret_cast<const T*>(pages.slot(0, meeting)) + i);
            for (int64_t rank = 1; rank < pages.size; ++rank) {
                sum += load(reinterpret_cast<const T*>(pages.slot(rank, meeting)) + i);
            }
            store(x + begin + i, sum);
        }
        for (int64_t i = whole; i < piece; ++i) {
            Floats sum{};
            for (int64_t rank = 0; rank < pages.size; ++rank) {
                T line[LANES] = {};
                line[0] = reinterpret_cast<const T*>(pages.slot(rank, meeting))[i];
                sum += load(line);
            }
            T line[LANES];
            store(line, sum);
            x[begin + i] = line[0];
        }
    }
}

}  // namespace
