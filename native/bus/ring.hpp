// A queue of pointers that grows by doubling and never shrinks; its user bounds it.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <utility>

namespace penstock::bus {

template <typename Item>
class Ring {
   public:
    Ring() = default;
    Ring(const Ring &) = delete;
    Ring &operator=(const Ring &) = delete;
    ~Ring() { std::free(items_); }

    std::size_t size() const noexcept { return tail_ - head_; }
    bool empty() const noexcept { return tail_ == head_; }

    // False where memory ran out; nothing has changed then.
    bool push(Item item) noexcept {
        if (size() == room_ && !grow()) return false;
        items_[tail_++ & (room_ - 1)] = item;
        return true;
    }
    // Room for so many more; false where memory ran out.
    bool reserve(std::size_t count) noexcept {
        while (size() + count > room_)
            if (!grow()) return false;
        return true;
    }
    // Gives the memory of an empty one back; it may be used again.
    void shrink() noexcept {
        if (!empty()) return;
        std::free(std::exchange(items_, nullptr));
        room_ = head_ = tail_ = 0;
    }
    Item pop() noexcept { return items_[head_++ & (room_ - 1)]; }
    Item &at(std::size_t index) noexcept { return items_[(head_ + index) & (room_ - 1)]; }

   private:
    bool grow() noexcept {
        std::size_t wider = room_ ? room_ * 2 : 16;
        auto *items = static_cast<Item *>(std::malloc(wider * sizeof(Item)));
        if (!items) return false;
        std::size_t count = size();
        for (std::size_t i = 0; i < count; ++i) items[i] = at(i);
        std::free(std::exchange(items_, items));
        room_ = wider;
        head_ = 0;
        tail_ = count;
        return true;
    }

    Item *items_ = nullptr;
    std::size_t room_ = 0;  // a power of two
    std::size_t head_ = 0, tail_ = 0;
};

}  // namespace penstock::bus
