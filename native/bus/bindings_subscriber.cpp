// Subscribers: callback, queue and fifo. A message counts as matched before the handler is called or the message
// queued.
#include <Python.h>
#include <structmember.h>
#include <sys/eventfd.h>

#include <new>

#include "bus/objects.hpp"
#include "message/wall_clock.hpp"

namespace penstock::bus {

PyTypeObject *subscriber_type = nullptr;

namespace {

SubscriberObject *as_subscriber(PyObject *self) { return reinterpret_cast<SubscriberObject *>(self); }
PyObject *as_object(SubscriberObject *self) { return reinterpret_cast<PyObject *>(self); }

// Subscriber(kind, name, handler, priority, max_public_id, max_peer_id, capacity, overflow, timeout, drop_above)
PyObject *subscriber_new(PyTypeObject *type, PyObject *, PyObject *) {
    auto *self = as_subscriber(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    new (&self->bits) std::vector<std::uint64_t>;
    new (&self->ring) Ring<Item>;
    new (&self->readers) SleeperList;
    new (&self->writers) SleeperList;
    self->descriptor = -1;
    return as_object(self);
}

int subscriber_init(PyObject *object, PyObject *arguments, PyObject *names) {
    static const char *keywords[] = {"kind", "name", "handler", "priority", "max_public_id", "max_peer_id", "depth",
                                     "full", "timeout", "drop_above", nullptr};
    SubscriberObject *self = as_subscriber(object);
    int kind, priority, max_public, max_peer, full, drop_above;
    long long capacity;
    PyObject *name, *handler, *timeout;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "iUOiiiLiOi", const_cast<char **>(keywords), &kind, &name, &handler,
                                     &priority, &max_public, &max_peer, &capacity, &full, &timeout, &drop_above))
        return -1;
    if (self->counters) {
        raise_error("StateError", "a subscriber is set up once");
        return -1;
    }
    if (kind < 0 || kind > 2 || full < 0 || full > 2 || priority < 0 || priority > 255 || max_public < 0 ||
        max_public > max_id || max_peer < max_public || max_peer > max_id || capacity < 1) {
        raise_error("InvalidArgument", "kind %d, priority %d, max_public_id %d, max_peer_id %d, depth %lld or overflow "
                    "%d is out of range", kind, priority, max_public, max_peer, capacity, full);
        return -1;
    }
    double seconds = -1;
    if (timeout != Py_None) {
        seconds = PyFloat_AsDouble(timeout);
        if (seconds == -1 && PyErr_Occurred()) return -1;
    }
    try {
        self->bits.assign(static_cast<std::size_t>(max_public) / 64 + 1, 0);
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
        return -1;
    }
    self->kind = static_cast<Kind>(kind);
    self->full = static_cast<Full>(full);
    self->priority = static_cast<std::uint8_t>(priority);
    self->max_public_id = max_public;
    self->max_peer_id = max_peer;
    self->capacity = static_cast<std::size_t>(capacity);
    self->timeout = seconds;
    self->drop_above = drop_above;
    self->name = Py_NewRef(name);
    self->handler = handler == Py_None ? nullptr : Py_NewRef(handler);
    static const char *const kinds[] = {"callback", "queue", "fifo"};
    Py_ssize_t length;
    const char *text = PyUnicode_AsUTF8AndSize(name, &length);
    if (!text) return -1;
    self->counters = counters_take("bus", kinds[kind], {text, static_cast<std::size_t>(length)});
    if (self->kind != Kind::callback) self->counters->capacity.set(self->capacity);
    return 0;
}

int subscriber_traverse(PyObject *object, visitproc visit, void *arg) {
    SubscriberObject *self = as_subscriber(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(reinterpret_cast<PyObject *>(self->bus));
    Py_VISIT(self->handler);
    Py_VISIT(self->predicate);
    return 0;
}

void leave_bus(SubscriberObject *self) {
    if (!self->bus) return;
    BusObject *bus = self->bus;
    bus_remove(bus, self);
}

int subscriber_clear(PyObject *object) {
    SubscriberObject *self = as_subscriber(object);
    leave_bus(self);
    Py_CLEAR(self->handler);
    Py_CLEAR(self->predicate);
    return 0;
}

void subscriber_dealloc(PyObject *object) {
    SubscriberObject *self = as_subscriber(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    for (Sleeper *sleeper = self->writers.head; sleeper; sleeper = sleeper->next) {
        static_cast<Writer *>(sleeper)->subscriber = nullptr;
        sleeper->wake();
    }
    subscriber_clear(object);
    discard(self);
    Py_CLEAR(self->name);
    Py_CLEAR(self->channel);
    if (self->descriptor >= 0) close(self->descriptor);
    if (self->counters) counters_give(self->counters);
    self->bits.~vector();
    self->ring.~Ring();
    type->tp_free(object);
    Py_DECREF(type);
}

bool check_readable(SubscriberObject *self) {
    if (self->kind != Kind::callback) [[likely]] return true;
    raise_error("StateError", "a callback subscriber has no queue: its handler is called by the bus");
    return false;
}

bool one_timeout(PyObject *const *arguments, Py_ssize_t count, PyObject *names, Py_ssize_t before, Deadline *deadline,
                 bool *poll) {
    PyObject *timeout = count > before ? arguments[before] : nullptr;
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (count > before + 1) {
        PyErr_Format(PyExc_TypeError, "takes at most %zd positional arguments, not %zd", before + 1, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < named; ++i) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        if (PyUnicode_CompareWithASCIIString(name, "timeout") == 0 && !timeout) {
            timeout = arguments[count + i];
        } else if (before && PyUnicode_CompareWithASCIIString(name, "most") == 0) {
            // read by the caller
        } else {
            PyErr_Format(PyExc_TypeError, "unexpected argument %R", name);
            return false;
        }
    }
    *poll = false;
    return !timeout || parse_timeout(timeout, deadline, poll);
}

PyObject *subscriber_read(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    SubscriberObject *self = as_subscriber(object);
    Deadline deadline;
    bool poll;
    if (!check_readable(self) || !one_timeout(arguments, count, names, 0, &deadline, &poll)) return nullptr;
    for (bool waited = false;; waited = true) {
        if (PyObject *message = pop(self, waited)) return message;
        int found = PyErr_Occurred() ? -1 : wait_for_message(self, deadline, poll);
        if (found < 0) return nullptr;
        if (found == 0) Py_RETURN_NONE;
    }
}

PyObject *subscriber_read_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    SubscriberObject *self = as_subscriber(object);
    Deadline deadline;
    bool poll;
    if (!check_readable(self) || !one_timeout(arguments, count, names, 1, &deadline, &poll)) return nullptr;
    PyObject *number = count > 0 ? arguments[0] : nullptr;
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i)
        if (PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, i), "most") == 0) number = arguments[count + i];
    Py_ssize_t most = 1024;
    if (number) {
        most = PyNumber_AsSsize_t(number, PyExc_OverflowError);
        if (most == -1 && PyErr_Occurred()) return nullptr;
        if (most < 1) return raise_error("InvalidArgument", "most=%zd must be 1 or more", most);
    }
    const bool waited = self->ring.empty();
    int found = wait_for_message(self, deadline, poll);
    if (found < 0) return nullptr;
    Py_ssize_t there = static_cast<Py_ssize_t>(self->ring.size());
    // Creating a list may run the garbage collector, whose finalisers may read too: so it is filled afterwards, with
    // what is there then.
    PyObject *list = PyList_New(most < there ? most : there);
    if (!list) return nullptr;
    Py_ssize_t filled = 0, size = PyList_GET_SIZE(list);
    if (self->kind == Kind::queue && static_cast<std::size_t>(size) <= self->ring.size())
        filled = take_all(self, list, waited);
    while (filled < size && !PyErr_Occurred()) {
        PyObject *message = pop(self, waited && filled == 0);
        if (!message) break;
        PyList_SET_ITEM(list, filled++, message);
    }
    if (PyErr_Occurred()) {
        Py_DECREF(list);
        return nullptr;
    }
    if (filled < size) {
        PyObject *shorter = PyList_GetSlice(list, 0, filled);
        Py_DECREF(list);
        return shorter;
    }
    return list;
}

