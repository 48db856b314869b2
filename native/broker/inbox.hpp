// Inbox: the bytes of one connection that have come in and were not consumed yet, in a block that messages may refer to.
//
// Rules
//   - Bytes below `end` of a block never move or change while anyone but the inbox refers to the block: what was
//     scanned can be lent out without a copy.
//   - A connection that holds no partial command holds no block. A block grows with what has come in, not with what a
//     peer claims will come.
//   - Not thread-safe: one connection, one thread at a time. References to a block may be dropped by any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace penstock::broker {

struct Block {
    std::atomic<std::uint32_t> users{1};
    std::size_t capacity = 0;
    std::uint8_t *data = nullptr;

    static Block *make(std::size_t capacity);  // null without memory
    void keep() noexcept { users.fetch_add(1, std::memory_order_relaxed); }
    void drop() noexcept;
    bool shared() const noexcept { return users.load(std::memory_order_acquire) > 1; }
};

class Inbox {
   public:
    static constexpr std::size_t block_bytes = 256 * 1024;
    static constexpr std::size_t least_room = 16 * 1024;

    Inbox() = default;
    Inbox(const Inbox &) = delete;
    Inbox &operator=(const Inbox &) = delete;
    ~Inbox() {
        if (block_) block_->drop();
    }

    // Where the next bytes go; `room` is how many may. `wanted` is how many more are known to belong to the current
    // command (0: unknown). Null without memory.
    std::uint8_t *space(std::size_t wanted, std::size_t &room);
    void filled(std::size_t bytes) noexcept { end_ += bytes; }
    void consume(std::size_t bytes) noexcept;
    // Gives the block back when nothing is left in it.
    void rest() noexcept;
    // Gives the block back with whatever is in it: the connection is over.
    void clear() noexcept {
        end_ = begin_;
        rest();
    }

    std::uint8_t *data() const noexcept { return block_ ? block_->data + begin_ : nullptr; }
    std::size_t size() const noexcept { return end_ - begin_; }
    Block *block() const noexcept { return block_; }
    std::size_t held_bytes() const noexcept { return block_ ? block_->capacity : 0; }
    // Bytes of partial commands that had to move to a new place: the only copies made here.
    std::uint64_t moved_bytes() const noexcept { return moved_; }

   private:
    bool replace(std::size_t capacity);

    Block *block_ = nullptr;
    std::size_t begin_ = 0, end_ = 0;
    std::uint64_t moved_ = 0;
};

}  // namespace penstock::broker
