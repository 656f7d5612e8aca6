// Pinning of the kernels' threads to cores: core 0 of the list is for the calling thread while it runs a program, the
// others for the workers. Also NUMA interleaving of memory. Linux only; elsewhere nothing happens.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int64_t MOST_PINS = 1024;
inline std::atomic<int32_t> pinned_cores[MOST_PINS];
inline std::atomic<int64_t> num_pins{0};
inline std::atomic<uint32_t> pins_version{0};  // incremented when the cores change
inline std::atomic<bool> caller_is_pinned{false};

#ifdef __linux__
inline cpu_set_t only_core(int64_t core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return set;
}

// Affinity of threads that are no longer pinned: that of the thread that pinned them. Written while nothing is pinned.
inline cpu_set_t free_cores;
#endif

// For a child of fork, whose threads are new and inherit their affinity.
inline void forget_pins() {
    num_pins.store(0);
    pins_version.store(0);
    caller_is_pinned.store(false);
}

// Pin thread i to cores[i]; count 0: unpin. Workers follow when they join their next loop. Unpinning does nothing if
// nothing was pinned.
inline void pin_threads([[maybe_unused]] const int64_t* cores, [[maybe_unused]] int64_t count) {
#ifdef __linux__
    const bool had_pins = num_pins.load() > 0;
    if (!had_pins && (count == 0 || sched_getaffinity(0, sizeof free_cores, &free_cores) != 0)) return;
    static const int handler = pthread_atfork(nullptr, nullptr, forget_pins);
    static_cast<void>(handler);
    count = count < MOST_PINS ? count : MOST_PINS;
    for (int64_t i = 0; i < count; ++i) pinned_cores[i].store(static_cast<int32_t>(cores[i]), std::memory_order_relaxed);
    num_pins.store(count, std::memory_order_release);
    pins_version.fetch_add(1, std::memory_order_release);
#endif
}

// Apply the current pinning to worker `index`; `version` is the one it applied last.
inline void follow_pins([[maybe_unused]] int64_t index, [[maybe_unused]] uint32_t& version) {
#ifdef __linux__
    const uint32_t now = pins_version.load(std::memory_order_acquire);
    if (now == version) return;
    version = now;
    const bool has_core = index + 1 < num_pins.load(std::memory_order_relaxed);
    if (has_core) {
        const cpu_set_t set = only_core(pinned_cores[index + 1].load(std::memory_order_relaxed));
        if (sched_setaffinity(0, sizeof set, &set) == 0) return;
    }
    sched_setaffinity(0, sizeof free_cores, &free_cores);  // if this fails, the thread keeps its affinity
#endif
}

// Pins the constructing thread to the first core for the lifetime of the object. Only one thread at a time; others stay
// unpinned.
class PinnedCaller {
   public:
    PinnedCaller() {
#ifdef __linux__
        if (num_pins.load(std::memory_order_acquire) == 0 || caller_is_pinned.exchange(true)) return;
        const cpu_set_t set = only_core(pinned_cores[0].load(std::memory_order_relaxed));
        is_pinned_ = sched_getaffinity(0, sizeof before_, &before_) == 0 && sched_setaffinity(0, sizeof set, &set) == 0;
        if (!is_pinned_) caller_is_pinned.store(false);
#endif
    }
    PinnedCaller(const PinnedCaller&) = delete;
    ~PinnedCaller() {
#ifdef __linux__
        if (!is_pinned_) return;
        sched_setaffinity(0, sizeof before_, &before_);
        caller_is_pinned.store(false);
#endif
    }

   private:
    [[maybe_unused]] bool is_pinned_ = false;
#ifdef __linux__
    cpu_set_t before_;
#endif
};

// Interleave new pages of this thread, and of threads and processes that it creates, over the NUMA nodes of a 64-bit
// mask; 0: the default policy. Returns whether the system call succeeded.
inline bool interleave_memory([[maybe_unused]] uint64_t nodes) {
#ifdef __linux__
    constexpr int DEFAULT = 0, INTERLEAVE = 3;
    return syscall(SYS_set_mempolicy, nodes ? INTERLEAVE : DEFAULT, nodes ? &nodes : nullptr, nodes ? 65 : 0) == 0;
#else
    return false;
#endif
}

}  // namespace