PyObject *subscriber_wait(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    SubscriberObject *self = as_subscriber(object);
    Deadline deadline;
    bool poll;
    if (!check_readable(self) || !one_timeout(arguments, count, names, 0, &deadline, &poll)) return nullptr;
    int found = wait_for_message(self, deadline, poll);
    if (found > 0) wake_reader(self);  // the message stays in the queue: wake the next thread that waits for it
    return found < 0 ? nullptr : PyBool_FromLong(found);
}

PyObject *subscriber_handle_queued(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
    SubscriberObject *self = as_subscriber(object);
    Deadline deadline;
    bool poll;
    if (!check_readable(self) || !one_timeout(arguments, count, names, 0, &deadline, &poll)) return nullptr;
    while (true) {
        // Read before the message is taken: another thread may unset the handler during the wait, and no message may be
        // lost then.
        PyObject *handler = Py_XNewRef(self->handler);
        if (!handler)
            return raise_error("StateError", "subscriber %R has no handler; give it one, or read() from it", self->name);
        if (PyObject *message = pop(self)) {
            bool fine = call(self, handler, message);
            Py_DECREF(handler);
            Py_DECREF(message);
            return fine ? Py_NewRef(Py_True) : nullptr;
        }
        Py_DECREF(handler);
        int found = PyErr_Occurred() ? -1 : wait_for_message(self, deadline, poll);
        if (found < 0) return nullptr;
        if (found == 0) Py_RETURN_FALSE;
    }
}

