// penstock._core.shm.Subscriber: read() with nothing in the way, and the message that carries metadata.
#include <Python.h>

#include <new>
#include <vector>

#include "message/message.hpp"
#include "shm/bindings.hpp"
#include "shm/subscriber.hpp"

namespace penstock::shm {

namespace {

struct Holder final : Owner {
    Subscriber *handle = nullptr;
    void release(std::uint64_t token) noexcept override { handle->release(std::uint32_t(token)); }
    void release_many(const std::uint64_t *tokens, std::size_t count) noexcept override {
        handle->release_many(tokens, count);
    }
};

struct SubscriberObject {
    PyObject_HEAD
    Subscriber *handle;
    Holder holder;
    PyObject *channel;  // str
    std::int64_t spin_ns;
    std::uint64_t drops_told;
    std::uint32_t waiting;  // threads in a wait without the GIL
    std::uint32_t streak;   // messages read without waiting since the last wait
    bool busy;              // the last read_many found something at once
    bool close_pending;
    bool watched;        // somebody polls the descriptor
    bool tells_drops;    // self._tell_dropped(count) wants to know
    bool refuse_broken;  // a wrong checksum raises
};

SubscriberObject *as_subscriber(PyObject *self) { return reinterpret_cast<SubscriberObject *>(self); }

// A message with what only this reach has. Plain messages are made where the channel has neither.
struct RichMessage {
    Message message;
    PyObject *metadata;
    bool intact;
};
PyTypeObject *rich_type = nullptr;

void rich_dealloc(PyObject *self) {
    Py_CLEAR(reinterpret_cast<RichMessage *>(self)->metadata);
    message_type->tp_dealloc(self);  // frees and gives the type back
}
PyObject *rich_metadata(PyObject *self, void *) {
    PyObject *metadata = reinterpret_cast<RichMessage *>(self)->metadata;
    return metadata ? Py_NewRef(metadata) : PyBytes_FromStringAndSize(nullptr, 0);
}
PyObject *rich_intact(PyObject *self, void *) { return PyBool_FromLong(reinterpret_cast<RichMessage *>(self)->intact); }

Subscriber *usable(SubscriberObject *self) {
    Subscriber *handle = self->handle;
    if (handle && !handle->closed.load(std::memory_order_relaxed) && handle->member.belongs_here()) [[likely]]
        return handle;
    if (handle && !handle->member.belongs_here())
        raise_error("StateError", "%s was opened before this process was forked; open it again in the child",
                    handle->member.describe().c_str());
    else
        raise_error("ClosedError", "this subscriber is closed");
    return nullptr;
}

void settle_close(SubscriberObject *self) {
    if (!self->close_pending || self->waiting) return;
    self->close_pending = false;
    without_gil([&] { self->handle->close(false); });
}

constexpr int batch_patience = 64;
constexpr std::size_t small_batch = 32;
constexpr std::int64_t linger_ns = 2'000;

// Runs a wait without the GIL. False with an error set.
bool wait_with(SubscriberObject *self, std::int64_t deadline, int extra, Woken &woken, int patience = 4) {
    // Who has read a good many at once is in a stream: the next one is near. Who waits for each one sleeps at once.
    std::int64_t spin_ns = self->spin_ns ? self->spin_ns : self->streak >= 32 ? short_spin_ns : 0;
    self->streak = 0;
    if (self->spin_ns) patience = 1;
    for (;;) {
        ++self->waiting;
        bool threw = false;
        try {
            woken = without_gil([&] { return self->handle->wait(deadline, spin_ns, extra, patience); });
        } catch (...) {
            threw = true;
            raise_current();
        }
        --self->waiting;
        if (threw) return false;
        settle_close(self);
        if (woken == Woken::closed || self->handle->closed.load())
            return raise_error("ClosedError", "this subscriber was closed while it waited"), false;
        if (woken != Woken::interrupted) return true;
        if (PyErr_CheckSignals() != 0) return false;
    }
}

void envelope_of(const View &view, Envelope &envelope) {
    envelope.data = view.data;
    envelope.size = std::int64_t(view.size);
    envelope.ordinal = view.ordinal;
    envelope.timestamp_ns = view.timestamp_ns;
    envelope.vchan_id = view.vchan;
    envelope.token = view.slot;
}

bool check_intact(SubscriberObject *self, const View &view) {
    if (view.intact) [[likely]] return true;
    self->handle->counters->errors.add();
    if (!self->refuse_broken) return true;
    self->handle->release(view.slot);
    raise_error("CorruptionError", "%s: the checksum of message %llu does not match its %llu bytes",
                self->handle->member.describe().c_str(), static_cast<unsigned long long>(view.ordinal),
                static_cast<unsigned long long>(view.size));
    return false;
}

PyObject *message_of(SubscriberObject *self, const View &view) {
    Subscriber *handle = self->handle;
    if (!check_intact(self, view)) return nullptr;
    Envelope envelope;
    envelope_of(view, envelope);
    PyObject *message;
    if (!view.metadata_size && (self->refuse_broken || !handle->verify)) [[likely]] {
        message = message_new(envelope, &self->holder, self->channel, reinterpret_cast<PyObject *>(self));
    } else {
        PyObject *metadata = nullptr;
        if (view.metadata_size)
            metadata = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(view.metadata), view.metadata_size);
        message = PyErr_Occurred() ? nullptr
                                   : message_new_of(rich_type, envelope, &self->holder, self->channel,
                                                    reinterpret_cast<PyObject *>(self));
        if (message) {
            reinterpret_cast<RichMessage *>(message)->metadata = metadata;
            reinterpret_cast<RichMessage *>(message)->intact = view.intact;
        } else {
            Py_XDECREF(metadata);
        }
    }
    if (!message) handle->release(view.slot);
    return message;
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
            if (!wait_with(self, deadline, -1, woken)) return nullptr;
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
            if (deadline != 0 && !wait_with(self, deadline, -1, woken, batch_patience)) return nullptr;
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

PyObject *subscriber_wait(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"timeout", "descriptor", nullptr};
    SubscriberObject *self = as_subscriber(object);
    PyObject *timeout = Py_None, *extra = Py_None;
    std::int64_t deadline;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|OO", const_cast<char **>(keywords), &timeout, &extra) ||
        !read_timeout(timeout, deadline))
        return nullptr;
    Subscriber *handle = usable(self);
    int descriptor = extra == Py_None ? -1 : PyObject_AsFileDescriptor(extra);
    if (!handle || PyErr_Occurred()) return nullptr;
    try {
        if (deadline == 0 && descriptor < 0) return PyBool_FromLong(handle->has_next());
    } catch (...) {
        return raise_current();
    }
    Woken woken = Woken::timeout;
    if (deadline == 0) deadline = monotonic_ns() + 1;
    if (!wait_with(self, deadline, descriptor, woken)) return nullptr;
    return PyBool_FromLong(woken == Woken::ready);
}

