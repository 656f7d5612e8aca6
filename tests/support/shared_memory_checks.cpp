// Checks of message_ring.h, shared_ranks.h and heartbeat.h with a thread in place of each process, so that a sanitizer
// sees both sides of the shared memory. Compiled and run by test_shared_memory.py and tools/sanitize.py.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "heartbeat.h"
#include "message_ring.h"
#include "shared_ranks.h"

namespace {

constexpr int64_t LONG = 60'000'000;  // microseconds

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "%s\n", what);
    std::_Exit(1);
}

// Memory for doorbells and rings, zero as shared memory is.
struct Memory {
    explicit Memory(int64_t bytes) : lines(bytes / 64 + 1) {}
    uint8_t* at(int64_t byte) { return reinterpret_cast<uint8_t*>(lines.data()) + byte; }

   private:
    struct alignas(64) Line {
        uint8_t bytes[64] = {};
    };
    std::vector<Line> lines;
};

constexpr int64_t SLOTS = 4, SLOT_BYTES = 512, MESSAGES = 5000;
constexpr int64_t ring_bytes(int64_t readers) { return 64 * (1 + readers) + SLOTS * SLOT_BYTES; }
int64_t length_of(int64_t number) { return number * 37 % (SLOT_BYTES - 8); }

void post_all(const MessageRing& ring, int64_t writer) {
    std::vector<uint8_t> bytes(SLOT_BYTES);
    for (int64_t number = 0; number < MESSAGES; ++number) {
        std::fill(bytes.begin(), bytes.end(), static_cast<uint8_t>(number + writer));
        while (!post_message(ring, length_of(number), number % 7, bytes.data(), length_of(number))) sched_yield();
    }
}

bool is_message(const MessageRing& ring, int64_t number, int64_t writer) {
    uint32_t head[2];
    const uint8_t* slot = ring.slot(static_cast<uint32_t>(number));
    std::memcpy(head, slot, sizeof head);
    if (head[0] != length_of(number) || head[1] != number % 7) return false;
    const uint8_t* bytes = slot + sizeof head;
    return std::all_of(bytes, bytes + head[0], [&](uint8_t each) { return each == static_cast<uint8_t>(number + writer); });
}

void one_writer_and_three_readers() {
    constexpr int64_t READERS = 3;
    Memory memory(64 + ring_bytes(READERS));
    const MessageRing ring{memory.at(64), reinterpret_cast<Doorbell*>(memory.at(0)), READERS, SLOTS, SLOT_BYTES};
    std::vector<std::thread> threads;
    threads.emplace_back([&] { post_all(ring, 0); });
    for (int64_t reader = 0; reader < READERS; ++reader)
        threads.emplace_back([&, reader] {
            for (int64_t number = 0; number < MESSAGES; ++number) {
                expect(await_message(ring, reader, static_cast<uint32_t>(number), LONG), "a message does not come");
                expect(is_message(ring, number, 0), "a message is another one");
            }
            await_message(ring, reader, MESSAGES, 0);  // all are read
        });
    for (std::thread& thread : threads) thread.join();
}

void three_writers_and_one_reader() {
    constexpr int64_t WRITERS = 3;
    Memory memory(64 + WRITERS * ring_bytes(1));
    std::vector<MessageRing> rings;
    for (int64_t writer = 0; writer < WRITERS; ++writer)
        rings.push_back({memory.at(64 + writer * ring_bytes(1)), reinterpret_cast<Doorbell*>(memory.at(0)), 1, SLOTS,
                         SLOT_BYTES});
    std::vector<std::thread> threads;
    for (int64_t writer = 0; writer < WRITERS; ++writer)
        threads.emplace_back([&, writer] { post_all(rings[writer], writer); });
    for (int64_t number = 0; number < MESSAGES; ++number) {
        expect(await_all(rings.data(), WRITERS, static_cast<uint32_t>(number), LONG), "a ring stays empty");
        for (int64_t writer = 0; writer < WRITERS; ++writer)
            expect(is_message(rings[writer], number, writer), "a message of several is another one");
    }
    await_all(rings.data(), WRITERS, MESSAGES, 0);
    for (std::thread& thread : threads) thread.join();
}

// Ranks add up small whole numbers, whose sums are exact in either type.
template <typename T> void ranks() {
    constexpr int64_t RANKS = 3, SLOT = 256;
    Memory memory(RANKS * (64 + 2 * SLOT));
    std::vector<std::thread> threads;
    for (int64_t rank = 0; rank < RANKS; ++rank)
        threads.emplace_back([&, rank] {
            RankPages pages{memory.at(0), SLOT, RANKS, rank, 60.0, -1};
            for (int64_t round = 0; round < 300; ++round) {
                const int64_t count = 1 + round * 7 % 500;
                std::vector<T> x(count);
                for (T& each : x) store_some(&each, all(static_cast<float>(rank + round % 5)), 1);
                all_reduce(pages, x.data(), count);
                expect(pages.missing < 0, "a rank does not come");
                const float sum = static_cast<float>(3 + 3 * (round % 5));
                for (const T& each : x) expect(load_some(&each, 1)[0] == sum, "a sum is another one");
            }
        });
    for (std::thread& thread : threads) thread.join();
}

void heartbeats() {
    int ends[2];
    expect(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "no sockets");
    alignas(8) uint64_t first = 0, second = 0;
    const auto count = [](uint64_t& beats) { return reinterpret_cast<std::atomic<uint64_t>&>(beats).load(); };
    expect(start_beating(&first, ends[0], 0.001) == 0, "no heartbeat");
    while (count(first) < 3) usleep(500);
    expect(start_beating(&second, ends[0], 0.001) == 0, "no second heartbeat");
    const uint64_t last = count(first);
    while (count(second) < 3) usleep(500);
    expect(count(first) == last, "the first heartbeat goes on");
    char byte = 0;
    expect(read(ends[1], &byte, 1) == 1 && byte == 1, "no byte for a beat");
    stop_beating();
    close(ends[0]);
    close(ends[1]);
    usleep(5000);  // its thread deletes it
}

}  // namespace

int main() {
    one_writer_and_three_readers();
    three_writers_and_one_reader();
    ranks<float>();
    ranks<bf16>();
    heartbeats();
}
