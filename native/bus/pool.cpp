#include "bus/pool.hpp"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <new>

namespace penstock::bus {

SlabPool *SlabPool::make(std::uint32_t block_bytes, std::uint32_t count) noexcept {
    auto *pool = new (std::nothrow) SlabPool;
    if (!pool) return nullptr;
    pool->block_bytes_ = block_bytes;
    pool->count_ = count;
    pool->stride_ = header_size + ((static_cast<std::size_t>(block_bytes) + 63) & ~std::size_t{63});
    pool->memory_ = static_cast<std::uint8_t *>(std::aligned_alloc(64, pool->stride_ * count));
    if (!pool->memory_) {
        delete pool;
        return nullptr;
    }
    // a draft that is not filled must not show the program's memory
    std::memset(pool->memory_, 0, pool->stride_ * count);
    for (std::uint32_t i = count; i-- > 0;) {
        Header *header = pool->block(i);
        header->capacity = block_bytes;
        header->next = pool->free_;
        pool->free_ = header;
    }
    return pool;
}

SlabPool::~SlabPool() { std::free(memory_); }

Header *SlabPool::get(std::uint32_t size) noexcept {
    Header *header = free_;
    if (!header || size > block_bytes_) return nullptr;
    free_ = header->next;
    return header;
}

void SlabPool::put(Header *header) noexcept {
    header->next = free_;
    free_ = header;
}

std::vector<Header *> SlabPool::list_out() {
    std::vector<Header *> list;
    for (std::uint32_t i = 0; i < count_; ++i)
        if (block(i)->flags & flag_out) list.push_back(block(i));
    return list;
}

int HeapPool::class_of(std::uint32_t bytes) noexcept {
    if (bytes <= 64) return 0;
    return std::bit_width((bytes - 1) >> 6);
}

HeapPool::~HeapPool() {
    for (Header *header : kept_)
        while (header) {
            Header *next = header->next;
            std::free(header);
            header = next;
        }
}

Header *HeapPool::get(std::uint32_t size) noexcept {
    if (size > most_bytes_ || (most_messages_ && out >= most_messages_)) return nullptr;
    int kind = class_of(size);
    Header *header;
    if (kind < classes && kept_[kind]) {
        header = kept_[kind];
        kept_[kind] = header->next;
        --kept_count_[kind];
    } else {
        std::size_t capacity = kind < classes ? std::size_t{64} << kind : size;
        // Cleared: a draft that is not filled must not show what the program had in this memory.
        header = static_cast<Header *>(std::calloc(1, header_size + capacity));
        if (!header) return nullptr;
        header->capacity = static_cast<std::uint32_t>(capacity);
    }
    header->next = nullptr;
    header->previous = last_;
    (last_ ? last_->next : first_) = header;
    last_ = header;
    return header;
}

void HeapPool::put(Header *header) noexcept {
    (header->previous ? header->previous->next : first_) = header->next;
    (header->next ? header->next->previous : last_) = header->previous;
    int kind = class_of(header->capacity);
    if (kind < classes && kept_count_[kind] < (kept_bytes >> (7 + kind))) {
        header->next = kept_[kind];
        kept_[kind] = header;
        ++kept_count_[kind];
    } else {
        std::free(header);
    }
}

std::vector<Header *> HeapPool::list_out() {
    std::vector<Header *> list;
    for (Header *header = first_; header; header = header->next) list.push_back(header);
    return list;
}

}  // namespace penstock::bus
