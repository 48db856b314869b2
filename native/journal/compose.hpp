// Composes a new segment from records of an old one, for compaction and repair. Pure, any thread.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "journal/format.hpp"

namespace penstock::journal {

struct Composed {
    std::vector<std::uint8_t> log;  // what follows the segment's header
    std::vector<IndexEntry> index;
};

// A first batch of `head` (encoded topic and state records), then the records of `entries`, a batch for each run of
// positions. `source` are the bytes of the old file, `entries` point into it and must have been checked.
Composed compose_segment(const std::uint8_t *source, std::uint64_t source_bytes, const IndexEntry *entries, std::size_t count,
                         std::uint64_t nonce, std::uint64_t first_position, const std::uint8_t *head,
                         std::uint64_t head_bytes, std::uint32_t head_records, std::uint32_t head_flags);

// The key of each record; empty where it has none.
std::vector<std::string> record_keys(const std::uint8_t *source, std::uint64_t source_bytes, const IndexEntry *entries,
                                     std::size_t count);

}  // namespace penstock::journal
