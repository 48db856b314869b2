// Message: read-only bytes that hold their memory until released.
#include "message/message.hpp"

#include <Python.h>
#include <structmember.h>

#include <cstdarg>
#include <cstring>

#include "gil.hpp"
#include "message/arguments.hpp"

namespace penstock {

PyTypeObject *message_type = nullptr;

PyObject *raise_error(const char *name, const char *format, ...) {
    PyObject *module = PyImport_ImportModule("penstock.errors");
    if (!module) return nullptr;
    PyObject *kind = PyObject_GetAttrString(module, name);
    Py_DECREF(module);
    if (!kind) return nullptr;
    va_list arguments;
    va_start(arguments, format);
    PyErr_FormatV(kind, format, arguments);
    va_end(arguments);
    Py_DECREF(kind);
    return nullptr;
}

namespace {

// Reading one by one allocates a message each time, so dead ones of the exact type are kept for reuse (GIL-guarded).
constexpr int free_limit = 256;
Message *free_list[free_limit];
int free_count = 0;

Message *as_message(PyObject *self) { return reinterpret_cast<Message *>(self); }

void give_back(Message *message) {
    Owner *owner = message->owner;
    if (!owner) return;
    message->owner = nullptr;
    owner->release(message->envelope.token);
}

// Whether the bytes are still the message's: it was not released, and not read by the process that this one was forked
// from.
bool holds_bytes(const Message *message) {
    return !message->released && !(message->owner && message->owner->inherited());
}

// Sets the error for a message whose bytes are gone.
void refuse_bytes(const Message *message, PyObject *kind, const char *text) {
    if (message->released) PyErr_SetString(kind, text);
    else
        raise_error("StateError",
                    "this message was read before this process was forked, and its memory is the parent's; copy it "
                    "(bytes(message)) before the fork, or open a subscriber in the child");
}

// Memory of a message made in Python: a buffer of any object.
struct BufferOwner final : Owner {
    Py_buffer buffer{};
    void release(std::uint64_t) noexcept override {
        calling_python([&] { PyBuffer_Release(&buffer); });
        delete this;
    }
};

void message_dealloc(PyObject *self) {
    Message *message = as_message(self);
    PyTypeObject *type = Py_TYPE(self);
    if (message->weakrefs) PyObject_ClearWeakRefs(self);
    give_back(message);
    Py_CLEAR(message->channel);
    Py_CLEAR(message->properties);
    Py_CLEAR(message->source);
    Py_CLEAR(message->decoder);
    if (type == message_type && free_count < free_limit) {
        free_list[free_count++] = message;
        return;  // the type reference stays with the kept object
    }
    type->tp_free(self);
    Py_DECREF(type);
}

int message_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    Message *message = as_message(self);
    if (!holds_bytes(message)) [[unlikely]] {
        view->obj = nullptr;
        refuse_bytes(message, PyExc_BufferError, "this message was released; its memory may hold another one");
        return -1;
    }
    auto *data = const_cast<std::uint8_t *>(message->envelope.data);
    static std::uint8_t nothing = 0;
    if (PyBuffer_FillInfo(view, self, data ? data : &nothing, message->envelope.size, 1, flags) != 0) return -1;
    ++message->exports;
    return 0;
}

void message_releasebuffer(PyObject *self, Py_buffer *) {
    Message *message = as_message(self);
    if (--message->exports == 0 && message->released) give_back(message);
}

PyObject *message_release(PyObject *self, PyObject *) {
    Message *message = as_message(self);
    if (message->released) return raise_error("StateError", "this message was released before");
    message->released = true;
    if (message->exports == 0) give_back(message);
    Py_RETURN_NONE;
}

PyObject *message_enter(PyObject *self, PyObject *) { return Py_NewRef(self); }

PyObject *message_exit(PyObject *self, PyObject *const *, Py_ssize_t) {
    if (!as_message(self)->released) return message_release(self, nullptr);
    Py_RETURN_NONE;
}

PyObject *message_array(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    return array_over(self, arguments, count, names);
}

// An empty message is true too, so that `while message := subscriber.read(1)` goes on.
int message_truth(PyObject *) { return 1; }

Py_ssize_t message_length(PyObject *self) { return as_message(self)->envelope.size; }

PyObject *message_repr(PyObject *self) {
    Message *message = as_message(self);
    const Envelope &e = message->envelope;
    return PyUnicode_FromFormat("<%s %S#%llu, %zd bytes%s>", _PyType_Name(Py_TYPE(self)),
                                message->channel ? message->channel : Py_None,
                                static_cast<unsigned long long>(e.ordinal), static_cast<Py_ssize_t>(e.size),
                                message->released ? ", released" : "");
}

Py_hash_t message_hash(PyObject *self) {
    Message *message = as_message(self);
    if (!holds_bytes(message)) {
        refuse_bytes(message, PyExc_BufferError, "this message was released");
        return -1;
    }
    PyObject *copy = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(message->envelope.data),
                                               message->envelope.size);
    if (!copy) return -1;
    Py_hash_t hash = PyObject_Hash(copy);
    Py_DECREF(copy);
    return hash;
}

