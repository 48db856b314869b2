// The Python object of a subscriber, for the files that give it its methods.
#pragma once

#include <deque>
#include <optional>

#include "shm/bindings_handle.hpp"
#include "shm/subscriber.hpp"

namespace penstock::shm {

struct Holder final : Owner {
    Subscriber *handle = nullptr;
    void release(std::uint64_t token) noexcept override { handle->release(std::uint32_t(token)); }
    bool retain(std::uint64_t token) noexcept override { return handle->retain(std::uint32_t(token)); }
    void release_many(const std::uint64_t *tokens, std::size_t count) noexcept override {
        handle->release_many(tokens, count);
    }
};

// What an error kept from being returned, for the next read: messages that are held and counted, then the next one's
// error.
struct Pending {
    std::deque<Envelope> messages;
    std::optional<Error> error;
    bool any() const { return error || !messages.empty(); }
};

struct SubscriberObject : HandleObject<Subscriber> {
    static constexpr const char *kind = "subscriber";
    Holder holder;
    PyObject *channel;  // str
    Pending *pending;
    std::uint64_t drops_told;
    std::int64_t limit_since_ns;  // since when messages wait while it holds all it may; 0: they do not
    std::uint32_t streak;   // messages read without waiting since the last wait
    bool busy;              // the last read_many found something at once
    bool watched;        // the descriptor is being polled
    bool tells_drops;    // self._tell_dropped(count) must be called
    bool limit_told;     // whether the warning about the limit was given
};

inline SubscriberObject *as_subscriber(PyObject *self) { return reinterpret_cast<SubscriberObject *>(self); }

// In bindings_read.cpp
PyObject *subscriber_read(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *subscriber_read_newest(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *subscriber_read_many(PyObject *object, PyObject *arguments, PyObject *names);
PyObject *subscriber_read_all(PyObject *object, PyObject *);
PyObject *subscriber_find(PyObject *object, PyObject *argument);
PyObject *subscriber_read_at(PyObject *object, PyObject *arguments);
PyObject *subscriber_place_of(PyObject *object, PyObject *argument);

inline Envelope envelope_of(const View &view) {
    Envelope envelope;
    envelope.data = view.data;
    envelope.size = std::int64_t(view.size);
    envelope.ordinal = view.ordinal;
    envelope.timestamp_ns = view.timestamp_ns;
    envelope.vchan_id = view.vchan;
    envelope.token = view.slot;
    envelope.metadata = view.metadata;
    envelope.metadata_size = view.metadata_size;
    envelope.intact = view.checked ? view.intact : -1;
    envelope.activation = view.flags & message_activation;
    return envelope;
}


}  // namespace penstock::shm
