// Writer: gathers records in memory and commits them as one batch: one write, one sync, then the frontier moves.
//
// Rules
//   - stage* may be called by any thread, and only copies; positions and ordinals are given there, in that order.
//   - commit may be called by any thread: one leads (writes all that is staged by then), the others wait for theirs.
//   - While a thread leads, others stage into the other buffer. Whoever holds the lead may replace the segment.
//   - A failed write drops everything staged (its positions are used again) and the writer goes on. After a failed
//     sync nothing is known about the file: the writer stays failed.
//   - No Python here; the GIL is not held in commit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "counters/counters.hpp"
#include "journal/disk.hpp"
#include "journal/format.hpp"

namespace penstock::journal {

inline constexpr std::int64_t time_now = INT64_MIN;  // no time was given: it is that of storing

struct Content {
    const std::uint8_t *data = nullptr;
    std::uint64_t bytes = 0;
    std::string_view properties, message_id, key;
    std::int64_t timestamp_ns = time_now;
    std::string_view account = {};  // whose message id it is
};

struct Topic {
    std::string name;
    std::uint8_t flags = 0;
    bool staged = false, committed = false;  // its topic record
    std::uint64_t next_ordinal = 1, committed_ordinal = 1;
};

// The open files of the active segment and how far they go.
struct ActiveSegment {
    int log = -1, index = -1, sums = -1;
    std::uint64_t nonce = 0, first_position = 0, end = 0, zeroed = 0;
    std::uint64_t entries = 0;
    std::uint64_t states = 0;  // records of the user's state
    bool sums_whole = true;    // all checksums of blocks were written
    std::uint32_t block_crc = 0;  // of the bytes since the last block border
};

enum class Failure : std::uint8_t { none, write, sync, closed, forked };

struct CommitResult {
    Failure failure = Failure::none;
    int error = 0;
    bool full = false;  // the segment has reached its size: the caller begins a new one
};

class Writer {
   public:
    Writer(Disk &disk, std::uint64_t segment_bytes, bool sync, std::uint8_t *frontier, int frontier_file);

    // Its number; 0: there are too many already, or too many that were never used.
    std::uint32_t topic(std::string_view name, std::uint8_t flags = 0);
    const Topic &topic_at(std::uint32_t id) const { return topics_[id - 1]; }
    std::uint32_t topic_count() const { return static_cast<std::uint32_t>(topics_.size()); }
    // False: a number that no writer gives.
    bool restore_topic(std::uint32_t id, std::string_view name, std::uint8_t flags, std::uint64_t next_ordinal,
                       std::int64_t last_stored_ns);

    // Each gives the position, or 0 when the staging buffer is full. Topic ids must be valid.
    std::uint64_t stage(std::uint32_t topic, const Content &content);
    std::uint64_t stage_many(const std::uint32_t *topics, std::size_t topic_stride, const std::uint8_t *buffer,
                             const std::uint64_t *offsets, const std::uint64_t *lengths, std::size_t count,
                             const std::int64_t *times = nullptr);
    bool stage_state(std::uint32_t kind, std::uint8_t flags, const std::uint8_t *data, std::uint64_t bytes);
    // Hold this during several calls that must go into one batch. Recursive.
    std::recursive_mutex &staging_lock() { return staging_mutex_; }

    // The batch that a record staged now goes into; read it under the staging lock, with the record.
    std::uint64_t ticket() const { return staging_number_; }
    CommitResult commit(std::uint64_t ticket = 0);  // 0: whatever is staged
    bool take_lead(bool only_if_full);  // waits for the leader; false when not full (or failed)
    void give_lead();
    void replace_segment(const ActiveSegment &segment, std::uint64_t next_position);  // by who leads
    void restore_segment();  // undoes the last replace_segment: the new one could not be begun
    // Writes what the caller encoded (a snapshot) into the segment, synced, without touching what is staged. Who leads.
    CommitResult commit_records(const std::vector<std::uint8_t> &records, std::uint32_t count, std::uint32_t flags);
    // Writes a batch that another writer of this journal has sealed for this place, for a copy of its log. False: it is
    // damaged, or belongs elsewhere; nothing was written. Only for the thread that leads, with nothing staged.
    bool commit_sealed(const std::vector<std::uint8_t> &batch, CommitResult &result);
    void publish_frontier(std::uint64_t first, std::uint64_t generation_step);
    // A group: batches, in as many segments as they need, that become visible together. Used by the thread
    // that leads, which keeps the lead from beginning to end; what others stage meanwhile is part of it, and they wait.
    void open_group();
    CommitResult commit_part();  // writes what is staged, invisible to readers; after a failure the writer stays failed
    CommitResult close_group();  // writes what is staged as the group's end, then gives the lead
    void drop_group();           // it is void when the journal is opened next; until then the writer has failed
    // Marks the state of the disk as unknown, as after a failed sync.
    void fail(int error);
    void close();  // waits for the thread that leads
    bool forked() const;  // in a child of the process that made it: its locks may be held by nobody

