// The broker's scanner, outbox and queue state under the sanitizers: random streams cut at random, against a plain model.
// sources: broker/scanner.cpp broker/inbox.cpp broker/outbox.cpp journal/queue_state.cpp
#include <algorithm>
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <unistd.h>
#include <sys/socket.h>

#include "broker/outbox.hpp"
#include "journal/queue_state.hpp"
#include "broker/scanner.hpp"

using namespace penstock::broker;
using namespace penstock::journal;

static void check(bool right, const char *what, unsigned seed) {
    if (right) return;
    std::fprintf(stderr, "broker_scan: %s (seed %u)\n", what, seed);
    std::abort();
}

static void feed(Scanner &scanner, const std::string &data) {
    std::size_t at = 0;
    while (at < data.size()) {
        std::size_t room = 0;
        std::uint8_t *place = scanner.inbox().space(scanner.wanted(), room);
        std::size_t now = std::min(room, data.size() - at);
        std::copy_n(data.data() + at, now, place);
        scanner.inbox().filled(now);
        at += now;
    }
}

static void streams(unsigned seed) {
    std::mt19937 chooser(seed);
    std::string stream, expected;
    for (int i = 0; i < 200; ++i) {
        std::string data(chooser() % 8 ? chooser() % 100 : chooser() % 400000, static_cast<char>(chooser()));
        stream += "PUB t" + std::to_string(chooser() % 3) + " " + std::to_string(data.size()) + "\n" + data + (chooser() % 2 ? "\n" : "");
        expected += data;
        if (chooser() % 10 == 0) {  // a range, alone and beyond what one message may have
            std::string range(chooser() % 2 ? chooser() % 100 : (1 << 20) + chooser() % 1000, static_cast<char>(chooser()));
            stream += (stream.back() == '\n' ? "LOAD x " : "\nLOAD x ") + std::to_string(range.size()) + "\n" + range;
            expected += range;
        }
        if (chooser() % 20 == 0) stream += "\nPING\n";  // the first newline is the optional one, or an empty line's
    }
    Scanner scanner(Grammar::hello, 1 << 20);
    std::string found;
    std::vector<Block *> kept;
    for (std::size_t at = 0; at < stream.size();) {
        std::size_t size = std::min<std::size_t>(stream.size() - at, 1 + chooser() % (chooser() % 4 ? 100 : 300000));
        feed(scanner, stream.substr(at, size));
        at += size;
        for (;;) {
            Event event = scanner.next(1 + chooser() % 50);
            if (event == Event::more) break;
            if (event == Event::fatal) return;  // an empty line is one: where it came by chance the rest is void
            if (event == Event::topic) scanner.allow(std::string(scanner.head()));
            if (event != Event::run) continue;
            for (const Range &range : scanner.ranges()) found.append(reinterpret_cast<const char *>(range.data), range.size);
            if (chooser() % 10 == 0) {  // somebody keeps the block
                scanner.inbox().block()->keep();
                kept.push_back(scanner.inbox().block());
            }
        }
    }
    check(found == expected, "payloads differ", seed);
    for (Block *block : kept) block->drop();
}

static void nonsense(unsigned seed) {
    static const char *words[] = {"PUB ", "SUB ", "HELLO 1\n", "STAGE ", "MSG ", "DATA ", "a.b ", "5", "\n", " ", "0\n", "9999999999", "-1", "\r\n"};
    std::mt19937 chooser(seed);
    Scanner scanner(static_cast<Grammar>(chooser() % 3), 1000, 200);
    for (int i = 0; i < 500; ++i) {
        std::string data = chooser() % 4 ? words[chooser() % std::size(words)] : std::string(1 + chooser() % 5, static_cast<char>(chooser()));
        feed(scanner, data);
        for (Event event = scanner.next(); event != Event::more && event != Event::fatal; event = scanner.next()) {
            if (event == Event::topic) chooser() % 2 ? (void)scanner.allow(std::string(scanner.head())) : scanner.refuse(std::string(scanner.head()));
        }
    }
}

static int released = 0;

