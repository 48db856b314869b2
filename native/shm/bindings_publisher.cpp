// penstock._core.shm.Publisher: publish() and reserve() with nothing in the way.
#include <Python.h>

#include <cstring>
#include <new>

#include "message/message.hpp"
#include "shm/bindings.hpp"
#include "shm/publisher.hpp"

namespace penstock::shm {

namespace {

struct PublisherObject;

struct Lender final : DraftOwner {
    PublisherObject *publisher = nullptr;
    PyObject *publish(PyObject *draft, std::uint64_t token, std::int64_t size) override;
    void cancel(std::uint64_t token) noexcept override;
};

struct PublisherObject {
    PyObject_HEAD
    Publisher *handle;
    Lender lender;
    std::int64_t spin_ns;
    std::int64_t timeout_ns;  // of publish and reserve; -1: for ever
    std::uint32_t waiting;    // threads in a wait without the GIL
    bool close_pending;
};

PublisherObject *as_publisher(PyObject *self) { return reinterpret_cast<PublisherObject *>(self); }

// The handle where it may be used, else null with an error set.
Publisher *usable(PublisherObject *self) {
    Publisher *handle = self->handle;
    if (handle && !handle->closed.load(std::memory_order_relaxed) && handle->member.belongs_here()) [[likely]]
        return handle;
    if (handle && !handle->member.belongs_here())
        raise_error("StateError", "%s was opened before this process was forked; open it again in the child",
                    handle->member.describe().c_str());
    else
        raise_error("ClosedError", "this publisher is closed");
    return nullptr;
}

void settle_close(PublisherObject *self) {
    if (!self->close_pending || self->waiting) return;
    self->close_pending = false;
    without_gil([&] { self->handle->close(); });
}

// Runs a wait without the GIL. False with an error set.
template <typename Function>
bool wait_with(PublisherObject *self, Woken &woken, Function &&function) {
    for (;;) {
        ++self->waiting;
        bool threw = false;
        std::string text;
        try {
            woken = without_gil(function);
        } catch (...) {
            threw = true;
            raise_current();
        }
        --self->waiting;
        if (threw) return false;
        settle_close(self);
        if (woken == Woken::closed) return raise_error("ClosedError", "this publisher was closed while it waited"), false;
        if (woken != Woken::interrupted) return true;
        if (PyErr_CheckSignals() != 0) return false;
    }
}

std::int64_t default_deadline(PublisherObject *self) {
    return self->timeout_ns < 0 ? -1 : self->timeout_ns == 0 ? 0 : monotonic_ns() + self->timeout_ns;
}

bool refuse_full(Publisher *handle, bool timed_out) {
    std::string text = handle->why_full();
    if (timed_out) PyErr_Format(PyExc_TimeoutError, "%s", text.c_str());
    else raise_error("CapacityError", "%s", text.c_str());
    return false;
}

// The slow end of taking a slot: wait for readers, or say who holds everything.
bool take_slowly(PublisherObject *self, Publisher *handle, Publisher::Place &place, PyObject *timeout) {
    std::int64_t deadline = 0;
    if (timeout ? !read_timeout(timeout, deadline) : (deadline = default_deadline(self), false)) return false;
    try {
        if (!handle->writer.reliable) {  // somebody dead may hold what ought to be free
            without_gil([&] { return handle->member.recover(); });
            return handle->reserve(place) == Taken::yes || refuse_full(handle, false);
        }
        for (;;) {
            handle->wake_readers();
            Woken woken = Woken::timeout;
            if (deadline != 0) {
                std::int64_t spin_ns = self->spin_ns > short_spin_ns ? self->spin_ns : short_spin_ns;
                if (!wait_with(self, woken, [&] { return handle->wait(deadline, spin_ns, -1); })) return false;
                if (!usable(self)) return false;
            }
            if (handle->reserve(place) == Taken::yes) return true;
            if (woken == Woken::timeout) return refuse_full(handle, true);
        }
    } catch (...) {
        raise_current();
        return false;
    }
}

bool grow_for(PyObject *self, Py_ssize_t size) {
    PyObject *done = PyObject_CallMethod(self, "_grow", "n", size);
    Py_XDECREF(done);
    return done != nullptr;
}

inline bool take(PublisherObject *self, Publisher *handle, Py_ssize_t size, Publisher::Place &place, PyObject *timeout) {
    try {
        while (std::uint64_t(size) > handle->slot_size()) [[unlikely]] {
            if (!grow_for(reinterpret_cast<PyObject *>(self), size)) return false;
            if (!usable(self)) return false;
        }
        if (handle->reserve(place) == Taken::yes) [[likely]] return true;
    } catch (...) {
        raise_current();
        return false;
    }
    return take_slowly(self, handle, place, timeout);
}

bool set_metadata(Publisher *handle, std::uint32_t slot, PyObject *metadata) {
    std::uint32_t room = handle->metadata_size();
    if (!metadata || metadata == Py_None) {
        if (room) std::memset(handle->metadata(slot), 0, room);
        return true;
    }
    Py_buffer buffer;
    if (PyObject_GetBuffer(metadata, &buffer, PyBUF_SIMPLE) != 0) return false;
    bool fits = buffer.len <= Py_ssize_t(room);
    if (fits) {
        std::memcpy(handle->metadata(slot), buffer.buf, size_t(buffer.len));
        std::memset(handle->metadata(slot) + buffer.len, 0, room - size_t(buffer.len));
    } else {
        raise_error("InvalidArgument", "%zd bytes of metadata do not fit: %s has metadata_size=%u", buffer.len,
                    handle->member.describe().c_str(), room);
    }
    PyBuffer_Release(&buffer);
    return fits;
}

// Publishes a reserved place; waits where a virtual channel's reliable reader must go on first. 0 with an error set.
std::uint64_t commit(PublisherObject *self, Publisher *handle, const Publisher::Place &place, std::uint64_t size,
                     std::int64_t now_ns, std::uint32_t flags = 0) {
    std::uint64_t ordinal = handle->publish(place, size, now_ns, flags);
    if (ordinal) [[likely]] return ordinal;
    std::int64_t deadline = default_deadline(self);
    while (!ordinal) {
        if (!handle->writer.reliable)
            return raise_error("CorruptionError", "%s: its ring is damaged", handle->member.describe().c_str()), 0;
        if (deadline >= 0 && monotonic_ns() >= deadline) return refuse_full(handle, true), 0;
        without_gil([] {
            timespec pause{0, 200'000};
            return nanosleep(&pause, nullptr);
        });
        if (PyErr_CheckSignals() != 0 || !usable(self)) return 0;
        ordinal = handle->publish(place, size, now_ns, flags);
    }
    return ordinal;
}

constexpr Py_ssize_t long_copy = 64 * 1024;

inline void copy_in(std::uint8_t *to, const void *from, Py_ssize_t size) {
    if (size < long_copy) std::memcpy(to, from, size_t(size));
    else without_gil([&] { return std::memcpy(to, from, size_t(size)); });
}

std::uint64_t publish_bytes(PublisherObject *self, Publisher *handle, const void *data, Py_ssize_t size, PyObject *timeout,
                            PyObject *metadata, std::int64_t now_ns) {
    Publisher::Place place;
    if (!take(self, handle, size, place, timeout)) return 0;
    copy_in(place.data, data, size);
    std::uint64_t ordinal = 0;
    if ((metadata || handle->metadata_size()) && !set_metadata(handle, place.slot, metadata)) [[unlikely]] {
        handle->cancel(place.slot);
        return 0;
    }
    ordinal = commit(self, handle, place, std::uint64_t(size), now_ns);
    if (!ordinal) [[unlikely]] {
        handle->cancel(place.slot);
        return 0;
    }
    handle->wake_readers();
    return ordinal;
}

std::uint64_t publish_object(PublisherObject *self, Publisher *handle, PyObject *data, PyObject *timeout,
                             PyObject *metadata, std::int64_t now_ns) {
    if (PyBytes_CheckExact(data)) [[likely]]
        return publish_bytes(self, handle, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), timeout, metadata, now_ns);
    Py_buffer buffer;
    if (PyObject_GetBuffer(data, &buffer, PyBUF_CONTIG_RO) != 0) return 0;
    std::uint64_t ordinal = publish_bytes(self, handle, buffer.buf, buffer.len, timeout, metadata, now_ns);
    PyBuffer_Release(&buffer);
    return ordinal;
}

// timeout= and metadata= of publish and reserve.
bool read_keywords(PyObject *const *values, PyObject *names, PyObject *&timeout, PyObject *&metadata, const char *of) {
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_CompareWithASCIIString(name, "timeout") == 0) timeout = values[i];
        else if (PyUnicode_CompareWithASCIIString(name, "metadata") == 0) metadata = values[i];
        else return PyErr_Format(PyExc_TypeError, "%s() has no argument %R", of, name), false;
    }
    return true;
}

