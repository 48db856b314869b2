// Shared-memory channels of Penstock for C++, over penstock_shm.h: handles that close themselves, messages that release
// themselves, errors that are thrown. C++17, header only; link what the C header needs.
//
// Rules: a handle is used by one thread at a time and outlives its messages and drafts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "penstock_shm.h"

namespace penstock_shm {

class Error : public std::runtime_error {
   public:
    explicit Error(int code) : std::runtime_error(penstock_shm_error()), code(code) {}
    const int code;  // a penstock_shm_code
};

inline int checked(int result) {
    if (result < 0) throw Error(result);
    return result;
}

struct Options : penstock_shm_options {
    Options() { penstock_shm_options_init(this); }
};

// Read-only bytes in the channel itself; releases them when it goes.
class Message {
   public:
    Message(penstock_shm_subscriber *subscriber, const penstock_shm_message &message)
        : subscriber_(subscriber), message_(message) {}
    Message(Message &&other) noexcept : subscriber_(std::exchange(other.subscriber_, nullptr)), message_(other.message_) {}
    Message &operator=(Message &&other) noexcept {
        std::swap(subscriber_, other.subscriber_);
        std::swap(message_, other.message_);
        return *this;
    }
    ~Message() { release(); }
    void release() noexcept {
        if (subscriber_) penstock_shm_release(std::exchange(subscriber_, nullptr), &message_);
    }

    const void *data() const { return message_.data; }
    std::size_t size() const { return message_.size; }
    std::string_view text() const { return {static_cast<const char *>(message_.data), message_.size}; }
    std::string_view metadata() const { return {static_cast<const char *>(message_.metadata), message_.metadata_size}; }
    std::uint64_t ordinal() const { return message_.ordinal; }
    std::int64_t timestamp_ns() const { return message_.timestamp_ns; }
    std::int32_t vchan_id() const { return message_.vchan_id; }
    bool intact() const { return message_.intact; }
    bool activation() const { return message_.activation; }
    const penstock_shm_message &raw() const { return message_; }

   private:
    penstock_shm_subscriber *subscriber_;
    penstock_shm_message message_;
};

// A writable buffer in the channel itself; cancelled when it goes unpublished.
class Draft {
   public:
    Draft(penstock_shm_publisher *publisher, void *data, std::size_t size, std::uint32_t slot)
        : publisher_(publisher), data_(data), size_(size), slot_(slot) {}
    Draft(Draft &&other) noexcept
        : publisher_(std::exchange(other.publisher_, nullptr)), data_(other.data_), size_(other.size_), slot_(other.slot_) {}
    Draft &operator=(Draft &&) = delete;
    ~Draft() {
        if (publisher_) penstock_shm_cancel(publisher_, slot_);
    }

    void *data() const { return data_; }
    std::size_t size() const { return size_; }
    void set_metadata(std::string_view metadata) {
        checked(penstock_shm_set_metadata(publisher_, slot_, metadata.data(), metadata.size()));
    }
    // The ordinal; 0: it gave way to what reliable subscribers had not read.
    std::uint64_t publish() { return publish(size_); }
    std::uint64_t publish(std::size_t size) {
        std::uint64_t ordinal = 0;
        checked(penstock_shm_publish(publisher_, slot_, size, &ordinal));
        publisher_ = nullptr;
        return ordinal;
    }

   private:
    penstock_shm_publisher *publisher_;
    void *data_;
    std::size_t size_;
    std::uint32_t slot_;
};

class Publisher {
   public:
    explicit Publisher(const std::string &name, const Options &options = Options()) {
        penstock_shm_publisher *opened = nullptr;
        checked(penstock_shm_publisher_open(name.c_str(), &options, &opened));
        handle_.reset(opened);
    }
    std::uint64_t publish(std::string_view data, double timeout_s = -1) {
        std::uint64_t ordinal = 0;
        checked(penstock_shm_publish_copy(handle_.get(), data.data(), data.size(), timeout_s, &ordinal));
        return ordinal;
    }
    Draft reserve(std::size_t size, double timeout_s = -1) {
        void *data = nullptr;
        std::uint32_t slot = 0;
        checked(penstock_shm_reserve(handle_.get(), size, timeout_s, &data, &slot));
        return {handle_.get(), data, size, slot};
    }
    // Asked before slots grow; false vetoes.
    void on_resize(std::function<bool(std::uint64_t from, std::uint64_t to)> function) {
        resize_ = std::make_unique<std::function<bool(std::uint64_t, std::uint64_t)>>(std::move(function));
        auto ask = [](void *context, std::uint64_t from, std::uint64_t to) -> int {
            return (*static_cast<std::function<bool(std::uint64_t, std::uint64_t)> *>(context))(from, to);
        };
        checked(penstock_shm_on_resize(handle_.get(), *resize_ ? +ask : nullptr, resize_.get()));
    }
    bool activate() { return checked(penstock_shm_activate(handle_.get())) == 1; }
    std::vector<std::uint32_t> retired(double timeout_s = 0) {
        std::vector<std::uint32_t> slots, some(1u << 16);
        for (bool more = true; more; timeout_s = 0) {
            auto found = std::size_t(checked(penstock_shm_retired(handle_.get(), timeout_s, some.data(), some.size())));
            more = found > some.size();
            slots.insert(slots.end(), some.begin(), some.begin() + std::ptrdiff_t(more ? some.size() : found));
        }
        return slots;
    }
    bool wait_ready(std::uint32_t subscribers = 1, double timeout_s = -1) {
        return checked(penstock_shm_wait_ready(handle_.get(), subscribers, timeout_s)) == 1;
    }
    bool wait(double timeout_s = -1, int descriptor = -1) {
        return checked(penstock_shm_publisher_wait(handle_.get(), timeout_s, descriptor)) == 1;
    }
    int fileno() { return checked(penstock_shm_publisher_fileno(handle_.get())); }
    std::uint64_t slot_size() const { return penstock_shm_slot_size(handle_.get()); }
    std::uint32_t metadata_size() const { return penstock_shm_metadata_size(handle_.get()); }
    std::int32_t vchan_id() const { return penstock_shm_publisher_vchan_id(handle_.get()); }
    penstock_shm_publisher *raw() const { return handle_.get(); }

