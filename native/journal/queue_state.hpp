// QueueState: which messages of one queue are done, in flight or waiting to be delivered again. No I/O, no Python.
//
//         done            |        looked at         |   not looked at yet
//   ----------------------+--------------------------+---------------------->  positions
//                       floor                      cursor
//
// Between floor and cursor every position is done (or was never this queue's) unless it has an entry. Memory is
// bounded by what is outstanding, never by the backlog.
//
// What is durable: floor, acknowledged runs above it, how far was delivered, the number of deliveries if above one (or
// if one of them reached nobody), and until when a message waits that was returned with a long delay. delta() returns
// the changes since the last call, snapshot() the complete state; apply() takes either, in the order written, and may
// be repeated. A change of epoch (seek, purge) makes records of older epochs void.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace penstock::journal {

using Run = std::pair<std::int64_t, std::int64_t>;  // closed

class Runs {
   public:
    void add(std::int64_t first, std::int64_t last);
    bool holds(std::int64_t position) const;
    void remove(std::int64_t position);
    void drop_below(std::int64_t position);
    std::int64_t skip(std::int64_t position) const;  // the first position from here on that is not in a run
    bool empty() const { return runs_.empty(); }
    void clear() { runs_.clear(); }
    const std::map<std::int64_t, std::int64_t> &all() const { return runs_; }

   private:
    std::map<std::int64_t, std::int64_t> runs_;
};

struct Waiting {
    std::int64_t position;
    std::uint32_t deliveries;  // so far
};

class QueueState {
   public:
    explicit QueueState(std::int64_t start) : floor_(start), cursor_(start) {}

    // A new message. False: it was done before a restart, or it waits: for the time to which it was delayed before the
    // restart, or to become a dead letter (due at once) if it was delivered `most` times (0: no limit). Otherwise
    // `deliveries` includes this delivery.
    bool deliver(std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns, std::uint32_t &deliveries,
                 std::int64_t now_ns = 0, std::uint32_t most = 0);
    // The same, but it waits until due_ns (delayed) or counts as done at once.
    bool hold(std::int64_t position, std::int64_t due_ns);
    void pass(std::int64_t position);
    void look_from(std::int64_t cursor) {
        if (cursor > cursor_) cursor_ = cursor;
        settle_floor();
    }

    // Marks what `consumer` (0: anybody) holds from first to last as done. First deliveries go out in order, so a range
    // that ends at one that was read covers only what was read before it; a redelivered message may be in transit at
    // the same time as the range, so it counts only if it is the first or last one, or if the range is `exact`.
    std::size_t acknowledge(std::uint32_t consumer, std::int64_t first, std::int64_t last, bool exact = false);
    // The same for messages one by one, in any order and whoever holds them.
    std::size_t acknowledge_each(const std::vector<std::int64_t> &positions);
    // Undoes an acknowledgement, or a move of the cursor, that could not be stored: the message waits again.
    void put_back(std::int64_t position, std::uint32_t deliveries, std::int64_t due_ns);
    // Marks a message at or past the cursor that is still to be delivered as done; false: there is none.
    bool finish_ahead(std::int64_t position);
    // Undoes finish_ahead.
    void reopen(std::int64_t position);
    // Lets a waiting message wait until later.
    bool postpone(std::int64_t position, std::int64_t due_ns);
    // `lasting`: it waits until then after a restart too.
    bool return_message(std::uint32_t consumer, std::int64_t position, std::int64_t due_ns, bool lasting = false);
    // It reached nobody: due again now, and this delivery does not count.
    bool take_back(std::int64_t position, std::int64_t now_ns);
    // Its consumer is still working on it: restart its ack time-out.
    bool extend(std::int64_t position, std::int64_t deadline_ns);
    // A consumer has acknowledged first to last. What it holds after that waits to be read, so it does not expire
    // before `deadline_ns`. What it holds before that, it is working on: that gets the same deadline, once.
    void heard(std::uint32_t consumer, std::int64_t first, std::int64_t last, std::int64_t deadline_ns);
    std::size_t drop_consumer(std::uint32_t consumer, std::int64_t now_ns, bool delivered);
    // Limits all deadlines to `latest_ns`, for a clock that was set back or a time-out that was shortened.
    std::size_t expire(std::int64_t now_ns, std::int64_t latest_ns = INT64_MAX);
    // The next that are due, in order of due time and position; they stay until redeliver or acknowledge.
    std::vector<Waiting> due(std::int64_t now_ns, std::size_t most) const;
    // Those that wait, whenever they are due, in order of position.
    std::vector<Waiting> waiting_from(std::int64_t position, std::size_t most) const;
    bool redeliver(std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns, std::uint32_t &deliveries);
    std::int64_t next_time_ns() const;  // when expire() or due() has something to do; INT64_MAX: never

