// The bus's Python type: all methods except delivery, which is in dispatch.cpp.
#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

#include "bus/objects.hpp"

namespace penstock::bus {

PyTypeObject *bus_type = nullptr;

namespace {

BusObject *as_bus(PyObject *self) { return reinterpret_cast<BusObject *>(self); }
PyObject *as_object(BusObject *self) { return reinterpret_cast<PyObject *>(self); }

// _serve(reference): the bus's own thread, with a weak reference to it. Returns when the bus stops and all is
// delivered, or when the bus was garbage-collected: while it sleeps, this thread holds no reference to it.
PyObject *bus_serve(PyObject *, PyObject *reference) {
    while (true) {
        PyObject *object = PyObject_CallNoArgs(reference);
        if (!object || object == Py_None) return object;
        BusObject *bus = as_bus(object);
        if (!PyObject_TypeCheck(object, bus_type) || !check_set_up(bus)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "_serve takes a weak reference to a bus");
            Py_DECREF(object);
            return nullptr;
        }
        give_hold(bus);
        if (bus->drainer) {
            raise_error("StateError", "bus %R is being served by another thread", bus->name);
            Py_DECREF(object);
            return nullptr;
        }
        bus->drainer = PyThread_get_thread_ident();
        Frame frame{bus};
        enter(&frame);
        drain(bus, &frame, SIZE_MAX);
        leave(&frame);
        bus->drainer = 0;
        if (bus->stopping) {
            bus->scheduled = false;
            Py_DECREF(object);
            Py_RETURN_NONE;
        }
        Drainer drainer;
        bus->drainers.join(&drainer);
        Py_DECREF(object);
        bool fine = drainer.gone || sleep_without_gil(&drainer, Deadline{});
        if (!drainer.gone) bus->drainers.leave(&drainer);
        if (!fine) PyErr_WriteUnraisable(reference);
    }
}

// _drain(): one task of an executor. Gives how many were served.
PyObject *bus_drain(PyObject *object, PyObject *) {
    BusObject *bus = as_bus(object);
    if (!check_set_up(bus)) return nullptr;
    give_hold(bus);
    if (bus->drainer) return PyLong_FromLong(0);
    bus->drainer = PyThread_get_thread_ident();
    Frame frame{bus};
    enter(&frame);
    std::size_t served = drain(bus, &frame, SIZE_MAX);
    leave(&frame);
    bus->drainer = 0;
    bus->scheduled = false;  // nothing is pending, and the GIL was held since that was seen
    return PyLong_FromSize_t(served);
}

PyObject *bus_new(PyTypeObject *type, PyObject *, PyObject *) {
    auto *self = as_bus(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    new (&self->subscribers) std::vector<SubscriberObject *>;
    new (&self->pending) Ring<Header *>;
    new (&self->drainers) SleeperList;
    new (&self->room) SleeperList;
    new (&self->changed) SleeperList;
    new (&self->flushers) SleeperList;
    return as_object(self);
}

int bus_init(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"name", "queued", "pending_depth", "pending_full", "pending_timeout",
                                     "max_message_bytes", "max_messages", "pending_bytes", "stuck_after", nullptr};
    BusObject *self = as_bus(object);
    PyObject *name, *timeout;
    int queued, full;
    long long capacity, most_bytes, most_messages, pending_bytes;
    double stuck_after;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "UpLiOLLLd", const_cast<char **>(keywords), &name, &queued,
                                     &capacity, &full, &timeout, &most_bytes, &most_messages, &pending_bytes, &stuck_after))
        return -1;
    if (self->heap) {
        raise_error("StateError", "a bus is set up once");
        return -1;
    }
    if (capacity < 0 || full < 0 || full > 2 || most_bytes < 0 || most_bytes > max_message_bytes || most_messages < 0) {
        raise_error("InvalidArgument", "pending_depth %lld, overflow %d, max_message_bytes %lld or max_messages %lld is "
                    "out of range", capacity, full, most_bytes, most_messages);
        return -1;
    }
    double seconds = -1;
    if (timeout != Py_None) {
        seconds = PyFloat_AsDouble(timeout);
        if (seconds == -1 && PyErr_Occurred()) return -1;
    }
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return -1;
    self->name = Py_NewRef(name);
    self->queued = queued;
    self->pending_capacity = static_cast<std::size_t>(capacity);
    self->pending_full = static_cast<Full>(full);
    self->pending_timeout = seconds;
    self->pending_most_bytes = static_cast<std::uint64_t>(pending_bytes);
    self->stuck_after = stuck_after;
    self->heap = new HeapPool(static_cast<std::uint32_t>(most_bytes), static_cast<std::uint64_t>(most_messages));
    self->heap->id = heap_allocator_id;
    self->counters = counters_take("bus", "bus", {text, static_cast<std::size_t>(length)});
    self->counters->capacity.set(self->pending_capacity);
    return 0;
}

