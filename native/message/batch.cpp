// Batch: many messages as one lazy sequence. It pins the memory of all. A message taken from it pins only its own memory
// if the owner can release messages one by one, otherwise that of the whole batch.
#include <Python.h>
#include <structmember.h>

#include <new>
#include <utility>

#include "message/arguments.hpp"
#include "message/message.hpp"

namespace penstock {

PyTypeObject *batch_type = nullptr;

namespace {

// Shared by the batch and its messages; the last one to be destroyed releases all the memory.
struct Hold final : Owner {
    std::vector<Envelope> entries;
    Owner *owner = nullptr;
    std::size_t users = 1;

    void release(std::uint64_t) noexcept override { drop(); }
    void drop() noexcept {
        if (--users) return;
        if (owner) {
            std::vector<std::uint64_t> tokens(entries.size());
            for (std::size_t i = 0; i < entries.size(); ++i) tokens[i] = entries[i].token;
            owner->release_many(tokens.data(), tokens.size());
        }
        delete this;
    }
};

struct Batch {
    PyObject_HEAD
    Hold *hold;          // null once released
    PyObject *channels;  // str, tuple of str, or null
    PyObject *source;
    PyObject *decoder;  // of each message taken out of it, or null
    PyObject *weakrefs;
};

struct Iterator {
    PyObject_HEAD
    Batch *batch;
    std::size_t next;
};

PyTypeObject *iterator_type = nullptr;

Batch *as_batch(PyObject *self) { return reinterpret_cast<Batch *>(self); }

void batch_dealloc(PyObject *self) {
    Batch *batch = as_batch(self);
    PyTypeObject *type = Py_TYPE(self);
    if (batch->weakrefs) PyObject_ClearWeakRefs(self);
    if (batch->hold) batch->hold->drop();
    Py_XDECREF(batch->channels);
    Py_XDECREF(batch->source);
    Py_XDECREF(batch->decoder);
    type->tp_free(self);
    Py_DECREF(type);
}

bool check_held(Batch *batch) {
    if (batch->hold && !(batch->hold->owner && batch->hold->owner->inherited())) [[likely]] return true;
    raise_error("StateError", batch->hold ? "this batch was read before this process was forked, and its memory is the "
                                            "parent's; open a subscriber in the child"
                                          : "this batch was released");
    return false;
}

PyObject *take(Batch *batch, std::size_t index) {
    if (!check_held(batch)) return nullptr;  // an __index__ or a finaliser that ran just now may have released it
    Hold *hold = batch->hold;
    const Envelope &entry = hold->entries[index];
    PyObject *channel = batch->channels;
    if (channel && PyTuple_Check(channel)) channel = PyTuple_GET_ITEM(channel, entry.channel);
    // If the owner can hold a message alone, it does not keep the others.
    bool alone = hold->owner && hold->owner->retain(entry.token);
    PyObject *message = message_new(entry, alone ? hold->owner : hold, channel, batch->source);
    if (message && !alone) ++hold->users;
    if (message && batch->decoder) reinterpret_cast<Message *>(message)->decoder = Py_NewRef(batch->decoder);
    if (!message && alone) hold->owner->release(entry.token);
    return message;
}

Py_ssize_t batch_length(PyObject *self) {
    Batch *batch = as_batch(self);
    if (!check_held(batch)) return -1;
    return static_cast<Py_ssize_t>(batch->hold->entries.size());
}

PyObject *batch_item(PyObject *self, Py_ssize_t index) {
    Batch *batch = as_batch(self);
    if (!check_held(batch)) return nullptr;
    if (index < 0 || static_cast<std::size_t>(index) >= batch->hold->entries.size()) {
        PyErr_SetString(PyExc_IndexError, "batch index out of range");
        return nullptr;
    }
    return take(batch, static_cast<std::size_t>(index));
}

PyObject *batch_subscript(PyObject *self, PyObject *key) {
    Py_ssize_t length = batch_length(self);
    if (length < 0) return nullptr;
    if (PyIndex_Check(key)) {
        Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (index == -1 && PyErr_Occurred()) return nullptr;
        return batch_item(self, index < 0 ? index + length : index);
    }
    if (!PySlice_Check(key)) return PyErr_Format(PyExc_TypeError, "a batch is indexed by int or slice, not %R", key);
    Py_ssize_t start, stop, step;
    if (PySlice_Unpack(key, &start, &stop, &step) != 0) return nullptr;
    Py_ssize_t count = PySlice_AdjustIndices(length, &start, &stop, step);
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; ++i) {
        PyObject *message = take(as_batch(self), static_cast<std::size_t>(start + i * step));
        if (!message) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, message);
    }
    return list;
}