PyObject *publisher_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    if (count != 1) return PyErr_Format(PyExc_TypeError, "publish() takes data, timeout= and metadata=");
    PyObject *timeout = nullptr, *metadata = nullptr;
    if (names && !read_keywords(arguments + 1, names, timeout, metadata, "publish")) return nullptr;
    std::uint64_t ordinal = publish_object(self, handle, arguments[0], timeout, metadata, realtime_ns());
    return ordinal ? PyLong_FromUnsignedLongLong(ordinal) : nullptr;
}

PyObject *publisher_publish_many(PyObject *object, PyObject *argument) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    Py_ssize_t done = 0;
    std::int64_t now_ns = 0;
    if (batch_check(argument)) {
        const std::vector<Envelope> *entries = batch_entries(argument);
        if (!entries) return nullptr;
        for (const Envelope &entry : *entries) {
            if (done++ % 16 == 0) now_ns = realtime_ns();
            if (!publish_bytes(self, handle, entry.data, Py_ssize_t(entry.size), nullptr, nullptr, now_ns)) return nullptr;
        }
        return PyLong_FromSsize_t(done);
    }
    PyObject *sequence = PySequence_Fast(argument, "publish_many() takes an iterable of bytes-like objects");
    if (!sequence) return nullptr;
    for (; done < PySequence_Fast_GET_SIZE(sequence); ++done) {
        if (done % 16 == 0) now_ns = realtime_ns();
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(sequence, done));  // the list may change while we wait
        bool published = publish_object(self, handle, item, nullptr, nullptr, now_ns);
        Py_DECREF(item);
        if (!published) break;
    }
    Py_DECREF(sequence);
    return PyErr_Occurred() ? nullptr : PyLong_FromSsize_t(done);
}

