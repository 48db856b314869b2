#include "journal/scan.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
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
        : data_(data), size_(size), range_(range), seed_(nonce_seed(range.nonce)), position_(range.first_position) {}

    Scan run() {
        std::uint64_t at = segment_header_bytes;
        scan_.end = at;
        while (at < size_) {
            std::uint64_t bytes = patient() ? check_batch(data_ + at, size_ - at, range_.nonce) : 0;
            if (bytes && acceptable(at)) {
                auto header = load<BatchHeader>(data_ + at);
                if (header.first_position + (header.messages ? 1 : 0) > range_.limit_position) break;
                take_batch(at, bytes);
                at += bytes;
                continue;
            }
            if (patient()) count_failure(at);
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
        if (first >> 62) return false;  // no journal gets so far: one more than it must not overflow
        return first == position_ || (first > position_ && range_.gaps_allowed);
    }

    void take_batch(std::uint64_t at, std::uint64_t bytes) {
        auto header = load<BatchHeader>(data_ + at);
        const bool open = header.flags & batch_open;
        if (open && !group_) remember_group();
        if (header.flags & batch_snapshot) clear_states();
        position_ = header.first_position;
        std::uint64_t record = at + sizeof(BatchHeader);
        for (std::uint32_t i = 0; i < header.records; ++i) record += take_record(record);
        scan_.end = at + bytes;
        ++scan_.batches;
        open_group_ = open ? header.group : 0;
        if (!open) group_.reset();
    }

    // A damaged header may claim any length, and so may a thousand others, so the bytes checked in vain are bounded by the
    // size of the log. After that no batch is looked for any more, and every record stands for itself (salvage).
    bool patient() const { return failed_bytes_ <= 4 * size_; }

    void count_failure(std::uint64_t at) {
        if (size_ - at < sizeof(BatchHeader)) return;
        auto header = load<BatchHeader>(data_ + at);
        if (header.nonce == range_.nonce && header.head_checksum == batch_head_check(header))
            failed_bytes_ += std::min(header.bytes, size_ - at);
    }

    // The state before a group began: if the group's last batch is missing, the whole group is void. Of topics
    // only those that change are kept, so that opening a group costs no more than what it holds.
    void remember_group() {
        Group group{{}, {}, std::nullopt, scan_.index.size(), scan_.topics.size(), scan_.states.size(), scan_.damage.size(), position_};
        copy_numbers(scan_, group.before);
        group_.emplace(std::move(group));
    }

    static void copy_numbers(const Scan &from, Scan &to) {
        to.end = from.end;
        to.next_position = from.next_position;
        to.batches = from.batches;
        to.state_records = from.state_records;
        to.least_time_ns = from.least_time_ns;
        to.greatest_time_ns = from.greatest_time_ns;
        to.least_stored_ns = from.least_stored_ns;
        to.greatest_stored_ns = from.greatest_stored_ns;
        to.tail_bytes = from.tail_bytes;
        to.open_group = from.open_group;
    }

    void clear_states() {
        if (group_ && !group_->states_before) {
            scan_.states.resize(group_->states);
            group_->states_before = std::move(scan_.states);
        }
        scan_.states.clear();
    }

    void drop_open_group() {
        if (!group_ || group_->position < std::min(range_.durable_position, range_.limit_position)) return;
        scan_.index.resize(group_->entries);
        for (auto &[place, topic] : group_->changed) scan_.topics[place] = std::move(topic);
        scan_.topics.resize(group_->topics);
        if (group_->states_before) scan_.states = std::move(*group_->states_before);
        else scan_.states.resize(group_->states);
        scan_.damage.resize(group_->damage);
        copy_numbers(group_->before, scan_);
        position_ = group_->position;
    }

    std::uint64_t take_record(std::uint64_t at) {
        auto record = load<RecordHeader>(data_ + at);
        if (record.kind == kind_message) {
            IndexEntry entry = entry_of(record, position_++, at);
            entry.entry_checksum = entry_check(seed_, entry);
            scan_.index.push_back(entry);
            ScanTopic &topic = topic_of(record.topic);
            topic.next_ordinal = std::max(topic.next_ordinal, record.ordinal + 1);
            topic.last_stored_ns = std::max(topic.last_stored_ns, record.stored_ns);
            scan_.least_time_ns = std::min(scan_.least_time_ns, record.timestamp_ns);
            scan_.greatest_time_ns = std::max(scan_.greatest_time_ns, record.timestamp_ns);
            scan_.least_stored_ns = std::min(scan_.least_stored_ns, record.stored_ns);
            scan_.greatest_stored_ns = std::max(scan_.greatest_stored_ns, record.stored_ns);
        } else if (record.kind == kind_state) {
            ++scan_.state_records;
            scan_.states.push_back({record.topic, record.flags, at + sizeof record, record.data_bytes});
        } else {
            ScanTopic &topic = topic_of(record.topic);
            topic.name.assign(reinterpret_cast<const char *>(data_ + at + sizeof record), record.data_bytes);
            topic.flags = record.flags;
            topic.next_ordinal = std::max(topic.next_ordinal, record.ordinal);
            topic.last_stored_ns = std::max(topic.last_stored_ns, record.stored_ns);
        }
        return record.bytes;
    }

    ScanTopic &topic_of(std::uint32_t id) {
        auto [place, made] = topic_places_.try_emplace(id, scan_.topics.size());
        if (made) scan_.topics.push_back({id, 0, {}, 1, INT64_MIN});
        ScanTopic &topic = scan_.topics[place->second];
        if (group_ && place->second < group_->topics) group_->changed.try_emplace(place->second, topic);
        return topic;
    }

    // The next intact batch at or after `at` that is consistent with what was read; size_ if there is none.
    std::uint64_t next_batch(std::uint64_t at) {
        for (; at + sizeof(BatchHeader) <= size_ && patient(); at += 8) {
            std::uint32_t magic;
            std::memcpy(&magic, data_ + at, 4);
            if (magic != batch_magic) continue;
            const std::uint64_t first = load<BatchHeader>(data_ + at).first_position;
            if (check_batch(data_ + at, size_ - at, range_.nonce) && first >= position_ && !(first >> 62)) return at;
            count_failure(at);
        }
        return size_;
    }

    // Between a damaged batch and the next intact one: records with a correct checksum are kept, the rest is reported.
    void salvage(std::uint64_t from, std::uint64_t to) {
        std::uint64_t until = to < size_ ? load<BatchHeader>(data_ + to).first_position
                                         : std::min(range_.durable_position, range_.limit_position);
        sum_beginnings(from, to);
        std::uint64_t bad_from = from, bad_position = position_;
        std::uint64_t at = from;
        auto tell = [&](std::uint64_t bad_to) {
            scan_.damage.push_back({bad_from, bad_to - bad_from, bad_position, position_, "checksum does not match"});
        };
        while (at + sizeof(RecordHeader) <= to) {
            std::uint64_t found = find_position(from, at, to, until);
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
        beginnings_ = {};
        position_ = std::max(position_, until);
        if (bad_from < to || bad_position < position_) {
            bool tail = to == size_ && bad_position == position_;
            if (!tail) tell(std::max(to, bad_from));
        }
    }

    // The CRC32C of every prefix of the damaged part, in steps of 8 bytes. With it the checksum of a record that may
    // begin anywhere costs the same, however long it claims to be, so that no payload can make this slow.
    void sum_beginnings(std::uint64_t from, std::uint64_t to) {
        beginnings_.assign(1, 0);
        for (std::uint64_t at = from; at + 8 <= to; at += 8) beginnings_.push_back(crc32c(beginnings_.back(), data_ + at, 8));
    }

    // The position of the record at `at`, which stores the lower half of it; 0 if no intact record can begin here.
    std::uint64_t find_position(std::uint64_t from, std::uint64_t at, std::uint64_t to, std::uint64_t until) const {
        auto record = load<RecordHeader>(data_ + at);
        if (!record_fits(record, to - at)) return 0;
        std::uint64_t position = position_ + (record.position_low - static_cast<std::uint32_t>(position_));
        if (record.kind == kind_message ? position >= until : position > until) return 0;
        std::uint32_t crc = crc32c(record_seed(range_.nonce, position), data_ + at + 4, 4);
        std::uint32_t before = beginnings_[(at + 8 - from) / 8], whole = beginnings_[(at + record.bytes - from) / 8];
        return (crc32c_shift(crc ^ before, record.bytes - 8) ^ whole) == record.checksum ? position : 0;
    }

    void finish() {
        drop_open_group();
        scan_.open_group = open_group_;
        scan_.next_position = position_;
        std::uint64_t last = size_;
        while (last > scan_.end && data_[last - 1] == 0) --last;
        scan_.tail_bytes = last - scan_.end;
    }

    const std::uint8_t *data_;
    std::uint64_t size_;
    ScanRange range_;
    std::uint32_t seed_;
    std::uint64_t position_;
    Scan scan_;
    struct Group {
        Scan before;  // its numbers alone
        std::unordered_map<std::size_t, ScanTopic> changed;  // those of before, by place, as they were
        std::optional<std::vector<ScanState>> states_before;  // where a snapshot has replaced them
        std::size_t entries, topics, states, damage;
        std::uint64_t position;
    };
    std::optional<Group> group_;
    std::uint64_t open_group_ = 0;
    std::uint64_t failed_bytes_ = 0;  // that failed checks may have read
    std::vector<std::uint32_t> beginnings_;
    std::unordered_map<std::uint32_t, std::size_t> topic_places_;
};

}  // namespace