// Equal to any bytes-like object of the same content.
PyObject *message_compare(PyObject *self, PyObject *other, int operation) {
    if (operation != Py_EQ && operation != Py_NE) Py_RETURN_NOTIMPLEMENTED;
    bool equal = false;
    if (self == other) {
        equal = true;
    } else if (!PyObject_CheckBuffer(other) || as_message(self)->released) {
        Py_RETURN_NOTIMPLEMENTED;
    } else if (!holds_bytes(as_message(self))) {
        refuse_bytes(as_message(self), nullptr, nullptr);
        return nullptr;
    } else {
        Py_buffer view;
        if (PyObject_GetBuffer(other, &view, PyBUF_SIMPLE) != 0) {
            PyErr_Clear();
            Py_RETURN_NOTIMPLEMENTED;
        }
        const Envelope &e = as_message(self)->envelope;
        equal = view.len == e.size && (e.size == 0 || std::memcmp(view.buf, e.data, e.size) == 0);
        PyBuffer_Release(&view);
    }
    return PyBool_FromLong(equal == (operation == Py_EQ));
}

PyObject *optional_number(std::int64_t value) {
    if (value < 0) Py_RETURN_NONE;
    return PyLong_FromLongLong(value);
}

PyObject *get_ordinal(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_message(self)->envelope.ordinal); }
PyObject *get_stored(PyObject *self, void *) {
    std::int64_t stored_ns = as_message(self)->envelope.stored_ns;
    if (stored_ns == Envelope::not_stored) Py_RETURN_NONE;
    return PyLong_FromLongLong(stored_ns);
}
PyObject *get_timestamp(PyObject *self, void *) { return PyLong_FromLongLong(as_message(self)->envelope.shown_time_ns()); }
PyObject *get_timed(PyObject *self, void *) {
    return PyBool_FromLong(as_message(self)->envelope.timestamp_ns != Envelope::no_time);
}
PyObject *get_position(PyObject *self, void *) { return optional_number(as_message(self)->envelope.position); }
PyObject *get_id(PyObject *self, void *) { return optional_number(as_message(self)->envelope.id); }
PyObject *get_vchan(PyObject *self, void *) { return optional_number(as_message(self)->envelope.vchan_id); }
PyObject *get_size(PyObject *self, void *) { return PyLong_FromSsize_t(as_message(self)->envelope.size); }
PyObject *get_released(PyObject *self, void *) { return PyBool_FromLong(as_message(self)->released); }
PyObject *get_pinned(PyObject *self, void *) { return PyBool_FromLong(as_message(self)->owner != nullptr); }
PyObject *get_address(PyObject *self, void *) {
    return PyLong_FromVoidPtr(const_cast<std::uint8_t *>(as_message(self)->envelope.data));
}
PyObject *get_channel(PyObject *self, void *) {
    PyObject *channel = as_message(self)->channel;
    return Py_NewRef(channel ? channel : Py_None);
}
PyObject *get_source(PyObject *self, void *) {
    PyObject *source = as_message(self)->source;
    return Py_NewRef(source ? source : Py_None);
}

// The value that ``make`` returns. If it raises, the result is what ``failed(message, error)`` returns or raises. This
// way a decoder that is a C function costs no Python frame.
PyObject *decode(PyObject *self, PyObject *make, PyObject *failed) {
    PyObject *value = PyObject_CallOneArg(make, self);
    if (value || !PyErr_ExceptionMatches(PyExc_Exception)) return value;
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    value = PyObject_CallFunctionObjArgs(failed, self, error, nullptr);
    Py_XDECREF(kind);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    return value;
}

