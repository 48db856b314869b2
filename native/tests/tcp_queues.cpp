// An outlet and an inlet joined by a socket pair, in threads: every message arrives once and in order; peers come, stall
// and go while others publish; nothing races.
// sources: tcp/chunk.cpp tcp/inlet.cpp tcp/loop.cpp tcp/outlet.cpp tcp/sending.cpp tcp/store.cpp counters/counters.cpp platform/shared_directory.cpp platform/liveness.cpp platform/deaths.cpp platform/checksum.cpp
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "tcp/inlet.hpp"
#include "tcp/outlet.hpp"

using namespace penstock;
using namespace penstock::tcp;

namespace {

void check(bool right, const char *what) {
    if (right) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

struct Pair {
    int ends[2];
    Pair() {
        check(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
        for (int end : ends) ::fcntl(end, F_SETFL, O_NONBLOCK);
    }
};

void send(Outlet &outlet, std::uint64_t number, std::size_t size) {
    std::vector<std::uint8_t> data(size, static_cast<std::uint8_t>(number));
    std::memcpy(data.data(), &number, sizeof number);
    Outgoing message;
    message.data = data.data();
    message.size = size;
    std::uint64_t ordinal = 0;
    outlet.lock();
    Quick quick = outlet.quick(message, ordinal);
    if (quick == Quick::flush) outlet.flush();
    if (quick == Quick::slow) check(outlet.publish(message, ordinal, -1) == Sent::done, "publish");
    outlet.unlock();
}

void everything_arrives() {
    constexpr std::uint64_t count = 20'000;
    auto loop = std::make_shared<Loop>();
    auto outlet = std::make_shared<Outlet>(loop, OverflowChoice::block, 1000, 1 << 20, -1, "test");
    Inlet inlet(1 << 24, 1 << 28, "test");
    Pair pair;
    outlet->add(pair.ends[0], true, "", 0);
    inlet.attach(inlet.next_serial(), 1, pair.ends[1], true, true, 1);
    std::thread publisher([&] {
        for (std::uint64_t i = 0; i < count; ++i) send(*outlet, i, i % 500 == 0 ? 100'000 : 8 + i % 300);
    });
    std::thread visitors([&] {  // others join, read nothing, and go
        for (int i = 0; i < 50; ++i) {
            Pair visitor;
            std::uint64_t id = outlet->add(visitor.ends[0], i % 2, "hello", 0);
            std::this_thread::yield();
            if (i % 3) ::close(visitor.ends[1]);
            outlet->remove(id);
            if (!(i % 3)) ::close(visitor.ends[1]);
            outlet->peer_counts();
            outlet->take_gone();
        }
    });
    for (std::uint64_t i = 0; i < count; ++i) {
        Received received;
        for (;;) {
            inlet.lock();
            Read result = inlet.take(received);
            if (result == Read::nothing) result = inlet.fetch(monotonic_ns() + 1'000'000'000, received);
            if (result == Read::message) inlet.count(received, true);
            inlet.unlock();
            if (result == Read::message) break;
            check(result == Read::nothing || result == Read::knocked, "read");
        }
        std::uint64_t number;
        std::memcpy(&number, received.data, sizeof number);
        check(number == i && received.header.ordinal == i + 1, "order");
        check(received.data[received.header.data_size - 1] ==
                  (received.header.data_size == 8 ? received.data[7] : static_cast<std::uint8_t>(i)),
              "content");
        chunk_drop(received.chunk);
    }
    publisher.join();
    visitors.join();
    check(inlet.counters()->lost() == 0, "nothing lost");
    check(inlet.counters()->delivered.get() == count, "all delivered");
    inlet.close();
    outlet->close();
    ::close(pair.ends[1]);
    loop->stop();
}

void drops_are_counted() {
    auto loop = std::make_shared<Loop>();
    for (auto overflow : {OverflowChoice::drop_oldest, OverflowChoice::drop_newest}) {
        auto outlet = std::make_shared<Outlet>(loop, overflow, 16, 1 << 20, -1, "test");
        Pair pair;
        outlet->add(pair.ends[0], true, "", 0);
        for (std::uint64_t i = 0; i < 20'000; ++i) send(*outlet, i, 200);
        Counters *counters = outlet->counters();
        check(counters->lost() > 0 && counters->matched.get() == 20'000, "drops");
        check(outlet->memory_bytes() < 1 << 20, "bounded memory");
        outlet->close();
        check(counters->in_flight() == 0, "balanced after close");
        ::close(pair.ends[1]);
    }
    loop->stop();
}

}  // namespace

int main() {
    everything_arrives();
    drops_are_counted();
    return 0;
}
