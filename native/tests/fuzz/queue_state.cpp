// Records of a queue's state as they may stand in a file: refused or taken, and what was taken is said again by a snapshot.
// sources: journal/queue_state.cpp
#include "driver.hpp"

#include "journal/queue_state.hpp"

using namespace penstock;
using namespace penstock::journal;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    fuzz::Input input(data, size);
    QueueState state(1);
    for (int i = 0; i < 20 && input.left(); ++i) {
        const auto kind = input.number<std::uint8_t>();
        if (kind == 255) {
            const auto note = input.number<std::uint8_t>();
            const auto first = input.number<std::int64_t>();
            state.apply_note(note % 8, first, input.number<std::int64_t>());
            continue;
        }
        auto record = input.bytes(kind);
        state.apply({reinterpret_cast<const char *>(record.data()), record.size()});
    }
    state.recovered();
    const std::string said = state.snapshot();
    QueueState again(1);
    CHECK(again.apply(said));
    again.recovered();
    CHECK(again.floor() == state.floor());
    for (int i = 0; i < 40; ++i) {
        const std::int64_t position = state.cursor();
        std::uint32_t deliveries = 0;
        if (position >= INT64_MAX - 1) break;
        if (state.open(position)) state.deliver(position, 1 + i % 2, 1000 + i, deliveries, 10, i % 3);
        else state.look_from(position + 1);
        if (i % 3 == 0) state.acknowledge(1, position - 5, position);
        if (i % 5 == 0) state.return_message(2, position, 50, i % 2);
        for (const Waiting &one : state.due(100, 4)) state.redeliver(one.position, 1, 2000, deliveries);
        state.expire(1000 + i);
    }
    state.next_time_ns();
    CHECK(again.apply(state.delta()));
    state.drop_consumer(1, 5, true);
    QueueState third(1);
    CHECK(third.apply(state.snapshot()));
    return 0;
}