PyObject *subscriber_fileno(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    try {
        int descriptor = handle->member.bell();
        if (!self->watched) {
            self->watched = true;
            if (!handle->arm()) handle->wake();  // something is there already
        }
        return PyLong_FromLong(descriptor);
    } catch (...) {
        return raise_current();
    }
}

PyObject *subscriber_close(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = self->handle;
    if (!handle || handle->closed.load()) Py_RETURN_NONE;
    handle->update_counters();
    handle->closed.store(true);
    if (handle->member.belongs_here()) handle->wake();
    self->close_pending = true;
    settle_close(self);
    Py_RETURN_NONE;
}

// The process ends: nothing is waited for.
PyObject *subscriber_abandon(PyObject *object, PyObject *) {
    if (Subscriber *handle = as_subscriber(object)->handle) handle->close(true);
    Py_RETURN_NONE;
}

PyObject *subscriber_counts(PyObject *object, PyObject *) {
    Subscriber *handle = as_subscriber(object)->handle;
    if (!handle) return raise_error("ClosedError", "this subscriber is closed");
    if (!handle->closed.load()) handle->update_counters();
    const Counters *c = handle->counters;
    PyObject *dropped = PyDict_New();
    for (std::size_t i = 0; dropped && i < drop_reason_count; ++i) {
        if (!c->dropped[i].get()) continue;
        PyObject *count = PyLong_FromUnsignedLongLong(c->dropped[i].get());
        if (!count || PyDict_SetItemString(dropped, drop_reason_names[i], count) != 0) Py_CLEAR(dropped);
        Py_XDECREF(count);
    }
    if (!dropped) return nullptr;
    return Py_BuildValue("KKNK", c->matched.get(), c->delivered.get(), dropped, c->errors.get());
}