   private:
    struct Close {
        void operator()(penstock_shm_publisher *handle) const { penstock_shm_publisher_close(handle); }
    };
    std::unique_ptr<std::function<bool(std::uint64_t, std::uint64_t)>> resize_;
    std::unique_ptr<penstock_shm_publisher, Close> handle_;
};

class Subscriber {
   public:
    explicit Subscriber(const std::string &name, const Options &options = Options()) {
        penstock_shm_subscriber *opened = nullptr;
        checked(penstock_shm_subscriber_open(name.c_str(), &options, &opened));
        handle_.reset(opened);
    }
    // The next message, or none when the time is over; timeout_s < 0 waits for ever.
    std::optional<Message> read(double timeout_s = -1) {
        return take([&](penstock_shm_message *message) { return penstock_shm_read(handle_.get(), timeout_s, message); });
    }
    std::optional<Message> read_newest() {
        return take([&](penstock_shm_message *message) { return penstock_shm_read_newest(handle_.get(), message); });
    }
    std::optional<Message> find(std::int64_t timestamp_ns) {
        return take([&](penstock_shm_message *message) { return penstock_shm_find(handle_.get(), timestamp_ns, message); });
    }
    // Names a message without holding it; read_again gives it while its slot is unchanged.
    penstock_shm_weak weak_reference(const Message &message) {
        penstock_shm_weak weak{};
        checked(penstock_shm_weak_of(handle_.get(), &message.raw(), &weak));
        return weak;
    }
    std::optional<Message> read_again(const penstock_shm_weak &weak) {
        return take([&](penstock_shm_message *message) { return penstock_shm_weak_read(handle_.get(), &weak, message); });
    }
    void on_dropped(std::function<void(std::uint64_t count)> function) {
        dropped_ = std::make_unique<std::function<void(std::uint64_t)>>(std::move(function));
        auto tell = [](void *context, penstock_shm_subscriber *, std::uint64_t count) {
            (*static_cast<std::function<void(std::uint64_t)> *>(context))(count);
        };
        checked(penstock_shm_on_dropped(handle_.get(), *dropped_ ? +tell : nullptr, dropped_.get()));
    }
    bool wait(double timeout_s = -1, int descriptor = -1) {
        return checked(penstock_shm_wait(handle_.get(), timeout_s, descriptor)) == 1;
    }
    int fileno() { return checked(penstock_shm_fileno(handle_.get())); }
    std::uint64_t dropped() const { return penstock_shm_dropped(handle_.get()); }
    std::int32_t vchan_id() const { return penstock_shm_subscriber_vchan_id(handle_.get()); }
    penstock_shm_subscriber *raw() const { return handle_.get(); }

   private:
    struct Close {
        void operator()(penstock_shm_subscriber *handle) const { penstock_shm_subscriber_close(handle); }
    };
    template <typename Function>
    std::optional<Message> take(Function &&function) {
        penstock_shm_message message;
        if (checked(function(&message)) == 0) return std::nullopt;
        return Message(handle_.get(), message);
    }
    std::unique_ptr<std::function<void(std::uint64_t)>> dropped_;
    std::unique_ptr<penstock_shm_subscriber, Close> handle_;
};

// Every channel of this machine.
inline void channels(const std::function<void(const penstock_shm_channel &)> &function) {
    checked(penstock_shm_channels(
        [](void *context, const penstock_shm_channel *channel) {
            (*static_cast<const std::function<void(const penstock_shm_channel &)> *>(context))(*channel);
        },
        const_cast<std::function<void(const penstock_shm_channel &)> *>(&function)));
}

}  // namespace penstock_shm
