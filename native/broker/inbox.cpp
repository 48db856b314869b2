#include "broker/inbox.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace penstock::broker {

Block *Block::make(std::size_t capacity) {
    auto *block = new (std::nothrow) Block;
    if (!block) return nullptr;
    block->data = static_cast<std::uint8_t *>(std::malloc(capacity));
    if (!block->data) {
        delete block;
        return nullptr;
    }
    block->capacity = capacity;
    return block;
}

void Block::drop() noexcept {
    if (users.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    std::free(data);
    delete this;
}

bool Inbox::replace(std::size_t capacity) {
    const std::size_t left = size();
    if (block_ && !block_->shared() && begin_ == 0 && capacity > block_->capacity) {
        auto *grown = static_cast<std::uint8_t *>(std::realloc(block_->data, capacity));  // large blocks: no copy
        if (!grown) return false;
        block_->data = grown;
        block_->capacity = capacity;
        return true;
    }
    if (block_ && !block_->shared() && capacity <= block_->capacity) {
        std::memmove(block_->data, block_->data + begin_, left);
    } else {
        Block *fresh = Block::make(capacity);
        if (!fresh) return false;
        if (left) std::memcpy(fresh->data, block_->data + begin_, left);
        if (block_) block_->drop();
        block_ = fresh;
    }
    moved_ += left;
    begin_ = 0;
    end_ = left;
    return true;
}

std::uint8_t *Inbox::space(std::size_t wanted, std::size_t &room) {
    if (block_ && begin_ == end_ && !block_->shared()) begin_ = end_ = 0;
    // Allocate at most twice what has arrived: the announced size may be wrong.
    const std::size_t ahead = std::clamp(wanted, least_room, std::max(block_bytes, 2 * size()));
    if (!block_ || block_->capacity - end_ < std::min(ahead, least_room) ||
        (wanted > block_->capacity - end_ && block_->capacity - begin_ < size() + wanted)) {
        if (!replace(std::max(block_bytes, size() + ahead))) return nullptr;
    }
    room = block_->capacity - end_;
    return block_->data + end_;
}

void Inbox::consume(std::size_t bytes) noexcept {
    begin_ += bytes;  // the bytes stay where they are: the caller may be about to lend them out
}

void Inbox::rest() noexcept {
    if (!block_ || begin_ != end_) return;
    block_->drop();
    block_ = nullptr;
    begin_ = end_ = 0;
}

}  // namespace penstock::broker