PyObject *subscriber_tell_drops(PyObject *object, PyObject *argument) {
    as_subscriber(object)->tells_drops = PyObject_IsTrue(argument) > 0;
    Py_RETURN_NONE;
}

PyObject *get_closed(PyObject *object, void *) {
    Subscriber *handle = as_subscriber(object)->handle;
    return PyBool_FromLong(!handle || handle->closed.load());
}
PyObject *get_vchan(PyObject *object, void *) {
    Subscriber *handle = as_subscriber(object)->handle;
    if (!handle || handle->reader.vchan < 0) Py_RETURN_NONE;
    return PyLong_FromLong(handle->reader.vchan);
}
PyObject *get_held(PyObject *object, void *) {
    Subscriber *handle = as_subscriber(object)->handle;
    return PyLong_FromUnsignedLong(handle ? handle->reader.held : 0);
}
PyObject *get_most_held(PyObject *object, void *) {
    Subscriber *handle = usable(as_subscriber(object));
    return handle ? PyLong_FromUnsignedLong(handle->reader.most_held) : nullptr;
}
PyObject *get_slots(PyObject *object, void *) {
    Subscriber *handle = usable(as_subscriber(object));
    try {
        if (handle) handle->has_next();
    } catch (...) {
        return raise_current();
    }
    return handle ? PyLong_FromUnsignedLong(handle->member.channel.slot_count) : nullptr;
}
PyObject *get_slot_size(PyObject *object, void *) {
    Subscriber *handle = usable(as_subscriber(object));
    if (!handle) return nullptr;
    return PyLong_FromUnsignedLongLong(handle->member.channel.header->ready.load() ? handle->member.slot_size() : 0);
}
PyObject *get_type(PyObject *object, void *) {
    Subscriber *handle = usable(as_subscriber(object));
    if (!handle) return nullptr;
    const char *text = handle->member.channel.header->type;
    return PyUnicode_DecodeUTF8(text, Py_ssize_t(strnlen(text, max_type_bytes + 1)), "replace");
}

