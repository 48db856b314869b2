// Inlet: the receiving side of one subscriber. It reads any number of connected sockets in the reader's own thread and
// gives out frames as views of pooled buffers.
//
// Rules
//   - One thread reads at a time; others that try wait for it. attach, detach, close and the counts may be called by
//     any thread: they knock, and a sleeping reader releases its turn.
//   - The sockets belong to the caller: the inlet only reads them, and tells (Lost) when one has nothing more to give.
//     It makes them blocking and gives them a short receive time-out, to wait in recv itself (see wait_in_receive).
//   - Nothing here knows Python. Nothing here is called with a lock of this file held but its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "counters/counters.hpp"
#include "tcp/chunk.hpp"
#include "tcp/frame.hpp"
#include "tcp/loop.hpp"

namespace penstock::tcp {

enum class Read { message, nothing, lost, closed, interrupted, knocked, full, ended };

// A frame where it lies; the chunk has been given a reference for it.
struct Received {
    const std::uint8_t *data;
    Header header;
    const std::uint8_t *properties;
    Chunk *chunk;
    std::uint32_t session;
    std::uint64_t serial;  // of the connection
};

struct Lost {
    std::uint32_t session = 0;
    std::uint64_t serial = 0;
    const char *reason = "";  // one of: closed, bad_header, too_large, error
    int error = 0;            // errno, or 0 if there is none
    std::uint64_t messages = 0;  // that came over this connection
};

// What is remembered of a session over its connections, to count what was missed between them.
struct SessionCount {
    std::uint64_t plain_ordinal = 0;
    bool known = false;
    std::uint64_t last_ordinal = 0;  // of messages without a virtual channel
    std::uint64_t credit = 0;  // drops that the publisher announced and that no gap in the ordinals has shown yet
    std::unordered_map<std::uint32_t, std::uint64_t> last;  // by vchan_plus_one, of those with one
};

struct Stream {
    int fd = -1;
    std::uint32_t session = 0;
    std::uint64_t serial = 0;
    bool extended = false;
    bool fresh = false;             // another publisher than the session's last one
    std::uint64_t next_ordinal = 0; // as its handshake said; 0: not known
    std::uint64_t past = 0;         // so many first messages are history; the previous connection may have delivered them
    bool in_ready = false;
    bool drained = false;    // the last receive gave less than it could
    bool after_big = false;  // the last frame was large: read the next header before receiving more
    bool can_wait = false;   // recv may wait for it, for receive_wait_ms
    bool brisk = true;       // its last wait was short
    SessionCount *count = nullptr;
    Chunk *chunk = nullptr;
    std::size_t begin = 0, end = 0;  // bytes not yet given out
    std::uint64_t skip = 0;          // bytes left to skip of a frame of unknown type
    std::uint64_t want = 0;          // size of the frame that begins at `begin`, as far as known
    std::int64_t received_ns = 0;
    std::uint64_t messages = 0;
};

class Inlet {
   public:
    Inlet(std::uint64_t max_message_size, std::size_t held_limit_bytes, const std::string &name);
    ~Inlet();
    Inlet(const Inlet &) = delete;
    Inlet &operator=(const Inlet &) = delete;

    int descriptor() const noexcept { return epoll_; }
    // A number for the next connection.
    std::uint64_t next_serial() noexcept { return ++serial_; }
    // Adds a session's next connection; it is read when the previous one has ended. `fresh`: another publisher, whose
    // next ordinal is `next_ordinal` (0: unknown). Of the first `past` messages, those received before are skipped.
    void attach(std::uint64_t serial, std::uint32_t session, int fd, bool extended, bool fresh,
                std::uint64_t next_ordinal, std::uint64_t past = 0);
    // The last one of the session that was given out, of messages without a virtual channel; 0: none.
    std::uint64_t last_ordinal(std::uint32_t session);
    // After this the inlet does not touch the session's sockets any more.
    void detach(std::uint32_t session);
    // No session will ever be connected again: once all is read, reading ends.
    void finish(bool ended);
    void close();
    bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    // The reader's turn. Between lock and unlock only.
    bool try_lock() { return knocks_.load(std::memory_order_acquire) == 0 && turn_.try_lock(); }
    void lock();
    // A caller that only polls makes a sleeping reader release its turn. One that would sleep too waits for the turn
    // until the deadline, but only for a moment (it must check for signals): false when that is over.
    bool lock_for_a_moment(std::int64_t deadline_ns);
    void unlock() { turn_.unlock(); }

    // Takes a message that is completely received already: no system call.
    Read take(Received &out);
    // The same for the rest of a batch: messages of one session only. Never loses a connection.
    bool take_message(Received &out, std::uint32_t session);
    // wait() found one: the next take gives it.
    void keep(const Received &received) {
        kept_ = received;
        has_kept_ = true;
    }
    bool has_kept() const noexcept { return has_kept_; }
    // Receives until there is a message, or until `deadline_ns` (monotonic; negative: none). 0 polls.
    Read fetch(std::int64_t deadline_ns, Received &out);
    const Lost &lost() const noexcept { return lost_; }
    // What has come so far, in bytes given out or yet to be given out, unread in the sockets too; and whether all of it
    // has been given out.
    std::uint64_t come() const noexcept;
    bool given(std::uint64_t come) const noexcept { return !has_kept_ && passed_ >= come; }
    // Counts what take and fetch gave: delivered, or dropped in favour of a newer one.
    void count(const Received &received, bool delivered);

    Counters *counters() noexcept { return counters_; }
    Budget *budget() noexcept { return budget_; }
    bool forked() const noexcept { return generation_ != fork_generation(); }
    std::uint64_t max_message_size() const noexcept { return max_message_size_; }

   private:
    // `ends`: a frame that breaks the protocol ends the connection. Otherwise it stays for the next call, as if nothing had come.
    Read scan(Stream &stream, Received &out, bool ends = true);
    Read fill(Stream &stream, bool wait = false);
    Stream *sole_stream(std::int64_t deadline_ns);
    Read wait_in_receive(Stream &stream);
    bool make_room(Stream &stream);
    Read lose(Stream *stream, const char *reason, int error);
    void activate(std::unique_ptr<Stream> stream);
    void forget(Stream *stream);
    Read poll(std::int64_t deadline_ns);
    void knock();
    void note_gap(SessionCount &count, const Header &header);
    static bool came_before(const SessionCount &count, const Header &header);

    const std::uint64_t max_message_size_;
    Budget *budget_;
    Counters *counters_;
    std::uint32_t generation_ = fork_generation();
    int epoll_ = -1, wake_ = -1;
    std::timed_mutex turn_;
    std::atomic<int> knocks_{0};
    std::atomic<bool> closed_{false};
    bool ended_ = false;
    std::unordered_map<std::uint32_t, std::deque<std::unique_ptr<Stream>>> sessions_;  // front: the one being read
    std::unordered_map<std::uint32_t, SessionCount> counts_;
    std::deque<Stream *> ready_;
    std::atomic<std::uint64_t> serial_{0};
    std::uint32_t fills_ = 0;
    std::uint64_t passed_ = 0;  // bytes of frames that were given out or skipped
    bool polled_ = false;  // the next message is measured
    std::size_t streams_ = 0;
    Lost lost_;
    Received kept_{};
    bool has_kept_ = false;
};

std::int64_t monotonic_ns() noexcept;
std::int64_t realtime_ns() noexcept;

}  // namespace penstock::tcp
