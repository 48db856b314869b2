// A publisher of a channel: takes a slot, lends its bytes, publishes them.
//
// Rules: one thread at a time, but wait() may run while another thread calls wake().
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "counters/counters.hpp"
#include "platform/checksum.hpp"
#include "shm/membership.hpp"
#include "shm/sleep.hpp"

namespace penstock::shm {

class Publisher {
   public:
    Publisher(const Options &options, bool checksums);
    ~Publisher();

    Membership member;
    Writer writer;
    Counters *counters;
    const bool checksums;
    const bool retirement;
    std::atomic<bool> closed{false};
    std::uint32_t reserved = 0;
    std::uint32_t stranded = 0;  // of those: cancelled, but a view could still write into them
    std::uint32_t looked_at = 0;  // published, but an array of this process still refers to it

    struct Place {
        std::uint32_t slot = 0;
        std::uint8_t *data = nullptr;
    };

    std::uint64_t slot_size() {
        std::uint32_t now = member.newest_segment();
        if (now != segment_) [[unlikely]] use_segment(now);
        return segment_size_;
    }
    void grow(std::uint64_t size) { member.grow(size); }

    // A slot for `size` bytes, at most slot_size(). `unread` and `held` are for the caller to wait for.
    Taken reserve(Place &place, std::uint64_t size) {
        if (full()) [[unlikely]] refuse_reserve();
        Taken result = member.channel.acquire(writer, place.slot);
        if (result != Taken::yes) return result;
        ++reserved;
        set_segment(place, size);
        return result;
    }
    std::uint8_t *metadata(std::uint32_t slot) const {
        return member.channel.metadata + std::uint64_t(slot) * member.channel.metadata_stride;
    }
    std::uint32_t metadata_size() const { return metadata_size_; }

    // The ordinal; 0 where the ring is damaged.
    std::uint64_t publish(const Place &place, std::uint64_t size, std::int64_t now_ns, std::uint32_t flags = 0) {
        Slot &slot = member.channel.slots[place.slot];
        slot.size.store(size, std::memory_order_release);
        if (writer.reliable) flags |= message_reliable;
        if (checksums) {
            flags |= message_checksummed;
            const std::uint8_t *beside = metadata_size_ ? metadata(place.slot) : nullptr;
            slot.checksum.store(checksum_of(place.data, size, beside, metadata_size_), std::memory_order_release);
        }
        slot.flags.store(flags, std::memory_order_release);
        std::uint64_t sequence = member.channel.commit(writer, place.slot, now_ns);
        if (sequence == 0) [[unlikely]] return 0;
        --reserved;
        if (retirement) untold_[place.slot].add(sequence);
        counters->matched.add();
        counters->delivered.add();
        counters->bytes.add(size);
        Member &me = member.channel.publishers[writer.index];
        me.count.store(me.count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        me.bytes.store(me.bytes.load(std::memory_order_relaxed) + size, std::memory_order_relaxed);
        me.cursor.store(sequence + 1, std::memory_order_relaxed);  // for `penstock autopsy`; in the cache line of `count` and `bytes`, so it costs nothing
        return writer.ordinal;
    }
    void cancel(std::uint32_t slot, bool was_stranded = false);
    // Stranded drafts do not count as long as there are no more of them than may be reserved: slots are limited.
    bool full() const { return reserved - std::min(stranded, member.most_held) >= member.most_held; }
    // A message of an unreliable publisher is dropped in favour of what reliable subscribers have not read.
    void stop_looking() {
        if (--looked_at == 0 && !member.joined()) member.unmap();
    }
    void count_given_up() {
        counters->matched.add();
        counters->drop(DropReason::overflow, 1);
        Word &dropped = member.self().dropped;
        dropped.store(dropped.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    }
    void wake_readers() { member.wake_readers(writer.vchan); }

    // Waits until a slot may be available (or waiting makes no more sense).
    Woken wait(std::int64_t deadline_ns, std::int64_t spin_until_ns, int extra);
    bool could_reserve();
    // For publishers that never wait: checks for dead members that block it, at most every 50 ms. True if there were
    // any.
    bool look_for_dead();
    // Waits for so many subscribers.
    // How many messages the slowest subscriber has not read, including overwritten ones.
    std::uint64_t unread() const;
    // Dead ones do not count. With a deadline of 0 a death is noticed within 50 ms, so that a check costs nothing.
    Woken wait_subscribers(std::uint32_t count, std::int64_t deadline_ns);
    std::uint32_t subscribers() const;
    std::uint32_t publishers() const;

    // Slots whose message was released by all subscribers since the last call, each as often as that happened, in the
    // order of the oldest such message; those beyond `most` are left for the next call.
    std::vector<std::uint32_t> retired(std::size_t most = SIZE_MAX);
    std::uint64_t count_retired() const;
    bool any_retired() const;
    Woken wait_retired(std::int64_t deadline_ns);

    // For pollers of the descriptor: true if it was armed (no slot is available), false if there is one.
    bool arm_if(bool nothing);
    void wake();  // ends a wait of another thread
    // Leaves, or stays until the last draft that can be written to is gone.
    void close(bool at_once = false) noexcept;
    std::string why_full() const;

   private:
    void use_segment(std::uint32_t segment);
    // A slot moves to the newest size when a message does not fit the one it has: growing costs the slots that grow.
    void set_segment(Place &place, std::uint64_t size) {
        Slot &slot = member.channel.slots[place.slot];
        slot_size();
        for (int turns = 0;; ++turns) {
            // If it has that size already, owning the slot keeps the segment from being freed.
            if (slot.segment.load(std::memory_order_relaxed) != segment_) [[unlikely]] {
                if (stays(place, size)) return;
                move_slot(place);
            }
            if (!member.channel.header->segment[segment_].gone.load()) [[likely]] break;
            if (turns > 1000) lose_segment(place);
            use_segment(member.newest_segment());
        }
        place.data = base_ + std::uint64_t(place.slot) * segment_size_;
    }
    bool stays(Place &place, std::uint64_t size);
    void move_slot(const Place &place);
    [[noreturn]] void lose_segment(const Place &place);
    [[noreturn]] void refuse_reserve() const;
    bool is_retired(std::uint64_t sequence, std::uint32_t slot) const;

    std::uint32_t segment_ = not_given;
    std::uint64_t segment_size_ = 0;
    std::uint8_t *base_ = nullptr;
    std::uint32_t metadata_size_ = 0;
    std::uint32_t moved_since_ = 0;
    bool retiring_ = false;
    std::int64_t looked_ns_ = 0;
    // Of a slot: the messages published there whose release was not told yet. All but the newest one are released, since
    // the slot was taken again, so that a count is enough, however many there are.
    struct Untold {
        std::uint64_t oldest = 0, newest = 0;  // sequences; 0: there is none
        std::uint64_t before_newest = 0;

        void add(std::uint64_t sequence) {
            if (oldest) ++before_newest;
            else oldest = sequence;
            newest = sequence;
        }
        void tell(std::uint64_t count) {
            if (count > before_newest) *this = {};
            else if ((before_newest -= count) == 0) oldest = newest;
        }
    };
    std::uint64_t count_retired(std::uint32_t slot) const {
        const Untold &untold = untold_[slot];
        return untold.oldest ? untold.before_newest + is_retired(untold.newest, slot) : 0;
    }
    std::vector<Untold> untold_;  // by slot, where retirement was asked for
};

}  // namespace penstock::shm
