// The journal's bytes on disk, version 2. docs/formats.md, "Journal", has the tables; this header and layout.py are the
// only places that know them. Little-endian; all structures are naturally aligned and have no padding of the compiler's.
//
//   segment  = header (4096) batch*           batch = header (64) record*
//   record   = header (56) data properties id key account padding-to-8
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace penstock::journal {

static_assert(std::endian::native == std::endian::little, "the journal is read and written in place");

inline constexpr std::uint32_t format_version = 2;
inline constexpr std::uint64_t segment_header_bytes = 4096;
inline constexpr std::uint64_t seal_offset = 512;
inline constexpr std::uint64_t block_bytes = 65536;
inline constexpr std::uint32_t batch_magic = 0x54414250;  // "PBAT"
inline constexpr std::uint32_t batch_snapshot = 1;
inline constexpr std::uint32_t batch_topics = 2;  // it has topic records
// its group continues: it counts only if the group's last batch exists
inline constexpr std::uint32_t batch_open = 4;
inline constexpr std::uint64_t max_batch_bytes = std::uint64_t{1} << 30;
inline constexpr std::uint32_t max_name_bytes = 255;

// Topics are numbered as they are asked for and get a record when they are first used, so numbers may have gaps.
// Tables of topics are as long as the greatest number, so a number from a file is refused above max_topics, or where it is
// more than max_unused_topics above the number of topics that have a record.
inline constexpr std::uint32_t max_topics = 1u << 24;
inline constexpr std::uint32_t max_unused_topics = 1u << 20;
inline constexpr bool topic_number_fits(std::uint64_t number, std::uint64_t named) {
    return number >= 1 && number <= max_topics && number <= named + max_unused_topics;
}

enum Kind : std::uint8_t { kind_message = 1, kind_state = 2, kind_topic = 3 };
inline constexpr std::uint8_t flag_internal = 1;
inline constexpr std::uint8_t flag_compacted_topic = 2;

enum SegmentFlag : std::uint32_t { segment_compacted = 1, segment_repaired = 2, segment_after_loss = 4 };
inline constexpr std::uint32_t segment_gaps = 3;  // compacted or repaired: positions may be missing

struct SegmentHeader {
    char magic[8];
    std::uint32_t version;
    std::uint32_t flags;
    std::uint8_t uuid[16];
    std::uint64_t nonce;
    std::uint64_t first_position;
    std::int64_t made_ns;
    std::uint32_t revision;
    std::uint32_t checksum;
};
static_assert(sizeof(SegmentHeader) == 64 && offsetof(SegmentHeader, checksum) == 60);

struct Seal {
    std::uint64_t end;
    std::uint64_t next_position;
    std::uint64_t messages;
    std::int64_t least_time_ns;
    std::int64_t greatest_time_ns;
    std::int64_t least_stored_ns;
    std::int64_t greatest_stored_ns;
    std::uint32_t reserved;
    std::uint32_t checksum;
};
static_assert(sizeof(Seal) == 64 && offsetof(Seal, checksum) == 60);

struct BatchHeader {
    std::uint32_t magic;
    std::uint32_t checksum;
    std::uint64_t nonce;
    std::uint64_t first_position;
    std::uint32_t messages;
    std::uint32_t records;
    std::uint64_t bytes;
    std::int64_t time_ns;
    std::uint64_t group;
    std::uint32_t flags;
    std::uint32_t head_checksum;
};
static_assert(sizeof(BatchHeader) == 64 && offsetof(BatchHeader, bytes) == 32 && offsetof(BatchHeader, head_checksum) == 60);

struct RecordHeader {
    std::uint32_t checksum;
    std::uint32_t bytes;
    std::uint8_t kind;
    std::uint8_t flags;
    std::uint16_t id_bytes;
    std::uint16_t key_bytes;
    std::uint16_t account_bytes;
    std::uint32_t topic;
    std::uint32_t properties_bytes;
    std::uint32_t data_bytes;
    std::uint32_t position_low;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::int64_t stored_ns;
};
static_assert(sizeof(RecordHeader) == 56 && offsetof(RecordHeader, topic) == 16 && offsetof(RecordHeader, ordinal) == 32);

struct IndexEntry {
    std::uint64_t position;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::int64_t stored_ns;
    std::uint64_t offset;
    std::uint32_t length;
    std::uint32_t topic;
    std::uint32_t extra_bytes;
    std::uint32_t checksum;
    std::uint32_t reserved;
    std::uint32_t entry_checksum;
};
static_assert(sizeof(IndexEntry) == 64 && offsetof(IndexEntry, entry_checksum) == 60);

struct TopicSummary {
    std::uint32_t topic;
    std::uint32_t checksum;
    std::uint64_t messages;
    std::uint64_t least_position;
    std::uint64_t greatest_position;
    std::uint64_t least_ordinal;
    std::uint64_t greatest_ordinal;
    std::int64_t least_time_ns;
    std::int64_t greatest_time_ns;
    std::int64_t least_stored_ns;
    std::int64_t greatest_stored_ns;
};
static_assert(sizeof(TopicSummary) == 80 && offsetof(TopicSummary, messages) == 8);

// The frontier file: its head, and two copies of its words, written one after the other at each move.
struct FrontierHead {
    char magic[8];
    std::uint32_t version;
    std::uint32_t reserved;
    std::uint8_t uuid[16];
};
static_assert(sizeof(FrontierHead) == 32);

struct FrontierCopy {
    std::uint64_t sequence;
    std::uint64_t frontier;
    std::uint64_t segment;
    std::uint64_t end;
    std::uint64_t generation;
    std::uint64_t first;
    std::uint32_t pid;
    std::uint32_t checksum;
};
static_assert(sizeof(FrontierCopy) == 56 && offsetof(FrontierCopy, checksum) == 52);
inline constexpr std::uint64_t frontier_bytes = 4096;
inline constexpr std::uint64_t frontier_first_copy = 64;
inline constexpr std::uint64_t frontier_second_copy = 128;
inline constexpr std::uint64_t frontier_bell = 192;

inline constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) & ~std::uint64_t{7}; }

// Properties, message id, key and account: everything after the data.
inline std::uint64_t extra_bytes(const RecordHeader &record) {
    return std::uint64_t{record.properties_bytes} + record.id_bytes + record.key_bytes + record.account_bytes;
}

// Whether the sizes in a record header fit into `room` bytes; checked before anything else of it is used.
inline bool record_fits(const RecordHeader &record, std::uint64_t room) {
    return record.bytes <= room && record.bytes == padded(sizeof(RecordHeader) + record.data_bytes + extra_bytes(record)) &&
           record.kind >= kind_message && record.kind <= kind_topic;
}

// The index entry of a record; seal_entry adds its checksum.
inline IndexEntry entry_of(const RecordHeader &record, std::uint64_t position, std::uint64_t offset) {
    return {position, record.ordinal, record.timestamp_ns, record.stored_ns, offset, record.data_bytes, record.topic,
            static_cast<std::uint32_t>(extra_bytes(record)), record.checksum, 0, 0};
}

}  // namespace penstock::journal
