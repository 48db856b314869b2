// A subscriber's queue: putting in, taking out, and sleeping for either. All of it with the GIL held, but for the sleep.
#include <fcntl.h>
#if __has_include(<malloc.h>)
#include <malloc.h>
#endif
#include <Python.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>

#include "bus/objects.hpp"

namespace penstock::bus {

// Whether there was one who slept.
bool wake_reader(SubscriberObject *self) {
    if (self->armed) signal_descriptor(self);
    for (Sleeper *sleeper = self->readers.head; sleeper; sleeper = sleeper->next)
        if (!sleeper->woken()) {
            sleeper->wake();
            return true;
        }
    return false;
}

void signal_descriptor(SubscriberObject *self) {
    self->armed = false;
    if (self->signalled) return;
    std::uint64_t one = 1;
    while (write(self->descriptor, &one, sizeof one) < 0 && errno == EINTR) {
    }
    self->signalled = true;
}

void enqueue(SubscriberObject *self, Item item) {
    if (!self->ring.push(item)) {  // out of memory: counted as a drop instead of ending the process
        self->counters->drop(DropReason::error);
        item.give_back();
        return;
    }
    item.mark_queued(true);
    self->counters->depth.set(self->ring.size());
    if (self->readers.head || self->armed) [[unlikely]] wake_reader(self);
}

namespace {

Pushed drop_new(SubscriberObject *self, Item item, DropReason reason) {
    self->counters->drop(reason);
    if (self->kind == Kind::fifo && self->bus) forward(self->bus, self, item);
    else item.give_back();
    return Pushed::dropped;
}

Pushed drop_old(SubscriberObject *self, Item item) {
    Item oldest = self->ring.pop();
    oldest.mark_queued(false);
    self->counters->drop(DropReason::overflow);
    enqueue(self, item);
    if (self->kind == Kind::fifo && !oldest.was_forwarded() && self->bus) forward(self->bus, self, oldest);
    else oldest.give_back();
    return Pushed::queued;
}

// It has been full for long: report it through its class and its counters. This may run any code.
[[gnu::cold]] void tell_stuck(SubscriberObject *self, double seconds) {
    if (dying(self)) return;
    Py_INCREF(reinterpret_cast<PyObject *>(self));
    counters_state(self->counters, "stuck: full, and its reader takes nothing; who publishes waits");
    PyObject *done = PyObject_CallMethod(reinterpret_cast<PyObject *>(self), "_tell_stuck", "d", seconds);
    if (!done) PyErr_WriteUnraisable(reinterpret_cast<PyObject *>(self));
    Py_XDECREF(done);
    Py_DECREF(reinterpret_cast<PyObject *>(self));
}

Pushed wait_for_room(SubscriberObject *self, Item item, double timeout) {
    Writer writer;
    writer.subscriber = self;
    BusObject *bus = self->bus;
    const double seconds = timeout == own_timeout ? self->timeout : timeout;
    Deadline deadline = (seconds < 0 ? Deadline{} : Deadline::after(seconds)).or_before(Publishing::deadline());
    const double patience = bus ? bus->stuck_after : 0;
    Deadline tell = bus ? Deadline::after(patience) : Deadline{};
    bool told = false;
    self->writers.join(&writer);
    Pushed result;
    while (true) {
        if (self->closed || self->bus != bus) {
            result = Pushed::dropped;
            self->counters->drop(DropReason::closed);
            // Only this thread's frame is sure to keep the bus: publish_to has none.
            if (bus && frame_of(bus) && bus->closed && !bus->queued) {
                raise_error("ClosedError", "bus %R was closed while subscriber %R was full; the message was dropped for it "
                            "and counted", bus->name, self->name);
                result = Pushed::failed;
            }
            break;
        }
        if (self->writers.head == &writer && self->ring.size() < self->capacity) {
            result = Pushed::queued;
            enqueue(self, item);
            break;
        }
        if (Publishing::ended()) {
            raise_error("ClosedError", "this publisher was closed while it waited for subscriber %R, which was full; the "
                        "message was dropped for it and counted", self->name);
            result = Pushed::failed;
            self->counters->drop(DropReason::closed);
            break;
        }
        if (deadline.passed()) {
            result = Pushed::timed_out;
            self->counters->drop(DropReason::overflow);
            break;
        }
        if (tell.passed()) {
            tell = Deadline{};
            told = true;
            tell_stuck(self, patience);
            if (writer.subscriber) continue;
            item.give_back();
            return Pushed::dropped;
        }
        writer.rearm();
        const bool earlier = tell.at_ns != Deadline::never &&
                             (deadline.at_ns == Deadline::never || tell.at_ns < deadline.at_ns);
        bool fine = sleep_without_gil(&writer, earlier ? tell : deadline);
        if (!writer.subscriber) {  // the subscriber is gone: nobody can read or count it
            item.give_back();
            return fine ? Pushed::dropped : Pushed::failed;
        }
        if (!fine) {
            result = Pushed::failed;
            self->counters->drop(DropReason::error);
            break;
        }
    }
    if (told) counters_state(self->counters, "");
    self->writers.leave(&writer);
    if (self->ring.size() < self->capacity) self->writers.wake_first();
    // last, because this may run any code, which may destroy the subscriber
    if (result != Pushed::queued) item.give_back();
    return result;
}

[[gnu::noinline]] Pushed push_full(SubscriberObject *self, Item item, bool wait, double timeout) {
    if (self->full == Full::drop_newest) return drop_new(self, item, DropReason::overflow);
    if (self->full == Full::drop_oldest) return drop_old(self, item);
    if (!wait || (self->drop_above >= 0 && item.id() > self->drop_above)) return drop_new(self, item, DropReason::overflow);
    return wait_for_room(self, item, timeout);
}

}  // namespace

Pushed push(SubscriberObject *self, Item item, bool wait, double timeout) {
    if (self->ring.size() < self->capacity && !self->writers.head) [[likely]] {
        enqueue(self, item);
        return Pushed::queued;
    }
    return push_full(self, item, wait, timeout);
}

bool has_room(SubscriberObject *self, std::size_t count) {
    return self->ring.size() + count <= self->capacity && !self->writers.head && self->ring.reserve(count);
}

void push_many(SubscriberObject *self, Header *const *headers, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) self->ring.push(Item::of(headers[i]));
    self->counters->matched.add(count);
    self->counters->depth.set(self->ring.size());
    for (std::size_t i = 0; i < count && (self->readers.head || self->armed); ++i)
        if (!wake_reader(self)) break;  // at most one sleeping reader per message
}

