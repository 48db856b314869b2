// penstock._core.bus: publishers, and what the files of these bindings share. Only files named bindings*.cpp here know
// Python; the layout, the pools, the queue and the sleeping do not.
#include "bindings.hpp"

#include <cmath>
#include <cstring>

#include "bus/objects.hpp"
#include "gil.hpp"
#include "platform/signals.hpp"

namespace penstock::bus {

PyTypeObject *publisher_type = nullptr;

bool parse_timeout(PyObject *timeout, Deadline *deadline, bool *poll) {
    *poll = false;
    *deadline = Deadline{};
    if (timeout == Py_None) return true;
    if (PyBool_Check(timeout) || !(PyLong_Check(timeout) || PyFloat_Check(timeout))) {
        PyErr_Format(PyExc_TypeError, "timeout must be seconds as a number or None, not %s", Py_TYPE(timeout)->tp_name);
        return false;
    }
    double seconds = PyFloat_AsDouble(timeout);
    if (seconds == -1 && PyErr_Occurred()) return false;
    if (!(seconds >= 0)) {
        raise_error("InvalidArgument", "timeout=%R must be 0 or more seconds, or None to wait for ever", timeout);
        return false;
    }
    if (seconds == 0) *poll = true;
    else *deadline = Deadline::after(seconds);
    return true;
}

bool parse_id(PyObject *number, std::uint16_t *id) {
    if (!PyLong_Check(number) || PyBool_Check(number)) {
        PyErr_Format(PyExc_TypeError, "a message id is an int of 0 to 65535, not %s", Py_TYPE(number)->tp_name);
        return false;
    }
    int overflow;
    long value = PyLong_AsLongAndOverflow(number, &overflow);
    if (overflow || value < 0 || value > max_id) {
        raise_error("InvalidArgument", "message id %R is not between 0 and 65535", number);
        return false;
    }
    *id = static_cast<std::uint16_t>(value);
    return true;
}

bool sleep_without_gil(Sleeper *sleeper, Deadline deadline) {
    for (const bool main = is_main_thread();;) {
        if (main && PyErr_CheckSignals() != 0) return false;  // before each sleep: a signal may have interrupted nothing
        const Deadline slice = main ? deadline.or_before({monotonic_ns() + signal_slice_ns}) : deadline;
        Slept slept;
        {
            GilReleased released;
            slept = sleeper->sleep(slice);
        }
        if (slept == Slept::interrupted) return PyErr_CheckSignals() == 0;
        if (slept == Slept::woken || deadline.passed()) return true;
    }
}

void give_way() { GilReleased released; }

bool ready_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type, PyTypeObject *base) {
    PyObject *made = base ? PyType_FromSpecWithBases(spec, reinterpret_cast<PyObject *>(base)) : PyType_FromSpec(spec);
    *type = reinterpret_cast<PyTypeObject *>(made);
    return made && PyModule_AddObjectRef(module, name, made) == 0;
}

Header *allocate_heap(BusObject *bus, std::uint16_t id, std::int64_t size) {
    HeapPool *pool = bus->heap;
    if (size < 0 || size > pool->most_bytes()) [[unlikely]] {
        raise_error("InvalidArgument", "a message of %lld bytes is not between 0 and the %u that bus %R allows "
                    "(max_message_bytes)", static_cast<long long>(size), pool->most_bytes(), bus->name);
        return nullptr;
    }
    Header *header = pool->take(id, static_cast<std::uint32_t>(size));
    if (!header) [[unlikely]]
        raise_error("CapacityError", "bus %R has %llu messages out and no memory for one more (max_messages)", bus->name,
                    static_cast<unsigned long long>(pool->out));
    return header;
}

