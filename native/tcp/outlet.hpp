// Outlet: the sending side of one publisher: a bounded queue per peer, frames stored once and shared by all queues.
//
// Rules
//   - publish may be called by any thread; callers take turns. A publisher that has been idle sends in the caller's
//     thread at once; in a burst frames gather (64 KiB or 100 us) and leave together; the loop sends what is left over.
//   - Whoever sends to a peer has set its `sending`; nobody else touches its outbox meanwhile.
//   - No lock is held during a system call that may take long. Nothing here knows Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "counters/counters.hpp"
#include "tcp/frame.hpp"
#include "tcp/loop.hpp"
#include "tcp/store.hpp"

namespace penstock::tcp {

constexpr std::size_t gather_bytes = 64 * 1024;
// Messages of a burst are gathered for so long, and for longer where there are many subscribers: one send to each of
// them takes about gather_peer_ns, so that the sends would otherwise begin again as soon as they have ended.
constexpr long gather_ns = 100'000;
constexpr long gather_peer_ns = 5'000;
constexpr long gather_most_ns = 10'000'000;
// A caller that publishes again sooner is in a burst: it cannot have read an answer. Where each send takes long, because
// there are many subscribers, so may the way back to the caller and the pause until it publishes again.
constexpr long idle_gap_ns = 1'500;
constexpr long idle_gap_peer_ns = 100;
constexpr long clock_set_back_ns = -1'000'000;  // less is another thread that waited for its turn
constexpr std::size_t direct_bytes = 32 * 1024;    // messages of at least this size are sent from the caller's memory
constexpr std::size_t copy_limit_bytes = 4 * 1024; // frames up to this size are copied to the outbox, larger ones are referenced

enum class OverflowChoice : std::uint8_t { block, drop_oldest, drop_newest };
enum class Sent { done, closed, timed_out, interrupted };
enum class Quick { done, flush, slow, closed };

// The history for later subscribers: the last messages within all three bounds (the newest always).
struct Kept {
    std::uint64_t messages = 0;  // 0: nothing is kept
    std::int64_t age_ns = 0;     // 0: however old
    std::uint64_t bytes = 0;
};

// A stretch of an outbox: in its staging memory, or in a frame that it holds.
struct Part {
    const std::uint8_t *base;  // null: the staging
    std::size_t offset, size;
};

struct Peer {
    std::uint64_t id = 0;
    int fd = -1;
    bool extended = false;
    std::deque<Frame *> queue;
    std::uint64_t queued_bytes = 0;
    // The outbox: data being sent, which can no longer be dropped; its frames are held until all of it is sent.
    std::vector<std::uint8_t> staging;
    std::vector<Part> parts;
    std::size_t part = 0;
    std::vector<Frame *> held;
    std::uint64_t outbox_messages = 0, outbox_bytes = 0;
    bool sending = false;
    bool blocked = false;  // the socket is full; the loop waits for it
    bool gone = false;
    // since when the peer has not acknowledged data or a window probe; 0: everything is acknowledged
    std::int64_t owing_ns = 0;
    std::uint64_t drops_to_tell = 0;
    std::uint64_t past_messages = 0, past_bytes = 0;  // of the history, when it joined: beyond its queue's bounds
    std::uint64_t matched = 0, delivered = 0, dropped_overflow = 0, dropped_closed = 0;
    std::uint64_t depth() const noexcept { return queue.size() + outbox_messages; }
    std::uint64_t bytes() const noexcept { return queued_bytes + outbox_bytes; }
    ~Peer();
};

struct Gone {
    std::uint64_t id;
    int error;  // errno; 0: closed by the peer
    std::uint64_t lost;
    std::uint64_t dropped_overflow;
};

struct PeerCount {
    std::uint64_t id;
    bool extended;
    std::uint64_t matched, delivered, dropped_overflow, dropped_closed, depth, bytes;
};

class Outlet : public std::enable_shared_from_this<Outlet> {
   public:
    Outlet(std::shared_ptr<Loop> loop, OverflowChoice overflow, std::uint64_t queue_messages, std::uint64_t queue_bytes,
           std::int64_t block_timeout_ns, const std::string &name, const Kept &kept = {});
    ~Outlet();

