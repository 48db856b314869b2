// Whatever a publisher sends, in whatever pieces: messages lie inside of what came, a connection that breaks the protocol or
// ends is told once, and nothing comes after that.
// sources: tcp/chunk.cpp tcp/inlet.cpp tcp/loop.cpp tcp/outlet.cpp tcp/sending.cpp tcp/store.cpp counters/counters.cpp platform/shared_directory.cpp platform/liveness.cpp platform/deaths.cpp platform/checksum.cpp
#include "driver.hpp"

#include <sys/socket.h>

#include "tcp/inlet.hpp"

using namespace penstock;
using namespace penstock::tcp;

namespace {
std::uint64_t sum = 0;  // so that every byte that is given out is read

void look(Inlet &inlet, const Received &received) {
    const auto end = received.chunk->data() + received.chunk->capacity;
    CHECK(received.data >= received.chunk->data() && received.data + received.header.data_size <= end);
    for (std::uint64_t i = 0; i < received.header.data_size; ++i) sum += received.data[i];
    for (std::uint32_t i = 0; i < received.header.properties_size; ++i) sum += received.properties[i];
    CHECK(received.header.vchan_plus_one <= INT32_MAX);
    inlet.count(received, true);
    chunk_drop(received.chunk);
}

// As read_many does; how many connections were told as lost.
unsigned drain(Inlet &inlet, unsigned lost, std::size_t most) {
    for (;;) {
        Received received;
        inlet.lock();
        Read read = inlet.take(received);
        if (read == Read::nothing) read = inlet.fetch(0, received);
        if (read == Read::message) {
            CHECK(!lost);
            const std::uint32_t session = received.session;
            look(inlet, received);
            for (std::size_t more = 1; more < most && inlet.take_message(received, session); ++more) look(inlet, received);
        }
        inlet.unlock();
        if (read == Read::lost) ++lost;
        else if (read != Read::message) return lost;
    }
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fuzz::place();
    counters_hide();
    fuzz::Input input(data, size);
    const auto how = input.number<std::uint8_t>();
    const std::size_t piece = 1 + input.number<std::uint8_t>() * (how & 16 ? 64 : 1);
    Inlet inlet(how & 1 ? 1 << 16 : 1 << 20, 1 << 24, "fuzz");
    int ends[2];
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    inlet.attach(inlet.next_serial(), 1, ends[1], how & 2, how & 4, how & 8 ? 1 : 0, how & 32 ? 3 : 0);
    unsigned lost = 0;
    while (input.left() && !lost) {
        auto bytes = input.bytes(piece);
        CHECK(::send(ends[0], bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
        lost = drain(inlet, lost, how & 64 ? 1 : 100);
    }
    ::close(ends[0]);
    lost = drain(inlet, lost, 100);
    CHECK(lost == 1);
    inlet.close();
    ::close(ends[1]);
    CHECK(inlet.budget()->held_bytes.load() == 0);
    return 0;
}
