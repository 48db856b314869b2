// publish, publish_many and reserve of penstock._core.shm.Publisher: the fast paths.
#include <cstring>

#include "shm/bindings_publisher.hpp"

namespace penstock::shm {

namespace {

constexpr std::int64_t of_handle = -2;  // no time-out was given: use the handle's own

std::int64_t settle_deadline(PublisherObject *self, std::int64_t given) {
    if (given != of_handle) return given;
    return self->timeout_ns < 0 ? -1 : self->timeout_ns == 0 ? 0 : monotonic_ns() + self->timeout_ns;
}

bool refuse_full(Publisher *handle, bool timed_out) {
    std::string text = handle->why_full();
    if (timed_out) PyErr_Format(PyExc_TimeoutError, "%s", text.c_str());
    else raise_error("CapacityError", "%s", text.c_str());
    return false;
}

// While other threads hold all that may be reserved, for the time of a copy. False with an error set.
bool await_copies(PublisherObject *self, Publisher *handle) {
    while (handle->reserved >= handle->member.most_held && self->copies->any()) [[unlikely]] {
        std::uint64_t before = self->copies->ended();
        run_without_gil(self, [&] { return self->copies->wait(before), true; });
        if (!usable(self)) return false;
    }
    return true;
}

// The slow path of taking a slot: wait for readers, or raise an error that says who holds everything. False without an
// error: an unreliable publisher found only slots that reliable subscribers still want, and may drop its message.
bool take_slowly(PublisherObject *self, Publisher *handle, std::uint64_t size, Publisher::Place &place,
                 std::int64_t deadline, bool may_give_up) {
    deadline = settle_deadline(self, deadline);
    try {
        if (!handle->writer.reliable) {  // a dead process may hold slots that should be free
            run_without_gil(self, [&] { return handle->member.recover(); });
            if (!usable(self) || !await_copies(self, handle)) return false;
            Taken taken = handle->reserve(place, size);
            if (taken == Taken::unread && may_give_up) return handle->count_given_up(), false;
            return taken == Taken::yes || refuse_full(handle, false);
        }
        for (;;) {
            handle->wake_readers();
            Woken woken = Woken::timeout;
            if (deadline != 0) {
                std::int64_t until = spin_until(self->spin_ns > short_spin_ns ? self->spin_ns : short_spin_ns);
                if (!wait_with(self, woken, [&] { return handle->wait(deadline, until, -1); })) return false;
            } else {
                run_without_gil(self, [&] { return handle->look_for_dead(); });
            }
            if (!usable(self) || !await_copies(self, handle)) return false;
            if (handle->reserve(place, size) == Taken::yes) return true;
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

inline bool take(PublisherObject *self, Publisher *handle, Py_ssize_t size, Publisher::Place &place,
                 std::int64_t deadline, bool may_give_up) {
    try {
        while (std::uint64_t(size) > handle->slot_size()) [[unlikely]] {
            if (!grow_for(reinterpret_cast<PyObject *>(self), size)) return false;
            if (!usable(self)) return false;
        }
        if (!await_copies(self, handle)) return false;
        if (handle->reserved >= handle->member.most_held) [[unlikely]] {
            PyGC_Collect();  // a forgotten draft may be part of a cycle
            if (!usable(self) || !await_copies(self, handle)) return false;
        }
        if (handle->reserve(place, std::uint64_t(size)) == Taken::yes) [[likely]] return true;
    } catch (...) {
        raise_current();
        return false;
    }
    return take_slowly(self, handle, std::uint64_t(size), place, deadline, may_give_up);
}

// The bytes of a metadata argument, taken before the handle is looked at: this may run other code. Empty if none is given.
struct Metadata {
    Py_buffer buffer{};

    Metadata() = default;
    Metadata(const Metadata &) = delete;
    ~Metadata() {
        if (buffer.obj) PyBuffer_Release(&buffer);
    }

    // False with an error set.
    bool read(PyObject *given) {
        return !given || given == Py_None || PyObject_GetBuffer(given, &buffer, PyBUF_SIMPLE) == 0;
    }
};

bool set_metadata(Publisher *handle, std::uint32_t slot, const Metadata &metadata) {
    const Py_ssize_t room = handle->metadata_size(), size = metadata.buffer.len;
    if (size > room) {
        raise_error("InvalidArgument", "%zd bytes of metadata do not fit: %s has metadata_size=%zd", size,
                    handle->member.describe().c_str(), room);
        return false;
    }
    if (size) std::memcpy(handle->metadata(slot), metadata.buffer.buf, size_t(size));
    if (room > size) std::memset(handle->metadata(slot) + size, 0, size_t(room - size));
    return true;
}

// Publishes a reserved place. 0 with an error set.
std::uint64_t commit(Publisher *handle, const Publisher::Place &place, std::uint64_t size, std::int64_t now_ns,
                     std::uint32_t flags = 0) {
    std::uint64_t ordinal = handle->publish(place, size, now_ns, flags);
    if (!ordinal) [[unlikely]] raise_error("CorruptionError", "%s: its ring is damaged", handle->member.describe().c_str());
    return ordinal;
}

constexpr Py_ssize_t long_copy = 64 * 1024;

// False with an error set where the publisher was closed meanwhile.
inline bool copy_in(PublisherObject *self, std::uint8_t *to, const void *from, Py_ssize_t size) {
    if (size < long_copy) [[likely]] {
        std::memcpy(to, from, size_t(size));
        return true;
    }
    run_without_gil(self, [&] { return std::memcpy(to, from, size_t(size)); });
    return usable(self) != nullptr;
}

// A long copy is one of `copies` until its message is published or its slot given back.
struct CopyNote {
    Copies *copies;
    CopyNote(PublisherObject *self, Py_ssize_t size) : copies(size < long_copy ? nullptr : self->copies) {
        if (copies) [[unlikely]] copies->begin();
    }
    ~CopyNote() {
        if (copies) [[unlikely]] copies->end();
    }
};

std::uint64_t publish_bytes(PublisherObject *self, Publisher *handle, const void *data, Py_ssize_t size,
                            std::int64_t deadline, const Metadata &metadata, std::int64_t now_ns) {
    Publisher::Place place;
    if (!take(self, handle, size, place, deadline, true)) return 0;
    CopyNote note(self, size);
    bool filled = copy_in(self, place.data, data, size) &&
                  (!(metadata.buffer.len || handle->metadata_size()) || set_metadata(handle, place.slot, metadata));
    std::uint64_t ordinal = filled ? commit(handle, place, std::uint64_t(size), now_ns) : 0;
    if (!ordinal) [[unlikely]] {
        handle->cancel(place.slot);
        return 0;
    }
    handle->wake_readers();
    return ordinal;
}

std::uint64_t publish_object(PublisherObject *self, Publisher *handle, PyObject *data, std::int64_t deadline,
                             const Metadata &metadata, std::int64_t now_ns) {
    if (PyBytes_CheckExact(data)) [[likely]]
        return publish_bytes(self, handle, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), deadline, metadata, now_ns);
    Py_buffer buffer;
    if (buffer_to_publish(data, &buffer, PyBUF_CONTIG_RO) != 0) return 0;
    std::uint64_t ordinal =
        usable(self) ? publish_bytes(self, handle, buffer.buf, buffer.len, deadline, metadata, now_ns) : 0;
    PyBuffer_Release(&buffer);
    return ordinal;
}

// timeout= and, where there is a place for it, metadata=.
bool read_keywords(PyObject *const *values, PyObject *names, std::int64_t &deadline, Metadata *metadata, const char *of) {
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        bool is_timeout = PyUnicode_CompareWithASCIIString(name, "timeout") == 0;
        if (is_timeout && !read_timeout(values[i], deadline)) return false;
        if (is_timeout) continue;
        if (!metadata || PyUnicode_CompareWithASCIIString(name, "metadata") != 0)
            return PyErr_Format(PyExc_TypeError, "%s() has no argument %R", of, name), false;
        if (!metadata->read(values[i])) return false;
    }
    return true;
}

// What publish_many gives: the number, which an error carries as its attribute `published`.
PyObject *counted(Py_ssize_t published) {
    if (!PyErr_Occurred()) [[likely]] return PyLong_FromSsize_t(published);
    tell_published(static_cast<std::size_t>(published));
    return nullptr;
}

// None: given up.
PyObject *ordinal_or_none(std::uint64_t ordinal) {
    if (ordinal) [[likely]] return PyLong_FromUnsignedLongLong(ordinal);
    return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None);
}

}  // namespace

PyObject *publisher_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (count != 1) return PyErr_Format(PyExc_TypeError, "publish() takes data, timeout= and metadata=");
    Metadata metadata;
    std::int64_t deadline = of_handle;
    if (names && !read_keywords(arguments + 1, names, deadline, &metadata, "publish")) return nullptr;
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    std::uint64_t ordinal = publish_object(self, handle, arguments[0], deadline, metadata, realtime_ns());
    return ordinal_or_none(ordinal);
}