PyObject *subscriber_fileno(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    if (!check_readable(self)) return nullptr;
    if (self->closed) return raise_closed(self);
    if (self->descriptor < 0) {
        self->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (self->descriptor < 0) return PyErr_SetFromErrno(PyExc_OSError);
        if (self->ring.empty() && !self->finished) self->armed = true;
        else signal_descriptor(self);
    }
    return PyLong_FromLong(self->descriptor);
}

// _set(id, on) of one id; the range was checked where the names are known.
PyObject *subscriber_set(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    SubscriberObject *self = as_subscriber(object);
    if (count != 2) return PyErr_Format(PyExc_TypeError, "_set takes an id and a flag");
    std::uint16_t id;
    if (!parse_id(arguments[0], &id)) return nullptr;
    int on = PyObject_IsTrue(arguments[1]);
    if (on < 0) return nullptr;
    if (self->closed) return raise_closed(self);
    if (self->bits.empty()) return raise_error("StateError", "this subscriber was not set up");
    if (id > self->max_public_id)
        return raise_error("InvalidArgument", "id %d is private to subscriber %R (max_public_id=%d): it is published to it "
                           "by publish_to and cannot be subscribed", id, self->name, self->max_public_id);
    std::uint64_t bit = std::uint64_t{1} << (id & 63);
    std::uint64_t &word = self->bits[id >> 6];
    bool was = word & bit;
    if (was == static_cast<bool>(on)) Py_RETURN_NONE;
    word ^= bit;
    self->subscribed += on ? 1 : -1;
    if (self->bus) bus_subscriptions_changed(self->bus, self->predicate ? -1 : id);
    if (self->bus && on) replay(self->bus, self, id);
    Py_RETURN_NONE;
}

