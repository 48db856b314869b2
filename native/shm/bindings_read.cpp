// read, read_newest, read_many and find of penstock._core.shm.Subscriber: the fast paths.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "shm/bindings_subscriber.hpp"

namespace penstock::shm {

namespace {

constexpr int batch_patience = 64;
constexpr std::size_t small_batch = 32;
constexpr std::int64_t linger_ns = 2'000;
constexpr std::int64_t limit_patience_ns = 1'000'000'000;  // warn after so long at the limit

// Waits for a message. False with an error set.
bool wait_message(SubscriberObject *self, std::int64_t deadline, Woken &woken, int patience = 4) {
    // A reader that has just read many messages is in a stream: spin, the next one is near. Otherwise sleep at once.
    std::int64_t until = spin_until(self->spin_ns ? self->spin_ns : self->streak >= 32 ? short_spin_ns : 0);
    self->streak = 0;
    if (self->spin_ns) patience = 1;
    return wait_with(self, woken, [&] { return self->handle->wait(deadline, until, -1, patience); });
}

bool tell_dropped(SubscriberObject *self) {
    std::uint64_t dropped = self->handle->counters->dropped[std::size_t(DropReason::overflow)].get();
    if (dropped == self->drops_told) [[likely]] return true;
    std::uint64_t count = dropped - self->drops_told;
    self->drops_told = dropped;
    if (!self->tells_drops) return true;
    PyObject *done = PyObject_CallMethod(reinterpret_cast<PyObject *>(self), "_tell_dropped", "K", count);
    Py_XDECREF(done);
    return done != nullptr;
}

// Nothing is there: arms the descriptor for pollers. False if there is something after all.
bool nothing_now(SubscriberObject *self, Subscriber *handle) { return !self->watched || handle->arm(); }

// A message over what was read; releases it and gives null with an error set when it cannot.
PyObject *message_of(SubscriberObject *self, const Envelope &envelope) {
    PyObject *message = message_new(envelope, &self->holder, self->channel, reinterpret_cast<PyObject *>(self));
    if (!message) self->handle->release(std::uint32_t(envelope.token));
    return message;
}

// The limit of held messages is reached, and messages wait: waits for a release, or arms the descriptor for one. False
// with an error set; `woken` is timeout if nothing was released.
bool wait_at_limit(SubscriberObject *self, Subscriber *handle, std::int64_t deadline, Woken &woken) {
    woken = Woken::timeout;
    std::int64_t now = monotonic_ns();
    if (!self->limit_since_ns) self->limit_since_ns = now;
    std::int64_t patience = self->limit_since_ns + limit_patience_ns;
    auto tell = [&] {
        self->limit_told = true;
        return PyErr_WarnEx(PyExc_RuntimeWarning, handle->why_limit().c_str(), 1) == 0 && usable(self);
    };
    if (deadline == 0) {  // an event loop waits for the descriptor and checks now and then
        if (!self->watched) return true;
        handle->arm_release();
        return self->limit_told || now < patience || tell();
    }
    bool tells = !self->limit_told && (deadline < 0 || deadline > patience);
    if (!wait_with(self, woken, [&] { return handle->wait_release(tells ? patience : deadline); })) return false;
    if (woken != Woken::timeout || self->limit_told) return true;
    if (tells) woken = Woken::ready;  // of the patience; the wait goes on
    return tell();
}

PyObject *read_with(SubscriberObject *self, PyObject *timeout, Found (Subscriber::*function)(View &)) {
    std::int64_t deadline = -2;
    // Parsed only when it is needed or may be invalid: a valid plain float costs one comparison.
    if (timeout && timeout != Py_None && !(PyFloat_CheckExact(timeout) && PyFloat_AS_DOUBLE(timeout) >= 0) &&
        !read_timeout(timeout, deadline))
        return nullptr;
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    Pending &pending = *self->pending;
    View view;
    try {
        for (;;) {
            if (pending.any()) [[unlikely]] {
                if (!pending.messages.empty()) {
                    Envelope envelope = pending.messages.front();
                    pending.messages.pop_front();
                    return message_of(self, envelope);
                }
                Error error = *std::exchange(pending.error, std::nullopt);
                return raise(error);
            }
            Found found = (handle->*function)(view);
            if (found == Found::message) [[likely]] {
                ++self->streak;
                self->limit_since_ns = 0;
                handle->counters->note_read();
                handle->tell_publishers();
                if (!tell_dropped(self)) [[unlikely]] {
                    pending.messages.push_back(envelope_of(view));
                    return nullptr;
                }
                return message_of(self, envelope_of(view));
            }
            if (deadline == -2 && !read_timeout(timeout, deadline)) return nullptr;
            if (found == Found::nothing && deadline == 0) {
                if (!nothing_now(self, handle)) continue;
                if (!tell_dropped(self)) return nullptr;
                Py_RETURN_NONE;
            }
            Woken woken = Woken::timeout;
            if (found == Found::limit ? !wait_at_limit(self, handle, deadline, woken) : !wait_message(self, deadline, woken))
                return nullptr;
            if (woken == Woken::timeout) {
                if (found == Found::nothing && !nothing_now(self, handle)) continue;
                Py_RETURN_NONE;
            }
        }
    } catch (...) {
        return raise_current();
    }
}

// read(timeout=None): the one argument by place or by name.
bool one_timeout(PyObject *const *arguments, Py_ssize_t count, PyObject *names, const char *of, PyObject *&timeout) {
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (count + named > 1 || (named && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") != 0))
        return PyErr_Format(PyExc_TypeError, "%s() takes a timeout in seconds and nothing else", of), false;
    timeout = count + named ? arguments[0] : nullptr;
    return true;
}

// Up to `most` messages that are there now, into `entries`. An error after the first one is raised by the next read.
Found gather(SubscriberObject *self, Subscriber *handle, std::size_t most, std::vector<Envelope> &entries) {
    Pending &pending = *self->pending;
    View view;
    Found found = Found::message;
    for (; entries.size() < most && !pending.messages.empty(); pending.messages.pop_front())
        entries.push_back(pending.messages.front());
    try {
        if (pending.error && entries.empty()) throw Error(*std::exchange(pending.error, std::nullopt));
        while (!pending.error && entries.size() < most && (found = handle->read(view)) == Found::message)
            entries.push_back(envelope_of(view));
    } catch (const Error &error) {
        if (entries.empty()) throw;
        pending.error = error;
    }
    return found;
}

// Makes a batch of what was read. If the on_dropped callback raises, the messages are kept for the next read.
PyObject *batch_of(SubscriberObject *self, Subscriber *handle, std::vector<Envelope> entries, PyObject *object) {
    if (!entries.empty()) {
        self->streak += std::uint32_t(entries.size());
        self->limit_since_ns = 0;
        handle->counters->note_read();
    }
    handle->tell_publishers();
    if (!tell_dropped(self)) {
        self->pending->messages.insert(self->pending->messages.begin(), entries.begin(), entries.end());
        return nullptr;
    }
    return batch_new(std::move(entries), &self->holder, self->channel, object);
}

}  // namespace

PyObject *subscriber_read(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *timeout;
    if (!one_timeout(arguments, count, names, "read", timeout)) return nullptr;
    return read_with(as_subscriber(object), timeout, &Subscriber::read);
}

PyObject *subscriber_read_newest(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PyObject *timeout;
    if (!one_timeout(arguments, count, names, "read_newest", timeout)) return nullptr;
    return read_with(as_subscriber(object), timeout, &Subscriber::read_newest);
}

PyObject *subscriber_read_many(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"most", "timeout", nullptr};
    SubscriberObject *self = as_subscriber(object);
    Py_ssize_t most = 1024;
    PyObject *timeout = Py_None;
    std::int64_t deadline = -1;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|nO", const_cast<char **>(keywords), &most, &timeout) ||
        !read_timeout(timeout, deadline))
        return nullptr;
    if (most < 1) return raise_error("InvalidArgument", "most=%zd must be 1 or more", most);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    std::vector<Envelope> entries;
    bool waited = false;
    try {
        for (;;) {
            std::size_t room = handle->prepare_batch(std::size_t(most));
            entries.reserve(room);
            Found found = gather(self, handle, room, entries);
            if (!entries.empty() && !waited && self->busy && entries.size() < std::min(small_batch, room)) {
                // Close behind a busy publisher: each check would take the cache lines that it is writing. Let some
                // messages gather.
                for (std::int64_t end = monotonic_ns() + linger_ns; monotonic_ns() < end;) relax();
                gather(self, handle, room, entries);
            }
            if (!entries.empty()) {
                break;
            }
            Woken woken = Woken::timeout;
            waited = true;
            if (found == Found::limit) {
                if (!wait_at_limit(self, handle, deadline, woken)) return nullptr;
                if (woken == Woken::timeout) break;
                continue;
            }
            if (deadline != 0 && !wait_message(self, deadline, woken, batch_patience)) return nullptr;
            if (woken == Woken::timeout && nothing_now(self, handle)) break;
        }
    } catch (...) {
        return raise_current();
    }
    self->busy = !waited;
    return batch_of(self, handle, std::move(entries), object);
}

// Every message that is there, as many as may be held, as a batch.
PyObject *subscriber_read_all(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    std::vector<Envelope> entries;
    try {
        Found found;
        do found = gather(self, handle, std::numeric_limits<std::size_t>::max(), entries);
        while (entries.empty() && found == Found::nothing && !nothing_now(self, handle));
        Woken woken;
        if (entries.empty() && found == Found::limit && !wait_at_limit(self, handle, 0, woken)) return nullptr;
    } catch (...) {
        return raise_current();
    }
    return batch_of(self, handle, std::move(entries), object);
}

PyObject *subscriber_find(PyObject *object, PyObject *argument) {
    SubscriberObject *self = as_subscriber(object);
    int overflow = 0;
    long long timestamp = PyLong_AsLongLongAndOverflow(argument, &overflow);
    if (timestamp == -1 && PyErr_Occurred()) return nullptr;
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    if (overflow > 0) Py_RETURN_NONE;  // no message can be that late
    if (overflow < 0) timestamp = std::numeric_limits<long long>::min();
    View view;
    try {
        Found found = handle->find(view, timestamp);
        if (found == Found::limit) return raise_error("CapacityError", "%s", handle->why_limit().c_str());
        if (found == Found::nothing) Py_RETURN_NONE;
        return message_of(self, envelope_of(view));
    } catch (...) {
        return raise_current();
    }
}

// (slot, sequence) of a message that this subscriber holds.
PyObject *subscriber_place_of(PyObject *object, PyObject *argument) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    if (!message_check(argument)) return PyErr_Format(PyExc_TypeError, "a Message is needed, not %s", Py_TYPE(argument)->tp_name);
    auto *message = reinterpret_cast<Message *>(argument);
    if (message->source != object || !message->owner || message->envelope.token >= handle->reader.pins.size())
        return raise_error("StateError", "the message was released, or another subscriber has read it");
    auto slot = std::uint32_t(message->envelope.token);
    return Py_BuildValue("IK", slot, static_cast<unsigned long long>(handle->reader.pins[slot].sequence));
}

PyObject *subscriber_read_at(PyObject *object, PyObject *arguments) {
    unsigned int slot;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(arguments, "IK", &slot, &sequence)) return nullptr;
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    View view;
    try {
        Found found = handle->again(view, slot, sequence);
        if (found == Found::limit) return raise_error("CapacityError", "%s", handle->why_limit().c_str());
        if (found == Found::nothing) Py_RETURN_NONE;
        return message_of(self, envelope_of(view));
    } catch (...) {
        return raise_current();
    }
}

}  // namespace penstock::shm
