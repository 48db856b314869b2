// penstock._core.shm.Subscriber: the type and what is not reading.
#include <new>

#include "shm/bindings_subscriber.hpp"

namespace penstock::shm {

namespace {

PyObject *subscriber_wait(PyObject *object, PyObject *arguments, PyObject *names) {
    if (as_subscriber(object)->pending->any() && usable(as_subscriber(object))) Py_RETURN_TRUE;
    return wait_method<SubscriberObject>(object, arguments, names);
}

PyObject *subscriber_fileno(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    try {
        int descriptor = handle->member.bells.watched();
        if (!self->watched) {
            self->watched = true;
            if (!handle->arm()) handle->wake();  // something is there already
        }
        return PyLong_FromLong(descriptor);
    } catch (...) {
        return raise_current();
    }
}

PyObject *subscriber_counts(PyObject *object, PyObject *) {
    Subscriber *handle = as_subscriber(object)->handle;
    if (!handle) return raise_error("ClosedError", "this subscriber is closed");
    if (!handle->closed.load()) {
        const bool alone = handle->member.belongs_here() && !as_subscriber(object)->inside.load();
        try {
            // Checks whether a publisher has joined; a waiting thread does so itself, and a forked child must not.
            if (alone) handle->has_next();
        } catch (...) {
            return raise_current();
        }
        handle->update_counters(alone);
    }
    const Counters *c = handle->counters;
    PyObject *dropped = PyDict_New();
    for (std::size_t i = 0; dropped && i < drop_reason_count; ++i) {
        if (!c->dropped[i].get()) continue;
        PyObject *count = PyLong_FromUnsignedLongLong(c->dropped[i].get());
        if (!count || PyDict_SetItemString(dropped, drop_reason_names[i], count) != 0) Py_CLEAR(dropped);
        Py_XDECREF(count);
    }
    if (!dropped) return nullptr;
    return Py_BuildValue("KKNKK", c->matched.get(), c->delivered.get(), dropped, c->errors.get(),
                         static_cast<unsigned long long>(handle->delivered_past()));
}

// Where what is there now ends; for _passed.
PyObject *subscriber_end(PyObject *object, PyObject *) {
    Subscriber *handle = usable(as_subscriber(object));
    if (!handle) return nullptr;
    try {
        return PyLong_FromUnsignedLongLong(handle->has_next() ? handle->member.channel.tail() : 0);
    } catch (...) {
        return raise_current();
    }
}

PyObject *subscriber_passed(PyObject *object, PyObject *argument) {
    SubscriberObject *self = as_subscriber(object);
    std::uint64_t end = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred()) return nullptr;
    Subscriber *handle = usable(self);
    if (!handle) return nullptr;
    return PyBool_FromLong(!self->pending->any() && handle->reader.cursor >= end);
}

PyObject *subscriber_tell_drops(PyObject *object, PyObject *argument) {
    as_subscriber(object)->tells_drops = PyObject_IsTrue(argument) > 0;
    Py_RETURN_NONE;
}

PyObject *get_held(PyObject *object, void *) {
    Subscriber *handle = as_subscriber(object)->handle;
    return PyLong_FromUnsignedLong(handle ? handle->reader.held : 0);
}
PyObject *get_most_held(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) { return PyLong_FromUnsignedLong(h.may_hold()); });
}
PyObject *get_slots(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) {
        h.has_next();  // checks whether a publisher has joined
        return PyLong_FromUnsignedLong(h.member.channel.slot_count);
    });
}
PyObject *get_slot_size(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) {
        return PyLong_FromUnsignedLongLong(h.member.channel.header->ready.load() ? h.member.slot_size() : 0);
    });
}
PyObject *get_local(PyObject *object, void *) {
    return read_property<SubscriberObject>(
        object, [](auto &h) { return PyBool_FromLong(h.member.channel.header->flags.load() & channel_local); });
}
PyObject *get_retirement(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) { return PyBool_FromLong(h.retirement()); });
}
PyObject *get_typed(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) { return PyBool_FromLong(h.typed()); });
}
PyObject *get_type(PyObject *object, void *) {
    return read_property<SubscriberObject>(object, [](auto &h) {
        std::string type = h.member.type();
        return PyUnicode_DecodeUTF8(type.data(), Py_ssize_t(type.size()), "replace");
    });
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
    self->channel = PyUnicode_FromStringAndSize(options.name.data(), Py_ssize_t(options.name.size()));
    if (!self->channel) return -1;
    try {
        self->handle = without_gil([&] { return new Subscriber(options, activation, verify, refuse_broken); });
    } catch (...) {
        raise_current();
        return -1;
    }
    self->holder.handle = self->handle;
    self->holder.lent_generation = fork_generation();
    return remember_handle(self) ? 0 : -1;
}