int bus_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    for (SubscriberObject *subscriber : as_bus(object)->subscribers)
        if (subscriber->kind == Kind::callback) Py_VISIT(reinterpret_cast<PyObject *>(subscriber));
    return 0;
}

void discard_pending(BusObject *bus) {
    const std::size_t count = bus->pending.size();
    while (!bus->pending.empty()) {
        bus->counters->drop(DropReason::closed);
        drop(take_pending(bus));
    }
    if (bus->counters) bus->counters->depth.set(0);
    bus->pending.shrink();
    give_memory_back(count);
}

void remove_all(BusObject *bus, bool finished) {
    while (!bus->subscribers.empty()) {
        SubscriberObject *subscriber = bus->subscribers.back();
        if (dying(subscriber)) {
            bus_remove(bus, subscriber);
            continue;
        }
        Py_INCREF(reinterpret_cast<PyObject *>(subscriber));
        bus_remove(bus, subscriber);
        if (finished) {
            subscriber->finished = true;
            subscriber->readers.wake_all();
            if (subscriber->descriptor >= 0) signal_descriptor(subscriber);
        }
        Py_DECREF(reinterpret_cast<PyObject *>(subscriber));
    }
}

int bus_clear(PyObject *object) {
    Py_INCREF(object);  // subscribers hold references to it and are about to drop them
    remove_all(as_bus(object), false);
    Py_DECREF(object);
    return 0;
}

void bus_dealloc(PyObject *object) {
    BusObject *self = as_bus(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs) PyObject_ClearWeakRefs(object);
    for (Sleeper *sleeper = self->drainers.head; sleeper; sleeper = sleeper->next)
        static_cast<Drainer *>(sleeper)->gone = true;
    self->drainers.wake_all();
    discard_pending(self);
    for (IdState *page : self->pages) {
        for (int i = 0; page && i < 256; ++i) {
            drop_route(page[i].route);
            drop_history(&page[i]);
        }
        std::free(page);
    }
    if (self->heap) self->heap->abandon();
    if (self->counters) counters_give(self->counters);
    Py_CLEAR(self->name);
    self->subscribers.~vector();
    self->pending.~Ring();
    type->tp_free(object);
    Py_DECREF(type);
}