PyObject *publisher_publish_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (count != 1) return PyErr_Format(PyExc_TypeError, "publish_many() takes a batch and timeout=");
    PyObject *argument = arguments[0];
    const Metadata none;
    std::int64_t deadline = of_handle;  // else of all of them together
    if (names && !read_keywords(arguments + 1, names, deadline, nullptr, "publish_many")) return nullptr;
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    Py_ssize_t published = 0, tried = 0;
    std::int64_t now_ns = 0;
    // After each message: whether to go on. Those that were published stay so: the error says how many.
    auto goes_on = [&](std::uint64_t ordinal) {
        published += ordinal != 0;
        return ordinal || !PyErr_Occurred();
    };
    if (batch_check(argument)) {
        BatchPin pin(argument);  // waiting for room releases the GIL
        if (!pin.entries()) return nullptr;
        for (const Envelope &entry : *pin.entries()) {
            if (tried++ % 16 == 0) now_ns = realtime_ns();
            if (!goes_on(publish_bytes(self, handle, entry.data, Py_ssize_t(entry.size), deadline, none, now_ns))) break;
        }
        return counted(published);
    }
    PyObject *sequence = PySequence_Fast(argument, "publish_many() takes an iterable of bytes-like objects");
    if (sequence && !usable(self)) Py_CLEAR(sequence);
    if (!sequence) return counted(0);
    for (; tried < PySequence_Fast_GET_SIZE(sequence); ++tried) {
        if (tried % 16 == 0) now_ns = realtime_ns();
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(sequence, tried));  // the list may change while we wait
        bool on = goes_on(publish_object(self, handle, item, deadline, none, now_ns));
        Py_DECREF(item);
        if (!on) break;
    }
    Py_DECREF(sequence);
    return counted(published);
}

