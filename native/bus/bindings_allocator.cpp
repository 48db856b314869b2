// Allocators: slab, heap and those written in Python; drafts of a bus.
#include <cstring>

#include "bus/objects.hpp"
#include "gil.hpp"

namespace penstock::bus {

PyTypeObject *allocator_type = nullptr;

namespace {

AllocatorObject *as_allocator(PyObject *self) { return reinterpret_cast<AllocatorObject *>(self); }

// Which pool has which id, process-wide: an id names one allocator, whatever bus it is on.
Pool *registry[256];

// Memory from a Python object with allocate(size) (a writable buffer, or None) and free(buffer).
class CustomPool final : public Pool {
   public:
    CustomPool(PyObject *source, std::uint32_t most_bytes) : source_(Py_NewRef(source)), most_bytes_(most_bytes) {
        extra_flags = flag_external;
    }
    ~CustomPool() override { Py_DECREF(source_); }
    std::uint32_t most_bytes() const noexcept override { return most_bytes_; }
    PyObject *source() const { return source_; }

    // Null without an error: the source gave None. Null with one: it raised, or gave something unfit.
    Header *get(std::uint32_t size) noexcept override {
        PyObject *memory = calling_python(
            [&] { return PyObject_CallMethod(source_, "allocate", "k", static_cast<unsigned long>(size)); });
        if (!memory) return nullptr;
        if (memory == Py_None) {
            Py_DECREF(memory);
            return nullptr;
        }
        auto *block = new Block{};
        if (PyObject_GetBuffer(memory, &block->buffer, PyBUF_WRITABLE) != 0 || block->buffer.len < size) {
            if (block->buffer.obj) {
                raise_error("InvalidArgument", "the allocator gave %zd bytes for a message of %u", block->buffer.len, size);
                PyBuffer_Release(&block->buffer);
            }
            Py_DECREF(memory);
            delete block;
            return nullptr;
        }
        block->memory = memory;
        block->data = static_cast<std::uint8_t *>(block->buffer.buf);
        block->header.capacity = static_cast<std::uint32_t>(block->buffer.len);
        block->header.next = nullptr;
        block->header.previous = last_;
        (last_ ? last_->next : first_) = &block->header;
        last_ = &block->header;
        return &block->header;
    }
    void put(Header *header) noexcept override {
        (header->previous ? header->previous->next : first_) = header->next;
        (header->next ? header->next->previous : last_) = header->previous;
        auto *block = reinterpret_cast<Block *>(header);
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        calling_python([&] {
            PyBuffer_Release(&block->buffer);
            PyObject *done = PyObject_CallMethod(source_, "free", "O", block->memory);
            if (!done) PyErr_WriteUnraisable(source_);
            Py_XDECREF(done);
            Py_DECREF(block->memory);
        });
        delete block;
        PyErr_Restore(type, value, trace);
    }
    std::vector<Header *> list_out() override {
        std::vector<Header *> list;
        for (Header *header = first_; header; header = header->next) list.push_back(header);
        return list;
    }