// publish(data, id=0): data is a draft, a static message, or anything with bytes, which is copied.
PyObject *bus_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    BusObject *bus = as_bus(object);
    PyObject *number = count > 1 ? arguments[1] : nullptr;
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (named == 1 && !number && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "id") == 0) {
        number = arguments[count];
        named = 0;
    }
    if (count < 1 || count > 2 || named)
        return PyErr_Format(PyExc_TypeError, "publish takes a message (or data) and an id");
    if (!check_bus_open(bus)) return nullptr;
    PyObject *item = arguments[0];
    Header *header;
    if (Py_TYPE(item) == draft_type || PyObject_TypeCheck(item, static_type) ||
        PyObject_TypeCheck(item, bus_message_type)) {
        if (number) return raise_error("InvalidArgument", "a message has its id already; id= is for data");
        if (Py_TYPE(item) == draft_type) return publish_draft_on(bus, reinterpret_cast<Draft *>(item));
        if (PyObject_TypeCheck(item, bus_message_type))
            return raise_error("StateError", "this message was published before; a message is published once");
        header = static_take(reinterpret_cast<StaticObject *>(item));
    } else {
        std::uint16_t id = 0;
        if (number && !parse_id(number, &id)) return nullptr;
        header = copy_in(bus, nullptr, id, item);
    }
    if (!header) return nullptr;
    bool external = header->allocator_id == no_allocator_id, committed = true;
    std::uint64_t ordinal = publish_header(bus, header, &committed);
    if (ordinal) [[likely]] return PyLong_FromUnsignedLongLong(ordinal);
    if (!committed && !external) drop(header);
    return nullptr;
}

PyObject *bus_publish_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    BusObject *bus = as_bus(object);
    std::uint16_t id = 0;
    if (count < 1 || count > 2) return PyErr_Format(PyExc_TypeError, "publish_many takes messages and an id");
    if (count == 2 && !parse_id(arguments[1], &id)) return nullptr;
    if (!check_bus_open(bus)) return nullptr;
    return publish_all(bus, nullptr, nullptr, id, arguments[0]);
}

// allocate(id, size, allocator=None, timeout=0)
PyObject *bus_allocate(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"id", "size", "allocator", "timeout", nullptr};
    BusObject *bus = as_bus(object);
    PyObject *number, *allocator = Py_None, *timeout = nullptr;
    long long size;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "OL|OO", const_cast<char **>(keywords), &number, &size, &allocator,
                                     &timeout))
        return nullptr;
    std::uint16_t id;
    Deadline deadline;
    bool poll = true;
    if (!check_bus_open(bus) || !parse_id(number, &id) || (timeout && !parse_timeout(timeout, &deadline, &poll)))
        return nullptr;
    Header *header;
    if (allocator == Py_None) {
        header = allocate_heap(bus, id, size);
    } else {
        if (!PyObject_TypeCheck(allocator, allocator_type))
            return PyErr_Format(PyExc_TypeError, "allocator must be an allocator or None, not %s",
                                Py_TYPE(allocator)->tp_name);
        auto *from = reinterpret_cast<AllocatorObject *>(allocator);
        if (from->bus != bus && !from->is_static)
            return raise_error("StateError", "allocator %R was not added to bus %R; call add_allocator() first", from->name,
                               bus->name);
        header = allocate(from, id, size, deadline, poll);
    }
    if (!header) {
        if (PyErr_Occurred()) return nullptr;
        Py_RETURN_NONE;
    }
    PyObject *draft = draft_new(payload(header), size, draft_owner, reinterpret_cast<std::uint64_t>(header), object);
    if (!draft) drop(header);
    return draft;
}

bool check_subscriber(PyObject *object) {
    if (PyObject_TypeCheck(object, subscriber_type)) return true;
    PyErr_Format(PyExc_TypeError, "not a subscriber of a bus: %R", object);
    return false;
}

PyObject *bus_add_method(PyObject *object, PyObject *subscriber) {
    if (!check_bus_open(as_bus(object)) || !check_subscriber(subscriber) ||
        !bus_add(as_bus(object), reinterpret_cast<SubscriberObject *>(subscriber)))
        return nullptr;
    return Py_NewRef(subscriber);
}

// _keep(id, messages, age_ns, bytes): keeps a history for later subscribers.
PyObject *bus_keep_method(PyObject *object, PyObject *arguments) {
    int id;
    unsigned long long most, bytes;
    long long age_ns;
    if (!PyArg_ParseTuple(arguments, "iKLK", &id, &most, &age_ns, &bytes) || !check_bus_open(as_bus(object)) ||
        !bus_keep(as_bus(object), static_cast<std::uint16_t>(id), most, age_ns, bytes))
        return nullptr;
    Py_RETURN_NONE;
}

