// Store: messages of one publisher, each stored once however many queues refer to it, and counted once.
//
// Rules
//   - A frame has a reference for each queue or outbox it stands in, and one for whoever is working on it.
//   - When the last one goes (but that of the history), the message is settled: lost if any peer lost it (the first reason counts), else
//     delivered. So a publisher's ledger counts messages; what each peer got is counted with the peer.
//   - Guarded by the outlet's mutex: nothing here locks.
#pragma once

#include <cstdint>

#include "counters/counters.hpp"

namespace penstock::tcp {

// What the caller says of a message besides its bytes. ordinal 0: the next one; no_time: now.
struct Outgoing {
    static constexpr std::int64_t no_time = INT64_MIN;
    const std::uint8_t *data = nullptr;
    std::uint64_t size = 0;
    std::uint64_t ordinal = 0;
    std::int64_t timestamp_ns = no_time;
    std::uint64_t drops = 0;
    std::uint32_t vchan_plus_one = 0;
    const std::uint8_t *properties = nullptr;
    std::uint32_t properties_size = 0;
};

struct Frame {
    std::uint32_t references;
    std::uint32_t vchan_plus_one;
    std::uint32_t properties_size;
    bool pooled;
    bool published;             // published and not settled yet; false for an unpublished draft
    bool kept;                  // one of the references is that of the history
    std::uint8_t lost_plus_one; // a DropReason, or 0
    std::uint64_t size;
    std::uint64_t capacity;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::int64_t published_ns;  // by this publisher's own clock, monotone; the age of what the history holds
    std::uint64_t drops;  // messages lost before this publisher got them, as far as its caller said
    Frame *next;
    std::uint8_t *payload() noexcept { return reinterpret_cast<std::uint8_t *>(this + 1); }
    std::uint8_t *properties() noexcept { return payload() + capacity; }

    void fill(const Outgoing &message) noexcept;
    void lose(DropReason reason) noexcept {
        if (!lost_plus_one) lost_plus_one = static_cast<std::uint8_t>(static_cast<std::uint8_t>(reason) + 1);
    }
};

class Store {
   public:
    explicit Store(Counters *counters) : counters_(counters) {}
    ~Store();
    Store(const Store &) = delete;
    Store &operator=(const Store &) = delete;

    // One reference. Throws std::bad_alloc.
    Frame *make(std::uint64_t size, std::uint32_t properties_size);
    Frame *make(const Outgoing &message);
    void drop(Frame *frame) noexcept;

    // A message is published: in a frame, or from its caller's memory (then settle it, or adopt a frame for it).
    void publish(std::uint64_t size) noexcept;
    void publish(Frame *frame) noexcept;
    void adopt(Frame *frame) noexcept;
    void settle(std::uint8_t lost_plus_one) noexcept;

    std::uint64_t bytes() const noexcept { return bytes_; }
    // For a forked child: at the fork another thread may have been changing the list of free frames.
    void abandon() noexcept { free_ = nullptr; }

   private:
    Counters *counters_;
    Frame *free_ = nullptr;
    std::uint32_t free_count_ = 0;
    std::uint64_t bytes_ = 0;
    std::uint64_t stored_ = 0;  // published frames that somebody still refers to
};

}  // namespace penstock::tcp