PyObject *publisher_reserve(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    if (count != 1) return PyErr_Format(PyExc_TypeError, "reserve() takes a size, timeout= and metadata=");
    PyObject *timeout = nullptr, *metadata = nullptr;
    if (names && !read_keywords(arguments + 1, names, timeout, metadata, "reserve")) return nullptr;
    Py_ssize_t size = PyNumber_AsSsize_t(arguments[0], PyExc_OverflowError);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    if (size < 0)
        return raise_error("InvalidArgument", "%s: a size of %zd bytes cannot be reserved",
                           handle->member.describe().c_str(), size);
    Publisher::Place place;
    if (!take(self, handle, size, place, timeout)) return nullptr;
    PyObject *draft = nullptr;
    if (!(metadata || handle->metadata_size()) || set_metadata(handle, place.slot, metadata))
        draft = draft_new(place.data, size, &self->lender, place.slot, object);
    if (!draft) handle->cancel(place.slot);
    return draft;
}

PyObject *Lender::publish(PyObject *draft, std::uint64_t token, std::int64_t size) {
    Publisher *handle = usable(publisher);
    if (!handle) return nullptr;
    Publisher::Place place{std::uint32_t(token), reinterpret_cast<Draft *>(draft)->data};
    std::uint64_t ordinal = commit(publisher, handle, place, std::uint64_t(size), realtime_ns());
    if (!ordinal) return nullptr;
    handle->wake_readers();
    return PyLong_FromUnsignedLongLong(ordinal);
}

