// Which core each thread of the kernels runs on, where they are pinned: the first one is of the thread that calls, while it
// runs a program, the others of the workers. And which memory nodes pages come from. Linux alone; elsewhere nothing happens.
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
inline std::atomic<uint32_t> pins_version{0};  // grows when the cores change
inline std::atomic<bool> caller_is_pinned{false};

#ifdef __linux__
inline cpu_set_t only_core(int64_t core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    return set;
}

// Where threads run that are pinned no longer: the cores of the thread that pinned them. Written while nothing is pinned.
inline cpu_set_t free_cores;
#endif

// In a child of fork, whose threads are new and inherit where they may run.
inline void forget_pins() {
    num_pins.store(0);
    pins_version.store(0);
    caller_is_pinned.store(false);
}

// Pins thread i to cores[i]; 0 cores: none. Workers follow when they join their next loop. Where nothing was pinned before,
// no thread is moved.
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

// Of worker `index`; `version` is what it has followed so far.
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
    sched_setaffinity(0, sizeof free_cores, &free_cores);  // where it may not, the thread runs where it can
#endif
}

// While it lives, the thread that made it runs on the first core. One thread at a time: others run where they can.
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

// New pages of this thread, and of threads and processes that it makes, come in turn from the memory nodes of a mask of 64
// bits; 0: as usual. Returns whether the system does so.
inline bool interleave_memory([[maybe_unused]] uint64_t nodes) {
#ifdef __linux__
    constexpr int DEFAULT = 0, INTERLEAVE = 3;
    return syscall(SYS_set_mempolicy, nodes ? INTERLEAVE : DEFAULT, nodes ? &nodes : nullptr, nodes ? 65 : 0) == 0;
#else
    return false;
#endif
}

}  // namespace
