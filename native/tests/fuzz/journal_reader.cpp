// A directory of a journal whose frontier, header, seal, index, summary and log all have right checksums and any content: every
// reading function gives an answer or a problem.
// sources: journal/reader.cpp journal/scan.cpp journal/checksum.cpp journal/frontier.cpp
#include "driver.hpp"

#include "journal/frontier.hpp"
#include "journal/reader.hpp"
#include "mend.hpp"

using namespace penstock;
using namespace penstock::journal;

namespace {
std::uint64_t sum = 0;
const std::string segment = "00000000000000000001-0000.";
constexpr std::uint64_t nonce = 0x1234567890abcdef;

// False: no reader takes it, and waits a second for a better one.
bool write_frontier(const std::string &place, fuzz::Input &input, std::uint64_t end) {
    std::vector<std::uint8_t> bytes(frontier_bytes);
    FrontierHead head{{'P', 'E', 'N', 'S', 'T', 'K', 'F', 'R'}, format_version, 0, {}};
    fuzz::store(bytes, 0, head);
    const auto far = input.number<std::uint8_t>();
    FrontierCopy copy{1, std::uint64_t{1} + (far & 128 ? input.number<std::uint64_t>() >> 2 : far), 1, end, 1, 1, 1, 0};
    if (far & 64) copy.end = (copy.frontier + 1) * 64 + segment_header_bytes;
    if (!plausible(copy)) return false;
    copy.checksum = frontier_check(bytes.data() + offsetof(FrontierHead, uuid), copy);
    fuzz::store(bytes, frontier_first_copy, copy);
    fuzz::write_file(place + "/frontier", bytes.data(), bytes.size());
    return true;
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    static const std::string place = [] {
        std::string made = fuzz::place() + "/journal";
        CHECK(mkdir(made.c_str(), 0700) == 0);
        return made;
    }();
    fuzz::Input input(data, size);
    const auto how = input.number<std::uint8_t>();
    Seal seal{};
    if (how & 1) {
        seal.end = 1 + input.number<std::uint16_t>();
        seal.next_position = how & 2 ? input.number<std::uint64_t>() : input.number<std::uint8_t>();
        seal.messages = how & 4 ? input.number<std::uint64_t>() : input.number<std::uint8_t>();
        seal.checksum = seal_check(nonce, seal);
    }
    std::vector<std::uint8_t> index(std::size_t{how & 8 ? 64u : input.number<std::uint8_t>() % 8u} * sizeof(IndexEntry));
    const std::uint32_t seed = nonce_seed(nonce);
    for (std::size_t i = 0; i < index.size() / sizeof(IndexEntry); ++i) {
        IndexEntry entry{};
        const auto what = input.number<std::uint8_t>();
        entry.position = i + 1 + (what & 1 ? input.number<std::uint8_t>() : 0);
        entry.offset = what & 2 ? input.number<std::uint64_t>() : segment_header_bytes + 64;
        entry.length = what & 4 ? input.number<std::uint32_t>() : 0;
        entry.topic = what & 8 ? input.number<std::uint32_t>() : 1;
        entry.entry_checksum = entry_check(seed, entry);
        fuzz::store(index, i * sizeof entry, entry);
    }
    std::vector<std::uint8_t> rows(std::size_t{input.number<std::uint8_t>() % 4u} * sizeof(TopicSummary));
    for (std::size_t at = 0; at < rows.size(); at += sizeof(TopicSummary)) {
        auto row = input.number<TopicSummary>();
        row.checksum = summary_check(seed, row);
        fuzz::store(rows, at, row);
    }
    const auto reading = input.number<std::uint8_t>();
    std::vector<std::uint8_t> log(segment_header_bytes);
    SegmentHeader header{{}, format_version, how & 16 ? 1u : 0u, {}, nonce, 1, 0, 0, 0};
    header.checksum = crc32c(0, &header, offsetof(SegmentHeader, checksum));
    fuzz::store(log, 0, header);
    fuzz::store(log, seal_offset, seal);
    fuzz::Input tail = input;  // the frontier's words are the first of the body
    input.number<std::uint8_t>();
    fuzz::add_records(log, input, nonce, 1);
    if (!write_frontier(place, tail, log.size())) return 0;
    fuzz::write_file(place + "/" + segment + "log", log.data(), log.size());
    fuzz::write_file(place + "/" + segment + "index", index.data(), index.size());
    fuzz::write_file(place + "/" + segment + "topics", rows.data(), rows.size());

    Problem problem;
    auto reader = Reader::open(place, 1 << 16, problem);
    if (!reader) return 0;
    for (bool records : {true, false}) {
        TopicFilter filter({"a", "b.>"});
        std::uint64_t start = 1;
        for (int i = 0; i < 30; ++i) {
            Pass pass{start, 1 + reading % 16u, 1 << 20, reading & 128 ? &filter : nullptr};
            pass.records = records;
            pass.entries = true;
            const ReadResult result = reader->read(pass);
            CHECK(result.entries.size() == result.found.size());
            for (const Found &found : result.found) {
                CHECK(found.topic <= max_unused_topics + 1000);
                if (!records) continue;
                RecordHeader record;
                std::memcpy(&record, found.record, sizeof record);
                for (std::uint32_t byte = 0; byte < record.bytes; ++byte) sum += found.record[byte];
            }
            if (result.next <= start) break;
            start = result.next;
        }
    }
    Problem ignored[6];
    reader->holes(ignored[0]);
    reader->find_time(3, reading % 3, ignored[1]);
    reader->find_ordinal(1 + reading % 3, 2, ignored[2]);
    CHECK(reader->topics(ignored[3]).size() <= max_unused_topics + 1000);
    reader->topic_id("b", ignored[4]);
    reader->places(ignored[5]);
    return 0;
}
