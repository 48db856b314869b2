// Message of a bus (a subtype of penstock's Message that knows its header) and messages in memory of the user.
#include <Python.h>
#include <structmember.h>

#include "bus/objects.hpp"
#include "gil.hpp"

namespace penstock::bus {

PyTypeObject *bus_message_type = nullptr;
PyTypeObject *static_type = nullptr;

namespace {

struct HeaderOwner final : Owner {
    void release(std::uint64_t token) noexcept override { drop(reinterpret_cast<Header *>(token)); }
} header_owner;

// Dead objects kept for the next message.
constexpr int free_limit = 8192;
BusMessage *free_list[free_limit];
int free_count = 0;

BusMessage *as_message(PyObject *self) { return reinterpret_cast<BusMessage *>(self); }

void give_back(BusMessage *object) {
    Message &message = object->base;
    if (!message.owner) return;
    message.owner = nullptr;
    auto *header = reinterpret_cast<Header *>(message.envelope.token);
    for (; object->acquired; --object->acquired) drop(header);
    drop(header);
}

void message_dealloc(PyObject *self) {
    BusMessage *object = as_message(self);
    Message &message = object->base;
    if (message.weakrefs) PyObject_ClearWeakRefs(self);
    // A callback message runs its callback here, which must not find this object in the free list yet.
    give_back(object);
    Py_CLEAR(message.channel);
    if (message.properties) Py_CLEAR(message.properties);
    if (message.source) Py_CLEAR(message.source);
    if (message.decoder) Py_CLEAR(message.decoder);
    if (free_count < free_limit) {
        free_list[free_count++] = object;
        return;  // the type reference stays with the kept object
    }
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

// A message with explicit references gives those up first; the last release is the base's.
PyObject *message_release(PyObject *self, PyObject *) {
    BusMessage *object = as_message(self);
    Message &message = object->base;
    if (message.released) return raise_error("StateError", "this message was released before");
    if (object->acquired) {
        --object->acquired;
        drop(header_of(self));
    } else {
        message.released = true;
        if (message.exports == 0) give_back(object);
    }
    Py_RETURN_NONE;
}

PyObject *message_acquire(PyObject *self, PyObject *) {
    BusMessage *object = as_message(self);
    if (object->base.released) return raise_error("StateError", "this message was released; it cannot be acquired");
    acquire(header_of(self));
    ++object->acquired;
    return Py_NewRef(self);
}

PyObject *message_exit(PyObject *self, PyObject *const *, Py_ssize_t) {
    if (!as_message(self)->base.released) return message_release(self, nullptr);
    Py_RETURN_NONE;
}

int message_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    Message &message = as_message(self)->base;
    if (message.released) {
        view->obj = nullptr;
        PyErr_SetString(PyExc_BufferError, "this message was released; its memory may hold another one");
        return -1;
    }
    int readonly = !(header_of(self)->flags & flag_writable);
    if (PyBuffer_FillInfo(view, self, const_cast<std::uint8_t *>(message.envelope.data), message.envelope.size, readonly,
                          flags) != 0)
        return -1;
    ++message.exports;
    return 0;
}

void message_releasebuffer(PyObject *self, Py_buffer *) {
    Message &message = as_message(self)->base;
    if (--message.exports == 0 && message.released) give_back(as_message(self));
}

bool held(PyObject *self) {
    if (as_message(self)->base.owner) return true;
    raise_error("StateError", "this message was released; its header may be another's");
    return false;
}
PyObject *get_allocator_id(PyObject *self, void *) {
    return held(self) ? PyLong_FromLong(header_of(self)->allocator_id) : nullptr;
}
PyObject *get_reference_count(PyObject *self, void *) {
    return PyLong_FromUnsignedLong(as_message(self)->base.owner ? header_of(self)->reference_count : 0);
}
PyObject *get_generation(PyObject *self, void *) {
    return held(self) ? PyLong_FromUnsignedLong(header_of(self)->generation) : nullptr;
}
PyObject *get_cancelled(PyObject *self, void *) {
    return held(self) ? PyBool_FromLong(header_of(self)->flags & flag_cancelled) : nullptr;
}
PyObject *get_writable(PyObject *self, void *) {
    return held(self) ? PyBool_FromLong(header_of(self)->flags & flag_writable) : nullptr;
}

PyMethodDef message_methods[] = {
    {"acquire", message_acquire, METH_NOARGS,
     "acquire()\n--\n\nOne more reference, which release() gives back; gives the message itself."},
    {"release", message_release, METH_NOARGS,
     "release()\n--\n\nGive one reference back; the last one gives the memory back (with live views: when they die)."},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(message_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef message_getset[] = {
    {"allocator_id", get_allocator_id, nullptr, "0 heap, 1..127 static, 128..254 run-time, 255 memory of the user.",
     nullptr},
    {"reference_count", get_reference_count, nullptr, "How many hold the message; 0 once released.", nullptr},
    {"generation", get_generation, nullptr, "Which start of a delayed message this is.", nullptr},
    {"cancelled", get_cancelled, nullptr, "Whether a delayed message was aborted after it fired.", nullptr},
    {"writable", get_writable, nullptr, "Whether its one receiver may write.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot message_slots[] = {
    {Py_tp_doc, const_cast<char *>("A message of a bus: penstock's Message with the header's fields.")},
    {Py_tp_dealloc, reinterpret_cast<void *>(message_dealloc)},
    {Py_tp_methods, message_methods},
    {Py_tp_getset, message_getset},
    {Py_bf_getbuffer, reinterpret_cast<void *>(message_getbuffer)},
    {Py_bf_releasebuffer, reinterpret_cast<void *>(message_releasebuffer)},
    {0, nullptr}};

PyType_Spec message_spec = {"penstock._core.bus.Message", sizeof(BusMessage), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, message_slots};

// ---- static messages

StaticObject *as_static(PyObject *self) { return reinterpret_cast<StaticObject *>(self); }

PyObject *static_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"memory", "id", "callback", nullptr};
    PyObject *memory, *number, *callback = Py_None;
    std::uint16_t id;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OO|O", const_cast<char **>(keywords), &memory, &number,
                                     &callback) ||
        !parse_id(number, &id))
        return nullptr;
    if (callback != Py_None && !PyCallable_Check(callback))
        return PyErr_Format(PyExc_TypeError, "callback must be a function or None, not %s", Py_TYPE(callback)->tp_name);
    auto *self = as_static(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    auto *pool = new StaticPool;
    if (PyObject_GetBuffer(memory, &pool->buffer, PyBUF_SIMPLE) != 0 || pool->buffer.len > max_message_bytes) {
        if (pool->buffer.obj) {
            PyBuffer_Release(&pool->buffer);
            raise_error("InvalidArgument", "a message has at most %lld bytes", static_cast<long long>(max_message_bytes));
        }
        delete pool;
        Py_DECREF(self);
        return nullptr;
    }
    pool->block.header.id = id;
    pool->block.header.allocator_id = no_allocator_id;
    pool->block.header.flags = flag_external;
    pool->block.header.size = pool->block.header.capacity = static_cast<std::uint32_t>(pool->buffer.len);
    pool->block.header.pool = pool;
    pool->block.data = static_cast<std::uint8_t *>(pool->buffer.buf);
    pool->callback = callback == Py_None ? nullptr : Py_NewRef(callback);
    pool->self = self;
    self->pool = pool;
    return reinterpret_cast<PyObject *>(self);
}

int static_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (StaticPool *pool = as_static(self)->pool) {
        Py_VISIT(pool->callback);
        Py_VISIT(pool->buffer.obj);
    }
    return 0;
}

int static_clear(PyObject *self) {
    if (as_static(self)->pool) Py_CLEAR(as_static(self)->pool->callback);
    return 0;
}

void static_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    if (StaticPool *pool = as_static(self)->pool) {
        Py_XDECREF(pool->callback);
        PyBuffer_Release(&pool->buffer);
        delete pool;
    }
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *static_acquire_method(PyObject *self, PyObject *) {
    return static_acquire(as_static(self)) ? Py_NewRef(self) : nullptr;
}

PyObject *static_release(PyObject *self, PyObject *) {
    StaticPool *pool = as_static(self)->pool;
    Header &header = pool->block.header;
    if (header.reference_count == 0)
        return raise_error("StateError", "this message has no reference to release; acquire() takes one");
    drop(&header);
    Py_RETURN_NONE;
}

PyObject *static_mark(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "_mark takes a generation and a flag");
    unsigned long generation = PyLong_AsUnsignedLongMask(arguments[0]);
    int cancelled = PyObject_IsTrue(arguments[1]);
    if (cancelled < 0 || PyErr_Occurred()) return nullptr;
    Header &header = as_static(self)->pool->block.header;
    header.generation = static_cast<std::uint32_t>(generation);
    header.flags = static_cast<std::uint8_t>(cancelled ? header.flags | flag_cancelled : header.flags & ~flag_cancelled);
    Py_RETURN_NONE;
}