void Lender::cancel(std::uint64_t token) noexcept {
    if (publisher->handle) publisher->handle->cancel(std::uint32_t(token));
}

PyObject *publisher_activate(PyObject *object, PyObject *) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    Publisher::Place place;
    try {
        if (handle->reserve(place) != Taken::yes) Py_RETURN_FALSE;
    } catch (...) {
        return raise_current();
    }
    if (handle->metadata_size()) std::memset(handle->metadata(place.slot), 0, handle->metadata_size());
    if (!commit(self, handle, place, 0, realtime_ns(), message_activation)) {
        handle->cancel(place.slot);
        return nullptr;
    }
    handle->wake_readers();
    Py_RETURN_TRUE;
}

PyObject *publisher_wait_ready(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"subscribers", "timeout", nullptr};
    PublisherObject *self = as_publisher(object);
    long long subscribers = 1;
    PyObject *timeout = Py_None;
    std::int64_t deadline;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|LO", const_cast<char **>(keywords), &subscribers, &timeout) ||
        !read_timeout(timeout, deadline))
        return nullptr;
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    if (subscribers < 0) return raise_error("InvalidArgument", "subscribers=%lld must be 0 or more", subscribers);
    Woken woken = Woken::timeout;
    if (deadline == 0) return PyBool_FromLong(handle->subscribers() >= subscribers);
    if (!wait_with(self, woken, [&] { return handle->wait_subscribers(std::uint32_t(subscribers), deadline); })) return nullptr;
    return PyBool_FromLong(woken == Woken::ready);
}

PyObject *publisher_wait(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"timeout", "descriptor", nullptr};
    PublisherObject *self = as_publisher(object);
    PyObject *timeout = Py_None, *extra = Py_None;
    std::int64_t deadline;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|OO", const_cast<char **>(keywords), &timeout, &extra) ||
        !read_timeout(timeout, deadline))
        return nullptr;
    Publisher *handle = usable(self);
    int descriptor = extra == Py_None ? -1 : PyObject_AsFileDescriptor(extra);
    if (!handle || PyErr_Occurred()) return nullptr;
    Woken woken = Woken::timeout;
    if (deadline == 0) deadline = monotonic_ns();
    if (!wait_with(self, woken, [&] { return handle->wait(deadline, self->spin_ns, descriptor); })) return nullptr;
    return PyBool_FromLong(woken == Woken::ready);
}

PyObject *publisher_retired(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"timeout", nullptr};
    PublisherObject *self = as_publisher(object);
    PyObject *timeout = nullptr;
    std::int64_t deadline = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|O", const_cast<char **>(keywords), &timeout) ||
        (timeout && !read_timeout(timeout, deadline)))
        return nullptr;
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    if (!handle->retirement)
        return raise_error("StateError", "%s: open the publisher with retirement=True to be told of released slots",
                           handle->member.describe().c_str());
    Woken woken;
    if (deadline != 0 && !wait_with(self, woken, [&] { return handle->wait_retired(deadline); })) return nullptr;
    try {
        std::vector<std::uint32_t> slots = handle->retired();
        PyObject *list = PyList_New(Py_ssize_t(slots.size()));
        for (std::size_t i = 0; list && i < slots.size(); ++i)
            PyList_SET_ITEM(list, Py_ssize_t(i), PyLong_FromUnsignedLong(slots[i]));
        return list;
    } catch (...) {
        return raise_current();
    }
}

PyObject *publisher_fileno(PyObject *object, PyObject *) {
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    try {
        // Armed now: readable once a reader has moved on. It is drained and armed again by the next call.
        bool nothing = handle->writer.reliable && !handle->could_reserve() && !(handle->retirement && handle->any_retired());
        if (!handle->arm_if(nothing)) handle->wake();
        else if (handle->could_reserve()) handle->wake();
        return PyLong_FromLong(handle->member.bell());
    } catch (...) {
        return raise_current();
    }
}

