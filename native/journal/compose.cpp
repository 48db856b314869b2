#include "journal/compose.hpp"

#include <cstring>

#include "journal/checksum.hpp"
#include "journal/writer.hpp"

namespace penstock::journal {
namespace {

constexpr std::uint64_t batch_goal_bytes = 1 << 20;

bool inside(const IndexEntry &entry, std::uint64_t bytes) {
    return entry.offset <= bytes && bytes - entry.offset >= sizeof(RecordHeader);
}

class Composer {
   public:
    Composer(std::uint64_t nonce, Composed &out) : nonce_(nonce), out_(out) {}

    void begin(std::uint64_t position, std::uint32_t flags) {
        start_ = out_.log.size();
        out_.log.resize(start_ + sizeof(BatchHeader));
        header_ = {batch_magic, 0, nonce_, position, 0, 0, 0, realtime_ns(), position, flags, 0};
        checksums_.clear();
    }

    std::uint64_t bytes() const { return out_.log.size() - start_; }

    // One encoded record; gives its offset in the new file.
    std::uint64_t add(const std::uint8_t *record, std::uint32_t bytes, std::uint64_t position) {
        std::uint64_t at = out_.log.size();
        out_.log.insert(out_.log.end(), record, record + bytes);
        auto low = static_cast<std::uint32_t>(position);
        std::memcpy(out_.log.data() + at + offsetof(RecordHeader, position_low), &low, 4);
        std::uint32_t checksum = crc32c(record_seed(nonce_, position), out_.log.data() + at + 4, bytes - 4);
        std::memcpy(out_.log.data() + at, &checksum, 4);
        checksums_.push_back(checksum);
        ++header_.records;
        return segment_header_bytes + at;
    }

    void count_message() { ++header_.messages; }
    std::uint32_t last_checksum() const { return checksums_.back(); }

    void end() {
        header_.bytes = out_.log.size() - start_;
        seal_header(header_, checksums_.data(), checksums_.size());
        std::memcpy(out_.log.data() + start_, &header_, sizeof header_);
    }

   private:
    std::uint64_t nonce_, start_ = 0;
    Composed &out_;
    BatchHeader header_{};
    std::vector<std::uint32_t> checksums_;
};

}  // namespace

Composed compose_segment(const std::uint8_t *source, std::uint64_t source_bytes, const IndexEntry *entries, std::size_t count,
                         std::uint64_t nonce, std::uint64_t first_position, const std::uint8_t *head,
                         std::uint64_t head_bytes, std::uint32_t head_records, std::uint32_t head_flags) {
    Composed out;
    Composer composer(nonce, out);
    composer.begin(first_position, head_flags | batch_snapshot);
    for (std::uint64_t at = 0; head_records && at + sizeof(RecordHeader) <= head_bytes; --head_records) {
        RecordHeader record;
        std::memcpy(&record, head + at, sizeof record);
        if (!record_fits(record, head_bytes - at)) break;
        composer.add(head + at, record.bytes, first_position);
        at += record.bytes;
    }
    bool open = true;
    const std::uint32_t seed = nonce_seed(nonce);
    std::uint64_t expected = 0;
    for (const IndexEntry *entry = entries; entry < entries + count; ++entry) {
        if (!inside(*entry, source_bytes)) continue;
        RecordHeader record;
        std::memcpy(&record, source + entry->offset, sizeof record);
        if (!record_fits(record, source_bytes - entry->offset)) continue;
        if (entry->position != expected || composer.bytes() > batch_goal_bytes) {
            if (open) composer.end();
            composer.begin(entry->position, 0);
            open = true;
        }
        IndexEntry moved = *entry;
        moved.offset = composer.add(source + entry->offset, record.bytes, entry->position);
        moved.checksum = composer.last_checksum();
        moved.entry_checksum = entry_check(seed, moved);
        composer.count_message();
        out.index.push_back(moved);
        expected = entry->position + 1;
    }
    if (open) composer.end();
    return out;
}

std::vector<std::string> record_keys(const std::uint8_t *source, std::uint64_t source_bytes, const IndexEntry *entries,
                                     std::size_t count) {
    std::vector<std::string> keys(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (!inside(entries[i], source_bytes)) continue;
        RecordHeader record;
        std::memcpy(&record, source + entries[i].offset, sizeof record);
        if (!record_fits(record, source_bytes - entries[i].offset) || !record.key_bytes) continue;
        std::uint64_t at = entries[i].offset + sizeof record + record.data_bytes + record.properties_bytes + record.id_bytes;
        keys[i].assign(reinterpret_cast<const char *>(source + at), record.key_bytes);
    }
    return keys;
}

}  // namespace penstock::journal