   private:
    struct Block {
        Header header;
        std::uint8_t *data;
        PyObject *memory;
        Py_buffer buffer;
    };
    static_assert(offsetof(Block, data) == header_size);
    PyObject *source_;
    Header *first_ = nullptr, *last_ = nullptr;
    std::uint32_t most_bytes_;
};

// Allocator(kind, name, block_size_or_most, count, source, static, debug)
PyObject *allocator_new(PyTypeObject *type, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"kind", "name", "size", "count", "source", "debug", nullptr};
    const char *kind;
    PyObject *name, *source = Py_None;
    long long size = 0, count = 0;
    int debug = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "sULL|Op", const_cast<char **>(keywords), &kind, &name, &size,
                                     &count, &source, &debug))
        return nullptr;
    if (size < 0 || size > max_message_bytes)
        return raise_error("InvalidArgument", "size %lld is not between 0 and %lld bytes", size,
                           static_cast<long long>(max_message_bytes));
    if (count < 0 || count > UINT32_MAX) return raise_error("InvalidArgument", "count %lld is out of range", count);
    Pool *pool = nullptr;
    auto bytes = static_cast<std::uint32_t>(size);
    if (!std::strcmp(kind, "slab")) {
        if (!count) return raise_error("InvalidArgument", "a slab has at least 1 block");
        pool = SlabPool::make(bytes, static_cast<std::uint32_t>(count));
    } else if (!std::strcmp(kind, "heap")) {
        pool = new HeapPool(bytes, static_cast<std::uint64_t>(count));
    } else {
        pool = new CustomPool(source, bytes);
    }
    if (!pool) return PyErr_NoMemory();
    auto *self = as_allocator(type->tp_alloc(type, 0));
    if (!self) {
        delete pool;
        return nullptr;
    }
    self->pool = pool;
    self->name = Py_NewRef(name);
    self->places = debug ? PyDict_New() : nullptr;
    return reinterpret_cast<PyObject *>(self);
}

void unregister(AllocatorObject *self) {
    if (self->pool->id != no_allocator_id) registry[self->pool->id] = nullptr;
    self->pool->id = no_allocator_id;
}

int allocator_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(reinterpret_cast<PyObject *>(as_allocator(self)->bus));
    Py_VISIT(as_allocator(self)->places);
    if (auto *custom = dynamic_cast<CustomPool *>(as_allocator(self)->pool)) Py_VISIT(custom->source());
    return 0;
}

int allocator_clear(PyObject *self) {
    Py_CLEAR(as_allocator(self)->bus);
    Py_CLEAR(as_allocator(self)->places);
    return 0;
}

void allocator_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    allocator_clear(self);
    Py_CLEAR(as_allocator(self)->name);
    unregister(as_allocator(self));
    as_allocator(self)->pool->abandon();
    type->tp_free(self);
    Py_DECREF(type);
}

bool take_id(AllocatorObject *self, int first, int last) {
    for (int id = first; id <= last; ++id)
        if (!registry[id]) {
            registry[id] = self->pool;
            self->pool->id = static_cast<std::uint8_t>(id);
            return true;
        }
    raise_error("CapacityError", "all allocator ids from %d to %d are taken; remove an allocator first", first, last);
    return false;
}

// _attach(bus or None): None declares it static. Gives the id.
PyObject *allocator_attach(PyObject *object, PyObject *bus) {
    AllocatorObject *self = as_allocator(object);
    if (self->bus || self->is_static)
        return raise_error("StateError", "allocator %R was added before; it belongs to %s", self->name,
                           self->is_static ? "every bus (it is static)" : "one bus only");
    if (bus == Py_None) {
        if (!take_id(self, first_static_id, last_static_id)) return nullptr;
        self->is_static = true;
    } else {
        if (!PyObject_TypeCheck(bus, bus_type)) return PyErr_Format(PyExc_TypeError, "not a bus: %R", bus);
        if (!take_id(self, first_runtime_id, last_runtime_id)) return nullptr;
        self->bus = reinterpret_cast<BusObject *>(Py_NewRef(bus));
    }
    return PyLong_FromLong(self->pool->id);
}

PyObject *allocator_detach(PyObject *object, PyObject *bus) {
    AllocatorObject *self = as_allocator(object);
    if (reinterpret_cast<PyObject *>(self->bus) != bus)
        return raise_error("StateError", "allocator %R was not added to this bus", self->name);
    if (self->pool->out)
        return raise_error("StateError", "allocator %R has %llu message(s) out and cannot be removed; outstanding() tells "
                           "which", self->name, static_cast<unsigned long long>(self->pool->out));
    unregister(self);
    Py_CLEAR(self->bus);
    Py_RETURN_NONE;
}

bool check_added(AllocatorObject *self) {
    if (self->pool->id != no_allocator_id) return true;
    raise_error("StateError", "allocator %R was not added to a bus; call bus.add_allocator() before allocating from it",
                self->name);
    return false;
}