static void outbox(unsigned seed) {
    std::mt19937 chooser(seed);
    released = 0;
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) std::abort();
    std::string memory(100000, 'm'), expected, got;
    int holds = 0;
    {
        Outbox box([](void *) { ++released; });
        char buffer[65536];
        for (int i = 0; i < 300; ++i) {
            std::vector<Delivery> rows;
            for (unsigned k = 0; k < chooser() % 40; ++k) {
                const std::size_t size = chooser() % 3000;
                rows.push_back({reinterpret_cast<const std::uint8_t *>(memory.data()), size, "t", k, k, 1, 1});
            }
            if (chooser() % 3 == 0) {
                box.text("reply\n");
                expected += "reply\n";
            } else {
                box.bare(rows.data(), rows.size(), &holds);
                ++holds;
                for (const Delivery &row : rows) expected.append(memory, 0, row.size);
            }
            if (box.send(pair[0]) < 0) std::abort();
            box.settle();
            box.take_sent(box.sent_bytes());
            for (ssize_t size; (size = read(pair[1], buffer, chooser() % sizeof buffer)) > 0;) got.append(buffer, static_cast<std::size_t>(size));
        }
        while (box.pending_bytes()) {
            box.send(pair[0]);
            for (ssize_t size; (size = read(pair[1], buffer, sizeof buffer)) > 0;) got.append(buffer, static_cast<std::size_t>(size));
        }
        box.settle();
    }
    close(pair[0]);
    close(pair[1]);
    check(got == expected, "what was written differs", seed);
    check(released == holds, "holds were not given back once each", seed);
}

static void queue(unsigned seed) {
    std::mt19937 chooser(seed);
    QueueState state(1);
    struct Held {
        std::uint32_t consumer;  // 0: waiting
        std::int64_t deadline;
    };
    std::map<std::int64_t, Held> held;
    std::int64_t next = 1, now = 0;
    for (int i = 0; i < 3000; ++i) {
        ++now;
        switch (chooser() % 6) {
            case 0:
            case 1: {
                std::uint32_t deliveries = 0, consumer = 1 + chooser() % 3;
                next += chooser() % 3;
                check(state.deliver(next, consumer, now + 50, deliveries), "a new message was refused", seed);
                held[next++] = {consumer, now + 50};
                break;
            }
            case 2: {
                const std::uint32_t consumer = 1 + chooser() % 3;
                const std::int64_t first = 1 + static_cast<std::int64_t>(chooser() % static_cast<unsigned>(next)), last = first + chooser() % 20;
                std::size_t wanted = 0;
                for (auto at = held.lower_bound(first); at != held.end() && at->first <= last;)
                    if (at->second.consumer == consumer) at = held.erase(at), ++wanted;
                    else ++at;
                check(state.acknowledge(consumer, first, last, true) == wanted, "acknowledged others than meant", seed);
                break;
            }
            case 3:
                state.expire(now);
                for (auto &[position, who] : held)
                    if (who.consumer && who.deadline <= now) who.consumer = 0;
                break;
            case 4:
                for (const Waiting &item : state.due(now, 5)) {
                    std::uint32_t deliveries = 0;
                    check(held.count(item.position) == 1, "what is done is due", seed);
                    state.redeliver(item.position, 1, now + 50, deliveries);
                    held[item.position] = {1, now + 50};
                }
                break;
            default: {
                QueueState copy(1);
                check(copy.apply(state.snapshot()), "a snapshot is no record", seed);
                copy.recovered();
                for (const auto &[position, who] : held) check(copy.open(position), "a held message is done in the snapshot", seed);
                state.delta();
            }
        }
        check(state.outstanding() == held.size(), "outstanding differs", seed);
        check(held.empty() || state.floor() <= held.begin()->first, "the floor passed a held message", seed);
    }
}

int main() {
    for (unsigned seed = 1; seed <= 60; ++seed) {
        streams(seed);
        outbox(seed);
        queue(seed);
    }
    for (unsigned seed = 1; seed <= 3000; ++seed) nonsense(seed);
    std::puts("broker_scan: ok");
}
