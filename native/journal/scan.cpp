#include "journal/scan.hpp"

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "journal/checksum.hpp"

namespace penstock::journal {
namespace {

template <typename Header>
Header load(const std::uint8_t *at) {
    Header header;
    std::memcpy(&header, at, sizeof header);
    return header;
}

bool record_whole(const std::uint8_t *at, std::uint64_t room, std::uint64_t nonce, std::uint64_t position) {
    if (room < sizeof(RecordHeader)) return false;
    auto record = load<RecordHeader>(at);
    return record_fits(record, room) &&
           crc32c(record_seed(nonce, position), at + 4, record.bytes - 4) == record.checksum;
}

class Scanner {
   public:
    Scanner(const std::uint8_t *data, std::uint64_t size, const ScanRange &range)
        : data_(data), size_(size), range_(range), position_(range.first_position) {}

    Scan run() {
        std::uint64_t at = segment_header_bytes;
        scan_.end = at;
        while (at < size_) {
            std::uint64_t bytes = check_batch(data_ + at, size_ - at, range_.nonce);
            if (bytes && acceptable(at)) {
                auto header = load<BatchHeader>(data_ + at);
                if (header.first_position + (header.messages ? 1 : 0) > range_.limit_position) break;
                take_batch(at, bytes);
                at += bytes;
                continue;
            }
            std::uint64_t next = next_batch(at + 8);
            if (next == size_ && position_ >= std::min(range_.durable_position, range_.limit_position)) break;
            salvage(at, next);
            at = next;
        }
        finish();
        return std::move(scan_);
    }

   private:
    bool acceptable(std::uint64_t at) const {
        std::uint64_t first = load<BatchHeader>(data_ + at).first_position;
        return first == position_ || (first > position_ && range_.gaps_allowed);
    }

    void take_batch(std::uint64_t at, std::uint64_t bytes) {
        auto header = load<BatchHeader>(data_ + at);
        if (header.flags & batch_snapshot) scan_.states.clear();
        position_ = header.first_position;
        std::uint64_t record = at + sizeof(BatchHeader);
        for (std::uint32_t i = 0; i < header.records; ++i) record += take_record(record);
        scan_.last_batch = at;
        scan_.end = at + bytes;
        ++scan_.batches;
    }

    std::uint64_t take_record(std::uint64_t at) {
        auto record = load<RecordHeader>(data_ + at);
        if (record.kind == kind_message) {
            std::uint32_t extra = record.properties_bytes + record.id_bytes + record.key_bytes;
            scan_.index.push_back({position_++, record.ordinal, record.timestamp_ns, at, record.data_bytes,
                                   record.topic, extra, record.checksum});
            ScanTopic &topic = topic_of(record.topic);
            topic.next_ordinal = std::max(topic.next_ordinal, record.ordinal + 1);
            topic.last_time_ns = std::max(topic.last_time_ns, record.timestamp_ns);
            scan_.least_time_ns = std::min(scan_.least_time_ns, record.timestamp_ns);
            scan_.greatest_time_ns = std::max(scan_.greatest_time_ns, record.timestamp_ns);
        } else if (record.kind == kind_state) {
            ++scan_.state_records;
            scan_.states.push_back({record.topic, record.flags, at + sizeof record, record.data_bytes});
        } else {
            ScanTopic &topic = topic_of(record.topic);
            topic.name.assign(reinterpret_cast<const char *>(data_ + at + sizeof record), record.data_bytes);
            topic.flags = record.flags;
            topic.next_ordinal = std::max(topic.next_ordinal, record.ordinal);
            topic.last_time_ns = std::max(topic.last_time_ns, record.timestamp_ns);
        }
        return record.bytes;
    }

    ScanTopic &topic_of(std::uint32_t id) {
        auto [place, made] = topic_places_.try_emplace(id, scan_.topics.size());
        if (made) scan_.topics.push_back({id, 0, {}, 1, 0});
        return scan_.topics[place->second];
    }

    // The next whole batch at or after `at` that fits what was seen; size_ when there is none.
    std::uint64_t next_batch(std::uint64_t at) const {
        for (; at + sizeof(BatchHeader) <= size_; at += 8) {
            std::uint32_t magic;
            std::memcpy(&magic, data_ + at, 4);
            if (magic == batch_magic && check_batch(data_ + at, size_ - at, range_.nonce) &&
                load<BatchHeader>(data_ + at).first_position >= position_)
                return at;
        }
        return size_;
    }

    // Between a bad batch and the next good one: records that are whole by their own checksum are kept, the rest told.
    void salvage(std::uint64_t from, std::uint64_t to) {
        std::uint64_t until = to < size_ ? load<BatchHeader>(data_ + to).first_position
                                         : std::min(range_.durable_position, range_.limit_position);
        std::uint64_t bad_from = from, bad_position = position_;
        std::uint64_t at = from;
        auto tell = [&](std::uint64_t bad_to) {
            scan_.damage.push_back({bad_from, bad_to - bad_from, bad_position, position_, "checksum does not match"});
        };
        while (at + sizeof(RecordHeader) <= to) {
            std::uint64_t found = find_position(at, to, until);
            if (!found) {
                at += 8;
                continue;
            }
            position_ = found;
            if (bad_from < at) tell(at);
            at += take_record(at);
            scan_.end = std::max(scan_.end, at);
            bad_from = at;
            bad_position = position_;
        }
        position_ = std::max(position_, until);
        if (bad_from < to || bad_position < position_) {
            bool tail = to == size_ && bad_position == position_;
            if (!tail) tell(std::max(to, bad_from));
        }
    }