    // Takes over the connected, non-blocking socket. Sends `answer` (writes the next ordinal into it at the offset, and
    // into the next field how many messages of the history come first, unless that is 0), then the history if `past` is
    // set, and from then on every message.
    std::uint64_t add(int fd, bool extended, const std::string &answer, std::size_t ordinal_offset, bool past = false);
    bool remove(std::uint64_t id);
    std::size_t drop_silent(std::uint32_t timeout_ms);
    // Callers' turn: publish is called between lock and unlock only.
    bool try_lock() { return turn_.try_lock(); }
    // Waits for a turn until the deadline, but only for a moment (to check for signals). With a deadline of 0 it waits
    // for callers that are almost done, not for one that waits for room. False when that is over.
    bool lock_for_a_moment(std::int64_t deadline_ns);
    void lock() { turn_.lock(); }
    void unlock() { turn_.unlock(); }

    // Publishes a small message without waiting and without a system call, if that can be. `flush`: it can, and flush()
    // is to be called now. `slow`: nothing was done; call publish. `more`: another follows at once, then flush().
    Quick quick(const Outgoing &message, std::uint64_t &ordinal, bool more = false);
    Sent publish(const Outgoing &message, std::uint64_t &ordinal, std::int64_t deadline_ns);
    // A frame to write into, to be published by publish_frame or given back by drop_frame.
    Frame *reserve(std::uint64_t size);
    Sent publish_frame(Frame *frame, std::uint64_t size, std::uint64_t &ordinal, std::int64_t deadline_ns);
    void drop_frame(Frame *frame);
    void flush();
    // Waits for all queues to empty; false when the time is over.
    Sent drain(std::int64_t deadline_ns);
    // What is still queued is dropped and counted. Peers' sockets are closed.
    void close();
    bool forked() const noexcept { return generation_ != fork_generation(); }
    bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    std::size_t peer_count();
    std::vector<PeerCount> peer_counts();
    std::vector<Gone> take_gone();
    int gone_descriptor() const noexcept { return gone_event_; }
    std::uint64_t last_ordinal();
    std::uint64_t memory_bytes();
    std::int64_t block_timeout_ns() const noexcept { return block_timeout_ns_; }
    Counters *counters() noexcept { return counters_; }

    // Called by the loop.
    void writable(const std::shared_ptr<Peer> &peer);
    void readable(const std::shared_ptr<Peer> &peer);
    bool flush_due();

   private:
    using Lock = std::unique_lock<std::mutex>;
    using PeerPtr = std::shared_ptr<Peer>;

    bool full(const Peer &peer, std::uint64_t size) const noexcept;
    bool any_full(std::uint64_t size) const noexcept;
    Outgoing stamped(const Outgoing &message, std::int64_t now);
    void enqueue(Peer &peer, Frame *frame);
    void give_past(Peer &peer);
    void keep(Frame *frame, std::int64_t now);
    void forget_oldest();
    bool note_unsent(std::uint64_t size, std::int64_t now, bool more);
    Sent wait_for_room(Lock &lock, std::uint64_t size, std::int64_t deadline_ns);
    Sent pump_until(Lock &lock, std::uint64_t size, bool empty, std::int64_t deadline_ns);
    void gather(Peer &peer);
    std::size_t put_header(Peer &peer, const Outgoing &message);
    void advance(Peer &peer, std::size_t bytes);
    bool pump(Lock &lock, const PeerPtr &peer);
    void rest(const PeerPtr &peer, bool socket_full);
    void send_peer(Lock &lock, const PeerPtr &peer);
    void send_all(Lock &lock);
    long gathering_ns() const noexcept;
    void send_direct(Lock &lock, const Outgoing &message);
    void lose(const PeerPtr &peer, int error);
    void clear(Peer &peer);

    std::shared_ptr<Loop> loop_;
    const OverflowChoice overflow_;
    const std::uint64_t queue_messages_, queue_bytes_;
    const std::int64_t block_timeout_ns_;
    const Kept kept_;
    Counters *counters_;
    Store store_;
    std::uint32_t generation_ = 0;
    int gone_event_ = -1, wake_ = -1;
    std::timed_mutex turn_;  // one caller at a time
    std::atomic<bool> waits_for_room_{false};  // that caller
    std::mutex mutex_;   // everything below
    std::condition_variable sent_;  // a sender has stopped
    std::vector<PeerPtr> peers_;
    std::vector<Gone> gone_;
    std::deque<Frame *> history_;  // the oldest first
    std::uint64_t history_bytes_ = 0;
    std::uint64_t last_ordinal_ = 0;
    std::int64_t last_published_ns_ = 0;
    std::int64_t last_publish_ns_ = 0, first_unsent_ns_ = 0;
    std::uint64_t unsent_bytes_ = 0;
    bool armed_ = false;
    std::atomic<bool> closed_{false};
};

}  // namespace penstock::tcp