PyObject *batch_iterate(PyObject *self) {
    if (!check_held(as_batch(self))) return nullptr;
    auto *iterator = PyObject_New(Iterator, iterator_type);
    if (!iterator) return nullptr;
    iterator->batch = as_batch(Py_NewRef(self));
    iterator->next = 0;
    return reinterpret_cast<PyObject *>(iterator);
}

void iterator_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(reinterpret_cast<PyObject *>(reinterpret_cast<Iterator *>(self)->batch));
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *iterator_next(PyObject *self) {
    auto *iterator = reinterpret_cast<Iterator *>(self);
    if (!check_held(iterator->batch)) return nullptr;
    if (iterator->next >= iterator->batch->hold->entries.size()) return nullptr;
    return take(iterator->batch, iterator->next++);
}

PyObject *batch_release(PyObject *self, PyObject *) {
    Batch *batch = as_batch(self);
    if (!batch->hold) return raise_error("StateError", "this batch was released");
    std::exchange(batch->hold, nullptr)->drop();
    Py_RETURN_NONE;
}

PyObject *batch_exit(PyObject *self, PyObject *const *, Py_ssize_t) {
    if (as_batch(self)->hold) return batch_release(self, nullptr);
    Py_RETURN_NONE;
}

PyObject *batch_enter(PyObject *self, PyObject *) { return Py_NewRef(self); }

PyObject *batch_copies(PyObject *self, PyObject *) {
    BatchPin pin(self);  // creating a list may run the garbage collector, whose finalisers may release the batch
    if (!pin.entries()) return nullptr;
    const auto &entries = *pin.entries();
    PyObject *list = PyList_New(static_cast<Py_ssize_t>(entries.size()));
    for (std::size_t i = 0; list && i < entries.size(); ++i) {
        PyObject *copy =
            PyBytes_FromStringAndSize(reinterpret_cast<const char *>(entries[i].data), entries[i].size);
        if (!copy) Py_CLEAR(list);
        else PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), copy);
    }
    return list;
}

// One column of the batch as a memoryview of 64-bit numbers, which numpy takes without a copy.
template <typename Number>
PyObject *column(PyObject *self, Number (*pick)(const Envelope &), const char *format) {
    Batch *batch = as_batch(self);
    if (!check_held(batch)) return nullptr;
    const auto &entries = batch->hold->entries;
    PyObject *bytes = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(entries.size() * sizeof(Number)));
    if (!bytes) return nullptr;
    auto *numbers = reinterpret_cast<Number *>(PyBytes_AS_STRING(bytes));
    for (std::size_t i = 0; i < entries.size(); ++i) numbers[i] = pick(entries[i]);
    PyObject *view = PyMemoryView_FromObject(bytes);
    Py_DECREF(bytes);
    if (!view) return nullptr;
    PyObject *result = PyObject_CallMethod(view, "cast", "s", format);
    Py_DECREF(view);
    return result;
}

PyObject *get_ordinals(PyObject *self, void *) {
    return column<std::uint64_t>(self, [](const Envelope &e) { return e.ordinal; }, "Q");
}
PyObject *get_timestamps(PyObject *self, void *) {
    return column<std::int64_t>(self, [](const Envelope &e) { return e.timestamp_ns; }, "q");
}
PyObject *get_stored(PyObject *self, void *) {
    return column<std::int64_t>(self, [](const Envelope &e) { return e.stored_ns; }, "q");
}
PyObject *get_sizes(PyObject *self, void *) {
    return column<std::int64_t>(self, [](const Envelope &e) { return e.size; }, "q");
}
PyObject *get_positions(PyObject *self, void *) {
    return column<std::int64_t>(self, [](const Envelope &e) { return e.position; }, "q");
}
PyObject *get_total(PyObject *self, void *) {
    Batch *batch = as_batch(self);
    if (!check_held(batch)) return nullptr;
    long long total = 0;
    for (const Envelope &entry : batch->hold->entries) total += entry.size;
    return PyLong_FromLongLong(total);
}

PyObject *get_decoder(PyObject *self, void *) {
    PyObject *decoder = as_batch(self)->decoder;
    return Py_NewRef(decoder ? decoder : Py_None);
}
int set_decoder(PyObject *self, PyObject *decoder, void *) {
    Py_XSETREF(as_batch(self)->decoder, Py_XNewRef(decoder == Py_None ? nullptr : decoder));
    return 0;
}

