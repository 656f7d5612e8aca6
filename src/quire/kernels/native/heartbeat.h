// Heartbeat of this process from a thread that never takes the GIL: it continues while another thread holds the GIL,
// and ends when the process is halted.
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
    std::atomic<uint64_t>* beats;  // counter to increment
    int socket;                    // receives a byte per beat; -1: none
    timespec pause;
    bool is_over = false;
};

inline pthread_mutex_t beating = PTHREAD_MUTEX_INITIALIZER;  // protects every use of a heartbeat
inline Heartbeat* last_heartbeat = nullptr;

// Thread function: count and send a byte every `pause` until the heartbeat is over.
inline void* beat(void* given) {
    auto* heart = static_cast<Heartbeat*>(given);
    const timespec pause = heart->pause;
    for (bool is_over = false; !is_over; nanosleep(&pause, nullptr)) {
        pthread_mutex_lock(&beating);
        is_over = heart->is_over;
        if (is_over) {
            delete heart;
        } else {
            heart->beats->fetch_add(1, std::memory_order_relaxed);
            const char byte = 1;
            if (heart->socket >= 0 && send(heart->socket, &byte, 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 && errno != EAGAIN &&
                errno != EINTR) {
                heart->socket = -1;  // the peer has closed
            }
        }
        pthread_mutex_unlock(&beating);
    }
    return nullptr;
}

// Stop the current heartbeat, if any. After this its counter and its socket may be freed.
inline void stop_beating() {
    pthread_mutex_lock(&beating);
    if (last_heartbeat != nullptr) {
        last_heartbeat->is_over = true;  // its thread deletes it
        last_heartbeat = nullptr;
    }
    pthread_mutex_unlock(&beating);
}

// Start a heartbeat every `seconds`, replacing the current one. Returns 0, or the error of pthread_create.
inline int start_beating(uint64_t* beats, int64_t socket, double seconds) {
    const double whole = std::floor(seconds);
    const timespec pause{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
    auto* heart = new Heartbeat{reinterpret_cast<std::atomic<uint64_t>*>(beats), static_cast<int>(socket), pause};
    stop_beating();
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals must be handled by Python's threads
    pthread_t thread;
    const int error = pthread_create(&thread, nullptr, beat, heart);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) {
        delete heart;
    } else {
        pthread_detach(thread);
        pthread_mutex_lock(&beating);
        last_heartbeat = heart;
        pthread_mutex_unlock(&beating);
    }
    return error;
}

}  // namespace