PyObject *subscriber_subscribed(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    PyObject *list = PyList_New(0);
    for (std::size_t id = 0; list && id < self->bits.size() * 64; ++id) {
        if (!((self->bits[id >> 6] >> (id & 63)) & 1)) continue;
        PyObject *number = PyLong_FromSize_t(id);
        if (!number || PyList_Append(list, number) != 0) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

// _deliver(item, writable, wait): publish_to. The item is a draft or a static message. False: full, and not to wait.
PyObject *subscriber_deliver(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    SubscriberObject *self = as_subscriber(object);
    if (count != 3) return PyErr_Format(PyExc_TypeError, "_deliver takes a message and two flags");
    if (self->closed) return raise_closed(self);
    int writable = PyObject_IsTrue(arguments[1]), wait = PyObject_IsTrue(arguments[2]);
    if (writable < 0 || wait < 0) return nullptr;
    const bool refuses = self->kind == Kind::fifo || (self->kind == Kind::queue && self->full == Full::block);
    if (!wait && refuses && (self->ring.size() >= self->capacity || self->writers.head))
        Py_RETURN_FALSE;  // nothing was taken; the caller tries again
    PyObject *item = arguments[0];
    Header *header = nullptr;
    Draft *draft = nullptr;
    if (Py_TYPE(item) == draft_type) {
        draft = reinterpret_cast<Draft *>(item);
        if (draft->owner != draft_owner) return raise_error("StateError", "this draft is not of a bus");
        header = reinterpret_cast<Header *>(draft->token);
    } else if (PyObject_TypeCheck(item, static_type)) {
        header = static_take(reinterpret_cast<StaticObject *>(item));
        if (!header) return nullptr;
    } else if (PyObject_TypeCheck(item, bus_message_type)) {
        return raise_error("StateError", "this message was published before; a message is published once");
    } else {
        return PyErr_Format(PyExc_TypeError, "publish_to takes a draft or a static message, not %s",
                            Py_TYPE(item)->tp_name);
    }
    if (!draft || draft->state == DraftState::open) {
        if (header->id <= self->max_public_id)
            return raise_error("InvalidArgument", "id %d is public at subscriber %R (max_public_id=%d): publish it on the "
                               "bus", header->id, self->name, self->max_public_id);
        if (writable && header->id <= self->max_peer_id)
            return raise_error("InvalidArgument", "id %d is peer-to-peer at subscriber %R: only a private message (above "
                               "%d) may be taken writable", header->id, self->name, self->max_peer_id);
        if (self->kind == Kind::callback && !self->handler)
            return raise_error("StateError", "callback subscriber %R has no handler", self->name);
    }
    if (draft && !(header = take_from_draft(draft))) return nullptr;
    header->flags |= flag_published | (writable ? flag_writable : 0);
    header->timestamp_ns = wall_ns();
    if (draft) header->size = static_cast<std::uint32_t>(draft->size);
    self->counters->matched.add();
    if (self->kind == Kind::callback) {
        PyObject *message = wrap(header, self->channel ? self->channel : self->name);
        if (!message) {
            self->counters->drop(DropReason::error);
            drop(header);
            return nullptr;
        }
        Py_INCREF(object);
        self->counters->delivered.add();
        self->counters->bytes.add(header->size);
        bool fine = call_handler(self, message);
        Py_DECREF(message);
        Py_DECREF(object);
        return fine ? Py_NewRef(Py_True) : nullptr;
    }
    if (self->kind == Kind::fifo) {  // private messages are not forwarded
        if (self->ring.size() >= self->capacity) {
            self->counters->drop(DropReason::overflow);
            drop(header);
            return raise_error("CapacityError", "subscriber %R is full (%zu messages)", self->name, self->capacity);
        }
        enqueue(self, Item::of(header).forwarded());
        Py_RETURN_TRUE;
    }
    PyObject *name = Py_NewRef(self->name);
    double timeout = self->timeout;
    Pushed pushed = push(self, Item::of(header), true);
    if (pushed == Pushed::timed_out) {
        PyObject *seconds = PyFloat_FromDouble(timeout);
        PyErr_Format(PyExc_TimeoutError, "subscriber %R was full for %S s; the message to it was dropped and counted", name,
                     seconds);
        Py_XDECREF(seconds);
    }
    Py_DECREF(name);
    return pushed == Pushed::timed_out || pushed == Pushed::failed ? nullptr : Py_NewRef(Py_True);
}

PyObject *subscriber_close(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    if (self->closed) Py_RETURN_NONE;
    // A fifo passes its messages on to the next ones, so it leaves the bus with its messages still in the queue.
    leave_bus(self);
    self->closed = true;
    const std::size_t discarded = discard(self);
    counters_retire(self->counters);
    self->ring.shrink();
    give_memory_back(discarded);
    self->readers.wake_all();
    self->writers.wake_all();
    if (self->descriptor >= 0) signal_descriptor(self);
    Py_RETURN_NONE;
}

PyObject *subscriber_interrupt(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    self->interrupted = true;
    self->readers.wake_all();
    if (self->armed) signal_descriptor(self);
    Py_RETURN_NONE;
}

PyObject *subscriber_failed(PyObject *object, PyObject *const *arguments, Py_ssize_t count) {
    if (count == 2) PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(arguments[1])), arguments[1]);
    PyErr_WriteUnraisable(object);
    Py_RETURN_NONE;
}