PyObject *batch_repr(PyObject *self) {
    Batch *batch = as_batch(self);
    if (!batch->hold) return PyUnicode_FromString("<Batch, released>");
    return PyUnicode_FromFormat("<Batch of %zd messages>", static_cast<Py_ssize_t>(batch->hold->entries.size()));
}

PyMethodDef batch_methods[] = {
    {"__class_getitem__", Py_GenericAlias, METH_O | METH_CLASS, nullptr},
    {"release", batch_release, METH_NOARGS,
     "release()\n--\n\nGive the memory back as soon as no message taken from the batch holds it."},
    {"copies", batch_copies, METH_NOARGS, "copies()\n--\n\nThe contents as a list of bytes."},
    {"__enter__", batch_enter, METH_NOARGS, nullptr},
    {"__exit__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(batch_exit)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef batch_getset[] = {
    {"ordinals", get_ordinals, nullptr, "Ordinals as a memoryview of unsigned 64-bit numbers.", nullptr},
    {"timestamps_ns", get_timestamps, nullptr, "Times as a memoryview of signed 64-bit numbers; -2**63 where there is none.", nullptr},
    {"stored_ns", get_stored, nullptr, "Times of storing as a memoryview of signed 64-bit numbers; -2**63 where nothing was stored.", nullptr},
    {"sizes", get_sizes, nullptr, "Sizes in bytes as a memoryview of signed 64-bit numbers.", nullptr},
    {"positions", get_positions, nullptr, "Journal positions (-1: none) as a memoryview.", nullptr},
    {"total_bytes", get_total, nullptr, "Bytes of all messages together.", nullptr},
    {"_decoder", get_decoder, set_decoder, "What makes the values of its messages, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef batch_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Batch, weakrefs), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

PyType_Slot batch_slots[] = {
    {Py_tp_doc, const_cast<char *>("Many messages as one lazy sequence.")},
    {Py_tp_dealloc, reinterpret_cast<void *>(batch_dealloc)},
    {Py_tp_repr, reinterpret_cast<void *>(batch_repr)},
    {Py_tp_iter, reinterpret_cast<void *>(batch_iterate)},
    {Py_tp_methods, batch_methods},
    {Py_tp_getset, batch_getset},
    {Py_tp_members, batch_members},
    {Py_sq_length, reinterpret_cast<void *>(batch_length)},
    {Py_sq_item, reinterpret_cast<void *>(batch_item)},
    {Py_mp_length, reinterpret_cast<void *>(batch_length)},
    {Py_mp_subscript, reinterpret_cast<void *>(batch_subscript)},
    {0, nullptr}};

PyType_Spec batch_spec = {"penstock._core.Batch", sizeof(Batch), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_SEQUENCE, batch_slots};

PyType_Slot iterator_slots[] = {{Py_tp_dealloc, reinterpret_cast<void *>(iterator_dealloc)},
                                {Py_tp_iter, reinterpret_cast<void *>(PyObject_SelfIter)},
                                {Py_tp_iternext, reinterpret_cast<void *>(iterator_next)},
                                {0, nullptr}};

PyType_Spec iterator_spec = {"penstock._core.BatchIterator", sizeof(Iterator), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, iterator_slots};

}  // namespace

PyObject *batch_new(std::vector<Envelope> &&entries, Owner *owner, PyObject *channels, PyObject *source) {
    auto *batch = PyObject_New(Batch, batch_type);
    if (!batch) return nullptr;
    batch->hold = new (std::nothrow) Hold;
    batch->channels = Py_XNewRef(channels);
    batch->source = Py_XNewRef(source);
    batch->decoder = nullptr;
    batch->weakrefs = nullptr;
    if (!batch->hold) {
        Py_DECREF(reinterpret_cast<PyObject *>(batch));
        return PyErr_NoMemory();
    }
    batch->hold->entries = std::move(entries);
    batch->hold->owner = owner;
    return reinterpret_cast<PyObject *>(batch);
}

const std::vector<Envelope> *batch_entries(PyObject *batch) {
    return check_held(as_batch(batch)) ? &as_batch(batch)->hold->entries : nullptr;
}

BatchPin::BatchPin(PyObject *batch) {
    if (!check_held(as_batch(batch))) return;
    Hold *hold = as_batch(batch)->hold;
    ++hold->users;
    hold_ = hold;
    entries_ = &hold->entries;
}

PyObject *batch_channels(PyObject *batch) { return as_batch(batch)->channels; }

bool batch_ready(PyObject *module) {
    batch_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&batch_spec));
    iterator_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&iterator_spec));
    return batch_type && iterator_type &&
           PyModule_AddObjectRef(module, "Batch", reinterpret_cast<PyObject *>(batch_type)) == 0;
}

}  // namespace penstock