    const ActiveSegment &segment() const { return segment_; }
    std::uint64_t next_position() const { return next_position_; }  // with what is staged
    std::int64_t last_stored_ns() const { return last_stored_ns_; }  // under the staging lock
    std::uint64_t committed_position() const { return committed_position_; }
    std::uint64_t staged_bytes() const;
    bool failed() const { return failure_ != Failure::none; }
    // set before the first commit; the caller removes it again
    void count_in(Counters *counters) { counters_ = counters; }
    std::atomic<std::uint64_t> commits = 0, failures = 0;  // a failure drops what was staged

   private:
    struct Staging {
        std::vector<std::uint8_t> bytes;
        std::size_t used = 0;
        std::uint64_t first_position = 0;
        std::uint32_t messages = 0, records = 0, flags = 0;
    };

    std::uint8_t *grow(std::uint64_t bytes);
    bool define(std::uint32_t topic);
    void put_message(std::uint8_t *at, std::uint64_t bytes, std::uint32_t topic, const Content &content);
    void advance_clock();
    CommitResult flush(Staging &staging, std::uint32_t flags);
    CommitResult store(Staging &staging);
    bool take_records(const std::vector<std::uint8_t> &batch);
    CommitResult undo_write(int error);
    void seal_batch(Staging &staging, std::uint32_t flags);
    void put_sums(const std::uint8_t *data, std::uint64_t bytes);
    void keep_topics();
    bool was_failed(std::uint64_t number) const;
    void note_failed(std::uint64_t number);
    void give_back(std::uint64_t number);
    void move_frontier();
    void put_frontier(std::uint64_t at, const FrontierCopy &copy);
    CommitResult lead(std::uint64_t &number);
    CommitResult lead_in_group(bool open);

    Disk &disk_;
    std::uint64_t segment_bytes_;
    bool sync_;
    std::uint8_t *frontier_;  // the mapped file
    FrontierCopy words_;      // the words that its copies have, or will have in a moment
    int frontier_file_;
    std::uint32_t generation_;

    std::recursive_mutex staging_mutex_;  // staging_, topics_, next_position_; taken before lead_mutex_, never after it
    Staging staging_;
    std::vector<Topic> topics_;
    std::uint64_t committed_topics_ = 0;
    std::unordered_map<std::string, std::uint32_t> names_;
    std::uint64_t next_position_ = 1;
    std::int64_t last_stored_ns_ = INT64_MIN;  // of the journal: never goes back
    std::uint64_t staging_number_ = 1;  // of the batch that is being gathered

    std::mutex lead_mutex_;
    std::condition_variable lead_changed_;
    bool leading_ = false;
    std::uint64_t done_number_ = 0;    // batches up to it are durable or failed
    std::deque<std::pair<std::uint64_t, std::uint64_t>> failed_;  // first and last of those that failed
    std::uint64_t failed_unknown_ = 0;  // up to it the outcome is not remembered: assume a failure
    int failed_error_ = 0;
    Failure failure_ = Failure::none;

    // Touched by the leader only.
    Staging writing_;
    std::vector<IndexEntry> entries_;
    std::vector<std::uint32_t> defined_;  // topics whose record is in the batch
    ActiveSegment segment_, previous_;
    std::atomic<std::uint64_t> committed_position_ = 1;
    std::atomic<bool> full_ = false;
    std::uint64_t group_ = 0;  // where the open group began; 0: none
    bool group_goes_on_ = true;  // what is written now is not its end
    Counters *counters_ = nullptr;
};

std::int64_t realtime_ns();

}  // namespace penstock::journal