// _go_on(id, ordinal): the ordinal before the next message's, which is this one or a greater one.
PyObject *bus_go_on_method(PyObject *object, PyObject *arguments) {
    int id;
    unsigned long long ordinal;
    std::uint64_t next;
    if (!PyArg_ParseTuple(arguments, "iK", &id, &ordinal) || !check_bus_open(as_bus(object)) ||
        !bus_go_on(as_bus(object), static_cast<std::uint16_t>(id), &(next = ordinal)))
        return nullptr;
    return PyLong_FromUnsignedLongLong(next);
}

PyObject *bus_remove_method(PyObject *object, PyObject *subscriber) {
    if (!check_subscriber(subscriber)) return nullptr;
    auto *entry = reinterpret_cast<SubscriberObject *>(subscriber);
    if (entry->bus != as_bus(object))
        return raise_error("StateError", "subscriber %R is not on bus %R", entry->name, as_bus(object)->name);
    bus_remove(as_bus(object), entry);
    Py_RETURN_NONE;
}

std::size_t matching(BusObject *bus, std::uint16_t id) {
    std::size_t count = 0;
    for (SubscriberObject *subscriber : bus->subscribers) count += matches(subscriber, id);
    return count;
}

// _wait_ready(id, subscribers, timeout, publisher): closing that publisher ends it.
PyObject *bus_wait_ready(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    BusObject *bus = as_bus(object);
    std::uint16_t id;
    Deadline deadline;
    bool poll = false;
    if (count != 4 || !PyObject_TypeCheck(arguments[3], publisher_type))
        return PyErr_Format(PyExc_TypeError, "_wait_ready takes an id, a number, a time-out and a publisher");
    Publishing publishing(reinterpret_cast<PublisherObject *>(arguments[3]));
    Py_ssize_t wanted = PyNumber_AsSsize_t(arguments[1], PyExc_OverflowError);
    if (wanted == -1 && PyErr_Occurred()) return nullptr;
    if (!parse_id(arguments[0], &id) || !parse_timeout(arguments[2], &deadline, &poll)) return nullptr;
    Sleeper sleeper;
    bus->changed.join(&sleeper);
    PyObject *result = nullptr;
    while (!result) {
        if (!check_bus_open(bus)) break;
        if (Publishing::ended()) {
            raise_error("ClosedError", "this publisher was closed");
            break;
        }
        if (static_cast<Py_ssize_t>(matching(bus, id)) >= wanted) result = Py_NewRef(Py_True);
        else if (poll || deadline.passed()) result = Py_NewRef(Py_False);
        else {
            sleeper.rearm();
            if (!sleep_without_gil(&sleeper, deadline)) break;
        }
    }
    bus->changed.leave(&sleeper);
    return result;
}

// _flush(timeout): whether all that was published before has been delivered.
PyObject *bus_flush(PyObject *object, PyObject *timeout) {
    BusObject *bus = as_bus(object);
    Deadline deadline;
    bool poll;
    if (!check_set_up(bus) || !parse_timeout(timeout, &deadline, &poll)) return nullptr;
    if (bus->drainer == PyThread_get_thread_ident())
        return raise_error("StateError", "flush() inside a handler of bus %R would wait for itself", bus->name);
    const Counters &c = *bus->counters;
    const std::uint64_t target = c.matched.get();
    Sleeper sleeper;
    bus->flushers.join(&sleeper);
    PyObject *result = nullptr;
    while (!result) {
        if (c.delivered.get() + c.lost() >= target) result = Py_NewRef(Py_True);
        else if (poll || deadline.passed()) result = Py_NewRef(Py_False);
        else {
            sleeper.rearm();
            if (!sleep_without_gil(&sleeper, deadline)) break;
        }
    }
    bus->flushers.leave(&sleeper);
    return result;
}

