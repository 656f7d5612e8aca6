// Checks of team.h, which no kernel can be made to fail: compiled and run by test_team.py.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "team.h"

namespace {

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

// How often each item of a loop is computed.
bool each_comes_once(int64_t count, int64_t most) {
    std::vector<int> times(count);
    share_out(count, most, true, [&] { return [&](int64_t i) { ++times[i]; }; });
    return std::all_of(times.begin(), times.end(), [](int n) { return n == 1; });
}

void loops() {
    for (int round = 0; round < 2000; ++round)
        for (const int64_t count : {0, 1, 2, 3, 7, 64, 1000}) expect(each_comes_once(count, round % 5 + 1), "not once");
}

void pauses() {  // longer than threads spin: they are parked in between
    for (int round = 0; round < 100; ++round) {
        usleep(200);
        expect(each_comes_once(100, 1), "not once after a pause");
    }
}

void failures() {
    for (int64_t bad = 0; bad < 200; ++bad) {
        bool is_told = false;
        try {
            for_each(200, true, [&](int64_t i) {
                if (i == bad) throw std::runtime_error("item " + std::to_string(i));
            });
        } catch (const std::runtime_error& error) {
            is_told = error.what() == "item " + std::to_string(bad);
        }
        expect(is_told, "a failure in a thread is lost");
        expect(each_comes_once(100, 3), "not once after a failure");
    }
}

void nested() {
    std::atomic<int64_t> sum{0};
    for_each(20, true, [&](int64_t) { for_each(30, true, [&](int64_t i) { sum += i; }); });
    expect(sum == 20 * 435, "a loop in a loop");
}

void callers() {  // who finds the team taken computes alone
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back(loops);
    for (std::thread& thread : threads) thread.join();
}

void sizes() {  // the number of threads changes between loops
    for (int64_t threads = 6; threads >= 1; --threads) {
        set_num_threads(threads);
        for (int round = 0; round < 100; ++round) expect(each_comes_once(50, 2), "not once after a change");
    }
    set_num_threads(4);
}

// Whether as many threads as there are take part: each item waits for all others.
bool all_take_part() {
    constexpr int64_t THREADS = 4;
    std::atomic<int64_t> came{0};
    std::atomic<bool> met{true};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    share_out(THREADS, 1, true, [&] {
        return [&](int64_t) {
            for (++came; came < THREADS && met; std::this_thread::yield())
                if (std::chrono::steady_clock::now() > end) met = false;
        };
    });
    return met;
}

void helpers() {
    for (int round = 0; round < 100; ++round) {
        expect(all_take_part(), "a worker does not come");
        if (round % 2) usleep(200);  // now it is parked
        expect(all_take_part(), "a worker does not wake");
    }
}

void child() {  // of fork: it has none of its parent's threads
    const pid_t made = fork();
    if (made == 0) {
        loops();
        failures();
        std::_Exit(0);
    }
    int status = 1;
    waitpid(made, &status, 0);
    expect(status == 0, "a child of fork");
    expect(each_comes_once(100, 1), "not once after a fork");
}

// On a core for each thread, whatever the machine has: the caller while it is told to, workers until they are let go.
void pins() {
#ifdef __linux__
    cpu_set_t before, now;
    sched_getaffinity(0, sizeof before, &before);
    std::vector<int64_t> cores;
    for (int64_t core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &before)) cores.push_back(core);
    const std::vector<int64_t> wanted{cores.front(), cores.back(), cores.back(), cores.back()};
    pin_threads(wanted.data(), static_cast<int64_t>(wanted.size()));
    const auto all_have = [&](int64_t workers, int64_t caller) {
        std::atomic<int64_t> wrong{0};
        const auto self = std::this_thread::get_id();
        for_each(64, true, [&](int64_t) {
            cpu_set_t own;
            sched_getaffinity(0, sizeof own, &own);
            wrong += CPU_COUNT(&own) != (std::this_thread::get_id() == self ? caller : workers);
        });
        return wrong == 0;
    };
    expect(all_take_part(), "a worker does not come to be pinned");  // it may have looked for its core just before
    for (int round = 0; round < 100; ++round) {
        const PinnedCaller pinned;
        const PinnedCaller second;  // one at a time: it changes nothing
        sched_getaffinity(0, sizeof now, &now);
        expect(CPU_COUNT(&now) == 1 && CPU_ISSET(cores.front(), &now), "the caller is not pinned");
        expect(all_have(1, 1), "a thread is not pinned");
    }
    sched_getaffinity(0, sizeof now, &now);
    expect(CPU_EQUAL(&now, &before), "the caller stays pinned");
    pin_threads(nullptr, 0);
    const int64_t all = CPU_COUNT(&before);
    expect(all_take_part(), "a worker does not come to be let go");
    for (int round = 0; round < 100; ++round) {
        const PinnedCaller nobody;
        expect(all_have(all, all), "a thread stays pinned");
    }
#endif
}

}  // namespace

int main() {
    set_num_threads(4);
    loops();
    pauses();
    helpers();
    failures();
    nested();
    callers();
    sizes();
    pins();
    child();
}
