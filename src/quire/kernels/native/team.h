// The threads of the kernels, made once for a process. The thread that calls a kernel walks its operations alone, and
// shares loops that are worth it: it opens a loop, takes items like everybody else, and closes it. A worker joins a loop
// that is open; the caller waits for those that have joined, never for one that the operating system does not run. So
// more threads than cores, or a neighbour that takes a core away, cost what they take and not a barrier of all threads
// for every operation. Between the loops of a step workers spin; when no loop comes, they are parked.
//
// Who takes which item is left to chance, so no result may depend on it: an item is computed whole by one thread, and
// what several items give is added up in the order of items.
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

// The items of one loop, as they are handed out.
class Turns {
   public:
    Turns(int64_t count, int64_t most, int64_t threads) : count_(count), most_(most), threads_(threads) {}

    // Items [begin, end) for the thread that asks; false: all are taken. The first turns are long, three quarters of a fair
    // share of what is left, as neighbours are read faster; the last items go one by one, so that threads end at about the
    // same time. A thread alone gets all items at once.
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

class Team {
   public:
    typedef void (*Call)(void* body, Turns& turns);

    // call(body, turns) on this thread and on up to threads - 1 others; who comes twice finds no items. Returns false, with
    // nothing done, if another thread has the team now, or this one is part of it.
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

    void make_workers(int64_t wanted) noexcept {
        wanted = std::min(wanted, most_workers_);
        if (num_workers_ >= wanted) return;
        sigset_t all, before;
        sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
        pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
        try {
            for (; num_workers_ < wanted; ++num_workers_)
                std::thread([this, index = num_workers_] { work(index); }).detach();
        } catch (...) {  // the system gives no more: those there are do it, and no more are asked for
            most_workers_ = num_workers_;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void take_part() noexcept {
        try {
            call_(body_, *turns_);
        } catch (...) {
            turns_->skip_rest();
            if (!failed_.exchange(true)) failure_ = std::current_exception();
        }
    }

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
        if (state_.fetch_sub(1, std::memory_order_seq_cst) == 1) left_.ring();  // the last one, of a closed loop
    }

    // From now on nobody joins; waits for those that have.
    void close() {
        state_.fetch_and(~OPEN, std::memory_order_acq_rel);
        const auto is_empty = [&] { return state_.load(std::memory_order_seq_cst) == 0; };
        if (!is_empty() && !spin_until(is_empty))
            for (uint32_t heard = left_.heard(); !is_empty(); heard = left_.heard()) left_.park(heard);
        failed_.store(false, std::memory_order_relaxed);
    }

    std::atomic<bool> busy_{false};
    // set by who has the team, read by who has joined
    Call call_ = nullptr;
    void* body_ = nullptr;
    Turns* turns_ = nullptr;
    int64_t helpers_ = 0, num_workers_ = 0, most_workers_ = MOST_THREADS;
    std::atomic<bool> failed_{false};
    std::exception_ptr failure_;
    alignas(64) std::atomic<uint32_t> state_{0};  // OPEN or not, and the number of workers that have joined
    alignas(64) Bell opened_;
    alignas(64) Bell left_;
};

inline std::atomic<Team*> the_team{nullptr};
inline std::atomic<int64_t> team_threads{1};

// Never deleted: its workers use it until the process ends. A child of fork has none of them, and makes a team of its
// own.
inline Team& team() {
    Team* found = the_team.load(std::memory_order_acquire);
    if (found != nullptr) return *found;
    static const int handler = pthread_atfork(nullptr, nullptr, [] {
        the_team.store(nullptr);
        forget_pins();  // they are its parent's
    });
    static_cast<void>(handler);
    Team* made = new Team;
    if (the_team.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

inline int64_t num_threads() { return team_threads.load(std::memory_order_relaxed); }
inline void set_num_threads(int64_t threads) { team_threads = std::clamp<int64_t>(threads, 1, MOST_THREADS); }

inline void share_items(int64_t count, int64_t most, int64_t threads, Team::Call call, void* body) {
    if (threads > 1) {
        Turns turns(count, most, threads);
        if (team().share(turns, threads, call, body)) return;
    }
    Turns turns(count, most, 1);
    call(body, turns);
}

// each = make() on every thread that takes part, then each(i) for items [0, count), every item once, in any order, up to
// `most` neighbours at a time by one thread. is_worth: whether sharing pays; a loop of less than some microseconds is
// done by the caller alone, by the same function, as what it does to items may take long to compile.
template <typename Make> void share_out(int64_t count, int64_t most, bool is_worth, Make make) {
    const auto call = [](void* given, Turns& turns) {
        int64_t begin, end;
        if (!turns.take(begin, end)) return;
        auto each = (*static_cast<Make*>(given))();
        do
            for (int64_t i = begin; i < end; ++i) each(i);
        while (turns.take(begin, end));
    };
    share_items(count, most, is_worth ? std::min(num_threads(), count) : 1, call, &make);
}

// The same with nothing that a thread keeps from item to item.
template <typename Each> void for_each(int64_t count, bool is_worth, const Each& each) {
    share_out(count, 1024, is_worth, [&] { return [&](int64_t i) { each(i); }; });
}

}  // namespace