int subscriber_init(PyObject *object, PyObject *arguments, PyObject *names) {
    SubscriberObject *self = as_subscriber(object);
    if (self->handle) return raise_error("StateError", "this subscriber is open"), -1;
    if (PyTuple_GET_SIZE(arguments) || !names) return PyErr_Format(PyExc_TypeError, "options are given by name"), -1;
    Options options;
    bool activation = false, verify = false, refuse_broken = false;
    long long spin_us = 0;
    if (!read_options(names, options) || !read_bool(names, "pass_activation", activation) ||
        !read_bool(names, "verify", verify) || !read_bool(names, "refuse_broken", refuse_broken) ||
        !read_number(names, "spin_us", 0, 1'000'000'000, spin_us))
        return -1;
    self->spin_ns = spin_us * 1000;
    self->refuse_broken = refuse_broken;
    self->channel = PyUnicode_FromStringAndSize(options.name.data(), Py_ssize_t(options.name.size()));
    if (!self->channel) return -1;
    try {
        self->handle = without_gil([&] { return new Subscriber(options, activation, verify); });
    } catch (...) {
        raise_current();
        return -1;
    }
    self->holder.handle = self->handle;
    return 0;
}

PyObject *subscriber_new(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *object = type->tp_alloc(type, 0);
    if (object) new (&as_subscriber(object)->holder) Holder;
    return object;
}

void subscriber_dealloc(PyObject *object) {
    SubscriberObject *self = as_subscriber(object);
    PyTypeObject *type = Py_TYPE(object);
    if (Subscriber *handle = self->handle) {
        self->handle = nullptr;
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        without_gil([&] { delete handle; return 0; });
        PyErr_Restore(kind, value, trace);
    }
    Py_CLEAR(self->channel);
    type->tp_free(object);
    Py_DECREF(type);
}

template <typename Function>
PyCFunction method(Function *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"read", method(subscriber_read), METH_FASTCALL | METH_KEYWORDS,
     "read(timeout=None)\n--\n\nThe next message, or None when the time is over."},
    {"read_newest", method(subscriber_read_newest), METH_FASTCALL | METH_KEYWORDS,
     "read_newest(timeout=None)\n--\n\nThe newest message; those before it are passed by."},
    {"read_many", method(subscriber_read_many), METH_VARARGS | METH_KEYWORDS,
     "read_many(most=1024, timeout=None)\n--\n\nUp to so many messages that are there, as a batch."},
    {"find", subscriber_find, METH_O,
     "find(timestamp_ns, /)\n--\n\nThe first message still in the channel at or after that time, or None."},
    {"wait", method(subscriber_wait), METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None, descriptor=None)\n--\n\nWait until there is something to read; False when the time is over or "
     "the other descriptor is readable."},
    {"fileno", subscriber_fileno, METH_NOARGS, "fileno()\n--\n\nA descriptor that is readable when a message may be there."},
    {"close", subscriber_close, METH_NOARGS, "close()\n--\n\nLeave the channel; held messages stay whole."},
    {"_abandon", subscriber_abandon, METH_NOARGS, nullptr},
    {"_again", subscriber_again, METH_VARARGS, nullptr},
    {"_place_of", subscriber_place_of, METH_O, nullptr},
    {"_counts", subscriber_counts, METH_NOARGS, nullptr},
    {"_tell_drops", subscriber_tell_drops, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"closed", get_closed, nullptr, "Whether close() was called.", nullptr},
    {"vchan_id", get_vchan, nullptr, "Id of the virtual channel, given or assigned; None elsewhere.", nullptr},
    {"held", get_held, nullptr, "Messages held now.", nullptr},
    {"max_active_messages", get_most_held, nullptr, "Messages that may be held at once.", nullptr},
    {"slots", get_slots, nullptr, "Number of slots; 0 before the first publisher.", nullptr},
    {"slot_size", get_slot_size, nullptr, "Bytes a slot has now; 0 before the first publisher.", nullptr},
    {"type", get_type, nullptr, "Name of the type that the channel carries; empty where none was given.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot type_slots[] = {{Py_tp_doc, const_cast<char *>("One subscriber of a shared-memory channel.")},
                            {Py_tp_new, reinterpret_cast<void *>(subscriber_new)},
                            {Py_tp_init, reinterpret_cast<void *>(subscriber_init)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(subscriber_dealloc)},
                            {Py_tp_methods, methods},
                            {Py_tp_getset, getset},
                            {0, nullptr}};

PyType_Spec spec = {"penstock._core.shm.Subscriber", sizeof(SubscriberObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, type_slots};

PyGetSetDef rich_getset[] = {
    {"metadata", rich_metadata, nullptr, "The publisher's metadata, metadata_size bytes.", nullptr},
    {"intact", rich_intact, nullptr, "False when the checksum does not match the bytes.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot rich_slots[] = {{Py_tp_doc, const_cast<char *>("A message with metadata or a verified checksum.")},
                            {Py_tp_dealloc, reinterpret_cast<void *>(rich_dealloc)},
                            {Py_tp_getset, rich_getset},
                            {0, nullptr}};

PyType_Spec rich_spec = {"penstock._core.shm.Message", sizeof(RichMessage), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, rich_slots};

}  // namespace

bool subscriber_ready(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (!type) return false;
    int added = PyModule_AddObjectRef(module, "Subscriber", type);
    Py_DECREF(type);
    rich_type = reinterpret_cast<PyTypeObject *>(
        PyType_FromSpecWithBases(&rich_spec, reinterpret_cast<PyObject *>(message_type)));
    return added == 0 && rich_type &&
           PyModule_AddObjectRef(module, "Message", reinterpret_cast<PyObject *>(rich_type)) == 0;
}

}  // namespace penstock::shm