namespace {

constexpr Py_ssize_t long_copy_bytes = 1 << 20;  // copies of at least this size release the GIL

Header *header_for(BusObject *bus, AllocatorObject *allocator, std::uint16_t id, Py_ssize_t size) {
    if (!allocator) return allocate_heap(bus, id, size);
    Header *header = allocate(allocator, id, size, Deadline{}, true);
    if (!header && !PyErr_Occurred())
        raise_error("CapacityError", "allocator %R has none of its messages left (%llu out); outstanding() tells where they "
                    "are", allocator->name, static_cast<unsigned long long>(allocator->pool->out));
    return header;
}

Header *copy_buffer(BusObject *bus, AllocatorObject *allocator, std::uint16_t id, PyObject *data) {
    Py_buffer view;
    if (buffer_to_publish(data, &view, PyBUF_CONTIG_RO) != 0) return nullptr;
    Header *header = header_for(bus, allocator, id, view.len);
    if (header) {
        if (view.len < long_copy_bytes) {
            std::memcpy(payload(header), view.buf, static_cast<std::size_t>(view.len));
        } else {
            GilReleased released;
            std::memcpy(payload(header), view.buf, static_cast<std::size_t>(view.len));
        }
    }
    PyBuffer_Release(&view);
    return header;
}

// 1 published, 0 failed with an error set.
std::uint64_t publish_copy(BusObject *bus, PublisherObject *publisher, AllocatorObject *allocator, std::uint16_t id,
                           PyObject *item) {
    Header *header = copy_in(bus, allocator, id, item);
    if (!header) [[unlikely]] return 0;
    bool committed = true;
    const std::uint32_t size = header->size;  // the header may be gone after it was published
    std::uint64_t ordinal = publish_header(bus, header, &committed);
    if (publisher && committed) {
        publisher->counters->matched.add();
        publisher->counters->delivered.add();
        publisher->counters->bytes.add(size);
    }
    if (!ordinal && !committed) drop(header);
    return ordinal;
}

PublisherObject *as_publisher(PyObject *self) { return reinterpret_cast<PublisherObject *>(self); }

bool check_open(PublisherObject *self) {
    if (!self->closed && self->bus) [[likely]] return check_bus_open(self->bus);
    raise_error("ClosedError", "this publisher was closed");
    return false;
}

PyObject *publisher_new(PyTypeObject *type, PyObject *, PyObject *) { return type->tp_alloc(type, 0); }

int publisher_init(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"bus", "id", "allocator", "name", nullptr};
    PublisherObject *self = as_publisher(object);
    PyObject *bus, *number, *allocator, *name;
    std::uint16_t id;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "O!OOU", const_cast<char **>(keywords), bus_type, &bus, &number,
                                     &allocator, &name) ||
        !parse_id(number, &id))
        return -1;
    if (self->counters) {
        raise_error("StateError", "a publisher is set up once");
        return -1;
    }
    if (allocator != Py_None) {
        if (!PyObject_TypeCheck(allocator, allocator_type)) {
            PyErr_Format(PyExc_TypeError, "allocator must be an allocator or None, not %s", Py_TYPE(allocator)->tp_name);
            return -1;
        }
        auto *from = reinterpret_cast<AllocatorObject *>(allocator);
        if (!from->is_static && reinterpret_cast<PyObject *>(from->bus) != bus) {
            raise_error("StateError", "allocator %R was not added to this bus; call add_allocator() first", from->name);
            return -1;
        }
        self->allocator = reinterpret_cast<AllocatorObject *>(Py_NewRef(allocator));
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return -1;
    self->counters = counters_take("bus", "publisher", {text, static_cast<std::size_t>(length)});
    self->id = id;
    self->bus = reinterpret_cast<BusObject *>(Py_NewRef(bus));
    return 0;
}

int publisher_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(reinterpret_cast<PyObject *>(as_publisher(object)->bus));
    Py_VISIT(reinterpret_cast<PyObject *>(as_publisher(object)->allocator));
    return 0;
}

int publisher_clear(PyObject *object) {
    as_publisher(object)->closed = true;
    Py_CLEAR(as_publisher(object)->bus);
    Py_CLEAR(as_publisher(object)->allocator);
    return 0;
}

void publisher_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    publisher_clear(object);
    if (as_publisher(object)->counters) counters_give(as_publisher(object)->counters);
    type->tp_free(object);
    Py_DECREF(type);
}

// One positional argument, and `timeout` by name, for all waits of this call. False with an error set.
bool parse_publish(const char *method, PyObject *const *arguments, Py_ssize_t count, PyObject *names, Deadline *deadline) {
    const Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (count == 1 && !named) [[likely]] return true;
    const bool known = named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "timeout") == 0;
    if (count != 1 || !known) {
        PyErr_Format(PyExc_TypeError, "%s() takes one argument by place, and timeout= in seconds", method);
        return false;
    }
    bool poll = false;
    if (!parse_timeout(arguments[1], deadline, &poll)) return false;
    if (poll) *deadline = Deadline::after(0);
    return true;
}

PyObject *publisher_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    Deadline deadline;
    if (!parse_publish("publish", arguments, count, names, &deadline) || !check_open(self)) return nullptr;
    PyObject *data = arguments[0];
    Publishing publishing(self, deadline);
    std::uint64_t ordinal = publish_copy(self->bus, self, self->allocator, self->id, data);
    return ordinal ? PyLong_FromUnsignedLongLong(ordinal) : nullptr;
}

PyObject *publisher_publish_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    Deadline deadline;
    if (!parse_publish("publish_many", arguments, count, names, &deadline) || !check_open(self)) return nullptr;
    Publishing publishing(self, deadline);
    return publish_all(self->bus, self, self->allocator, self->id, arguments[0]);
}

PyObject *publisher_reserve(PyObject *object, PyObject *number) {
    PublisherObject *self = as_publisher(object);
    if (!check_open(self)) return nullptr;
    Py_ssize_t size = PyNumber_AsSsize_t(number, PyExc_OverflowError);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    if (size < 0) return raise_error("InvalidArgument", "size %zd must be 0 or more bytes", size);
    Header *header = header_for(self->bus, self->allocator, self->id, size);
    if (!header) return nullptr;
    PyObject *draft = draft_new(payload(header), size, draft_owner, reinterpret_cast<std::uint64_t>(header), object);
    if (!draft) drop(header);
    return draft;
}

// _now(data, timeout=None): publish, or BlockingIOError if that would wait.
PyObject *publisher_publish_now(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (!check_open(self)) return nullptr;
    if (would_wait(self->bus, self->id)) {
        PyErr_SetNone(PyExc_BlockingIOError);
        return nullptr;
    }
    return publisher_publish(object, arguments, count, names);
}