Header &static_header(PyObject *self) { return as_static(self)->pool->block.header; }
PyObject *static_id(PyObject *self, void *) { return PyLong_FromLong(static_header(self).id); }
PyObject *static_count(PyObject *self, void *) { return PyLong_FromUnsignedLong(static_header(self).reference_count); }
PyObject *static_allocator(PyObject *self, void *) { return PyLong_FromLong(static_header(self).allocator_id); }
PyObject *static_size(PyObject *self, void *) { return PyLong_FromUnsignedLong(static_header(self).size); }
PyObject *static_address(PyObject *self, void *) { return PyLong_FromVoidPtr(as_static(self)->pool->block.data); }
PyObject *static_queued(PyObject *self, void *) { return PyBool_FromLong(static_header(self).flags & flag_queued); }

PyMethodDef static_methods[] = {
    {"acquire", static_acquire_method, METH_NOARGS,
     "acquire()\n--\n\nTake a reference, which the next publish takes over; gives the message itself."},
    {"release", static_release, METH_NOARGS, "release()\n--\n\nGive a reference back unpublished."},
    {"_mark", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(static_mark)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef static_getset[] = {
    {"id", static_id, nullptr, "The message's id.", nullptr},
    {"reference_count", static_count, nullptr, "0: idle, may be used again.", nullptr},
    {"allocator_id", static_allocator, nullptr, "255: memory of the user.", nullptr},
    {"size", static_size, nullptr, "Bytes.", nullptr},
    {"address", static_address, nullptr, "Where the bytes are in memory.", nullptr},
    {"queued", static_queued, nullptr, "Whether it waits in a subscriber's queue.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot static_slots[] = {
    {Py_tp_doc, const_cast<char *>("StaticMessage(memory, id, callback=None)\n--\n\nA message in memory that the user "
                                   "gives (bytearray, numpy array), used again and again.")},
    {Py_tp_new, reinterpret_cast<void *>(static_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(static_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(static_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(static_clear)},
    {Py_tp_methods, static_methods},
    {Py_tp_getset, static_getset},
    {0, nullptr}};

PyType_Spec static_spec = {"penstock._core.bus.StaticMessage", sizeof(StaticObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, static_slots};

}  // namespace

PyObject *wrap(Header *header, PyObject *channel) {
    BusMessage *object;
    if (free_count > 0) {
        object = free_list[--free_count];
        Py_SET_REFCNT(reinterpret_cast<PyObject *>(object), 1);
    } else {
        object = PyObject_New(BusMessage, bus_message_type);
        if (!object) return nullptr;
        object->base.envelope = Envelope{};
        object->base.properties = nullptr;
        object->base.source = nullptr;
        object->base.decoder = nullptr;
    }
    Message &message = object->base;
    Envelope &envelope = message.envelope;  // fields that a reused object has already are not written again
    envelope.data = payload(header);
    envelope.size = header->size;
    envelope.ordinal = header->ordinal;
    envelope.timestamp_ns = header->timestamp_ns;
    envelope.id = header->id;
    envelope.token = reinterpret_cast<std::uint64_t>(header);
    message.owner = &header_owner;
    message.channel = Py_XNewRef(channel);
    message.weakrefs = nullptr;
    message.exports = 0;
    message.released = false;
    object->acquired = 0;
    return reinterpret_cast<PyObject *>(object);
}

bool static_acquire(StaticObject *object) {
    StaticPool *pool = object->pool;
    Header &header = pool->block.header;
    if (header.reference_count == UINT32_MAX) {
        raise_error("CapacityError", "this message has as many references as a count can hold");
        return false;
    }
    if (header.reference_count++ == 0) {
        Py_INCREF(reinterpret_cast<PyObject *>(object));
        ++pool->out;
    }
    return true;
}

Header *static_take(StaticObject *object) {
    Header &header = object->pool->block.header;
    if (header.reference_count == 0)
        raise_error("StateError", "this static message was not acquired; call acquire() before each publish");
    else if (header.flags & flag_published)
        raise_error("StateError", "this static message is still in flight (reference_count %u); publish it again when the "
                                  "count is 0", header.reference_count);
    else
        return &header;
    return nullptr;
}

// The count is 0 already, so that the callback may acquire and publish it again.
void StaticPool::give(Header *header) noexcept {
    header->flags = flag_external;
    --out;
    auto *object = reinterpret_cast<PyObject *>(self);
    if (callback) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyObject *function = Py_NewRef(callback);
        PyObject *result = calling_python([&] { return PyObject_CallOneArg(function, object); });
        if (!result) PyErr_WriteUnraisable(function);
        Py_XDECREF(result);
        Py_DECREF(function);
        PyErr_Restore(type, value, trace);
    }
    calling_python([&] { Py_DECREF(object); });  // may be the end of this pool
}

bool message_types(PyObject *module) {
    return ready_type(module, "Message", &message_spec, &bus_message_type, message_type) &&
           ready_type(module, "StaticMessage", &static_spec, &static_type);
}

}  // namespace penstock::bus
