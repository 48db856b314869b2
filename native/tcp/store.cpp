#include "tcp/store.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace penstock::tcp {

namespace {
constexpr std::size_t pooled_payload_bytes = 184;
constexpr std::uint32_t pooled_frames = 8192;
}  // namespace

Store::~Store() {
    while (free_) {
        Frame *frame = free_;
        free_ = frame->next;
        std::free(frame);
    }
}

void Frame::fill(const Outgoing &message) noexcept {
    ordinal = message.ordinal;
    timestamp_ns = message.timestamp_ns;
    drops = message.drops;
    vchan_plus_one = message.vchan_plus_one;
    if (message.size && message.data) std::memcpy(payload(), message.data, message.size);
    if (message.properties_size) std::memcpy(properties(), message.properties, message.properties_size);
}

Frame *Store::make(std::uint64_t size, std::uint32_t properties_size) {
    Frame *frame;
    bool pooled = size + properties_size <= pooled_payload_bytes;
    if (pooled && free_) {
        frame = free_;
        free_ = frame->next;
        --free_count_;
    } else {
        std::uint64_t capacity = pooled ? pooled_payload_bytes : size + properties_size;
        frame = static_cast<Frame *>(std::malloc(sizeof(Frame) + capacity));
        if (!frame) throw std::bad_alloc();
    }
    frame->references = 1;
    frame->pooled = pooled;
    frame->published = false;
    frame->kept = false;
    frame->lost_plus_one = 0;
    frame->size = size;
    frame->capacity = size;
    frame->properties_size = properties_size;
    bytes_ += size + properties_size;
    return frame;
}

Frame *Store::make(const Outgoing &message) {
    Frame *frame = make(message.size, message.properties_size);
    frame->fill(message);
    return frame;
}

void Store::drop(Frame *frame) noexcept {
    if (--frame->references > frame->kept) return;
    if (std::exchange(frame->published, false)) {
        counters_->depth.set(--stored_);
        settle(frame->lost_plus_one);
    }
    if (frame->references) return;
    bytes_ -= frame->capacity + frame->properties_size;
    if (frame->pooled && free_count_ < pooled_frames) {
        frame->next = free_;
        free_ = frame;
        ++free_count_;
    } else {
        std::free(frame);
    }
}

void Store::publish(std::uint64_t size) noexcept {
    counters_->matched.add(1);
    counters_->bytes.add(size);
}

void Store::publish(Frame *frame) noexcept {
    publish(frame->size);
    adopt(frame);
}

void Store::adopt(Frame *frame) noexcept {
    frame->published = true;
    counters_->depth.set(++stored_);
}

void Store::settle(std::uint8_t lost_plus_one) noexcept {
    if (lost_plus_one) counters_->drop(static_cast<DropReason>(lost_plus_one - 1));
    else counters_->delivered.add(1);
}

}  // namespace penstock::tcp