    // The position under which the record at `at` is whole, 0 when under none that it can have.
    std::uint64_t find_position(std::uint64_t at, std::uint64_t to, std::uint64_t until) const {
        auto record = load<RecordHeader>(data_ + at);
        if (!record_fits(record, to - at)) return 0;
        std::uint64_t last = std::min(until, position_ + 64);
        for (std::uint64_t position = position_; position <= last; ++position)
            if (record_whole(data_ + at, to - at, range_.nonce, position)) return position;
        return 0;
    }

    void finish() {
        scan_.next_position = position_;
        std::uint64_t last = size_;
        while (last > scan_.end && data_[last - 1] == 0) --last;
        scan_.tail_bytes = last - scan_.end;
    }

    const std::uint8_t *data_;
    std::uint64_t size_;
    ScanRange range_;
    std::uint64_t position_;
    Scan scan_;
    std::unordered_map<std::uint32_t, std::size_t> topic_places_;
};

}  // namespace

std::uint64_t check_batch(const std::uint8_t *at, std::uint64_t room, std::uint64_t nonce) {
    if (room < sizeof(BatchHeader)) return 0;
    auto header = load<BatchHeader>(at);
    if (header.magic != batch_magic || header.nonce != nonce || header.bytes < sizeof header || header.bytes > room ||
        header.bytes % 8 || header.messages > header.records)
        return 0;
    std::uint32_t crc = crc32c(0, at + 8, sizeof header - 8);
    std::uint64_t offset = sizeof header, position = header.first_position;
    std::uint32_t messages = 0;
    for (std::uint32_t i = 0; i < header.records; ++i) {
        if (!record_whole(at + offset, header.bytes - offset, nonce, position)) return 0;
        auto record = load<RecordHeader>(at + offset);
        crc = crc32c(crc, &record.checksum, 4);
        if (record.kind == kind_message) ++position, ++messages;
        offset += record.bytes;
    }
    return crc == header.checksum && offset == header.bytes && messages == header.messages ? header.bytes : 0;
}

std::vector<std::uint32_t> block_sums(const std::uint8_t *data, std::uint64_t end) {
    constexpr std::uint64_t seal = 512, seal_end = 560;
    const std::uint8_t zeros[seal_end - seal] = {};
    std::vector<std::uint32_t> sums;
    for (std::uint64_t at = 0; at < end; at += block_bytes) {
        std::uint64_t stop = std::min(at + block_bytes, end), from = at;
        std::uint32_t crc = 0;
        if (at == 0 && stop >= seal_end) {
            crc = crc32(crc32(0, data, seal), zeros, sizeof zeros);
            from = seal_end;
        }
        sums.push_back(crc32(crc, data + from, stop - from));
    }
    return sums;
}

std::vector<std::uint8_t> summarise(const IndexEntry *entries, std::size_t count) {
    struct Summary {
        std::uint32_t topic, reserved;
        std::uint64_t messages, least_position, greatest_position, least_ordinal, greatest_ordinal;
        std::int64_t least_time_ns, greatest_time_ns;
    };
    static_assert(sizeof(Summary) == 64);
    auto add = [](Summary &summary, const IndexEntry &entry) {
        ++summary.messages;
        summary.greatest_position = entry.position;
        summary.greatest_ordinal = entry.ordinal;
        summary.least_time_ns = std::min(summary.least_time_ns, entry.timestamp_ns);
        summary.greatest_time_ns = std::max(summary.greatest_time_ns, entry.timestamp_ns);
    };
    std::unordered_map<std::uint32_t, Summary> topics;
    Summary *last = nullptr;  // messages of one topic often stand together
    for (const IndexEntry *entry = entries; entry < entries + count; ++entry) {
        if (last && last->topic == entry->topic) {
            add(*last, *entry);
            continue;
        }
        auto [place, made] = topics.try_emplace(entry->topic, Summary{entry->topic, 0, 0, entry->position, 0, entry->ordinal, 0,
                                                                      entry->timestamp_ns, entry->timestamp_ns});
        last = &place->second;
        add(*last, *entry);
    }
    std::vector<Summary> ordered;
    for (const auto &[id, summary] : topics) ordered.push_back(summary);
    std::sort(ordered.begin(), ordered.end(), [](const Summary &a, const Summary &b) { return a.topic < b.topic; });
    auto *bytes = reinterpret_cast<const std::uint8_t *>(ordered.data());
    return {bytes, bytes + ordered.size() * sizeof(Summary)};
}

Scan scan_segment(const std::uint8_t *data, std::uint64_t size, const ScanRange &range) {
    return Scanner(data, size, range).run();
}

}  // namespace penstock::journal