// _stop(discard): no more publishes; the bus's thread ends when all is delivered. Whether it was open until now.
PyObject *bus_stop(PyObject *object, PyObject *discard) {
    BusObject *bus = as_bus(object);
    int dropping = PyObject_IsTrue(discard);
    if (dropping < 0) return nullptr;
    if (bus->closed) Py_RETURN_FALSE;
    bus->closed = true;
    bus->stopping = true;
    if (dropping) discard_pending(bus);
    bus->room.wake_all();
    bus->changed.wake_all();
    bus->drainers.wake_all();
    bus->flushers.wake_all();
    Py_RETURN_TRUE;
}

// _finish(): removes the subscribers; what they hold can still be read.
PyObject *bus_finish(PyObject *object, PyObject *) {
    discard_pending(as_bus(object));
    remove_all(as_bus(object), true);
    for (IdState *page : as_bus(object)->pages)
        for (int i = 0; page && i < 256; ++i) drop_history(&page[i]);
    Py_RETURN_NONE;
}

PyObject *bus_subscribers(PyObject *object, PyObject *) {
    const auto &all = as_bus(object)->subscribers;
    PyObject *list = PyList_New(0);
    // appending creates no object, so no Python code runs and the list cannot change
    for (std::size_t i = 0; list && i < all.size(); ++i)
        if (!dying(all[i]) && PyList_Append(list, reinterpret_cast<PyObject *>(all[i])) != 0) Py_CLEAR(list);
    return list;
}

PyObject *bus_counts(PyObject *object, PyObject *) {
    BusObject *bus = as_bus(object);
    if (!check_set_up(bus)) return nullptr;
    const Counters &c = *bus->counters;
    PyObject *dropped = PyDict_New();
    for (std::size_t i = 0; dropped && i < drop_reason_count; ++i) {
        if (!c.dropped[i].get()) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(c.dropped[i].get());
        if (!number || PyDict_SetItemString(dropped, drop_reason_names[i], number) != 0) Py_CLEAR(dropped);
        Py_XDECREF(number);
    }
    if (!dropped) return nullptr;
    return Py_BuildValue("(KKNL)", c.matched.get(), c.delivered.get(), dropped, static_cast<long long>(c.in_flight()));
}

PyObject *get_name(PyObject *self, void *) { return Py_NewRef(as_bus(self)->name ? as_bus(self)->name : Py_None); }
PyObject *get_closed(PyObject *self, void *) { return PyBool_FromLong(as_bus(self)->closed); }
PyObject *get_pending(PyObject *self, void *) { return PyLong_FromSize_t(as_bus(self)->pending.size()); }
PyObject *get_in_use(PyObject *self, void *) {
    return PyLong_FromUnsignedLongLong(as_bus(self)->heap ? as_bus(self)->heap->out : 0);
}
PyObject *get_serving(PyObject *self, void *) { return PyBool_FromLong(as_bus(self)->drainer != 0); }
// Whether a publisher waits for room in the queue of a subscriber.
PyObject *get_waits(PyObject *self, void *) {
    for (SubscriberObject *subscriber : as_bus(self)->subscribers)
        if (subscriber->writers.head) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}