PyObject *publisher_close(PyObject *object, PyObject *) {
    PublisherObject *self = as_publisher(object);
    if (std::exchange(self->closed, true) || !self->bus) Py_RETURN_NONE;
    counters_retire(self->counters);
    // a publish of this publisher may be waiting there
    for (SubscriberObject *subscriber : self->bus->subscribers) subscriber->writers.wake_all();
    self->bus->room.wake_all();
    self->bus->changed.wake_all();
    Py_RETURN_NONE;
}

PyObject *get_bus(PyObject *self, void *) {
    auto *bus = reinterpret_cast<PyObject *>(as_publisher(self)->bus);
    return Py_NewRef(bus ? bus : Py_None);
}
PyObject *get_id(PyObject *self, void *) { return PyLong_FromLong(as_publisher(self)->id); }
PyObject *get_closed(PyObject *self, void *) { return PyBool_FromLong(as_publisher(self)->closed); }
PyObject *get_published(PyObject *self, void *) {
    Counters *counters = as_publisher(self)->counters;
    return PyLong_FromUnsignedLongLong(counters ? counters->matched.get() : 0);
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))
PyMethodDef publisher_methods[] = {
    {"publish", FAST(publisher_publish), METH_FASTCALL | METH_KEYWORDS,
     "publish(data, /, *, timeout=None)\n--\n\nPublish a copy of data; gives its ordinal. After so many seconds of waiting it is "
     "dropped for\nthe subscribers that are full, counted, and TimeoutError raised."},
    {"publish_many", FAST(publisher_publish_many), METH_FASTCALL | METH_KEYWORDS,
     "publish_many(batch, /, *, timeout=None)\n--\n\nPublish a copy of each, in order; gives how many. The time is that of all."},
    {"reserve", publisher_reserve, METH_O,
     "reserve(size, /)\n--\n\nA writable buffer; leaving its with block publishes it."},
    {"_now", FAST(publisher_publish_now), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"close", publisher_close, METH_NOARGS, "close()\n--\n\nStop publishing. Closing twice does nothing."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef publisher_getset[] = {{"bus", get_bus, nullptr, "The bus it publishes on.", nullptr},
                                  {"id", get_id, nullptr, "The id of its messages.", nullptr},
                                  {"closed", get_closed, nullptr, "Whether close was called.", nullptr},
                                  {"_published", get_published, nullptr, nullptr, nullptr},
                                  {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot publisher_slots[] = {{Py_tp_doc, const_cast<char *>("One writing handle of a bus.")},
                                 {Py_tp_new, reinterpret_cast<void *>(publisher_new)},
                                 {Py_tp_init, reinterpret_cast<void *>(publisher_init)},
                                 {Py_tp_dealloc, reinterpret_cast<void *>(publisher_dealloc)},
                                 {Py_tp_traverse, reinterpret_cast<void *>(publisher_traverse)},
                                 {Py_tp_clear, reinterpret_cast<void *>(publisher_clear)},
                                 {Py_tp_methods, publisher_methods},
                                 {Py_tp_getset, publisher_getset},
                                 {0, nullptr}};

PyType_Spec publisher_spec = {"penstock._core.bus.Publisher", sizeof(PublisherObject), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, publisher_slots};

}  // namespace

namespace {
[[gnu::tls_model("initial-exec")]] thread_local Publishing *publishing_now = nullptr;
}  // namespace

Publishing::Publishing(PublisherObject *publisher, Deadline deadline) noexcept
    : publisher_(publisher), deadline_(deadline), outer_(std::exchange(publishing_now, this)) {}
Publishing::~Publishing() { publishing_now = outer_; }
bool Publishing::ended() noexcept {
    return publishing_now && publishing_now->publisher_ && publishing_now->publisher_->closed;
}
Deadline Publishing::deadline() noexcept { return publishing_now ? publishing_now->deadline_ : Deadline{}; }

Header *copy_in(BusObject *bus, AllocatorObject *allocator, std::uint16_t id, PyObject *data) {
    if (!PyBytes_CheckExact(data) || PyBytes_GET_SIZE(data) >= long_copy_bytes)
        return copy_buffer(bus, allocator, id, data);
    Py_ssize_t size = PyBytes_GET_SIZE(data);
    Header *header = header_for(bus, allocator, id, size);
    if (header) [[likely]] std::memcpy(payload(header), PyBytes_AS_STRING(data), static_cast<std::size_t>(size));
    return header;
}

bool publisher_types(PyObject *module) { return ready_type(module, "Publisher", &publisher_spec, &publisher_type); }

}  // namespace penstock::bus

namespace penstock {

void bind_bus(nanobind::module_ &module) {
    module.doc() = "The native part of penstock.bus.";
    PyObject *handle = module.ptr();
    if (!bus::message_types(handle) || !bus::allocator_types(handle) || !bus::subscriber_types(handle) ||
        !bus::bus_types(handle) || !bus::publisher_types(handle))
        throw nanobind::python_error();
}

}  // namespace penstock