PyObject *publisher_do_grow(PyObject *object, PyObject *argument) {
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    long long size = PyLong_AsLongLong(argument);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    if (size < 0) return raise_error("InvalidArgument", "a slot cannot have %lld bytes", size);
    try {
        without_gil([&] { handle->grow(std::uint64_t(size)); return 0; });
        return PyLong_FromUnsignedLongLong(handle->slot_size());
    } catch (...) {
        return raise_current();
    }
}

PyObject *publisher_grown_size(PyObject *object, PyObject *argument) {
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    long long size = PyLong_AsLongLong(argument);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    return PyLong_FromUnsignedLongLong(Membership::grown_size(handle->slot_size(), std::uint64_t(size)));
}

// The process ends: nothing is waited for.
PyObject *publisher_abandon(PyObject *object, PyObject *) {
    if (Publisher *handle = as_publisher(object)->handle) handle->close(true);
    Py_RETURN_NONE;
}

PyObject *publisher_close(PyObject *object, PyObject *) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = self->handle;
    if (!handle || handle->closed.load()) Py_RETURN_NONE;
    handle->closed.store(true);
    if (handle->member.belongs_here()) handle->wake();
    self->close_pending = true;
    settle_close(self);
    Py_RETURN_NONE;
}

PyObject *publisher_counts(PyObject *object, PyObject *) {
    Publisher *handle = as_publisher(object)->handle;
    if (!handle) return raise_error("ClosedError", "this publisher is closed");
    return Py_BuildValue("KK", handle->counters->matched.get(), handle->counters->bytes.get());
}

PyObject *get_closed(PyObject *object, void *) {
    Publisher *handle = as_publisher(object)->handle;
    return PyBool_FromLong(!handle || handle->closed.load());
}
PyObject *get_vchan(PyObject *object, void *) {
    Publisher *handle = as_publisher(object)->handle;
    if (!handle || handle->writer.vchan < 0) Py_RETURN_NONE;
    return PyLong_FromLong(handle->writer.vchan);
}
PyObject *get_slots(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyLong_FromUnsignedLong(handle->member.channel.slot_count) : nullptr;
}
PyObject *get_slot_size(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    try {
        return PyLong_FromUnsignedLongLong(handle->slot_size());
    } catch (...) {
        return raise_current();
    }
}
PyObject *get_subscribers(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyLong_FromUnsignedLong(handle->subscribers()) : nullptr;
}
PyObject *get_publishers(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyLong_FromUnsignedLong(handle->publishers()) : nullptr;
}
PyObject *get_metadata_size(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyLong_FromUnsignedLong(handle->metadata_size()) : nullptr;
}
PyObject *get_max_reserved(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyLong_FromUnsignedLong(handle->member.most_held) : nullptr;
}
PyObject *get_fixed_size(PyObject *object, void *) {
    Publisher *handle = usable(as_publisher(object));
    return handle ? PyBool_FromLong(handle->member.channel.header->flags.load() & channel_fixed_size) : nullptr;
}

