#include "journal/writer.hpp"

#include <cerrno>
#include <cstring>
#include <ctime>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "journal/checksum.hpp"
#include "journal/frontier.hpp"
#include "journal/scan.hpp"

namespace penstock::journal {
namespace {

// Small commits go into space that was zero-written ahead, so that a sync updates no metadata. Larger ones extend the
// file.
constexpr std::uint64_t ahead_bytes = 1 << 20;
constexpr std::uint64_t small_commit_bytes = 1 << 17;
constexpr std::uint64_t kept_staging_bytes = 8 << 20;
constexpr std::size_t failures_remembered = 1024;  // stretches of them

std::atomic<std::uint32_t> forks = 0;

std::uint32_t fork_count() {
    [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
    return forks.load();
}

}  // namespace

std::int64_t realtime_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

Writer::Writer(Disk &disk, std::uint64_t segment_bytes, bool sync, std::uint8_t *frontier, int frontier_file)
    : disk_(disk), segment_bytes_(segment_bytes), sync_(sync), frontier_(frontier), frontier_file_(frontier_file),
      generation_(fork_count()) {
    words_ = read_frontier(frontier_).value_or(FrontierCopy{});
    words_.pid = static_cast<std::uint32_t>(getpid());
}

bool Writer::forked() const { return forks.load(std::memory_order_relaxed) != generation_; }

std::uint32_t Writer::topic(std::string_view name, std::uint8_t flags) {
    std::lock_guard lock(staging_mutex_);
    auto known = names_.find(std::string(name));
    if (known != names_.end()) return known->second;
    if (!topic_number_fits(topics_.size() + 1, committed_topics_)) return 0;
    topics_.push_back({std::string(name), flags});
    return names_[std::string(name)] = static_cast<std::uint32_t>(topics_.size());
}

bool Writer::restore_topic(std::uint32_t id, std::string_view name, std::uint8_t flags, std::uint64_t next_ordinal,
                           std::int64_t last_stored_ns) {
    std::lock_guard lock(staging_mutex_);
    if (!topic_number_fits(id, committed_topics_)) return false;
    if (topics_.size() < id) topics_.resize(id);
    if (!topics_[id - 1].committed) ++committed_topics_;
    topics_[id - 1] = {std::string(name), flags, true, true, next_ordinal, next_ordinal};
    names_[std::string(name)] = id;
    last_stored_ns_ = std::max(last_stored_ns_, last_stored_ns);
    return true;
}

std::uint64_t Writer::staged_bytes() const { return staging_.used; }

// Space for so many bytes at the end of the staging buffer, after space for the batch header; null if full.
std::uint8_t *Writer::grow(std::uint64_t bytes) {
    if (staging_.used == 0) {
        staging_.used = sizeof(BatchHeader);
        staging_.first_position = next_position_;
    }
    std::uint64_t needed = staging_.used + bytes;
    if (needed > max_batch_bytes) return nullptr;
    if (needed > staging_.bytes.size())
        staging_.bytes.resize(std::max<std::uint64_t>(needed, std::min(max_batch_bytes, staging_.bytes.size() * 2 + 65536)));
    std::uint8_t *at = staging_.bytes.data() + staging_.used;
    staging_.used = needed;
    ++staging_.records;
    return at;
}

// Puts the topic's record before its first message.
bool Writer::define(std::uint32_t id) {
    Topic &topic = topics_[id - 1];
    std::uint64_t bytes = padded(sizeof(RecordHeader) + topic.name.size());
    std::uint8_t *at = grow(bytes);
    if (!at) return false;
    RecordHeader record{};
    record.bytes = static_cast<std::uint32_t>(bytes);
    record.kind = kind_topic;
    record.flags = topic.flags;
    record.topic = id;
    record.data_bytes = static_cast<std::uint32_t>(topic.name.size());
    record.ordinal = topic.next_ordinal;
    record.timestamp_ns = record.stored_ns = last_stored_ns_;
    std::memcpy(at, &record, sizeof record);
    std::memset(at + bytes - 8, 0, 8);
    std::memcpy(at + sizeof record, topic.name.data(), topic.name.size());
    topic.staged = true;
    staging_.flags |= batch_topics;
    return true;
}

// Sets the time of storing for the messages of one call. It never goes back, even if the clock is set back.
void Writer::advance_clock() { last_stored_ns_ = std::max(last_stored_ns_, realtime_ns()); }

void Writer::put_message(std::uint8_t *at, std::uint64_t bytes, std::uint32_t id, const Content &content) {
    RecordHeader record{0,
                        static_cast<std::uint32_t>(bytes),
                        kind_message,
                        0,
                        static_cast<std::uint16_t>(content.message_id.size()),
                        static_cast<std::uint16_t>(content.key.size()),
                        static_cast<std::uint16_t>(content.account.size()),
                        id,
                        static_cast<std::uint32_t>(content.properties.size()),
                        static_cast<std::uint32_t>(content.bytes),
                        0,  // filled in with the checksum
                        topics_[id - 1].next_ordinal++,
                        content.timestamp_ns == time_now ? last_stored_ns_ : content.timestamp_ns,
                        last_stored_ns_};
    std::memset(at + bytes - 8, 0, 8);  // the padding; overwritten if there is none
    std::memcpy(at, &record, sizeof record);
    at += sizeof record;
    if (content.bytes) std::memcpy(at, content.data, content.bytes);
    at += content.bytes;
    for (std::string_view part : {content.properties, content.message_id, content.key, content.account}) {
        if (part.empty()) continue;
        std::memcpy(at, part.data(), part.size());
        at += part.size();
    }
    ++staging_.messages;
    ++next_position_;
}

std::uint64_t Writer::stage(std::uint32_t id, const Content &content) {
    std::lock_guard lock(staging_mutex_);
    if (!topics_[id - 1].staged && !define(id)) return 0;
    std::uint64_t extra = content.properties.size() + content.message_id.size() + content.key.size() + content.account.size();
    std::uint64_t bytes = padded(sizeof(RecordHeader) + content.bytes + extra);
    std::uint8_t *at = grow(bytes);
    if (!at) return 0;
    std::uint64_t position = next_position_;
    advance_clock();
    put_message(at, bytes, id, content);
    return position;
}

std::uint64_t Writer::stage_many(const std::uint32_t *topics, std::size_t topic_stride, const std::uint8_t *buffer,
                                 const std::uint64_t *offsets, const std::uint64_t *lengths, std::size_t count,
                                 const std::int64_t *times) {
    std::lock_guard lock(staging_mutex_);
    std::uint64_t total = 0;
    for (std::size_t i = 0; i < count; ++i) total += padded(sizeof(RecordHeader) + lengths[i]);
    if (staging_.used + total + sizeof(BatchHeader) > max_batch_bytes) return 0;
    if (std::uint64_t needed = staging_.used + total + sizeof(BatchHeader); needed > staging_.bytes.size())
        staging_.bytes.resize(needed);
    std::uint64_t first = next_position_;
    advance_clock();
    for (std::size_t i = 0; i < count; ++i) {
        std::uint32_t id = topics[i * topic_stride];
        if (!topics_[id - 1].staged && !define(id)) return 0;
        std::uint64_t bytes = padded(sizeof(RecordHeader) + lengths[i]);
        std::uint8_t *at = grow(bytes);
        if (!at) return 0;
        put_message(at, bytes, id, {buffer + offsets[i], lengths[i], {}, {}, {}, times ? times[i] : time_now});
    }
    return first;
}

bool Writer::stage_state(std::uint32_t kind, std::uint8_t flags, const std::uint8_t *data, std::uint64_t bytes) {
    std::lock_guard lock(staging_mutex_);
    std::uint64_t whole = padded(sizeof(RecordHeader) + bytes);
    std::uint8_t *at = grow(whole);
    if (!at) return false;
    RecordHeader record{};
    record.bytes = static_cast<std::uint32_t>(whole);
    record.kind = kind_state;
    record.flags = flags;
    record.topic = kind;
    record.data_bytes = static_cast<std::uint32_t>(bytes);
    std::memset(at + whole - 8, 0, 8);
    std::memcpy(at, &record, sizeof record);
    if (bytes) std::memcpy(at + sizeof record, data, bytes);
    return true;
}

bool Writer::was_failed(std::uint64_t number) const {
    if (number <= failed_unknown_) return true;
    auto after = std::upper_bound(failed_.begin(), failed_.end(), number,
                                  [](std::uint64_t n, const auto &stretch) { return n < stretch.first; });
    return after != failed_.begin() && std::prev(after)->second >= number;
}

// Adjacent ones are merged: a disk that stays full costs one entry, however often it refuses.
void Writer::note_failed(std::uint64_t number) {
    if (!failed_.empty() && failed_.back().second + 1 == number) failed_.back().second = number;
    else failed_.emplace_back(number, number);
    if (failed_.size() <= failures_remembered) return;
    failed_unknown_ = failed_.front().second;
    failed_.pop_front();
}

CommitResult Writer::commit(std::uint64_t number) {
    if (forked()) return {Failure::forked, 0, false};
    if (number == 0) {
        std::lock_guard staging(staging_mutex_);
        std::lock_guard lead(lead_mutex_);
        number = staging_.used ? staging_number_ : staging_number_ - 1;
        // nothing is staged, and the failure was reported to whoever had staged
        if (!staging_.used && was_failed(number)) return {};
    }
    {
        std::unique_lock lead(lead_mutex_);
        lead_changed_.wait(lead, [&] { return done_number_ >= number || !leading_; });
        if (done_number_ >= number && was_failed(number)) return {Failure::write, failed_error_, false};
        if (done_number_ >= number) return {Failure::none, 0, full_};
        if (failure_ != Failure::none) return {failure_, failed_error_, false};
        leading_ = true;
    }
    CommitResult result;
    try {
        result = lead(number);
    } catch (...) {  // no memory to undo what was refused: the state is no longer known
        result = {Failure::sync, ENOMEM, false};
    }
    {
        std::lock_guard lead(lead_mutex_);
        if (result.failure == Failure::none) done_number_ = number;
        if (result.failure == Failure::sync) failure_ = Failure::sync;
        if (result.failure != Failure::none) failed_error_ = result.error;
        leading_ = false;
    }
    lead_changed_.notify_all();
    return result;
}

// Writes all that is staged; `number` becomes that of the batch.
CommitResult Writer::lead(std::uint64_t &number) {
    {
        std::lock_guard staging(staging_mutex_);
        std::swap(staging_, writing_);
        staging_ = Staging{std::move(staging_.bytes)};
        number = staging_number_++;
    }
    CommitResult result = flush(writing_, 0);
    if (result.failure == Failure::write) give_back(number);
    if (writing_.bytes.size() > kept_staging_bytes) writing_.bytes = {};
    return result;
}

void Writer::open_group() { group_ = committed_position_; }

CommitResult Writer::commit_part() { return lead_in_group(true); }

CommitResult Writer::close_group() { return lead_in_group(false); }

CommitResult Writer::lead_in_group(bool open) {
    if (forked()) return {Failure::forked, 0, false};
    {
        std::lock_guard lead(lead_mutex_);
        if (failure_ != Failure::none) return {failure_, failed_error_, false};
    }
    std::uint64_t number = 0;
    {
        std::lock_guard staging(staging_mutex_);
        if (!staging_.used) {  // write an empty batch, which ends the group
            staging_.used = sizeof(BatchHeader);
            staging_.bytes.resize(std::max(staging_.bytes.size(), staging_.used));
            staging_.first_position = next_position_;
        }
        std::swap(staging_, writing_);
        staging_ = Staging{std::move(staging_.bytes)};
        number = staging_number_++;
    }
    group_goes_on_ = open;
    CommitResult result = flush(writing_, 0);
    group_goes_on_ = true;  // for what is written before its end, such as the head of a segment
    if (writing_.bytes.size() > kept_staging_bytes) writing_.bytes = {};
    {
        std::lock_guard lead(lead_mutex_);
        if (result.failure != Failure::none) {  // parts of it are written: only opening the journal again removes them
            result.failure = failure_ = Failure::sync;
            failed_error_ = result.error;
        } else if (!open) {
            done_number_ = number;
            leading_ = false;
        }
    }
    if (!open) lead_changed_.notify_all();
    return result;
}

void Writer::drop_group() {
    {
        std::lock_guard lead(lead_mutex_);
        if (failure_ == Failure::none) {
            failure_ = Failure::sync;
            failed_error_ = ECANCELED;
        }
        leading_ = false;
    }
    lead_changed_.notify_all();
}

// After a failed write: takes back all positions assigned since the last commit, and what was staged meanwhile.
void Writer::give_back(std::uint64_t number) {
    std::lock_guard staging(staging_mutex_);
    bool others = staging_.used != 0;
    staging_ = Staging{std::move(staging_.bytes)};
    next_position_ = committed_position_;
    for (Topic &topic : topics_) {
        topic.staged = topic.committed;
        topic.next_ordinal = topic.committed_ordinal;
    }
    std::lock_guard lead(lead_mutex_);
    ++failures;
    if (counters_) counters_->errors.add();
    note_failed(number);
    if (others) note_failed(number = staging_number_++);  // whoever staged meanwhile gets the failure too
    done_number_ = number;
}

CommitResult Writer::flush(Staging &staging, std::uint32_t flags) {
    try {
        seal_batch(staging, flags);
    } catch (const std::bad_alloc &) {  // nothing was written yet
        return {Failure::write, ENOMEM, false};
    }
    return store(staging);
}

// Writes a sealed batch and its entries, then moves the frontier.
CommitResult Writer::store(Staging &staging) {
    ActiveSegment &segment = segment_;
    int error = 0;
    if (!entries_.empty())
        error = disk_.write(segment.index, reinterpret_cast<const std::uint8_t *>(entries_.data()),
                            entries_.size() * sizeof(IndexEntry), 0, segment.entries * sizeof(IndexEntry));
    std::uint64_t zeros = 0, after = segment.end + staging.used;
    if (after > segment.zeroed && staging.used <= small_commit_bytes && after < segment_bytes_)
        zeros = std::min(ahead_bytes, segment_bytes_ - after);  // not beyond its size, where the next segment begins
    if (error) return {Failure::write, error, false};
    error = disk_.write(segment.log, staging.bytes.data(), staging.used, zeros, segment.end);
    if (error == ENOSPC && zeros) {  // if there is no room for zeros ahead, store the batch without them
        zeros = 0;
        error = disk_.write(segment.log, staging.bytes.data(), staging.used, 0, segment.end);
    }
    if (error) return undo_write(error);
    if (sync_ && (error = disk_.sync(segment.log))) return {Failure::sync, error, false};
    put_sums(staging.bytes.data(), staging.used);
    segment.end = after;
    segment.zeroed = std::max(segment.zeroed, after + zeros);
    segment.entries += entries_.size();
    committed_position_ = staging.first_position + staging.messages;
    keep_topics();
    full_ = segment.end >= segment_bytes_;
    ++commits;
    if (counters_) {
        counters_->matched.add(staging.messages);
        counters_->delivered.add(staging.messages);
        counters_->bytes.add(staging.used);
        counters_->last_ns.set(static_cast<std::uint64_t>(realtime_ns()));
    }
    if (group_ && !group_goes_on_) group_ = 0;
    if (!group_) move_frontier();
    return {Failure::none, 0, full_};
}

// A failed write may have left a complete batch behind. It was refused, so it must not be found when the journal is
// opened next: its first bytes are wiped, on disk too. If that fails, the state of the file is unknown.
CommitResult Writer::undo_write(int error) {
    std::uint32_t there = 0;
    ssize_t got = pread(segment_.log, &there, sizeof there, static_cast<off_t>(segment_.end));
    if (got < 0) return {Failure::sync, error, false};
    if (got == 0 || there == 0) return {Failure::write, error, false};
    const std::uint8_t wiped[8] = {};
    int failed = disk_.write(segment_.log, wiped, sizeof wiped, 0, segment_.end);
    if (!failed) failed = disk_.sync(segment_.log);
    if (failed) return {Failure::sync, failed, false};
    return {Failure::write, error, false};
}

// Checksums and index entries, in one pass over what is about to be written.
void Writer::seal_batch(Staging &staging, std::uint32_t flags) {
    if (group_ && group_goes_on_) flags |= batch_open;
    BatchHeader header{batch_magic, 0, segment_.nonce, staging.first_position, staging.messages, staging.records,
                       staging.used, realtime_ns(), group_ ? group_ : staging.first_position, flags | staging.flags, 0};
    std::uint8_t *base = staging.bytes.data();
    header.head_checksum = batch_head_check(header);
    std::uint32_t crc = crc32c(0, reinterpret_cast<std::uint8_t *>(&header) + 8, sizeof header - 8);
    const std::uint32_t seed = nonce_seed(segment_.nonce);
    std::uint64_t position = staging.first_position;
    entries_.clear();
    defined_.clear();
    entries_.reserve(staging.messages);
    for (std::uint64_t at = sizeof header; at < staging.used;) {
        RecordHeader record;
        std::memcpy(&record, base + at, sizeof record);
        record.position_low = static_cast<std::uint32_t>(position);
        std::memcpy(base + at + offsetof(RecordHeader, position_low), &record.position_low, 4);
        record.checksum = crc32c(record_seed(segment_.nonce, position), base + at + 4, record.bytes - 4);
        std::memcpy(base + at, &record.checksum, 4);
        crc = crc32c(crc, &record.checksum, 4);
        if (record.kind == kind_message) {
            IndexEntry &entry = entries_.emplace_back(entry_of(record, position++, segment_.end + at));
            entry.entry_checksum = entry_check(seed, entry);
        }
        if (record.kind == kind_topic) defined_.push_back(record.topic);
        if (record.kind == kind_state && !(record.flags & flag_internal)) ++segment_.states;
        at += record.bytes;
    }
    header.checksum = crc;
    std::memcpy(base, &header, sizeof header);
}

// Checksums of the blocks that this batch completes. A failure here does not fail the commit: they are a cache. After a
// failure no more are written, so that the file ends before the missing one instead of having a hole (a wrong
// checksum).
void Writer::put_sums(const std::uint8_t *data, std::uint64_t bytes) {
    std::uint64_t at = segment_.end;
    while (bytes) {
        std::uint64_t piece = std::min(bytes, block_bytes - at % block_bytes);
        segment_.block_crc = crc32(segment_.block_crc, data, piece);
        at += piece;
        data += piece;
        bytes -= piece;
        if (at % block_bytes) continue;
        if (segment_.sums_whole) {
            int error = disk_.write(segment_.sums, reinterpret_cast<std::uint8_t *>(&segment_.block_crc), 4, 0,
                                    (at / block_bytes - 1) * 4);
            if (error) segment_.sums_whole = false;
        }
        segment_.block_crc = 0;
    }
}

void Writer::keep_topics() {
    std::lock_guard lock(staging_mutex_);
    for (std::uint32_t id : defined_) {
        if (!topics_[id - 1].committed) ++committed_topics_;
        topics_[id - 1].committed = true;
    }
    for (const IndexEntry &entry : entries_) {
        Topic &topic = topics_[entry.topic - 1];
        topic.committed_ordinal = entry.ordinal + 1;
    }
}

// Writes both copies, one after the other: at every moment one of them is intact, and at rest either may get damaged.
void Writer::move_frontier() {
    ++words_.sequence;
    if (!group_) {
        words_.frontier = committed_position_;
        words_.segment = segment_.first_position;
        words_.end = segment_.end;
    }
    words_.checksum = frontier_check(frontier_ + offsetof(FrontierHead, uuid), words_);
    put_frontier(frontier_first_copy, words_);
    put_frontier(frontier_second_copy, words_);
    const std::uint8_t bell = 1;
    (void)!pwrite(frontier_file_, &bell, 1, frontier_bell);
}

// In this order, the checksum last: a reader that sees it also sees the rest.
void Writer::put_frontier(std::uint64_t at, const FrontierCopy &copy) {
    std::uint64_t words[sizeof copy / 8];
    std::memcpy(words, &copy, sizeof copy);
    auto *target = reinterpret_cast<std::uint64_t *>(frontier_ + at);
    for (std::size_t i = 0; i < sizeof copy / 8; ++i)
        std::atomic_ref<std::uint64_t>(target[i]).store(words[i], std::memory_order_release);
}

void Writer::publish_frontier(std::uint64_t first, std::uint64_t generation_step) {
    words_.first = first;
    words_.generation += generation_step;
    move_frontier();
}

bool Writer::take_lead(bool only_if_full) {
    std::unique_lock lead(lead_mutex_);
    lead_changed_.wait(lead, [&] { return !leading_; });
    if (failure_ != Failure::none) return false;
    if (only_if_full && !full_) return false;
    leading_ = true;
    return true;
}

void Writer::give_lead() {
    {
        std::lock_guard lead(lead_mutex_);
        leading_ = false;
    }
    lead_changed_.notify_all();
}

void Writer::replace_segment(const ActiveSegment &segment, std::uint64_t next_position) {
    previous_ = segment_;
    segment_ = segment;
    full_ = segment.end >= segment_bytes_;
    if (next_position) {
        std::lock_guard lock(staging_mutex_);
        committed_position_ = next_position_ = next_position;
    }
}

void Writer::restore_segment() {
    segment_ = previous_;
    full_ = segment_.end >= segment_bytes_;
    move_frontier();  // it referred to the segment that was given up
}

CommitResult Writer::commit_records(const std::vector<std::uint8_t> &records, std::uint32_t count, std::uint32_t flags) {
    if (forked()) return {Failure::forked, 0, false};
    Staging staging;
    staging.bytes.resize(sizeof(BatchHeader) + records.size());
    if (!records.empty()) std::memcpy(staging.bytes.data() + sizeof(BatchHeader), records.data(), records.size());
    staging.used = staging.bytes.size();
    staging.first_position = committed_position_;
    staging.records = count;
    CommitResult result = flush(staging, flags);
    if (result.failure == Failure::sync) {
        std::lock_guard lead(lead_mutex_);
        failure_ = Failure::sync;
        failed_error_ = result.error;
    }
    return result;
}

bool Writer::commit_sealed(const std::vector<std::uint8_t> &batch, CommitResult &result) {
    const std::uint64_t whole = check_batch(batch.data(), batch.size(), segment_.nonce);
    if (whole == 0 || whole != batch.size()) return false;
    BatchHeader header;
    std::memcpy(&header, batch.data(), sizeof header);
    if (header.first_position != committed_position_ || !take_records(batch)) return false;
    Staging staging;
    staging.bytes = batch;
    staging.used = batch.size();
    staging.first_position = header.first_position;
    staging.messages = header.messages;
    staging.records = header.records;
    const bool open = header.flags & batch_open;
    if (open && !group_) group_ = header.group;
    group_goes_on_ = open;
    result = store(staging);
    group_goes_on_ = true;
    if (result.failure != Failure::none) {
        fail(result.error);
        return true;
    }
    std::lock_guard lock(staging_mutex_);
    next_position_ = committed_position_;
    return true;
}

// The index entries and the topics of an intact batch; false if a message has a topic without a name.
bool Writer::take_records(const std::vector<std::uint8_t> &batch) {
    const std::uint32_t seed = nonce_seed(segment_.nonce);
    std::uint64_t position = committed_position_;
    entries_.clear();
    defined_.clear();
    for (std::uint64_t at = sizeof(BatchHeader); at < batch.size();) {
        RecordHeader record;
        std::memcpy(&record, batch.data() + at, sizeof record);
        if (record.kind == kind_topic) {
            std::string_view name(reinterpret_cast<const char *>(batch.data() + at + sizeof record), record.data_bytes);
            if (!restore_topic(record.topic, name, record.flags, record.ordinal, record.stored_ns)) return false;
        } else if (record.kind == kind_message) {
            if (record.topic == 0 || record.topic > topics_.size()) return false;
            IndexEntry &entry = entries_.emplace_back(entry_of(record, position++, segment_.end + at));
            entry.entry_checksum = entry_check(seed, entry);
        } else if (!(record.flags & flag_internal)) {
            ++segment_.states;
        }
        at += record.bytes;
    }
    return true;
}

void Writer::fail(int error) {
    {
        std::lock_guard lead(lead_mutex_);
        if (failure_ == Failure::none) failure_ = Failure::sync;
        failed_error_ = error;
    }
    lead_changed_.notify_all();
}

void Writer::close() {
    if (forked()) return;
    {
        std::unique_lock lead(lead_mutex_);
        lead_changed_.wait(lead, [&] { return !leading_; });
        if (failure_ == Failure::none) failure_ = Failure::closed;
    }
    lead_changed_.notify_all();
}

}  // namespace penstock::journal
