// Where the memory of messages comes from and goes back to. Pure C++; guarded by the GIL.
//
// Rules
//   - take gives a header with one reference, or null when there is none now; drop gives one reference back, and the last
//     one gives the memory back.
//   - A pool whose handle is gone lives until its last message was freed (abandon).
#pragma once

#include <cstdint>
#include <vector>

#include "bus/header.hpp"
#include "bus/sleeper.hpp"

namespace penstock::bus {

struct Pool {
    std::uint64_t out = 0;       // messages taken and not yet back
    std::uint64_t taken = 0;     // ever
    std::uint64_t most_out = 0;  // high-water mark
    std::uint64_t failed = 0;    // times there was none
    std::uint8_t id = no_allocator_id;
    std::uint8_t extra_flags = 0;
    bool abandoned = false;
    SleeperList waiting;  // threads that wait for a message

    virtual ~Pool() = default;
    // The largest payload a message can have.
    virtual std::uint32_t most_bytes() const noexcept = 0;
    virtual Header *get(std::uint32_t size) noexcept = 0;
    virtual void put(Header *header) noexcept = 0;
    // Headers of the messages that are out, oldest first where the pool knows.
    virtual std::vector<Header *> list_out() = 0;

    Header *take(std::uint16_t message_id, std::uint32_t size) noexcept {
        Header *header = get(size);
        if (!header) return nullptr;
        header->reference_count = 1;
        header->id = message_id;
        header->allocator_id = id;
        header->flags = flag_out | extra_flags;
        header->size = size;
        header->ordinal = 0;
        header->timestamp_ns = INT64_MIN;  // Envelope::no_time, until it is published
        header->pool = this;
        header->generation = 0;
        header->taken = static_cast<std::uint32_t>(++taken);
        if (++out > most_out) most_out = out;
        return header;
    }
    // The last reference has gone.
    virtual void give(Header *header) noexcept {
        header->flags = 0;
        put(header);
        returned();
    }
    void returned() noexcept {
        --out;
        waiting.wake_first();
        if (abandoned && out == 0) delete this;
    }
    void abandon() noexcept {
        abandoned = true;
        if (out == 0) delete this;
    }
};

inline void acquire(Header *header) noexcept { ++header->reference_count; }
inline void drop(Header *header) noexcept {
    if (--header->reference_count == 0) header->pool->give(header);
}

// Fixed blocks in one piece of memory.
class SlabPool final : public Pool {
   public:
    // Null where the memory could not be had.
    static SlabPool *make(std::uint32_t block_bytes, std::uint32_t count) noexcept;
    ~SlabPool() override;

    std::uint32_t most_bytes() const noexcept override { return block_bytes_; }
    Header *get(std::uint32_t size) noexcept override;
    void put(Header *header) noexcept override;
    std::vector<Header *> list_out() override;
    std::uint32_t count() const noexcept { return count_; }
    std::size_t stride() const noexcept { return stride_; }

   private:
    SlabPool() = default;
    Header *block(std::uint32_t index) noexcept { return reinterpret_cast<Header *>(memory_ + index * stride_); }

    std::uint8_t *memory_ = nullptr;
    Header *free_ = nullptr;
    std::size_t stride_ = 0;
    std::uint32_t block_bytes_ = 0, count_ = 0;
};

// The heap; freed small blocks are kept for reuse.
class HeapPool final : public Pool {
   public:
    HeapPool(std::uint32_t most_bytes, std::uint64_t most_messages) noexcept
        : most_bytes_(most_bytes), most_messages_(most_messages) {}
    ~HeapPool() override;

    std::uint32_t most_bytes() const noexcept override { return most_bytes_; }
    Header *get(std::uint32_t size) noexcept override;
    void put(Header *header) noexcept override;
    std::vector<Header *> list_out() override;

   private:
    static constexpr int classes = 6;  // payloads of 64, 128, ... 2048 bytes
    static constexpr std::uint32_t kept_bytes = 1 << 20;  // of each class
    static int class_of(std::uint32_t bytes) noexcept;

    Header *kept_[classes] = {};
    std::uint32_t kept_count_[classes] = {};
    Header *first_ = nullptr, *last_ = nullptr;  // those out
    std::uint32_t most_bytes_;
    std::uint64_t most_messages_;  // 0: no bound
};

}  // namespace penstock::bus