std::uint64_t check_batch(const std::uint8_t *at, std::uint64_t room, std::uint64_t nonce) {
    if (room < sizeof(BatchHeader)) return 0;
    auto header = load<BatchHeader>(at);
    if (header.magic != batch_magic || header.nonce != nonce || header.bytes < sizeof header || header.bytes > room ||
        header.bytes % 8 || header.messages > header.records || header.head_checksum != batch_head_check(header))
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
    constexpr std::uint64_t seal_end = seal_offset + sizeof(Seal);
    const std::uint8_t zeros[sizeof(Seal)] = {};
    std::vector<std::uint32_t> sums;
    for (std::uint64_t at = 0; at < end; at += block_bytes) {
        std::uint64_t stop = std::min(at + block_bytes, end), from = at;
        std::uint32_t crc = 0;
        if (at == 0 && stop >= seal_end) {
            crc = crc32(crc32(0, data, seal_offset), zeros, sizeof zeros);
            from = seal_end;
        }
        sums.push_back(crc32(crc, data + from, stop - from));
    }
    return sums;
}

std::vector<TopicSummary> summarise(const IndexEntry *entries, std::size_t count, std::uint64_t nonce) {
    auto add = [](TopicSummary &summary, const IndexEntry &entry) {
        ++summary.messages;
        summary.greatest_position = entry.position;
        summary.greatest_ordinal = entry.ordinal;
        summary.least_time_ns = std::min(summary.least_time_ns, entry.timestamp_ns);
        summary.greatest_time_ns = std::max(summary.greatest_time_ns, entry.timestamp_ns);
        summary.greatest_stored_ns = entry.stored_ns;
    };
    std::unordered_map<std::uint32_t, TopicSummary> topics;
    TopicSummary *last = nullptr;  // messages of one topic are often adjacent
    for (const IndexEntry *entry = entries; entry < entries + count; ++entry) {
        if (last && last->topic == entry->topic) {
            add(*last, *entry);
            continue;
        }
        auto [place, made] = topics.try_emplace(
            entry->topic, TopicSummary{entry->topic, 0, 0, entry->position, 0, entry->ordinal, 0, entry->timestamp_ns,
                                       entry->timestamp_ns, entry->stored_ns, entry->stored_ns});
        last = &place->second;
        add(*last, *entry);
    }
    std::vector<TopicSummary> ordered;
    for (const auto &[id, summary] : topics) ordered.push_back(summary);
    std::sort(ordered.begin(), ordered.end(), [](const auto &a, const auto &b) { return a.topic < b.topic; });
    for (TopicSummary &summary : ordered) summary.checksum = summary_check(nonce_seed(nonce), summary);
    return ordered;
}

Scan scan_segment(const std::uint8_t *data, std::uint64_t size, const ScanRange &range) {
    return Scanner(data, size, range).run();
}

}  // namespace penstock::journal