// Decoded at each access, not cached: a value may be a view that holds the message, so that a cached one would leak it.
PyObject *get_value(PyObject *self, void *) {
    if (PyObject *decoder = as_message(self)->decoder) {
        Py_INCREF(decoder);
        PyObject *value = PyTuple_CheckExact(decoder) && PyTuple_GET_SIZE(decoder) == 2
                              ? decode(self, PyTuple_GET_ITEM(decoder, 0), PyTuple_GET_ITEM(decoder, 1))
                              : PyObject_CallOneArg(decoder, self);
        Py_DECREF(decoder);
        return value;
    }
    return PyBytes_FromObject(self);
}
PyObject *get_decoder(PyObject *self, void *) {
    PyObject *decoder = as_message(self)->decoder;
    return Py_NewRef(decoder ? decoder : Py_None);
}
int set_decoder(PyObject *self, PyObject *decoder, void *) {
    Py_XSETREF(as_message(self)->decoder, Py_XNewRef(decoder == Py_None ? nullptr : decoder));
    return 0;
}

PyObject *get_properties(PyObject *self, void *) {
    Message *message = as_message(self);
    if (!message->properties) {
        const Envelope &e = message->envelope;
        if (e.properties_size && message->released)
            return raise_error("StateError", "this message was released; its properties are gone");
        message->properties = decode_properties(e.properties, e.properties_size);
        if (!message->properties) return nullptr;
    }
    return PyDictProxy_New(message->properties);
}

PyObject *message_tp_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"data", "ordinal", "timestamp_ns", "channel", "position", "id",
                                     "vchan_id", "properties", "source", nullptr};
    PyObject *data;
    unsigned long long ordinal = 0;
    long long timestamp = Envelope::no_time;
    PyObject *channel = Py_None, *position = Py_None, *id = Py_None, *vchan = Py_None, *properties = Py_None,
             *source = Py_None;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|$KLOOOOOO", const_cast<char **>(keywords), &data, &ordinal,
                                     &timestamp, &channel, &position, &id, &vchan, &properties, &source))
        return nullptr;
    auto number = [](PyObject *object) { return object == Py_None ? -1LL : PyLong_AsLongLong(object); };
    Envelope envelope;
    envelope.ordinal = ordinal;
    envelope.timestamp_ns = timestamp;
    envelope.position = number(position);
    envelope.id = static_cast<std::int32_t>(number(id));
    envelope.vchan_id = static_cast<std::int32_t>(number(vchan));
    if (PyErr_Occurred()) return nullptr;
    if (properties != Py_None && !PyDict_Check(properties)) {
        PyErr_SetString(PyExc_TypeError, "properties must be a dict of str to str");
        return nullptr;
    }
    auto *owner = new BufferOwner;
    if (PyObject_GetBuffer(data, &owner->buffer, PyBUF_SIMPLE) != 0) {
        delete owner;
        return nullptr;
    }
    envelope.data = static_cast<const std::uint8_t *>(owner->buffer.buf);
    envelope.size = owner->buffer.len;
    PyObject *self = message_new_of(type, envelope, owner, channel == Py_None ? nullptr : channel,
                                    source == Py_None ? nullptr : source);
    if (!self) {
        owner->release(0);
        return nullptr;
    }
    if (properties != Py_None) {
        as_message(self)->properties = PyDict_Copy(properties);
        if (!as_message(self)->properties) {
            Py_DECREF(self);
            return nullptr;
        }
    }
    return self;
}

PyObject *get_activation(PyObject *self, void *) { return PyBool_FromLong(as_message(self)->envelope.activation); }
PyObject *get_intact(PyObject *self, void *) {
    std::int8_t intact = as_message(self)->envelope.intact;
    return intact < 0 ? Py_NewRef(Py_None) : PyBool_FromLong(intact);
}
PyObject *get_metadata(PyObject *self, void *) {
    const Envelope &e = as_message(self)->envelope;
    if (!e.metadata_size) Py_RETURN_NONE;
    if (as_message(self)->released) return raise_error("StateError", "this message was released; its metadata is gone");
    if (!holds_bytes(as_message(self))) return refuse_bytes(as_message(self), nullptr, nullptr), nullptr;
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(e.metadata), e.metadata_size);
}

