// How a thread waits: it spins for microseconds, then it sleeps on a futex until another thread wakes it.
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

// A pause instruction for spin loops.
inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does nothing on most cores
#endif
}

// Longer than the serial parts between two loops of a step, shorter than a scheduler's time slice.
constexpr std::chrono::microseconds SPIN{50};

// Spin until ready() or for SPIN; returns the last ready().
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

// A counter that threads can wait on (a futex; a condition variable outside Linux).
class Bell {
   public:
    uint32_t heard() const { return number_.load(std::memory_order_seq_cst); }

    // Increment the counter and wake all waiting threads; a system call only if any thread is parked.
    void ring() {
        number_.fetch_add(1, std::memory_order_seq_cst);
        if (parked_.load(std::memory_order_seq_cst) > 0) wake();
    }

    // Sleep until the counter differs from `last`; may return spuriously.
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
    std::atomic<uint32_t> parked_{0};  // threads; a flag cleared by `ring` would miss one that parks at that moment
    static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
};

}  // namespace
