// penstock._core.shm.Publisher: the type and what is not publishing.
#include <new>

#include "shm/bindings_publisher.hpp"

namespace penstock::shm {

namespace {

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
    if (subscribers > UINT32_MAX) subscribers = UINT32_MAX;
    if (!wait_with(self, woken, [&] { return handle->wait_subscribers(std::uint32_t(subscribers), deadline); })) return nullptr;
    return PyBool_FromLong(woken == Woken::ready);
}

constexpr std::size_t most_told = 1'000'000;  // by one call: a list of what was published for days would fill the memory

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
        std::vector<std::uint32_t> slots = handle->retired(most_told);
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
        return PyLong_FromLong(handle->member.bells.watched());
    } catch (...) {
        return raise_current();
    }
}

PyObject *publisher_do_grow(PyObject *object, PyObject *argument) {
    long long size = PyLong_AsLongLong(argument);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    if (size < 0) return raise_error("InvalidArgument", "a slot cannot have %lld bytes", size);
    try {
        run_without_gil(as_publisher(object), [&] { handle->grow(std::uint64_t(size)); return 0; });
        if (!usable(as_publisher(object))) return nullptr;
        return PyLong_FromUnsignedLongLong(handle->slot_size());
    } catch (...) {
        return raise_current();
    }
}

PyObject *publisher_grown_size(PyObject *object, PyObject *argument) {
    long long size = PyLong_AsLongLong(argument);
    if (size == -1 && PyErr_Occurred()) return nullptr;
    Publisher *handle = usable(as_publisher(object));
    if (!handle) return nullptr;
    return PyLong_FromUnsignedLongLong(Membership::grown_size(handle->slot_size(), std::uint64_t(size)));
}

PyObject *publisher_counts(PyObject *object, PyObject *) {
    Publisher *handle = as_publisher(object)->handle;
    if (!handle) return raise_error("ClosedError", "this publisher is closed");
    return Py_BuildValue("KK", handle->counters->delivered.get(), handle->counters->lost());
}

PyObject *get_slots(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.member.channel.slot_count); });
}
PyObject *get_slot_size(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLongLong(h.slot_size()); });
}
PyObject *get_unread(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLongLong(h.unread()); });
}

PyObject *get_subscribers(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.subscribers()); });
}
PyObject *get_publishers(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.publishers()); });
}
PyObject *get_metadata_size(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.metadata_size()); });
}
PyObject *get_max_reserved(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.member.most_held); });
}
PyObject *get_last_ordinal(PyObject *object, void *) {
    return read_property<PublisherObject>(object, [](auto &h) {
        return PyLong_FromUnsignedLongLong(h.member.channel.tail() - 1 + h.member.channel.header->before.load());
    });
}
PyObject *get_fixed_size(PyObject *object, void *) {
    return read_property<PublisherObject>(
        object, [](auto &h) { return PyBool_FromLong(h.member.channel.header->flags.load() & channel_fixed_size); });
}

int publisher_init(PyObject *object, PyObject *arguments, PyObject *names) {
    PublisherObject *self = as_publisher(object);
    if (self->handle) return raise_error("StateError", "this publisher is open"), -1;
    if (PyTuple_GET_SIZE(arguments) || !names) return PyErr_Format(PyExc_TypeError, "options are given by name"), -1;
    Options options;
    bool checksums = false;
    long long spin_us = 0;
    if (!read_options(names, options) || !read_bool(names, "checksum", checksums) ||
        !read_bool(names, "retirement", options.retirement) || !read_number(names, "spin_us", 0, 1'000'000'000, spin_us))
        return -1;
    self->spin_ns = spin_us * 1000;
    self->timeout_ns = -1;
    PyObject *timeout = PyDict_GetItemString(names, "timeout");
    std::int64_t deadline;
    if (!read_timeout(timeout, deadline)) return -1;
    if (deadline >= 0) self->timeout_ns = deadline ? std::int64_t(PyFloat_AsDouble(timeout) * 1e9) : 0;
    try {
        self->handle = without_gil([&] { return new Publisher(options, checksums); });
    } catch (...) {
        raise_current();
        return -1;
    }
    return remember_handle(self) ? 0 : -1;
}

PyObject *publisher_new(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *object = type->tp_alloc(type, 0);
    if (!object) return nullptr;
    PublisherObject *self = as_publisher(object);
    new (&self->lender) Lender;
    self->lender.publisher = self;
    self->lender.lent_generation = fork_generation();
    self->copies = new Copies;
    return object;
}

void publisher_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    destroy_handle(as_publisher(object));
    delete as_publisher(object)->copies;
    type->tp_free(object);
    Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"publish", method(publisher_publish), METH_FASTCALL | METH_KEYWORDS,
     "publish(data, *, timeout='as opened', metadata=None)\n--\n\nPublish a copy of data; gives its ordinal."},
    {"publish_many", method(publisher_publish_many), METH_FASTCALL | METH_KEYWORDS,
     "publish_many(batch, *, timeout='as opened')\n--\n\nPublish each of them, in order; gives how many. The time is that of all."},
    {"reserve", method(publisher_reserve), METH_FASTCALL | METH_KEYWORDS,
     "reserve(size, *, timeout='as opened', metadata=None)\n--\n\nA writable buffer in the channel itself."},
    {"wait_ready", method(publisher_wait_ready), METH_VARARGS | METH_KEYWORDS,
     "wait_ready(subscribers=1, timeout=None)\n--\n\nWait until so many subscribers are there."},
    {"wait", method(wait_method<PublisherObject>), METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None, descriptor=None)\n--\n\nWait until a slot may be had; False when the time is over or the other "
     "descriptor is readable."},
    {"retired", method(publisher_retired), METH_VARARGS | METH_KEYWORDS,
     "retired(timeout=0)\n--\n\nSlots whose message was released by all since the last call, at most 1,000,000 of "
     "them; the others are left for the next call."},
    {"fileno", publisher_fileno, METH_NOARGS, "fileno()\n--\n\nA descriptor that is readable when a slot may be had."},
    {"close", close_method<PublisherObject>, METH_NOARGS, "close()\n--\n\nLeave the channel."},
    {"_agree_on_schema", agree_on_schema_method<PublisherObject>, METH_VARARGS, nullptr},
    {"_durable", durable_method<PublisherObject>, METH_O, nullptr},
    {"_activate", publisher_activate, METH_NOARGS, nullptr},
    {"_do_grow", publisher_do_grow, METH_O, nullptr},
    {"_grown_size", publisher_grown_size, METH_O, nullptr},
    {"_counts", publisher_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"closed", get_closed<PublisherObject>, nullptr, "Whether close() was called.", nullptr},
    {"vchan_id", get_vchan<PublisherObject>, nullptr, "Id of the virtual channel, given or assigned; None on an ordinary channel.", nullptr},
    {"slots", get_slots, nullptr, "Number of slots.", nullptr},
    {"slot_size", get_slot_size, nullptr, "Bytes a slot has now.", nullptr},
    {"subscribers", get_subscribers, nullptr, "Subscribers that would get a message now.", nullptr},
    {"unread", get_unread, nullptr, "How many messages of the channel the slowest subscriber has not read yet.", nullptr},
    {"publishers", get_publishers, nullptr, "Publishers of the channel or multiplexer.", nullptr},
    {"metadata_size", get_metadata_size, nullptr, "Bytes of metadata a message has.", nullptr},
    {"max_reserved", get_max_reserved, nullptr, "Messages that may be reserved at once.", nullptr},
    {"last_ordinal", get_last_ordinal, nullptr, "Of the channel's last message; 0: none.", nullptr},
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