// Another message over the same memory, which it holds by a view of the first one.
PyObject *message_copy(PyObject *self, PyObject *) {
    auto *owner = new BufferOwner;
    if (PyObject_GetBuffer(self, &owner->buffer, PyBUF_SIMPLE) != 0) {
        delete owner;
        return nullptr;
    }
    Message *message = as_message(self);
    PyObject *copy = message_new(message->envelope, owner, message->channel, message->source);
    if (!copy) owner->release(0);
    else as_message(copy)->properties = Py_XNewRef(message->properties);
    if (copy) as_message(copy)->decoder = Py_XNewRef(message->decoder);
    return copy;
}

// A message with the same fields over a copy of the bytes: it holds no memory of the reach that it came from.
PyObject *message_deepcopy(PyObject *self, PyObject *) {
    Message *message = as_message(self);
    if (!holds_bytes(message)) {
        refuse_bytes(message, PyExc_BufferError, "this message was released; there is nothing to copy");
        return nullptr;
    }
    const Envelope &e = message->envelope;
    const std::size_t sizes[] = {static_cast<std::size_t>(e.size), e.details_size(), e.metadata_size};
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(sizes[0] + sizes[1] + sizes[2]));
    if (!bytes) return nullptr;
    auto *to = reinterpret_cast<std::uint8_t *>(PyBytes_AS_STRING(bytes));
    if (sizes[0]) std::memcpy(to, e.data, sizes[0]);
    if (sizes[1]) std::memcpy(to + sizes[0], e.properties, sizes[1]);
    if (sizes[2]) std::memcpy(to + sizes[0] + sizes[1], e.metadata, sizes[2]);
    auto *owner = new BufferOwner;
    int failed = PyObject_GetBuffer(bytes, &owner->buffer, PyBUF_SIMPLE);
    Py_DECREF(bytes);
    if (failed) {
        delete owner;
        return nullptr;
    }
    Envelope envelope = e;
    envelope.token = 0;
    envelope.data = to;
    envelope.properties = sizes[1] ? to + sizes[0] : nullptr;
    envelope.metadata = sizes[2] ? to + sizes[0] + sizes[1] : nullptr;
    PyObject *copy = message_new(envelope, owner, message->channel, message->source);
    if (!copy) {
        owner->release(0);
        return nullptr;
    }
    as_message(copy)->properties = Py_XNewRef(message->properties);  // shared: it is never changed
    as_message(copy)->decoder = Py_XNewRef(message->decoder);
    return copy;
}