PyObject *get_scheduled(PyObject *self, void *) { return PyBool_FromLong(as_bus(self)->scheduled); }
int set_scheduled(PyObject *self, PyObject *value, void *) {
    int on = value ? PyObject_IsTrue(value) : 0;
    if (on < 0) return -1;
    as_bus(self)->scheduled = on;
    return 0;
}
PyObject *get_here(PyObject *self, void *) {
    return PyBool_FromLong(as_bus(self)->drainer == PyThread_get_thread_ident() || frame_of(as_bus(self)));
}
// In a forked child: only this thread exists, so nothing else sleeps, serves or dispatches.
PyObject *bus_forked(PyObject *object, PyObject *) {
    BusObject *bus = as_bus(object);
    bus->drainers.forget();
    bus->room.forget();
    bus->changed.forget();
    bus->flushers.forget();
    keep_own_frames(bus);
    if (bus->drainer != PyThread_get_thread_ident()) {
        bus->drainer = 0;
        bus->scheduled = false;
        give_hold(bus);
    }
    for (SubscriberObject *subscriber : bus->subscribers) forget_sleepers(subscriber);
    Py_RETURN_NONE;
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))
PyMethodDef bus_methods[] = {
    {"publish", FAST(bus_publish), METH_FASTCALL | METH_KEYWORDS,
     "publish(message, id=0)\n--\n\nPublish a draft, an acquired static message, or a copy of data under an id; gives the "
     "ordinal."},
    {"publish_many", FAST(bus_publish_many), METH_FASTCALL,
     "publish_many(batch, id=0, /)\n--\n\nPublish a copy of each; gives how many."},
    {"allocate", FAST(bus_allocate), METH_VARARGS | METH_KEYWORDS,
     "allocate(id, size, allocator=None, timeout=0)\n--\n\nA draft with that id, or None where there was no memory in "
     "time."},
    {"add", bus_add_method, METH_O, "add(subscriber)\n--\n\nStart delivering to it; gives the subscriber."},
    {"remove", bus_remove_method, METH_O, "remove(subscriber)\n--\n\nStop delivering to it; its subscriptions stay."},
    {"_keep", bus_keep_method, METH_VARARGS, nullptr},
    {"_go_on", bus_go_on_method, METH_VARARGS, nullptr},
    {"_wait_ready", FAST(bus_wait_ready), METH_FASTCALL, nullptr},
    {"_flush", bus_flush, METH_O, nullptr},
    {"_serve", bus_serve, METH_O | METH_STATIC, nullptr},
    {"_drain", bus_drain, METH_NOARGS, nullptr},
    {"_stop", bus_stop, METH_O, nullptr},
    {"_finish", bus_finish, METH_NOARGS, nullptr},
    {"_subscribers", bus_subscribers, METH_NOARGS, nullptr},
    {"_counts", bus_counts, METH_NOARGS, nullptr},
    {"_forked", bus_forked, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef bus_getset[] = {
    {"name", get_name, nullptr, "Name for people and addresses.", nullptr},
    {"closed", get_closed, nullptr, "Whether close was called.", nullptr},
    {"pending", get_pending, nullptr, "Messages published and not yet delivered.", nullptr},
    {"heap_in_use", get_in_use, nullptr, "Messages of the bus's own heap that are out.", nullptr},
    {"_serving", get_serving, nullptr, nullptr, nullptr},
    {"_waits", get_waits, nullptr, nullptr, nullptr},
    {"_scheduled", get_scheduled, set_scheduled, nullptr, nullptr},
    {"_here", get_here, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef bus_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(BusObject, weakrefs), READONLY, nullptr},
                             {nullptr, 0, 0, 0, nullptr}};

PyType_Slot bus_slots[] = {
    {Py_tp_doc, const_cast<char *>("The native part of a bus.")},
    {Py_tp_new, reinterpret_cast<void *>(bus_new)},
    {Py_tp_init, reinterpret_cast<void *>(bus_init)},
    {Py_tp_dealloc, reinterpret_cast<void *>(bus_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(bus_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(bus_clear)},
    {Py_tp_methods, bus_methods},
    {Py_tp_members, bus_members},
    {Py_tp_getset, bus_getset},
    {0, nullptr}};

PyType_Spec bus_spec = {"penstock._core.bus.Bus", sizeof(BusObject), 0,
                        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, bus_slots};

}  // namespace

bool bus_types(PyObject *module) { return ready_type(module, "Bus", &bus_spec, &bus_type); }

}  // namespace penstock::bus