PyObject *publisher_reserve(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (count != 1) return PyErr_Format(PyExc_TypeError, "reserve() takes a size, timeout= and metadata=");
    Metadata metadata;
    std::int64_t deadline = of_handle;
    if (names && !read_keywords(arguments + 1, names, deadline, &metadata, "reserve")) return nullptr;
    Py_ssize_t size = PyNumber_AsSsize_t(arguments[0], PyExc_OverflowError);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    if (size < 0)
        return raise_error("InvalidArgument", "%s: a size of %zd bytes cannot be reserved",
                           handle->member.describe().c_str(), size);
    Publisher::Place place;
    if (!take(self, handle, size, place, deadline, false)) return nullptr;
    PyObject *draft = nullptr;
    if (!(metadata.buffer.len || handle->metadata_size()) || set_metadata(handle, place.slot, metadata))
        draft = draft_new(place.data, size, &self->lender, place.slot, object);
    if (!draft) handle->cancel(place.slot);
    return draft;
}

constexpr std::uint64_t stranded_bit = 1ull << 32;  // of a token, above the slot

PyObject *Lender::publish(PyObject *draft, std::uint64_t token, std::int64_t size) {
    Publisher *handle = usable(publisher);
    if (!handle) return nullptr;
    Publisher::Place place{std::uint32_t(token), reinterpret_cast<Draft *>(draft)->data};
    std::uint64_t ordinal = commit(handle, place, std::uint64_t(size), realtime_ns());
    if (ordinal) handle->wake_readers();
    return ordinal_or_none(ordinal);
}

void Lender::cancel(std::uint64_t token) noexcept {
    if (publisher->handle) publisher->handle->cancel(std::uint32_t(token), token & stranded_bit);
}

std::uint64_t Lender::strand(std::uint64_t token) noexcept {
    if (publisher->handle) ++publisher->handle->stranded;
    return token | stranded_bit;
}

void Lender::hold(std::uint64_t) noexcept {
    if (publisher->handle) ++publisher->handle->looked_at;
}
void Lender::let_go(std::uint64_t) noexcept {
    if (publisher->handle) publisher->handle->stop_looking();
}

bool Lender::closed(const Draft *) const {
    return !publisher->handle || publisher->handle->closed.load(std::memory_order_relaxed);
}

PyObject *publisher_activate(PyObject *object, PyObject *) {
    PublisherObject *self = as_publisher(object);
    Publisher *handle = usable(self);
    if (!handle) return nullptr;
    Publisher::Place place;
    try {
        if (handle->reserve(place, 0) != Taken::yes) Py_RETURN_FALSE;
    } catch (...) {
        return raise_current();
    }
    if (handle->metadata_size()) std::memset(handle->metadata(place.slot), 0, handle->metadata_size());
    if (!commit(handle, place, 0, realtime_ns(), message_activation)) {
        handle->cancel(place.slot);
        return nullptr;
    }
    handle->wake_readers();
    Py_RETURN_TRUE;
}

}  // namespace penstock::shm