PyObject *subscriber_new(PyTypeObject *type, PyObject *, PyObject *) {
    PyObject *object = type->tp_alloc(type, 0);
    if (!object) return nullptr;
    new (&as_subscriber(object)->holder) Holder;
    as_subscriber(object)->pending = new Pending;
    return object;
}

void subscriber_dealloc(PyObject *object) {
    SubscriberObject *self = as_subscriber(object);
    PyTypeObject *type = Py_TYPE(object);
    destroy_handle(self);
    delete self->pending;
    Py_CLEAR(self->channel);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"read", method(subscriber_read), METH_FASTCALL | METH_KEYWORDS,
     "read(timeout=None)\n--\n\nThe next message, or None when the time is over."},
    {"read_newest", method(subscriber_read_newest), METH_FASTCALL | METH_KEYWORDS,
     "read_newest(timeout=None)\n--\n\nThe newest message; those before it are passed by."},
    {"read_many", method(subscriber_read_many), METH_VARARGS | METH_KEYWORDS,
     "read_many(most=1024, timeout=None)\n--\n\nUp to so many messages that are there, as a batch."},
    {"_read_all", subscriber_read_all, METH_NOARGS, nullptr},
    {"find", subscriber_find, METH_O,
     "find(timestamp_ns, /)\n--\n\nThe first message still in the channel at or after that time, or None."},
    {"wait", method(subscriber_wait), METH_VARARGS | METH_KEYWORDS,
     "wait(timeout=None, descriptor=None)\n--\n\nWait until there is something to read; False when the time is over or "
     "the other descriptor is readable."},
    {"fileno", subscriber_fileno, METH_NOARGS, "fileno()\n--\n\nA descriptor that is readable when a message may be there."},
    {"close", close_method<SubscriberObject>, METH_NOARGS, "close()\n--\n\nLeave the channel; held messages stay whole."},
    {"_begin_wait", begin_wait_method<SubscriberObject>, METH_NOARGS, nullptr},
    {"_end_wait", end_wait_method<SubscriberObject>, METH_NOARGS, nullptr},
    {"_durable", durable_method<SubscriberObject>, METH_O, nullptr},
    {"_agree_on_schema", agree_on_schema_method<SubscriberObject>, METH_VARARGS, nullptr},
    {"_read_at", subscriber_read_at, METH_VARARGS, nullptr},
    {"_place_of", subscriber_place_of, METH_O, nullptr},
    {"_counts", subscriber_counts, METH_NOARGS, nullptr},
    {"_end", subscriber_end, METH_NOARGS, nullptr},
    {"_passed", subscriber_passed, METH_O, nullptr},
    {"_tell_drops", subscriber_tell_drops, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"closed", get_closed<SubscriberObject>, nullptr, "Whether close() was called.", nullptr},
    {"vchan_id", get_vchan<SubscriberObject>, nullptr, "Id of the virtual channel, given or assigned; None elsewhere.", nullptr},
    {"held", get_held, nullptr, "Messages held now.", nullptr},
    {"max_active_messages", get_most_held, nullptr, "Messages that may be held at once, as things stand.", nullptr},
    {"slots", get_slots, nullptr, "Number of slots; 0 before the first publisher.", nullptr},
    {"slot_size", get_slot_size, nullptr, "Bytes a slot has now; 0 before the first publisher.", nullptr},
    {"local", get_local, nullptr, "Whether the channel is not to leave this machine; False before the first publisher.", nullptr},
    {"retirement", get_retirement, nullptr,
     "Whether a publisher was opened with retirement: it is told when its messages are released.", nullptr},
    {"_typed", get_typed, nullptr, "Whether a publisher is there whose channel, or virtual channel, has a type.", nullptr},
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

}  // namespace

bool subscriber_ready(PyObject *module) {
    PyObject *type = PyType_FromSpec(&spec);
    if (!type) return false;
    int added = PyModule_AddObjectRef(module, "Subscriber", type);
    Py_DECREF(type);
    return added == 0;
}

}  // namespace penstock::shm