void forward_queued(BusObject *bus, SubscriberObject *self) {
    if (self->kind != Kind::fifo) return;
    // Take all of them first: dropping one may run a callback that reads from this queue.
    Ring<Header *> leaving;
    for (std::size_t i = 0; i < self->ring.size(); ++i) {
        Item item = self->ring.at(i);
        if (item.was_forwarded() || !leaving.push(item.header())) continue;
        self->ring.at(i) = item.forwarded();
        acquire(item.header());
    }
    while (!leaving.empty()) forward(bus, self, Item::of(leaving.pop()));
}

// Drops what is queued; counted if somebody can still read the count.
std::size_t discard(SubscriberObject *self) {
    std::size_t count = 0;
    while (!self->ring.empty()) {
        Item item = self->ring.pop();
        item.mark_queued(false);
        self->counters->drop(DropReason::closed);
        ++count;
        if (self->kind == Kind::fifo && !item.was_forwarded() && self->bus) forward(self->bus, self, item);
        else item.give_back();
    }
    if (self->counters) self->counters->depth.set(0);
    return count;
}

void give_memory_back(std::size_t messages) {
#ifdef __GLIBC__
    if (messages >= 1000) malloc_trim(0);
#else
    (void)messages;
#endif
}

namespace {

// Hands one more reference on to the next fifo subscriber.
void pass_on(BusObject *bus, SubscriberObject *self, Header *header) {
    acquire(header);
    forward(bus, self, Item::of(header));
}

// Nothing is there: arm the descriptor.
void arm(SubscriberObject *self) {
    if (self->descriptor < 0 || self->closed || self->finished) return;
    if (self->signalled) {
        std::uint64_t count;
        while (read(self->descriptor, &count, sizeof count) < 0 && errno == EINTR) {
        }
        self->signalled = false;
    }
    self->armed = true;
}

}  // namespace

