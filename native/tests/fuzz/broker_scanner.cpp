// Whatever a client or a broker sends, in whatever pieces: ranges lie inside of what came, a fatal error is the last event.
// sources: broker/scanner.cpp broker/inbox.cpp
#include "driver.hpp"

#include "broker/scanner.hpp"

using namespace penstock;
using namespace penstock::broker;

namespace {
std::uint64_t sum = 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fuzz::Input input(data, size);
    const auto how = input.number<std::uint8_t>();
    const std::size_t piece = 1 + input.number<std::uint8_t>() * (how & 8 ? 16 : 1);
    Scanner scanner(static_cast<Grammar>(how % 3), how & 16 ? 100 : 1 << 20, how & 32 ? 64 : 4096);
    bool failed = false;
    while (input.left() && !failed) {
        auto bytes = input.bytes(piece);
        for (std::size_t at = 0; at < bytes.size();) {
            std::size_t room = 0;
            std::uint8_t *place = scanner.inbox().space(scanner.wanted(), room);
            CHECK(place && room);
            const std::size_t now = std::min(room, bytes.size() - at);
            std::memcpy(place, bytes.data() + at, now);
            scanner.inbox().filled(now);
            at += now;
        }
        for (unsigned events = 0;; ++events) {
            CHECK(events < 100'000);
            const Event event = scanner.next(how & 64 ? 1 : 1000);
            if (event == Event::more) break;
            failed = event == Event::fatal;
            if (failed) break;
            if (event == Event::topic) {
                if (scanner.head().size() % 5 == 4) scanner.refuse(std::string(scanner.head()));
                else scanner.allow(std::string(scanner.head()));
                continue;
            }
            if (event != Event::run && event != Event::line) continue;
            for (const Range &range : scanner.ranges()) {
                for (std::uint32_t i = 0; i < range.size + range.properties_size; ++i) sum += range.data[i];
                if (event == Event::run) CHECK(range.topic < scanner.topics().size());
                if (range.properties_size) good_properties(range.data + range.size, range.properties_size, how & 1);
            }
        }
        scanner.inbox().rest();
        CHECK(scanner.inbox().held_bytes() <= 64 << 20);
    }
    return 0;
}
