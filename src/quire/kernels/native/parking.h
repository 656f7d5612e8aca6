// How a thread waits: it spins for microseconds, then it is parked until another one wakes it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace {

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// Longer than what is serial between two loops of a step, shorter than what a scheduler would call a turn.
constexpr std::chrono::microseconds SPIN{50};

template <typename Ready> inline bool spin_until(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + SPIN;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

// A number that grows, and threads that wait for it to.
class Bell {
   public:
    uint32_t heard() const { return number_.load(std::memory_order_seq_cst); }

    // Whoever waits goes on. A system call only if threads are parked, and one for all of them.
    void ring() {
        number_.fetch_add(1, std::memory_order_seq_cst);
        if (parked_.load(std::memory_order_seq_cst) > 0) wake();
    }

    // Returns when the number is no longer `last`, or for no reason.
    void park(uint32_t last) {
        parked_.fetch_add(1, std::memory_order_seq_cst);
        sleep(last);
        parked_.fetch_sub(1, std::memory_order_seq_cst);
    }

   private:
#ifdef __linux__
    void sleep(uint32_t last) { syscall(SYS_futex, &number_, FUTEX_WAIT_PRIVATE, last, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &number_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t last) {
        std::unique_lock<std::mutex> lock(mutex_);
        woken_.wait(lock, [&] { return heard() != last; });
    }
    void wake() {
        { const std::lock_guard<std::mutex> lock(mutex_); }
        woken_.notify_all();
    }
    std::mutex mutex_;
    std::condition_variable woken_;
#endif
    std::atomic<uint32_t> number_{0};
    std::atomic<uint32_t> parked_{0};  // threads: a flag that one ring clears would hide who parks at that moment
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
};

}  // namespace