// allocate(id, size, timeout=0)
PyObject *allocator_allocate(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"id", "size", "timeout", nullptr};
    PyObject *number, *timeout = nullptr;
    long long size;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OL|O", const_cast<char **>(keywords), &number, &size, &timeout))
        return nullptr;
    std::uint16_t id;
    Deadline deadline;
    bool poll = true;
    if (!parse_id(number, &id) || (timeout && !parse_timeout(timeout, &deadline, &poll))) return nullptr;
    Header *header = allocate(as_allocator(object), id, size, deadline, poll);
    if (!header) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    PyObject *draft = draft_new(payload(header), size, draft_owner, reinterpret_cast<std::uint64_t>(header), object);
    if (!draft) drop(header);
    return draft;
}

PyObject *allocator_outstanding(PyObject *object, PyObject *) {
    AllocatorObject *self = as_allocator(object);
    std::vector<Header *> list = self->pool->list_out();
    PyObject *result = PyList_New(0);
    for (Header *header : list) {
        if (!result) break;
        PyObject *place = nullptr;
        if (self->places) {
            PyObject *key = PyLong_FromUnsignedLong(header->taken);
            place = key ? PyDict_GetItem(self->places, key) : nullptr;
            Py_XDECREF(key);
        }
        PyObject *entry = Py_BuildValue("(HIIKO)", header->id, header->size, header->reference_count,
                                        reinterpret_cast<unsigned long long>(payload(header)), place ? place : Py_None);
        if (!entry || PyList_Append(result, entry) != 0) Py_CLEAR(result);
        Py_XDECREF(entry);
    }
    return result;
}

PyObject *get_id(PyObject *self, void *) {
    if (as_allocator(self)->pool->id == no_allocator_id) Py_RETURN_NONE;
    return PyLong_FromLong(as_allocator(self)->pool->id);
}
PyObject *get_name(PyObject *self, void *) { return Py_NewRef(as_allocator(self)->name); }
PyObject *get_bus(PyObject *self, void *) {
    auto *bus = reinterpret_cast<PyObject *>(as_allocator(self)->bus);
    return Py_NewRef(bus ? bus : Py_None);
}
PyObject *get_in_use(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_allocator(self)->pool->out); }
PyObject *get_taken(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_allocator(self)->pool->taken); }
PyObject *get_most(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_allocator(self)->pool->most_out); }
PyObject *get_failed(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_allocator(self)->pool->failed); }
PyObject *get_bytes(PyObject *self, void *) { return PyLong_FromUnsignedLong(as_allocator(self)->pool->most_bytes()); }

PyObject *allocator_places(PyObject *self, PyObject *) {
    PyObject *places = as_allocator(self)->places;
    return PyLong_FromSsize_t(places ? PyDict_GET_SIZE(places) : 0);
}

// _wake(): threads that wait for a message check again whether the bus is open.
PyObject *allocator_wake(PyObject *self, PyObject *) {
    as_allocator(self)->pool->waiting.wake_all();
    Py_RETURN_NONE;
}