PyObject *subscriber_counts(PyObject *object, PyObject *) {
    SubscriberObject *self = as_subscriber(object);
    if (!self->counters) return raise_error("StateError", "this subscriber was not set up");
    const Counters &c = *self->counters;
    PyObject *dropped = PyDict_New();
    for (std::size_t i = 0; dropped && i < drop_reason_count; ++i) {
        if (!c.dropped[i].get()) continue;
        PyObject *number = PyLong_FromUnsignedLongLong(c.dropped[i].get());
        if (!number || PyDict_SetItemString(dropped, drop_reason_names[i], number) != 0) Py_CLEAR(dropped);
        Py_XDECREF(number);
    }
    if (!dropped) return nullptr;
    return Py_BuildValue("(KKNKK)", c.matched.get(), c.delivered.get(), dropped,
                         static_cast<unsigned long long>(self->ring.size()), c.errors.get());
}

PyObject *optional(PyObject *value) { return Py_NewRef(value ? value : Py_None); }
PyObject *get_handler(PyObject *self, void *) { return optional(as_subscriber(self)->handler); }
int set_handler(PyObject *object, PyObject *value, void *) {
    SubscriberObject *self = as_subscriber(object);
    bool none = !value || value == Py_None;
    if (!none && !PyCallable_Check(value)) {
        PyErr_Format(PyExc_TypeError, "a handler is a function or None, not %s", Py_TYPE(value)->tp_name);
        return -1;
    }
    if (none && self->kind == Kind::callback && self->bus) {
        raise_error("StateError", "callback subscriber %R is on a bus and needs a handler; remove it first", self->name);
        return -1;
    }
    PyObject *old = self->handler;
    self->handler = none ? nullptr : Py_NewRef(value);
    Py_XDECREF(old);
    return 0;
}
PyObject *get_predicate(PyObject *self, void *) { return optional(as_subscriber(self)->predicate); }
int set_predicate(PyObject *object, PyObject *value, void *) {
    SubscriberObject *self = as_subscriber(object);
    bool none = !value || value == Py_None;
    if (!none && !PyCallable_Check(value)) {
        PyErr_Format(PyExc_TypeError, "a predicate is a function or None, not %s", Py_TYPE(value)->tp_name);
        return -1;
    }
    PyObject *old = self->predicate;
    self->predicate = none ? nullptr : Py_NewRef(value);
    if (self->bus) bus_subscriptions_changed(self->bus, -1);
    Py_XDECREF(old);
    return 0;
}
PyObject *get_priority(PyObject *self, void *) { return PyLong_FromLong(as_subscriber(self)->priority); }
int set_priority(PyObject *object, PyObject *value, void *) {
    long priority = value ? PyLong_AsLong(value) : -1;
    if (priority == -1 && PyErr_Occurred()) return -1;
    if (priority < 0 || priority > 255) {
        raise_error("InvalidArgument", "priority %ld is not between 0 (served first) and 255", priority);
        return -1;
    }
    as_subscriber(object)->priority = static_cast<std::uint8_t>(priority);
    return 0;
}
PyObject *get_history(PyObject *self, void *) { return PyBool_FromLong(!as_subscriber(self)->no_history); }
int set_history(PyObject *object, PyObject *value, void *) {
    int wanted = value ? PyObject_IsTrue(value) : -1;
    if (wanted >= 0) as_subscriber(object)->no_history = !wanted;
    return wanted < 0 ? -1 : 0;
}
PyObject *get_bus(PyObject *self, void *) { return optional(reinterpret_cast<PyObject *>(as_subscriber(self)->bus)); }
PyObject *get_name(PyObject *self, void *) { return optional(as_subscriber(self)->name); }
PyObject *get_closed(PyObject *self, void *) {
    return PyBool_FromLong(as_subscriber(self)->closed || as_subscriber(self)->finished);
}
PyObject *get_delivered_bytes(PyObject *self, void *) {
    return PyLong_FromUnsignedLongLong(as_subscriber(self)->counters ? as_subscriber(self)->counters->bytes.get() : 0);
}
PyObject *get_queued(PyObject *self, void *) { return PyLong_FromSize_t(as_subscriber(self)->ring.size()); }
PyObject *get_capacity(PyObject *self, void *) { return PyLong_FromSize_t(as_subscriber(self)->capacity); }
PyObject *get_max_public(PyObject *self, void *) { return PyLong_FromLong(as_subscriber(self)->max_public_id); }
PyObject *get_max_peer(PyObject *self, void *) { return PyLong_FromLong(as_subscriber(self)->max_peer_id); }
PyObject *get_bytes(PyObject *self, void *) { return PyLong_FromSize_t(as_subscriber(self)->bits.size() * 8); }

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))
PyMethodDef subscriber_methods[] = {
    {"read", FAST(subscriber_read), METH_FASTCALL | METH_KEYWORDS,
     "read(timeout=None)\n--\n\nThe next message, or None when the time is over."},
    {"read_many", FAST(subscriber_read_many), METH_FASTCALL | METH_KEYWORDS,
     "read_many(most=1024, timeout=None)\n--\n\nA list of up to most messages; waits for the first one only."},
    {"wait", FAST(subscriber_wait), METH_FASTCALL | METH_KEYWORDS,
     "wait(timeout=None)\n--\n\nWhether there is something to read before the time is over."},
    {"handle_queued", FAST(subscriber_handle_queued), METH_FASTCALL | METH_KEYWORDS,
     "handle_queued(timeout=None)\n--\n\nCall the handler with the next message; False when there was none in time."},
    {"fileno", subscriber_fileno, METH_NOARGS, "fileno()\n--\n\nA descriptor that is readable when a message may be there."},
    {"close", subscriber_close, METH_NOARGS,
     "close()\n--\n\nLeave the bus; what is queued is dropped and counted. Closing twice does nothing."},
    {"interrupt", subscriber_interrupt, METH_NOARGS,
     "interrupt()\n--\n\nEnd a wait for messages: who waits, or the next who would, gets nothing at once."},
    {"_set", FAST(subscriber_set), METH_FASTCALL, nullptr},
    {"_subscribed", subscriber_subscribed, METH_NOARGS, nullptr},
    {"_deliver", FAST(subscriber_deliver), METH_FASTCALL, nullptr},
    {"_failed", FAST(subscriber_failed), METH_FASTCALL, nullptr},
    {"_counts", subscriber_counts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef subscriber_getset[] = {
    {"handler", get_handler, set_handler, "What is called with each message, or None.", nullptr},
    {"predicate", get_predicate, set_predicate, "What chooses messages beside their ids, or None.", nullptr},
    {"priority", get_priority, set_priority, "0 is served first; read when the subscriber is added.", nullptr},
    {"history", get_history, set_history, "Whether it begins with what is kept for who joins.", nullptr},
    {"bus", get_bus, nullptr, "The bus it was added to, or None.", nullptr},
    {"name", get_name, nullptr, "Name for people.", nullptr},
    {"closed", get_closed, nullptr, "Whether it, or the bus it was on, was closed.", nullptr},
    {"delivered_bytes", get_delivered_bytes, nullptr, "Bytes of the messages that were delivered.", nullptr},
    {"queued", get_queued, nullptr, "Messages that wait in its queue.", nullptr},
    {"depth", get_capacity, nullptr, "The most that may wait in its queue.", nullptr},
    {"max_public_id", get_max_public, nullptr, "Ids up to this are public.", nullptr},
    {"max_peer_id", get_max_peer, nullptr, "Ids above max_public_id and up to this are peer-to-peer.", nullptr},
    {"subscription_bytes", get_bytes, nullptr, "Memory of the subscription bits.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot subscriber_slots[] = {
    {Py_tp_doc, const_cast<char *>("One reading handle of a bus.")},
    {Py_tp_new, reinterpret_cast<void *>(subscriber_new)},
    {Py_tp_init, reinterpret_cast<void *>(subscriber_init)},
    {Py_tp_dealloc, reinterpret_cast<void *>(subscriber_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void *>(subscriber_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(subscriber_clear)},
    {Py_tp_methods, subscriber_methods},
    {Py_tp_getset, subscriber_getset},
    {0, nullptr}};

PyType_Spec subscriber_spec = {"penstock._core.bus.Subscriber", sizeof(SubscriberObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, subscriber_slots};

}  // namespace

bool subscriber_types(PyObject *module) { return ready_type(module, "Subscriber", &subscriber_spec, &subscriber_type); }

}  // namespace penstock::bus
