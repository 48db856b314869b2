// The journal's bytes on disk. docs/formats.md, "Journal", has the tables; this header and format.py are the only
// places that know them. Little-endian; all structures are naturally aligned and have no padding of the compiler's.
//
//   segment  = header (4096) batch*           batch = header (64) record*
//   record   = header (48) data properties id key padding-to-8
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace penstock::journal {

static_assert(std::endian::native == std::endian::little, "the journal is read and written in place");

inline constexpr std::uint64_t segment_header_bytes = 4096;
inline constexpr std::uint64_t block_bytes = 65536;
inline constexpr std::uint32_t batch_magic = 0x54414250;  // "PBAT"
inline constexpr std::uint32_t batch_snapshot = 1;
inline constexpr std::uint32_t batch_topics = 2;  // it has topic records
inline constexpr std::uint64_t max_batch_bytes = std::uint64_t{1} << 30;
inline constexpr std::uint32_t max_name_bytes = 255;

enum Kind : std::uint8_t { kind_message = 1, kind_state = 2, kind_topic = 3 };
inline constexpr std::uint8_t flag_internal = 1;
inline constexpr std::uint8_t flag_compacted_topic = 2;

struct BatchHeader {
    std::uint32_t magic;
    std::uint32_t checksum;
    std::uint64_t nonce;
    std::uint64_t first_position;
    std::uint32_t messages;
    std::uint32_t records;
    std::uint64_t bytes;
    std::int64_t time_ns;
    std::uint64_t previous;
    std::uint32_t flags;
    std::uint32_t reserved;
};
static_assert(sizeof(BatchHeader) == 64 && offsetof(BatchHeader, bytes) == 32 && offsetof(BatchHeader, flags) == 56);

struct RecordHeader {
    std::uint32_t checksum;
    std::uint32_t bytes;
    std::uint8_t kind;
    std::uint8_t flags;
    std::uint16_t id_bytes;
    std::uint16_t key_bytes;
    std::uint16_t reserved;
    std::uint32_t topic;
    std::uint32_t properties_bytes;
    std::uint32_t data_bytes;
    std::uint32_t reserved_too;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
};
static_assert(sizeof(RecordHeader) == 48 && offsetof(RecordHeader, topic) == 16 && offsetof(RecordHeader, ordinal) == 32);

struct IndexEntry {
    std::uint64_t position;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::uint64_t offset;
    std::uint32_t length;
    std::uint32_t topic;
    std::uint32_t extra_bytes;
    std::uint32_t checksum;
};
static_assert(sizeof(IndexEntry) == 48 && offsetof(IndexEntry, checksum) == 44);

struct FrontierFile {
    char magic[8];
    std::uint32_t version;
    std::uint32_t pid;
    std::uint8_t uuid[16];
    std::uint64_t sequence;
    std::uint64_t frontier;
    std::uint64_t segment;
    std::uint64_t end;
    std::uint64_t generation;
    std::uint64_t first;
};
static_assert(sizeof(FrontierFile) == 80 && offsetof(FrontierFile, sequence) == 32);
inline constexpr std::uint64_t frontier_bytes = 4096;
inline constexpr std::uint64_t frontier_bell = 128;

inline constexpr std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) & ~std::uint64_t{7}; }

// Whether a record header can be what it says within `room` bytes; checked before anything else of it is believed.
inline bool record_fits(const RecordHeader &record, std::uint64_t room) {
    std::uint64_t content = std::uint64_t{record.data_bytes} + record.properties_bytes + record.id_bytes + record.key_bytes;
    return record.bytes <= room && record.bytes == padded(sizeof(RecordHeader) + content) && record.kind >= kind_message &&
           record.kind <= kind_topic;
}

}  // namespace penstock::journal
