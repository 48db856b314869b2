// The journal's writer under many threads and a failing disk, and its scanner on damaged bytes.
// sources: journal/writer.cpp journal/frontier.cpp journal/disk.cpp journal/scan.cpp journal/compose.cpp journal/checksum.cpp
#include "journal/frontier.hpp"
#include "journal/writer.hpp"

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "journal/checksum.hpp"
#include "journal/compose.hpp"
#include "journal/scan.hpp"

using namespace penstock::journal;

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (0)

constexpr int log_file = 1000, index_file = 1001, sums_file = 1002;  // no descriptors: only the memory disk knows them
constexpr std::uint64_t nonce = 0x1234567890abcdef;

struct MemoryDisk final : Disk {
    std::map<int, std::vector<std::uint8_t>> files;
    unsigned fail_every = 0, writes = 0;
    int sync_error = 0;

    int write(int file, const std::uint8_t *data, std::size_t bytes, std::size_t zeros, std::uint64_t offset) override {
        if (file == log_file && fail_every && ++writes % fail_every == 0) return EDQUOT;
        auto &content = files[file];
        if (content.size() < offset + bytes + zeros) content.resize(offset + bytes + zeros);
        if (bytes) std::memcpy(content.data() + offset, data, bytes);
        if (zeros) std::memset(content.data() + offset + bytes, 0, zeros);
        return 0;
    }
    int sync(int) override { return sync_error; }
};

struct Fixture {
    MemoryDisk disk;
    alignas(8) std::uint8_t frontier[frontier_bytes] = {};
    Writer writer{disk, 1 << 30, true, frontier, -1};

    Fixture() {
        disk.files[log_file].resize(segment_header_bytes);
        ActiveSegment segment;
        segment.log = log_file;
        segment.index = index_file;
        segment.sums = sums_file;
        segment.nonce = nonce;
        segment.first_position = 1;
        segment.end = segment.zeroed = segment_header_bytes;
        writer.replace_segment(segment, 1);
    }
    std::uint64_t durable() const { return read_frontier(frontier).value_or(FrontierCopy{}).frontier; }
    Scan scan() {
        const auto &log = disk.files[log_file];
        return scan_segment(log.data(), log.size(), {nonce, 1, ~std::uint64_t{0} >> 1, 0, false});
    }
};

static void threads(unsigned fail_every) {
    Fixture fixture;
    fixture.disk.fail_every = fail_every;
    constexpr int workers = 6, each = 300;
    std::atomic<int> refused{0};
    std::vector<std::set<std::uint64_t>> stored(workers);
    std::vector<std::thread> running;
    for (int worker = 0; worker < workers; ++worker)
        running.emplace_back([&, worker] {
            std::string data(static_cast<std::size_t>(worker * 10), 'a' + static_cast<char>(worker));
            std::uint32_t topic = fixture.writer.topic("topic." + std::to_string(worker));
            for (int i = 0; i < each; ++i) {
                std::uint64_t position, ticket;
                {
                    std::lock_guard lock(fixture.writer.staging_lock());
                    position = fixture.writer.stage(
                        topic, {reinterpret_cast<const std::uint8_t *>(data.data()), data.size(), {}, {}, {}, 0});
                    if (i % 3 == 0) fixture.writer.stage_state(7, 0, reinterpret_cast<const std::uint8_t *>("s"), 1);
                    ticket = fixture.writer.ticket();
                }
                CommitResult result = fixture.writer.commit(ticket);
                if (result.failure == Failure::none) CHECK(stored[worker].insert(position).second);
                else ++refused;
            }
        });
    for (auto &thread : running) thread.join();
    Scan scan = fixture.scan();
    std::size_t acknowledged = 0;
    std::map<std::uint64_t, const IndexEntry *> found;
    for (const IndexEntry &entry : scan.index) found[entry.position] = &entry;
    for (int worker = 0; worker < workers; ++worker) {
        acknowledged += stored[worker].size();
        std::uint32_t topic = fixture.writer.topic("topic." + std::to_string(worker));
        for (std::uint64_t position : stored[worker]) {
            CHECK(found.count(position));
            CHECK(found[position]->topic == topic && found[position]->length == static_cast<std::uint32_t>(worker * 10));
        }
    }
    CHECK(scan.damage.empty());
    CHECK(acknowledged == scan.index.size());
    CHECK(acknowledged + static_cast<std::size_t>(refused) == workers * each);
    CHECK(fixture.durable() == scan.next_position);
    CHECK(fail_every ? refused > 0 : refused == 0);
    for (const ScanTopic &topic : scan.topics) {
        std::uint64_t count = 0;
        for (const IndexEntry &entry : scan.index)
            if (entry.topic == topic.id) CHECK(entry.ordinal == ++count);  // contiguous also after refusals
    }
}

