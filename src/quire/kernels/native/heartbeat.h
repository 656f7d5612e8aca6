// Signs of life of this process, by a thread of its own that never waits for the Python interpreter: they go on while some
// other thread holds the interpreter's lock, and end when the process is halted.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>

namespace {

struct Heartbeat {
    std::atomic<uint64_t>* beats;  // counted here
    int socket;                    // a byte goes there for every beat; -1: there is none
    timespec pause;
};

inline void* beat(void* given) {
    const Heartbeat heart = *static_cast<Heartbeat*>(given);
    delete static_cast<Heartbeat*>(given);
    for (int socket = heart.socket;;) {
        heart.beats->fetch_add(1, std::memory_order_relaxed);
        const char byte = 1;
        if (socket >= 0 && send(socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN && errno != EINTR) {
            socket = -1;  // the other end is gone
        }
        nanosleep(&heart.pause, nullptr);
    }
}

// Returns 0, or the error of pthread_create. The thread ends with the process.
inline int start_beating(uint64_t* beats, int64_t socket, double seconds) {
    const double whole = std::floor(seconds);
    const timespec pause{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
    auto* heart = new Heartbeat{reinterpret_cast<std::atomic<uint64_t>*>(beats), static_cast<int>(socket), pause};
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, beat, heart);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) {
        delete heart;
    } else {
        pthread_detach(thread);
    }
    return error;
}

}  // namespace
