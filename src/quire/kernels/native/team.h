// The thread pool of the kernels, created once per process. The thread that calls a kernel runs its operations, and
// shares loops that are worth it: it opens a loop, takes items like every worker, and closes it. A worker joins an open
// loop; the caller waits only for workers that have joined, never for one that the operating system has not scheduled.
// So oversubscribed cores cost the time they lose, not a barrier of all threads for every operation. Between the loops
// of a step workers spin; if no loop comes, they sleep.
//
// Items are assigned dynamically, so no result may depend on the assignment: an item is computed entirely by one
// thread, and results of several items are combined in the order of items.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "parking.h"
#include "pinning.h"

namespace {

constexpr int64_t MOST_THREADS = 1024;

// Hands out the items of one loop.
class Turns {
   public:
    Turns(int64_t count, int64_t most, int64_t threads) : count_(count), most_(most), threads_(threads) {}

    // Take items [begin, end) for the calling thread; false: all are taken. Chunks start at three quarters of a fair
    // share of what is left, since adjacent items are read faster, and shrink to single items, so that threads finish
    // at about the same time. A single thread gets all items at once.
    bool take(int64_t& begin, int64_t& end) {
        begin = next_.load(std::memory_order_relaxed);
        do {
            if (begin >= count_) return false;
            end = threads_ == 1 ? count_ : begin + std::clamp<int64_t>((count_ - begin) * 3 / (4 * threads_), 1, most_);
        } while (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed));
        return true;
    }
    void skip_rest() { next_.store(count_, std::memory_order_relaxed); }

   private:
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) const int64_t count_;
    const int64_t most_, threads_;
};

// The pool of worker threads.
class Team {
   public:
    typedef void (*Call)(void* body, Turns& turns);

    // Run call(body, turns) on this thread and on up to threads - 1 workers; a worker that joins again finds no items.
    // Returns false, and does nothing, if another thread is using the team or this thread is part of it. Rethrows an
    // exception of any thread.
    bool share(Turns& turns, int64_t threads, Call call, void* body) {
        if (busy_.exchange(true, std::memory_order_acquire)) return false;
        make_workers(threads - 1);
        call_ = call;
        body_ = body;
        turns_ = &turns;
        helpers_ = threads - 1;
        state_.fetch_or(OPEN, std::memory_order_seq_cst);
        opened_.ring();
        take_part();
        close();
        const std::exception_ptr failure = std::move(failure_);
        failure_ = nullptr;
        busy_.store(false, std::memory_order_release);
        if (failure) std::rethrow_exception(failure);
        return true;
    }

   private:
    static constexpr uint32_t OPEN = 1u << 31;

    // Create workers until there are `wanted`.
    void make_workers(int64_t wanted) noexcept {
        wanted = std::min(wanted, most_workers_);
        if (num_workers_ >= wanted) return;
        sigset_t all, before;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals must be handled by Python's threads
        try {
            for (; num_workers_ < wanted; ++num_workers_)
                std::thread([this, index = num_workers_] { work(index); }).detach();
        } catch (...) {  // no more threads available: go on with those that exist
            most_workers_ = num_workers_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    // Take items until there are none; records the first exception and skips the rest.
    void take_part() noexcept {
        try {
            call_(body_, *turns_);
        } catch (...) {
            turns_->skip_rest();
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }

    // The loop of a worker thread.
    void work(int64_t index) {
        for (uint32_t pins = 0;;) {
            const uint32_t heard = opened_.heard();
            follow_pins(index, pins);
            if (join(index)) {
                take_part();
                leave();
            }
            if (!spin_until([&] { return opened_.heard() != heard; })) opened_.park(heard);
        }
    }

    // Join the open loop, if there is one and this worker is wanted.
    bool join(int64_t index) {
        uint32_t now = state_.load(std::memory_order_acquire);
        while (now & OPEN)
            if (state_.compare_exchange_weak(now, now + 1, std::memory_order_acq_rel)) {
                if (index < helpers_) return true;
                leave();
                return false;
            }
        return false;
    }

    void leave() {
        if (state_.fetch_sub(1, std::memory_order_seq_cst) == 1) left_.ring();  // the last worker of a closed loop
    }

    // Close the loop: no worker can join any more; wait for those that have joined.
    void close() {
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        const auto is_empty = [&] { return state_.load(std::memory_order_seq_cst) == 0; };
        if (!is_empty() && !spin_until(is_empty))
            for (uint32_t heard = left_.heard(); !is_empty(); heard = left_.heard()) left_.park(heard);
        failed_.store(false, std::memory_order_relaxed);
    }

    std::atomic<bool> busy_{false};
    // written by the thread that uses the team, read by workers that have joined
    Call call_ = nullptr;
    void* body_ = nullptr;
    Turns* turns_ = nullptr;
    int64_t helpers_ = 0, num_workers_ = 0, most_workers_ = MOST_THREADS;
    std::atomic<bool> failed_{false};
    std::exception_ptr failure_;
    alignas(64) std::atomic<uint32_t> state_{0};  // OPEN flag, and the number of workers that have joined
    alignas(64) Bell opened_;
    alignas(64) Bell left_;
};

inline std::atomic<Team*> the_team{nullptr};
inline std::atomic<int64_t> team_threads{1};

// The process-wide team. Never deleted, since its workers use it until the process ends. A forked child creates its
// own.
inline Team& team() {
    Team* found = the_team.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static const int handler = pthread_atfork(nullptr, nullptr, [] {
        the_team.store(nullptr);
        forget_pins();  // they belong to the parent
    });
    static_cast<void>(handler);
    Team* made = new Team;
    if (the_team.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

inline int64_t num_threads() { return team_threads.load(std::memory_order_relaxed); }
inline void set_num_threads(int64_t threads) { team_threads = std::clamp<int64_t>(threads, 1, MOST_THREADS); }

// Run `call` on the team, or on this thread alone if the team is not available.
inline void share_items(int64_t count, int64_t most, int64_t threads, Team::Call call, void* body) {
    if (threads > 1) {
        Turns turns(count, most, threads);
        if (team().share(turns, threads, call, body)) return;
    }
    Turns turns(count, count, 1);
    call(body, turns);
}

// Parallel loop: each = make() on every participating thread, then each(begin, end) for ranges of items [0, count),
// every item once, in any order, at most `most` adjacent items at a time. is_worth: whether to use several threads; a
// loop of less than a few microseconds runs on the caller alone, through the same code, to save compile time.
template <typename Make> void share_ranges(int64_t count, int64_t most, bool is_worth, Make make) {
    const auto call = [](void* given, Turns& turns) {
        int64_t begin, end;
        if (!turns.take(begin, end)) return;
        auto each = (*static_cast<Make*>(given))();
        do each(begin, end);
        while (turns.take(begin, end));
    };
    share_items(count, most, is_worth ? std::min(num_threads(), count) : 1, call, &make);
}

// The same, item by item: each(i).
template <typename Make> void share_out(int64_t count, int64_t most, bool is_worth, Make make) {
    share_ranges(count, most, is_worth, [&] {
        return [each = make()](int64_t begin, int64_t end) mutable {
            for (int64_t i = begin; i < end; ++i) each(i);
        };
    });
}

// The same without per-thread state.
template <typename Each> void for_each(int64_t count, bool is_worth, const Each& each) {
    share_out(count, 1024, is_worth, [&] { return [&](int64_t i) { each(i); }; });
}

}  // namespace
