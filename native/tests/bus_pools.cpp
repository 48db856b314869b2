// Pools, the ring and the sleepers of the bus, under the guard that the GIL is in Python: one mutex.
// sources: bus/pool.cpp
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>

#include "bus/pool.hpp"
#include "bus/ring.hpp"

using namespace penstock::bus;

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (0)

static void slab() {
    SlabPool *pool = SlabPool::make(40, 8);
    std::vector<Header *> out;
    while (Header *header = pool->take(7, 40)) {
        std::memset(payload(header), 0xAB, 40);  // the whole block is ours: the sanitizer would tell
        out.push_back(header);
    }
    CHECK(out.size() == 8 && pool->list_out().size() == 8 && pool->most_out == 8);
    CHECK(!pool->take(7, 41));
    acquire(out[3]);
    drop(out[3]);
    CHECK(pool->out == 8 && out[3]->reference_count == 1);
    drop(out.back());
    out.pop_back();
    CHECK(pool->out == 7);
    Header *again = pool->take(9, 0);
    CHECK(again && again->id == 9 && again->size == 0 && again->reference_count == 1);
    drop(again);
    pool->abandon();  // it lives on until the last message is back
    for (Header *header : out) drop(header);
}

static void heap() {
    auto *pool = new HeapPool(1 << 20, 0);
    std::mt19937 chance(1);
    std::vector<Header *> out;
    for (int i = 0; i < 20000; ++i) {
        if (out.size() < 200 && chance() % 2) {
            std::uint32_t size = chance() % 5000;
            Header *header = pool->take(1, size);
            CHECK(header->capacity >= size);
            std::memset(payload(header), 1, size);
            out.push_back(header);
        } else if (!out.empty()) {
            std::size_t index = chance() % out.size();
            drop(out[index]);
            out[index] = out.back();
            out.pop_back();
        }
        CHECK(pool->out == out.size());
    }
    CHECK(pool->list_out().size() == out.size());
    CHECK(!pool->take(1, (1 << 20) + 1));
    pool->abandon();
    for (Header *header : out) drop(header);
}

static void ring() {
    Ring<int *> ring;
    static int numbers[1000];
    std::size_t pushed = 0, popped = 0;
    std::mt19937 chance(2);
    while (popped < 100000) {
        if (ring.size() < 900 && chance() % 2) CHECK(ring.push(&numbers[pushed++ % 1000]));
        else if (!ring.empty()) CHECK(ring.pop() == &numbers[popped++ % 1000]);
        if (!ring.empty()) CHECK(ring.at(0) == &numbers[popped % 1000]);
    }
}

// A bounded queue between threads: nobody sleeps through a wake, nobody overtakes.
static void sleepers() {
    std::mutex guard;
    SleeperList readers, writers;
    Ring<int *> ring;
    static int token;
    constexpr std::size_t capacity = 4;
    constexpr int rounds = 20000, threads = 3;
    auto write = [&] {
        for (int i = 0; i < rounds; ++i) {
            std::unique_lock lock(guard);
            Sleeper sleeper;
            writers.join(&sleeper);
            while (writers.head != &sleeper || ring.size() >= capacity) {
                sleeper.rearm();
                lock.unlock();
                sleeper.sleep(Deadline::after(60));
                lock.lock();
            }
            CHECK(ring.push(&token));
            writers.leave(&sleeper);
            if (ring.size() < capacity) writers.wake_first();
            readers.wake_all();
        }
    };
    auto read = [&] {
        for (int i = 0; i < rounds; ++i) {
            std::unique_lock lock(guard);
            Sleeper sleeper;
            readers.join(&sleeper);
            while (ring.empty()) {
                sleeper.rearm();
                lock.unlock();
                CHECK(sleeper.sleep(Deadline::after(60)) != Slept::timed_out);
                lock.lock();
            }
            ring.pop();
            readers.leave(&sleeper);
            writers.wake_first();
        }
    };
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) {
        all.emplace_back(write);
        all.emplace_back(read);
    }
    for (std::thread &thread : all) thread.join();
    CHECK(ring.empty() && readers.empty() && writers.empty());
    Sleeper alone;
    CHECK(alone.sleep(Deadline::after(0.001)) == Slept::timed_out);
}

int main() {
    slab();
    heap();
    ring();
    sleepers();
    return 0;
}