int publisher_init(PyObject *object, PyObject *arguments, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (self->handle) return raise_error("StateError", "this publisher is open"), -1;
    if (PyTuple_GET_SIZE(arguments) || !names) return PyErr_Format(PyExc_TypeError, "options are given by name"), -1;
    Options options;
    bool checksums = false, retirement = false;
    long long spin_us = 0;
    if (!read_options(names, options) || !read_bool(names, "checksum", checksums) ||
        !read_bool(names, "retirement", retirement) || !read_number(names, "spin_us", 0, 1'000'000'000, spin_us))
        return -1;
    self->spin_ns = spin_us * 1000;
    self->timeout_ns = -1;
    PyObject *timeout = PyDict_GetItemString(names, "timeout");
    std::int64_t deadline;
    if (!read_timeout(timeout, deadline)) return -1;
    if (deadline >= 0) self->timeout_ns = deadline ? std::int64_t(PyFloat_AsDouble(timeout) * 1e9) : 0;
    try {
        self->handle = without_gil([&] { return new Publisher(options, checksums, retirement); });
    } catch (...) {
        raise_current();
        return -1;
    }
    return 0;
}

PyObject *publisher_new(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *object = type->tp_alloc(type, 0);
    if (!object) return nullptr;
    PublisherObject *self = as_publisher(object);
    new (&self->lender) Lender;
    self->lender.publisher = self;
    return object;
}

void publisher_dealloc(PyObject *object) {
    PublisherObject *self = as_publisher(object);
    PyTypeObject *type = Py_TYPE(object);
    if (Publisher *handle = self->handle) {
        self->handle = nullptr;
        PyObject *kind, *value, *trace;
        PyErr_Fetch(&kind, &value, &trace);
        without_gil([&] { delete handle; return 0; });
        PyErr_Restore(kind, value, trace);
    }
    type->tp_free(object);
    Py_DECREF(type);
}

template <typename Function>
PyCFunction method(Function *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"publish", method(publisher_publish), METH_FASTCALL | METH_KEYWORDS,
     "publish(data, *, timeout=..., metadata=None)\n--\n\nPublish a copy of data; gives its ordinal."},
    {"publish_many", publisher_publish_many, METH_O,
     "publish_many(batch, /)\n--\n\nPublish each of them, in order; gives how many."},
    {"reserve", method(publisher_reserve), METH_FASTCALL | METH_KEYWORDS,
     "reserve(size, *, timeout=..., metadata=None)\n--\n\nA writable buffer in the channel itself."},
    {"wait_ready", method(publisher_wait_ready), METH_VARARGS | METH_KEYWORDS,
     "wait_ready(subscribers=1, timeout=None)\n--\n\nWait until so many subscribers are there."},
    {"wait", method(publisher_wait), METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None, descriptor=None)\n--\n\nWait until a slot may be had; False when the time is over or the other "
     "descriptor is readable."},
    {"retired", method(publisher_retired), METH_VARARGS | METH_KEYWORDS,
     "retired(timeout=0)\n--\n\nSlots whose message was released by all since the last call."},
    {"fileno", publisher_fileno, METH_NOARGS, "fileno()\n--\n\nA descriptor that is readable when a slot may be had."},
    {"close", publisher_close, METH_NOARGS, "close()\n--\n\nLeave the channel."},
    {"_abandon", publisher_abandon, METH_NOARGS, nullptr},
    {"_activate", publisher_activate, METH_NOARGS, nullptr},
    {"_do_grow", publisher_do_grow, METH_O, nullptr},
    {"_grown_size", publisher_grown_size, METH_O, nullptr},
    {"_counts", publisher_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"closed", get_closed, nullptr, "Whether close() was called.", nullptr},
    {"vchan_id", get_vchan, nullptr, "Id of the virtual channel, given or assigned; None on an ordinary channel.", nullptr},
    {"slots", get_slots, nullptr, "Number of slots.", nullptr},
    {"slot_size", get_slot_size, nullptr, "Bytes a slot has now.", nullptr},
    {"subscribers", get_subscribers, nullptr, "Subscribers that would get a message now.", nullptr},
    {"publishers", get_publishers, nullptr, "Publishers of the channel or multiplexer.", nullptr},
    {"metadata_size", get_metadata_size, nullptr, "Bytes of metadata a message has.", nullptr},
    {"max_reserved", get_max_reserved, nullptr, "Messages that may be reserved at once.", nullptr},
    {"fixed_size", get_fixed_size, nullptr, "Whether slots never grow.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot type_slots[] = {{Py_tp_doc, const_cast<char *>("One publisher of a shared-memory channel.")},
                            {Py_tp_new, reinterpret_cast<void *>(publisher_new)},
                            {Py_tp_init, reinterpret_cast<void *>(publisher_init)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(publisher_dealloc)},
                            {Py_tp_methods, methods},
                            {Py_tp_getset, getset},
                            {0, nullptr}};

PyType_Spec spec = {"penstock._core.shm.Publisher", sizeof(PublisherObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                    type_slots};

}  // namespace

bool publisher_ready(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (!type) return false;
    int added = PyModule_AddObjectRef(module, "Publisher", type);
    Py_DECREF(type);
    return added == 0;
}

}  // namespace penstock::shm
