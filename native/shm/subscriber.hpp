// A subscriber of a channel: holds one message after the other in its slot, without a copy.
//
// Rules: one thread at a time, but wait() may run while another thread calls wake() or release().
#pragma once

#include <atomic>
#include <cstdint>

#include "counters/counters.hpp"
#include "platform/checksum.hpp"
#include "shm/membership.hpp"
#include "shm/sleep.hpp"

namespace penstock::shm {

// A message held by this process.
struct View {
    const std::uint8_t *data = nullptr;
    std::uint64_t size = 0;
    std::uint64_t ordinal = 0;
    std::int64_t timestamp_ns = 0;
    std::uint64_t sequence = 0;
    std::uint32_t slot = 0;
    std::int32_t vchan = -1;
    std::uint32_t flags = 0;
    bool checked = false;  // against a checksum
    bool intact = true;    // false: the checksum does not match
    const std::uint8_t *metadata = nullptr;
    std::uint32_t metadata_size = 0;
};

class Subscriber {
   public:
    // `refuse_damaged`: a message with a wrong checksum is an error and is not returned.
    Subscriber(const Options &options, bool pass_activation, bool verify, bool refuse_damaged = false);
    ~Subscriber();

    Membership member;
    Reader reader;
    Counters *counters;
    const bool pass_activation;
    const bool verify, refuse_damaged;
    std::atomic<bool> closed{false};

    Found read(View &view) {
        if (!ready_ && !prepare()) [[unlikely]] return Found::nothing;
        for (;;) {
            std::uint32_t slot;
            Found found = member.channel.next(reader, slot);
            if (found != Found::message) {
                if (found == Found::damaged) [[unlikely]] refuse_damage();
                if (reader.vchan < 0 && reader.cursor != expected_) [[unlikely]] account(reader.cursor);
                return found;
            }
            if (deliver(view, slot)) [[likely]] return found;
        }
    }
    // The newest message; those before it are skipped.
    Found read_newest(View &view);
    // The first message at or after that time, wherever the subscriber is. The cursor stays.
    Found find(View &view, std::int64_t timestamp_ns);
    // Message `sequence` again, if its slot is unchanged.
    Found again(View &view, std::uint32_t slot, std::uint64_t sequence);

    void release(std::uint32_t slot) noexcept {
        if (!member.belongs_here() || !member.joined()) [[unlikely]] return;
        if (!member.channel.unpin(reader, slot)) return;
        released();
    }
    void release_many(const std::uint64_t *slots, std::size_t count) noexcept;
    // Another handle shares the reference to a slot that is held.
    bool retain(std::uint32_t slot) noexcept {
        if (!member.belongs_here() || !member.joined() || !reader.pins[slot].count) return false;
        ++reader.pins[slot].count;
        return true;
    }
    // After reading: reliable publishers may continue.
    void tell_publishers() { member.wake_publishers(reader.cursor); }

    bool has_next() { return (ready_ || prepare()) && member.channel.has_next(reader); }
    // Messages that it may hold now, and how many of them a batch may take: a batch leaves room for the next one.
    std::uint32_t may_hold() const {
        return reader.most_held + reader.extra + (reader.may_exceed && ready_ ? member.channel.unclaimed() : 0);
    }
    std::uint32_t prepare_batch(std::size_t most);
    Woken wait(std::int64_t deadline_ns, std::int64_t spin_until_ns, int extra, int patience = 1);
    // At the limit: waits until a message is released, by another thread or by a subscriber that has claimed free
    // slots.
    Woken wait_release(std::int64_t deadline_ns);
    // For pollers of the descriptor: arms the bell; false if there is something to read after all.
    bool arm();
    // The same at the limit: a release rings it.
    void arm_release();
    void wake();
    // Leaves, or lingers until the last held message is released.
    void close(bool at_once) noexcept;

    // Updates `matched`: what was published since joining, read or not. `alone`: no thread waits for a message.
    void update_counters(bool alone = false);
    std::uint64_t delivered_past() const { return history_; }
    // Whether a publisher whose messages it reads asks which of them all have released.
    bool retirement() const;
    // Whether it has a publisher whose channel, or virtual channel, has a type.
    bool typed() const;
    std::string why_limit() const;

   private:
    void released() noexcept {
        if (waits_for_release_.load(std::memory_order_relaxed)) [[unlikely]] wake_for_release();
        if (retiring_) [[unlikely]] return finish();
        member.wake_publishers(reader.cursor);
    }
    void wake_for_release() noexcept;
    [[noreturn]] void refuse_message(std::uint64_t sequence, std::uint32_t slot, const std::string &why);
    template <typename Condition>
    bool any_publisher(Condition holds) const;  // of those whose messages it reads
    bool prepare();
    bool deliver(View &view, std::uint32_t slot);
    bool fill(View &view, std::uint32_t slot, std::uint64_t sequence);
    void account(std::uint64_t upto, DropReason reason = DropReason::overflow);
    void drop(std::uint64_t count, DropReason reason);
    void count_overwritten(std::uint64_t newest, bool alone);
    void note_counted(std::uint64_t next);
    [[noreturn]] void refuse_damage() const;
    void finish() noexcept;

    bool ready_ = false;
    bool retiring_ = false;
    bool waited_ = false;  // measure the latency of the next message
    std::atomic<bool> waits_for_release_{false};
    std::uint32_t metadata_size_ = 0;
    std::uint64_t last_ordinal_ = 0;  // of the virtual channel
    std::uint64_t history_ = 0;       // delivered although published before joining
    std::uint64_t expected_ = 1;      // plain: next sequence that has not been accounted for
};

}  // namespace penstock::shm