PyMethodDef message_methods[] = {
    {"__deepcopy__", message_deepcopy, METH_O,
     "__deepcopy__(memo, /)\n--\n\nA message over a copy of the bytes, which holds nothing of its channel."},
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, nullptr},
    {"release", message_release, METH_NOARGS,
     "release()\n--\n\nGive the memory back now. With live views it goes back when the last of them dies."},
    {"array", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(message_array)),
     METH_FASTCALL | METH_KEYWORDS,
     "array(shape=None, dtype='uint8')\n--\n\nA read-only numpy array over the message, without a copy."},
    {"__copy__", message_copy, METH_NOARGS,
     "__copy__()\n--\n\nAnother message over the same memory, which goes back when both are gone."},
    {"__enter__", message_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(message_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef message_getset[] = {
    {"ordinal", get_ordinal, nullptr, "Number in its channel or topic, from 1.", nullptr},
    {"timestamp_ns", get_timestamp, nullptr,
     "Realtime nanoseconds: the time that its publisher gave it, or when it was published (then monotone per channel).", nullptr},
    {"_timed", get_timed, nullptr, "Whether it has a time; timestamp_ns is 0 if not.", nullptr},
    {"stored_ns", get_stored, nullptr, "When a journal or broker stored it, monotone per journal; None elsewhere.", nullptr},
    {"channel", get_channel, nullptr, "Name of the channel or topic.", nullptr},
    {"position", get_position, nullptr, "Number in its journal across topics, or None.", nullptr},
    {"id", get_id, nullptr, "Message id, where the reach has one, or None.", nullptr},
    {"vchan_id", get_vchan, nullptr, "Virtual channel id, or None.", nullptr},
    {"properties", get_properties, nullptr, "Read-only mapping of text to text; empty where there are none.", nullptr},
    {"source", get_source, nullptr, "The session that it came by (tcp), or None.", nullptr},
    {"value", get_value, nullptr, "The decoded object if its subscriber has a type, else the bytes.", nullptr},
    {"_decoder", get_decoder, set_decoder, "What makes the value of this message, or None.", nullptr},
    {"metadata", get_metadata, nullptr, "The publisher's metadata, or None where the channel has none.", nullptr},
    {"intact", get_intact, nullptr, "Whether the checksum matches; None if it was not checked.", nullptr},
    {"activation", get_activation, nullptr, "Whether it says that a publisher has opened, and was not published.", nullptr},
    {"size", get_size, nullptr, "Bytes.", nullptr},
    {"released", get_released, nullptr, "Whether release() was called.", nullptr},
    {"pinned", get_pinned, nullptr, "Whether the memory is still held.", nullptr},
    {"address", get_address, nullptr, "Where the bytes are in this process's memory.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef message_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Message, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot message_slots[] = {
    {Py_tp_doc, const_cast<char *>("Read-only bytes with an ordinal, a time and a channel, holding their memory until "
                                   "released.\n\nSupports the buffer protocol: bytes(message), memoryview(message), "
                                   "numpy.frombuffer(message, ...).")},
    {Py_tp_new, reinterpret_cast<void *>(message_tp_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(message_dealloc)},
    {Py_tp_repr, reinterpret_cast<void *>(message_repr)},
    {Py_tp_hash, reinterpret_cast<void *>(message_hash)},
    {Py_tp_richcompare, reinterpret_cast<void *>(message_compare)},
    {Py_tp_methods, message_methods},
    {Py_tp_getset, message_getset},
    {Py_tp_members, message_members},
    {Py_sq_length, reinterpret_cast<void *>(message_length)},
    {Py_nb_bool, reinterpret_cast<void *>(message_truth)},
    {Py_bf_getbuffer, reinterpret_cast<void *>(message_getbuffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void *>(message_releasebuffer)},
    {0, nullptr}};

PyType_Spec message_spec = {"penstock._core.Message", sizeof(Message), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, message_slots};

void fill(Message *message, const Envelope &envelope, Owner *owner, PyObject *channel, PyObject *source) {
    message->envelope = envelope;
    message->owner = owner;
    message->channel = Py_XNewRef(channel);
    message->properties = nullptr;
    message->source = Py_XNewRef(source);
    message->decoder = nullptr;
    message->weakrefs = nullptr;
    message->exports = 0;
    message->released = false;
}

}  // namespace

PyObject *message_new(const Envelope &envelope, Owner *owner, PyObject *channel, PyObject *source) {
    Message *message;
    if (free_count > 0) {
        message = free_list[--free_count];
        Py_SET_REFCNT(reinterpret_cast<PyObject *>(message), 1);  // the kept object was never destroyed
    } else {
        message = PyObject_New(Message, message_type);
        if (!message) return nullptr;
    }
    fill(message, envelope, owner, channel, source);
    return reinterpret_cast<PyObject *>(message);
}

PyObject *message_new_of(PyTypeObject *type, const Envelope &envelope, Owner *owner, PyObject *channel,
                         PyObject *source) {
    if (type == message_type) return message_new(envelope, owner, channel, source);
    PyObject *self = type->tp_alloc(type, 0);
    if (!self) return nullptr;
    fill(as_message(self), envelope, owner, channel, source);
    return self;
}

void tell_published(std::size_t count) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *number = PyLong_FromSize_t(count);
    PyObject *noted = number && PyObject_SetAttrString(value, "published", number) == 0
                          ? PyObject_CallMethod(value, "add_note", "N", PyUnicode_FromFormat("%zu were published", count))
                          : nullptr;
    if (!noted) PyErr_Clear();
    Py_XDECREF(noted);
    Py_XDECREF(number);
    PyErr_Restore(type, value, trace);
}

bool message_ready(PyObject *module) {
    message_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&message_spec));
    return message_type &&
           PyModule_AddObjectRef(module, "Message", reinterpret_cast<PyObject *>(message_type)) == 0;
}

}  // namespace penstock