// The next message, or null when there is none (or, with an error set, no memory for its object). A fifo's message is
// passed on to the next one first, and only then is its predicate called: passing on runs no Python code, so nothing
// can change the order in between.
PyObject *pop(SubscriberObject *self, bool waited) {
    while (!self->ring.empty()) {
        Item item = self->ring.pop();
        Counters *counters = self->counters;
        counters->depth.set(self->ring.size());
        item.mark_queued(false);
        if (self->writers.head) self->writers.wake_first();
        const bool passing = self->kind == Kind::fifo && !item.was_forwarded();
        if (passing && self->bus) pass_on(self->bus, self, item.header());
        PyObject *message = item.object();
        if (!message && !(message = wrap(item.header(), self->channel ? self->channel : self->name))) [[unlikely]] {
            counters->drop(DropReason::error);
            item.give_back();
            return nullptr;
        }
        if (passing && self->predicate && ask_predicate(self, message) <= 0) {
            Py_DECREF(message);
            continue;
        }
        if (waited || counters->delivered.get() % measured_every == 0) [[unlikely]]
            counters->measure(reinterpret_cast<Message *>(message)->envelope.timestamp_ns);
        counters->note_read();
        counters->delivered.add();
        counters->bytes.add(static_cast<std::uint64_t>(reinterpret_cast<Message *>(message)->envelope.size));
        return message;
    }
    return nullptr;
}

// Fills the list from a queue that has enough, counting once; how far it came.
Py_ssize_t take_all(SubscriberObject *self, PyObject *list, bool waited) {
    PyObject *channel = self->channel ? self->channel : self->name;
    std::uint64_t bytes = 0;
    Py_ssize_t filled = 0;
    for (const Py_ssize_t size = PyList_GET_SIZE(list); filled < size; ++filled) {
        Item item = self->ring.pop();
        item.mark_queued(false);
        PyObject *message = item.object();
        if (!message && !(message = wrap(item.header(), channel))) [[unlikely]] {
            self->counters->drop(DropReason::error);
            item.give_back();
            break;
        }
        bytes += static_cast<std::uint64_t>(reinterpret_cast<Message *>(message)->envelope.size);
        PyList_SET_ITEM(list, filled, message);
    }
    const std::uint64_t before = self->counters->delivered.get(), after = before + static_cast<std::uint64_t>(filled);
    if (filled && (waited || before % measured_every == 0 || before / measured_every != after / measured_every))
        self->counters->measure(reinterpret_cast<Message *>(PyList_GET_ITEM(list, 0))->envelope.timestamp_ns);
    if (filled) self->counters->note_read();
    self->counters->delivered.set(after);
    self->counters->bytes.add(bytes);
    self->counters->depth.set(self->ring.size());
    if (self->writers.head) self->writers.wake_first();
    return filled;
}

PyObject *raise_closed(SubscriberObject *self) {
    return raise_error("ClosedError", self->closed ? "subscriber %R was closed" : "the bus of subscriber %R was closed",
                       self->name);
}

// 1: something is there; 0: the time is over; -1: an error is set (closed, or a signal handler raised).
int wait_for_message(SubscriberObject *self, Deadline deadline, bool poll) {
    if (!self->ring.empty()) return 1;
    if (self->closed || self->finished) {
        raise_closed(self);
        return -1;
    }
    if (poll) {
        arm(self);
        return 0;
    }
    Sleeper sleeper;
    self->readers.join(&sleeper);
    int result = 0;
    while (true) {
        if (!self->ring.empty()) {
            result = 1;
            break;
        }
        if (self->closed || self->finished) {
            raise_closed(self);
            result = -1;
            break;
        }
        if (self->interrupted) {
            self->interrupted = false;
            break;
        }
        if (deadline.passed()) break;
        sleeper.rearm();
        if (!sleep_without_gil(&sleeper, deadline)) {
            result = -1;
            break;
        }
    }
    self->readers.leave(&sleeper);
    // It was woken but leaves without the message: wake the next reader.
    if (result < 0 && !self->ring.empty() && !self->closed) wake_reader(self);
    if (result == 0) arm(self);
    return result;
}

void detach_wake(SubscriberObject *self) { self->writers.wake_all(); }

void forget_sleepers(SubscriberObject *self) {
    self->readers.forget();
    self->writers.forget();
    if (self->descriptor < 0) return;
    // The descriptor is shared with the parent: a new one takes its number.
    int fresh = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fresh < 0) return;
    dup3(fresh, self->descriptor, O_CLOEXEC);
    close(fresh);
    self->signalled = false;
    if (self->ring.empty()) self->armed = true;
    else signal_descriptor(self);
}

}  // namespace penstock::bus
