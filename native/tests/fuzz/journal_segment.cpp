// The scan of a segment's bytes, with right checksums or any: what it finds lies inside of the segment, in order.
// sources: journal/scan.cpp journal/compose.cpp journal/checksum.cpp journal/writer.cpp journal/frontier.cpp journal/disk.cpp
#include "driver.hpp"

#include "journal/compose.hpp"
#include "journal/scan.hpp"
#include "mend.hpp"

using namespace penstock;
using namespace penstock::journal;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    constexpr std::uint64_t nonce = 0x1234567890abcdef;
    fuzz::Input input(data, size);
    const auto how = input.number<std::uint8_t>();
    const std::uint64_t durable = input.number<std::uint8_t>();
    std::vector<std::uint8_t> log(segment_header_bytes);
    if (how & 1) {
        fuzz::add_records(log, input, nonce, 1);
    } else {
        auto bytes = input.rest();
        log.insert(log.end(), bytes.begin(), bytes.end());
    }
    const std::uint64_t limit = how & 2 ? 40 : std::uint64_t{1} << 63;
    const Scan scan = scan_segment(log.data(), log.size(), {nonce, 1, limit, durable, (how & 4) != 0});
    CHECK(scan.end <= log.size() && scan.end + scan.tail_bytes <= log.size());
    std::uint64_t before = 0;
    for (const IndexEntry &entry : scan.index) {
        CHECK(entry.position > before);
        CHECK(entry.position < std::uint64_t{1} << 63);
        before = entry.position;
        CHECK(entry.offset + sizeof(RecordHeader) + entry.length + entry.extra_bytes <= log.size());
    }
    for (const ScanState &state : scan.states) CHECK(state.offset + state.bytes <= log.size());
    for (const ScanDamage &bad : scan.damage) CHECK(bad.offset + bad.bytes <= log.size() && bad.first_position <= bad.next_position);
    summarise(scan.index.data(), scan.index.size(), nonce);
    record_keys(log.data(), log.size(), scan.index.data(), scan.index.size());
    const Composed made = compose_segment(log.data(), log.size(), scan.index.data(), scan.index.size(), nonce + 1, 1, nullptr, 0, 0, 0);
    std::vector<std::uint8_t> whole(segment_header_bytes);
    whole.insert(whole.end(), made.log.begin(), made.log.end());
    const Scan again = scan_segment(whole.data(), whole.size(), {nonce + 1, 1, std::uint64_t{1} << 63, 0, true});
    CHECK(again.damage.empty() && again.index.size() == scan.index.size());
    return 0;
}