static void failed_sync() {
    Fixture fixture;
    std::uint32_t topic = fixture.writer.topic("a");
    fixture.writer.stage(topic, {});
    CHECK(fixture.writer.commit().failure == Failure::none);
    fixture.disk.sync_error = EIO;
    fixture.writer.stage(topic, {});
    CHECK(fixture.writer.commit().failure == Failure::sync && fixture.durable() == 2);
    fixture.disk.sync_error = 0;
    fixture.writer.stage(topic, {});
    CHECK(fixture.writer.commit().failure == Failure::sync);  // for good
    CHECK(fixture.durable() == 2 && !fixture.writer.take_lead(false));
}

// Whatever the bytes, scanning ends, stays inside them, and hands out only records whose checksum is right.
static void damaged_bytes() {
    Fixture fixture;
    std::mt19937_64 random(42);
    std::uint32_t topic = fixture.writer.topic("topic");
    for (int i = 0; i < 60; ++i) {
        std::vector<std::uint8_t> data(random() % 300, static_cast<std::uint8_t>(i));
        fixture.writer.stage(topic, {data.data(), data.size(), {}, "id", "key", 0});
        if (i % 4 == 0) CHECK(fixture.writer.commit().failure == Failure::none);
    }
    CHECK(fixture.writer.commit().failure == Failure::none);
    auto whole = fixture.disk.files[log_file];
    whole.resize(fixture.writer.segment().end);
    Scan right = fixture.scan();
    for (int turn = 0; turn < 3000; ++turn) {
        auto bytes = whole;
        for (unsigned i = 0; i < 1 + random() % 6; ++i) {
            std::uint64_t value = random() % 2 ? random() : random() % 64;
            std::size_t at = segment_header_bytes + random() % (bytes.size() - segment_header_bytes - 8);
            std::memcpy(bytes.data() + at, &value, 1 + random() % 8);
        }
        bytes.resize(bytes.size() - random() % 2 * (random() % (bytes.size() - segment_header_bytes)));
        Scan scan = scan_segment(bytes.data(), bytes.size(), {nonce, 1, 61, random() % 62, random() % 2 == 0});
        for (const IndexEntry &entry : scan.index) {
            CHECK(entry.offset + sizeof(RecordHeader) + entry.length <= bytes.size());
            CHECK(std::memcmp(bytes.data() + entry.offset, whole.data() + right.index[entry.position - 1].offset, 48) == 0);
        }
        Composed composed = compose_segment(bytes.data(), bytes.size(), scan.index.data(), scan.index.size(), 77, 1, nullptr, 0, 0, 0);
        CHECK(composed.index.size() == scan.index.size());
        record_keys(bytes.data(), bytes.size(), scan.index.data(), scan.index.size());
    }
}

static void checksums() {
    std::vector<std::uint8_t> data(5000);
    std::mt19937 random(1);
    for (auto &byte : data) byte = static_cast<std::uint8_t>(random());
    CHECK(crc32c(0, "123456789", 9) == 0xe3069283 && crc32(0, "123456789", 9) == 0xcbf43926);
    for (std::size_t from = 0; from < 20; ++from)
        for (std::size_t bytes : {0, 1, 15, 16, 63, 64, 65, 79, 80, 200, 4096}) {
            const std::uint8_t *at = data.data() + from;
            CHECK(crc32c(7, at, bytes) == crc32c_table(7, at, bytes));
            std::uint32_t slow = 7;
            for (std::size_t i = 0; i < bytes; ++i) slow = crc32(slow, at + i, 1);
            CHECK(crc32(7, at, bytes) == slow);
        }
}

int main() {
    checksums();
    threads(0);
    threads(7);
    failed_sync();
    damaged_bytes();
    std::puts("journal_writer: ok");
}
