// read, read_newest, read_many and find of penstock._core.shm.Subscriber, with nothing in the way.
#include <vector>

#include "shm/bindings_subscriber.hpp"

namespace penstock::shm {

namespace {

constexpr int batch_patience = 64;
constexpr std::size_t small_batch = 32;
constexpr std::int64_t linger_ns = 2'000;

// Waits for a message. False with an error set.
bool wait_message(SubscriberObject *self, std::int64_t deadline, Woken &woken, int patience = 4) {
    // Who has read a good many at once is in a stream: the next one is near. Who waits for each one sleeps at once.
    std::int64_t spin_ns = self->spin_ns ? self->spin_ns : self->streak >= 32 ? short_spin_ns : 0;
    self->streak = 0;
    if (self->spin_ns) patience = 1;
    return wait_with(self, woken, [&] { return self->handle->wait(deadline, spin_ns, -1, patience); });
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

// Nothing is there: prepares the descriptor of who polls it. False when there is something after all.
bool nothing_now(SubscriberObject *self, Subscriber *handle) { return !self->watched || handle->arm(); }

PyObject *read_with(SubscriberObject *self, PyObject *timeout, Found (Subscriber::*function)(View &)) {
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    View view;
    std::int64_t deadline = -2;
    const bool fine = !timeout || timeout == Py_None || (PyFloat_CheckExact(timeout) && PyFloat_AS_DOUBLE(timeout) >= 0);
    if (!fine && !read_timeout(timeout, deadline)) return nullptr;  // before anything is taken
    try {
        for (;;) {
            Found found = (handle->*function)(view);
            if (found == Found::message) [[likely]] {
                ++self->streak;
                handle->tell_publishers();
                PyObject *message = message_of(self, view);
                if (message && !tell_dropped(self)) Py_CLEAR(message);
                return message;
            }
            if (deadline == -2 && !read_timeout(timeout, deadline)) return nullptr;
            if (found == Found::limit) {
                if (deadline == 0) Py_RETURN_NONE;
                return raise_error("CapacityError", "%s", handle->why_limit().c_str());
            }
            if (deadline == 0) {
                if (!nothing_now(self, handle)) continue;
                if (!tell_dropped(self)) return nullptr;
                Py_RETURN_NONE;
            }
            Woken woken = Woken::timeout;
            if (!wait_message(self, deadline, woken)) return nullptr;
            if (woken == Woken::timeout) {
                if (!nothing_now(self, handle)) continue;
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

// Up to `most` messages that are there now, into `entries`.
Found gather(SubscriberObject *self, Subscriber *handle, std::size_t most, std::vector<Envelope> &entries) {
    View view;
    Found found = Found::message;
    while (entries.size() < most && (found = handle->read(view)) == Found::message) {
        if (!view.intact && !check_intact(self, view)) return found;
        envelope_of(view, entries.emplace_back());
    }
    return found;
}

void give_back(Subscriber *handle, const std::vector<Envelope> &entries) {
    for (const Envelope &entry : entries) handle->release(std::uint32_t(entry.token));
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
            std::size_t room = handle->reader.most_held - std::min(handle->reader.held, handle->reader.most_held);
            entries.reserve(std::min<std::size_t>(std::size_t(most), room));
            Found found = gather(self, handle, std::size_t(most), entries);
            if (PyErr_Occurred()) break;
            if (!entries.empty() && !waited && self->busy && entries.size() < small_batch) {
                // Right behind a busy publisher: each look takes the lines that it is writing. Let some gather.
                for (std::int64_t end = monotonic_ns() + linger_ns; monotonic_ns() < end;) relax();
                gather(self, handle, std::size_t(most), entries);
                if (PyErr_Occurred()) break;
            }
            if (!entries.empty()) {
                self->streak += std::uint32_t(entries.size());
                break;
            }
            if (found == Found::limit) {
                if (deadline == 0) break;
                return raise_error("CapacityError", "%s", handle->why_limit().c_str());
            }
            Woken woken = Woken::timeout;
            waited = true;
            if (deadline != 0 && !wait_message(self, deadline, woken, batch_patience)) return nullptr;
            if (woken == Woken::timeout && nothing_now(self, handle)) break;
        }
    } catch (...) {
        give_back(handle, entries);
        return raise_current();
    }
    self->busy = !waited;
    handle->tell_publishers();
    if (PyErr_Occurred() || !tell_dropped(self)) {
        give_back(handle, entries);
        return nullptr;
    }
    return batch_new(std::move(entries), &self->holder, self->channel, object);
}

PyObject *subscriber_find(PyObject *object, PyObject *argument) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    long long timestamp = PyLong_AsLongLong(argument);
    if (!handle || (timestamp == -1 && PyErr_Occurred())) return nullptr;
    View view;
    try {
        Found found = handle->find(view, timestamp);
        if (found == Found::limit) return raise_error("CapacityError", "%s", handle->why_limit().c_str());
        if (found == Found::nothing) Py_RETURN_NONE;
        return message_of(self, view);
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

PyObject *subscriber_again(PyObject *object, PyObject *arguments) {
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
        return message_of(self, view);
    } catch (...) {
        return raise_current();
    }
}

}  // namespace penstock::shm