PyMethodDef allocator_methods[] = {
    {"_wake", allocator_wake, METH_NOARGS, nullptr},
    {"_places", allocator_places, METH_NOARGS, nullptr},
    {"allocate", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(allocator_allocate)),
     METH_VARARGS | METH_KEYWORDS,
     "allocate(id, size, timeout=0)\n--\n\nA draft, or None where there was no memory in time."},
    {"_attach", allocator_attach, METH_O, nullptr},
    {"_detach", allocator_detach, METH_O, nullptr},
    {"_outstanding", allocator_outstanding, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef allocator_getset[] = {
    {"id", get_id, nullptr, "Number in message headers, or None before it is added.", nullptr},
    {"name", get_name, nullptr, "Name for people.", nullptr},
    {"bus", get_bus, nullptr, "The bus it was added to, or None.", nullptr},
    {"in_use", get_in_use, nullptr, "Messages that are out.", nullptr},
    {"taken", get_taken, nullptr, "Messages taken ever.", nullptr},
    {"most_in_use", get_most, nullptr, "The most messages that were ever out at once.", nullptr},
    {"failed", get_failed, nullptr, "Times there was none to be had.", nullptr},
    {"max_message_bytes", get_bytes, nullptr, "The largest message it has memory for.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot allocator_slots[] = {
    {Py_tp_doc, const_cast<char *>("Where the memory of messages comes from.")},
    {Py_tp_new, reinterpret_cast<void *>(allocator_new)},
    {Py_tp_dealloc, reinterpret_cast<void *>(allocator_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(allocator_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(allocator_clear)},
    {Py_tp_methods, allocator_methods},
    {Py_tp_getset, allocator_getset},
    {0, nullptr}};

PyType_Spec allocator_spec = {"penstock._core.bus.Allocator", sizeof(AllocatorObject), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, allocator_slots};

// A draft is published where it was taken from: a bus, a publisher, or an allocator (of one bus).
struct BusDraftOwner final : DraftOwner {
    PyObject *publish(PyObject *object, std::uint64_t token, std::int64_t size) override {
        auto *draft = reinterpret_cast<Draft *>(object);
        BusObject *bus = nullptr;
        PublisherObject *publisher = nullptr;
        if (PyObject_TypeCheck(draft->keep, publisher_type)) {
            publisher = reinterpret_cast<PublisherObject *>(draft->keep);
            if (publisher->closed) return raise_error("ClosedError", "this publisher was closed");
            bus = publisher->bus;
        } else if (PyObject_TypeCheck(draft->keep, allocator_type)) {
            bus = as_allocator(draft->keep)->bus;
            if (!bus) return raise_error("StateError", "this draft is of no one bus; call bus.publish(draft)");
        } else {
            bus = reinterpret_cast<BusObject *>(draft->keep);
        }
        return publish_draft(draft, bus, publisher, token, size);
    }
    static PyObject *publish_draft(Draft *draft, BusObject *bus, PublisherObject *publisher, std::uint64_t token,
                                   std::int64_t size) {
        if (!check_bus_open(bus)) return nullptr;
        auto *header = reinterpret_cast<Header *>(token);
        header->size = static_cast<std::uint32_t>(size);
        draft->memory_held = false;
        Py_INCREF(reinterpret_cast<PyObject *>(bus));
        bool committed = true;
        Publishing publishing(publisher);
        std::uint64_t ordinal = publish_header(bus, header, &committed);
        Py_DECREF(reinterpret_cast<PyObject *>(bus));
        if (publisher && committed) {
            publisher->counters->matched.add();
            publisher->counters->delivered.add();
            publisher->counters->bytes.add(static_cast<std::uint64_t>(size));
        }
        if (ordinal) return PyLong_FromUnsignedLongLong(ordinal);
        draft->memory_held = !committed;
        return nullptr;
    }
    void cancel(std::uint64_t token) noexcept override { drop(reinterpret_cast<Header *>(token)); }
    bool closed(const Draft *draft) const override {
        return PyObject_TypeCheck(draft->keep, publisher_type) && reinterpret_cast<PublisherObject *>(draft->keep)->closed;
    }
    void hold(std::uint64_t token) noexcept override { acquire(reinterpret_cast<Header *>(token)); }
    void let_go(std::uint64_t token) noexcept override { drop(reinterpret_cast<Header *>(token)); }
} the_draft_owner;

// Forgets the allocation places of messages that were freed.
void prune_places(AllocatorObject *allocator) {
    PyObject *kept = PyDict_New();
    for (Header *header : allocator->pool->list_out()) {
        PyObject *key = kept ? PyLong_FromUnsignedLong(header->taken) : nullptr;
        PyObject *place = key ? PyDict_GetItem(allocator->places, key) : nullptr;
        if (place && PyDict_SetItem(kept, key, place) != 0) Py_CLEAR(kept);
        Py_XDECREF(key);
    }
    if (!kept) return PyErr_Clear();
    Py_SETREF(allocator->places, kept);
}

// In debug mode: records who allocated it. Out of line, because it walks the stack.
[[gnu::cold]] void note_place(AllocatorObject *allocator, Header *header) {
    if (static_cast<std::uint64_t>(PyDict_GET_SIZE(allocator->places)) > 2 * allocator->pool->out + 256)
        prune_places(allocator);
    PyObject *key = PyLong_FromUnsignedLong(header->taken);
    PyObject *place = PyObject_CallMethod(reinterpret_cast<PyObject *>(allocator), "_place", nullptr);
    if (!key || !place || PyDict_SetItem(allocator->places, key, place) != 0) PyErr_WriteUnraisable(nullptr);
    Py_XDECREF(key);
    Py_XDECREF(place);
}

}  // namespace

DraftOwner *draft_owner = &the_draft_owner;

Header *allocate(AllocatorObject *allocator, std::uint16_t id, std::int64_t size, Deadline deadline, bool poll) {
    if (!check_added(allocator)) return nullptr;
    Pool *pool = allocator->pool;
    if (size < 0 || size > pool->most_bytes()) {
        raise_error("InvalidArgument", "%lld bytes do not fit allocator %R, whose messages have 0 to %u bytes",
                    static_cast<long long>(size), allocator->name, pool->most_bytes());
        return nullptr;
    }
    Header *header = pool->take(id, static_cast<std::uint32_t>(size));
    if (!header && !poll && !PyErr_Occurred()) {
        Sleeper sleeper;
        Py_INCREF(reinterpret_cast<PyObject *>(allocator));
        pool->waiting.join(&sleeper);
        while (!header && !deadline.passed()) {
            sleeper.rearm();
            if (!sleep_without_gil(&sleeper, deadline) || !check_added(allocator)) break;
            if (allocator->bus && !check_bus_open(allocator->bus)) break;
            header = pool->take(id, static_cast<std::uint32_t>(size));
            if (!header && PyErr_Occurred()) break;
        }
        pool->waiting.leave(&sleeper);
        pool->waiting.wake_first();  // with a message, because there may be more; without one, to pass the wake-up on
        Py_DECREF(reinterpret_cast<PyObject *>(allocator));
    }
    if (!header) ++pool->failed;
    else if (allocator->places) note_place(allocator, header);
    return header;
}

PyObject *publish_draft_on(BusObject *bus, Draft *draft) {
    if (draft->owner != draft_owner)
        return raise_error("StateError", "this draft is not of a bus; publish it where it was reserved");
    BusObject *of = nullptr;
    if (PyObject_TypeCheck(draft->keep, allocator_type)) {
        AllocatorObject *allocator = as_allocator(draft->keep);
        of = allocator->is_static ? bus : allocator->bus;
    } else if (PyObject_TypeCheck(draft->keep, publisher_type)) {
        of = reinterpret_cast<PublisherObject *>(draft->keep)->bus;
    } else {
        of = reinterpret_cast<BusObject *>(draft->keep);
    }
    if (of != bus)
        return raise_error("StateError", "this draft is of bus %R, not of bus %R; publish it there",
                           of ? of->name : Py_None, bus->name);
    if (!draft_begin_publish(draft)) return nullptr;
    return draft_end_publish(draft, BusDraftOwner::publish_draft(draft, bus, nullptr, draft->token, draft->size));
}

Header *take_from_draft(Draft *draft) {
    if (draft->owner != draft_owner) {
        raise_error("StateError", "this draft is not of a bus; publish it where it was reserved");
        return nullptr;
    }
    if (!draft_begin_publish(draft)) return nullptr;
    draft->memory_held = false;
    return reinterpret_cast<Header *>(draft->token);
}

bool allocator_types(PyObject *module) { return ready_type(module, "Allocator", &allocator_spec, &allocator_type); }

}  // namespace penstock::bus