    void reset(std::int64_t start);

    // Whether a message at or past the cursor is still to be delivered.
    bool open(std::int64_t position) const { return position >= cursor_ && !done_before_.holds(position); }
    std::uint32_t deliveries(std::int64_t position) const;  // so far, as is known
    std::vector<Run> runs() const;  // what is done above the floor
    std::int64_t floor() const { return floor_; }
    std::int64_t cursor() const { return cursor_; }
    std::size_t outstanding() const { return live_; }
    std::size_t in_flight() const { return live_ - waiting_.size(); }
    std::size_t waiting() const { return waiting_.size(); }
    std::size_t in_flight_of(std::uint32_t consumer) const {
        auto found = held_.find(consumer);
        return found == held_.end() ? 0 : found->second;
    }

    bool changed() const { return changed_; }
    std::string delta();
    std::string snapshot() const;
    std::string done_record(std::int64_t position) const;  // says that one more is done; nothing is changed here
    bool apply(std::string_view record);  // false: not a record of this kind
    // The notes of older versions of a journal's queues: done (first, last), tries (position, n), cursor, due time
    // (position, time), seek. Unknown kinds are ignored.
    void apply_note(int kind, std::int64_t first, std::int64_t second);
    void recovered();                     // after the last apply()

   private:
    static constexpr std::int64_t most_deliveries = (1 << 28) - 1;
    enum class Place : std::uint8_t { done, in_flight, waiting };
    struct Entry {
        std::int64_t position;
        std::int64_t time_ns;  // deadline, or when due
        std::uint32_t consumer;
        std::uint32_t deliveries : 28;
        // a delivery of it reached nobody: store the number of deliveries even if it is 0 or 1
        std::uint32_t uncounted : 1;
        std::uint32_t lasting : 1;  // its due time outlives a restart
        std::uint32_t place : 2;
    };

    struct Heard {
        std::int64_t reached = 0;   // the last position it is known to have got to
        std::int64_t deadline_ns = 0;
    };

    std::size_t find(std::int64_t position) const;  // first entry at or after it
    Entry *live(std::int64_t position);
    void add(const Entry &entry);
    void finish(Entry &entry);
    void leave_place(Entry &entry);
    bool is_done(const Entry &entry) const { return entry.place == static_cast<std::uint8_t>(Place::done); }
    Entry *in_flight_at(std::int64_t position);
    void wait(Entry &entry, std::int64_t due_ns);
    void clamp(std::int64_t latest_ns);
    void settle_floor();
    void note_count_before(std::int64_t position, std::int64_t count);
    bool is_done_before(std::int64_t position) const { return position < floor_ || done_before_.holds(position); }
    void note_deadline(std::int64_t deadline_ns, std::int64_t position);
    bool expire_one(std::int64_t deadline_ns, std::int64_t position, std::int64_t now_ns);
    void tidy();
    void uncount(Entry &entry);
    static bool tells_deliveries(const Entry &entry) { return entry.deliveries > 1 || entry.uncounted; }
    void note_deliveries(const Entry &entry) {
        if (tells_deliveries(entry)) counts_[entry.position] = entry.deliveries;
        changed_ = true;
    }

    std::uint64_t epoch_ = 1;
    std::int64_t floor_, cursor_;
    std::deque<Entry> entries_;
    std::size_t live_ = 0;
    std::unordered_map<std::uint32_t, std::size_t> held_;                   // in flight, by consumer
    std::unordered_map<std::uint32_t, Heard> heard_;                        // by consumer
    std::set<std::pair<std::int64_t, std::int64_t>> waiting_;               // (due, position)
    std::deque<std::pair<std::int64_t, std::int64_t>> deadlines_;           // (deadline, position), in time order
    // deadlines earlier than the last one in deadlines_
    std::set<std::pair<std::int64_t, std::int64_t>> early_deadlines_;
    // State from before a restart, removed as the cursor passes it.
    Runs done_before_;
    std::int64_t delivered_before_ = 0;
    std::map<std::int64_t, std::uint32_t> counts_before_;
    std::map<std::int64_t, std::int64_t> due_before_;
    // Since the last delta().
    std::vector<Run> acked_;
    std::map<std::int64_t, std::uint32_t> counts_;
    std::map<std::int64_t, std::int64_t> waits_;
    bool changed_ = false, was_reset_ = false;
};

}  // namespace penstock::journal
