// Scans a segment's bytes, for recovery, verify, repair and rebuilding an index. Works on a
// copy of the file in memory (never on a mapping, which a truncated file would turn into a fault). Pure, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "journal/format.hpp"

namespace penstock::journal {

struct ScanTopic {
    std::uint32_t id;
    std::uint8_t flags;
    std::string name;
    std::uint64_t next_ordinal;
    std::int64_t last_stored_ns;
};

struct ScanState {
    std::uint32_t kind;
    std::uint8_t flags;
    std::uint64_t offset;  // of the data
    std::uint32_t bytes;
};

struct ScanDamage {
    std::uint64_t offset, bytes;
    std::uint64_t first_position, next_position;  // what cannot be read; equal: no message is concerned
    std::string text;
};

struct Scan {
    std::vector<IndexEntry> index;
    std::vector<ScanTopic> topics;  // as of the end: next ordinals count the messages seen
    std::vector<ScanState> states;  // since the last snapshot
    std::vector<ScanDamage> damage;
    std::uint64_t end = 0;            // after the last whole batch
    std::uint64_t next_position = 0;
    std::uint64_t batches = 0;
    std::uint64_t state_records = 0;
    std::int64_t least_time_ns = INT64_MAX, greatest_time_ns = INT64_MIN;
    std::int64_t least_stored_ns = INT64_MAX, greatest_stored_ns = INT64_MIN;
    std::uint64_t tail_bytes = 0;     // from `end` to the last byte that is not zero
    std::uint64_t open_group = 0;     // where a group began whose last batch is missing
};

struct ScanRange {
    std::uint64_t nonce;
    std::uint64_t first_position;
    std::uint64_t limit_position;    // where the next segment begins: positions from there on are void
    std::uint64_t durable_position;  // positions below it must exist: an error below it is damage, not a torn tail
    bool gaps_allowed;
};

// The size of the intact batch at `at`, or 0.
std::uint64_t check_batch(const std::uint8_t *at, std::uint64_t room, std::uint64_t nonce);
// CRC-32 of each block up to `end`, the seal in the header taken as zeros; the last one may be of a part of a block.
std::vector<std::uint32_t> block_sums(const std::uint8_t *data, std::uint64_t end);
// One for each topic in an index, in order of topic: the `.topics` file.
std::vector<TopicSummary> summarise(const IndexEntry *entries, std::size_t count, std::uint64_t nonce);
Scan scan_segment(const std::uint8_t *data, std::uint64_t size, const ScanRange &range);

}  // namespace penstock::journal
