// Delivery: routes by id, dispatch along them, the ways of publishing, joining and leaving.
//
// A route is the list of subscribers of one id in order of delivery. It is built when the id is first published after a
// change and dropped at the next change, so a publish visits only those subscribers. A running dispatch keeps the route
// that it began with; a subscriber that is removed meanwhile is struck from it. All of it with the GIL held.
#include <Python.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <utility>

#include "bus/objects.hpp"
#include "message/wall_clock.hpp"

namespace penstock::bus {

namespace {

constexpr std::size_t turn = 512;  // messages after which the GIL is released once, so that other threads can run

[[gnu::tls_model("initial-exec")]] thread_local Frame *thread_frames = nullptr;

PyObject *as_object(BusObject *self) { return reinterpret_cast<PyObject *>(self); }

}  // namespace

Frame *frame_of(BusObject *bus) {
    for (Frame *frame = thread_frames; frame; frame = frame->outer)
        if (frame->bus == bus) return frame;
    return nullptr;
}

void enter(Frame *frame) {
    BusObject *bus = frame->bus;
    frame->outer = thread_frames;
    thread_frames = frame;
    frame->next = bus->frames;
    if (bus->frames) bus->frames->previous = frame;
    bus->frames = frame;
}

void leave(Frame *frame) {
    thread_frames = frame->outer;
    (frame->previous ? frame->previous->next : frame->bus->frames) = frame->next;
    if (frame->next) frame->next->previous = frame->previous;
}

void keep_own_frames(BusObject *bus) {
    bus->frames = nullptr;
    for (Frame *frame = thread_frames; frame; frame = frame->outer)
        if (frame->bus == bus) {
            frame->previous = nullptr;
            frame->next = bus->frames;
            if (bus->frames) bus->frames->previous = frame;
            bus->frames = frame;
        }
}

void drop_route(Route *route) {
    if (route && --route->users == 0) std::free(route);
}

namespace {

IdState *state_of(BusObject *bus, std::uint16_t id) {
    IdState *&page = bus->pages[id >> 8];
    if (!page) [[unlikely]] {
        page = static_cast<IdState *>(std::calloc(256, sizeof(IdState)));
        if (!page) {
            PyErr_NoMemory();
            return nullptr;
        }
    }
    return &page[id & 255];
}

Route *build_route(BusObject *bus, IdState *state, std::uint16_t id) {
    std::uint32_t count = 0;
    for (SubscriberObject *subscriber : bus->subscribers) count += matches(subscriber, id);
    auto *route = static_cast<Route *>(std::malloc(sizeof(Route) + count * sizeof(SubscriberObject *)));
    if (!route) {
        PyErr_NoMemory();
        return nullptr;
    }
    route->users = 1;
    route->count = 0;
    for (SubscriberObject *subscriber : bus->subscribers)
        if (matches(subscriber, id)) route->entries[route->count++] = subscriber;
    state->route = route;
    return route;
}

// The publisher gets the first error; later ones are added to it as notes.
void keep_error(Frame *frame) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (frame->error) {
        PyObject *note = PyUnicode_FromFormat("and: %S", value);
        PyObject *done = note ? PyObject_CallMethod(frame->error, "add_note", "O", note) : nullptr;
        if (!done) PyErr_WriteUnraisable(as_object(frame->bus));
        Py_XDECREF(done);
        Py_XDECREF(note);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return;
    }
    if (trace) PyException_SetTraceback(value, trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    frame->error = value;
}

[[gnu::cold, gnu::noinline]] void tell_timeout(Frame *frame, PyObject *name, std::int64_t waited_ns) {
    if (frame->bus->queued) return;  // in a bus thread there is no caller to raise it to; it was counted
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", static_cast<double>(waited_ns / 1'000'000) / 1e3);
    PyErr_Format(PyExc_TimeoutError,
                 "subscriber %R was full for %s s; the message was dropped for it and counted, the others received it", name,
                 seconds);
    keep_error(frame);
}

void push_to(Frame *frame, SubscriberObject *subscriber, Item item, double given = own_timeout) {
    if (subscriber->ring.size() < subscriber->capacity && !subscriber->writers.head) [[likely]] {
        push(subscriber, item, true);
        return;
    }
    PyObject *name = Py_NewRef(subscriber->name);  // the subscriber may be gone after a wait
    const std::int64_t began_ns = monotonic_ns();
    Pushed pushed = push(subscriber, item, true, given);
    if (pushed == Pushed::timed_out) tell_timeout(frame, name, monotonic_ns() - began_ns);
    if (pushed == Pushed::failed) keep_error(frame);
    Py_DECREF(name);
}

// One more object over the message; null, with the error kept, where there is no memory for it.
PyObject *another(Frame *frame, Header *header) {
    acquire(header);
    PyObject *message = wrap(header, frame->bus->name);
    if (message) [[likely]] return message;
    drop(header);
    keep_error(frame);
    return nullptr;
}

void forget_oldest(History *history) {
    Header *oldest = history->ring.pop();
    history->bytes -= oldest->size;
    drop(oldest);
}

// Called where the route of a message is chosen: a subscriber that joins before is on the route, one that joins later
// finds the message here.
void keep(IdState *state, Header *header) {
    History *history = state->history;
    // memory that belongs to the user is not kept
    if (!history || header->flags & flag_external || !history->ring.push(header)) return;
    acquire(header);
    history->bytes += header->size;
    while (history->ring.size() > 1 &&
           (history->ring.size() > history->most || history->bytes > history->most_bytes ||
            (history->age_ns && history->ring.at(0)->timestamp_ns < header->timestamp_ns - history->age_ns)))
        forget_oldest(history);
}

// Serves one message, taking over a reference to it.
void dispatch(Frame *frame, Header *header) {
    BusObject *bus = frame->bus;
    IdState *state = state_of(bus, header->id);
    Route *route = state ? (state->route ? state->route : build_route(bus, state, header->id)) : nullptr;
    if (!route) {
        keep_error(frame);
        drop(header);
        return;
    }
    if (state->history) [[unlikely]] keep(state, header);
    if (!route->count) {
        drop(header);
        return;
    }
    ++route->users;
    frame->route = route;
    PyObject *message = nullptr;
    for (std::uint32_t i = 0; i < route->count; ++i) {
        SubscriberObject *subscriber = route->entries[i];
        if (!subscriber) continue;
        if (subscriber->predicate && subscriber->kind != Kind::fifo) [[unlikely]] {
            if (dying(subscriber)) continue;
            if (!message && !(message = another(frame, header))) break;
            Py_INCREF(reinterpret_cast<PyObject *>(subscriber));
            int matching = ask_predicate(subscriber, message);
            Py_DECREF(reinterpret_cast<PyObject *>(subscriber));
            if (!untouched(message)) Py_CLEAR(message);
            if (matching <= 0 || !route->entries[i]) continue;
        }
        if (subscriber->kind == Kind::callback) {
            if (!message && !(message = another(frame, header))) [[unlikely]] break;
            subscriber->counters->matched.add();
            Py_INCREF(reinterpret_cast<PyObject *>(subscriber));
            Counters *counters = subscriber->counters;
            counters->delivered.add();
            counters->bytes.add(header->size);
            if (!call_handler(subscriber, message)) [[unlikely]] keep_error(frame);
            Py_DECREF(reinterpret_cast<PyObject *>(subscriber));
            if (!untouched(message)) Py_CLEAR(message);
        } else {
            bool last = subscriber->kind == Kind::fifo;  // from there it is passed on to the next fifo subscriber
            subscriber->counters->matched.add();
            acquire(header);
            push_to(frame, subscriber, Item::of(header));
            if (last) break;
        }
    }
    Py_XDECREF(message);
    frame->route = nullptr;
    drop_route(route);
    drop(header);
}

// Delivers what is pending on this frame; raises the frame's error.
bool finish(Frame *frame) {
    while (!frame->pending.empty()) dispatch(frame, frame->pending.pop());
    leave(frame);
    if (!frame->error) [[likely]] return true;
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(frame->error)), frame->error);
    Py_CLEAR(frame->error);
    return false;
}

bool schedule(BusObject *bus) {
    if (bus->drainers.head) {
        if (!std::exchange(bus->held, true)) Py_INCREF(as_object(bus));  // the delivering thread drops it
        bus->drainers.wake_first();
    }
    if (bus->scheduled) return true;
    bus->scheduled = true;  // set first, so that a signal handler does not schedule it a second time
    if (!std::exchange(bus->held, true)) Py_INCREF(as_object(bus));
    PyObject *done = PyObject_CallMethod(as_object(bus), "_schedule", nullptr);
    if (!done) {
        bus->scheduled = false;
        give_hold(bus);  // not the last reference: the caller has one
        return false;
    }
    Py_DECREF(done);
    return true;
}

bool is_full(const BusObject *bus, const Header *header) {
    if (bus->pending_capacity && bus->pending.size() >= bus->pending_capacity) return true;
    return !bus->pending.empty() && bus->pending_bytes + sizeof(Header) + header->size > bus->pending_most_bytes;
}

// No overflow policy was given: raise an error for the publisher that says which subscriber the bus waits for.
[[gnu::cold]] void raise_pending_full(BusObject *bus) {
    PyObject *stuck = nullptr;
    for (SubscriberObject *subscriber : bus->subscribers)
        if (!stuck && subscriber->writers.head) stuck = subscriber->name;
    PyObject *who = stuck ? PyUnicode_FromFormat("subscriber %R is full and everybody waits for it", stuck)
                          : PyUnicode_FromString("its handlers are slower than its publishers");
    if (!who) return;
    raise_error("CapacityError", "%llu bytes in %zu messages wait for dispatch on bus %R, and no more may "
                "(pending_bytes): %U; nothing was published",
                static_cast<unsigned long long>(bus->pending_bytes), bus->pending.size(), bus->name, who);
    Py_DECREF(who);
}

// Room in a bounded publish queue. 1: there is; 0: the message must be dropped; -1: an error is set.
int wait_for_pending_room(BusObject *bus, Header *header) {
    if (!bus->pending_capacity) {
        raise_pending_full(bus);
        return -1;
    }
    // The delivering thread cannot wait for itself, nor can a signal handler that interrupted a publish of this thread.
    if (bus->drainer == PyThread_get_thread_ident() || frame_of(bus)) return 1;
    if (bus->pending_full == Full::drop_newest) return 0;
    if (bus->pending_full == Full::drop_oldest) {
        while (is_full(bus, header)) {
            Header *oldest = take_pending(bus);
            bus->counters->drop(DropReason::overflow);
            drop(oldest);
        }
        return 1;
    }
    Frame frame{bus};
    enter(&frame);
    const Deadline own = bus->pending_timeout < 0 ? Deadline{} : Deadline::after(bus->pending_timeout);
    const Deadline deadline = own.or_before(Publishing::deadline());
    Sleeper sleeper;
    bus->room.join(&sleeper);
    int result = 1;
    while (bus->closed || bus->room.head != &sleeper || is_full(bus, header)) {
        if (bus->closed) {
            check_bus_open(bus);
            result = -1;
            break;
        }
        if (Publishing::ended()) {
            raise_error("ClosedError", "this publisher was closed while bus %R was full; nothing was published", bus->name);
            result = -1;
            break;
        }
        if (deadline.passed()) {
            PyErr_Format(PyExc_TimeoutError, "the publish queue of bus %R was full (%zu messages); nothing was published",
                         bus->name, bus->pending_capacity);
            result = -1;
            break;
        }
        sleeper.rearm();
        if (!sleep_without_gil(&sleeper, deadline)) {
            result = -1;
            break;
        }
    }
    bus->room.leave(&sleeper);
    leave(&frame);
    // It may have been woken, but leaves without using the room: wake the next one.
    if (result < 0 && !is_full(bus, header)) bus->room.wake_first();
    return result;
}

void stamp(IdState *state, Header *header, std::int64_t now_ns) {
    if (now_ns > state->timestamp_ns) state->timestamp_ns = now_ns;
    header->timestamp_ns = state->timestamp_ns;
}

// The moment of publishing in direct mode.
std::uint64_t number(BusObject *bus, IdState *state, Header *header) {
    header->ordinal = ++state->ordinal;
    header->flags |= flag_published;
    bus->counters->matched.add();
    bus->counters->delivered.add();
    bus->counters->bytes.add(header->size);
    return header->ordinal;
}

std::uint64_t publish_queued(BusObject *bus, IdState *state, Header *header, bool *committed) {
    if (is_full(bus, header)) [[unlikely]] {
        int room = wait_for_pending_room(bus, header);
        if (room < 0) {
            *committed = false;
            return 0;
        }
        if (room == 0) {
            bus->counters->matched.add();
            bus->counters->drop(DropReason::overflow);
            drop(header);
            return ++state->ordinal;  // the gap in the ordinals shows the drop
        }
    }
    std::uint64_t ordinal = ++state->ordinal;
    header->ordinal = ordinal;
    header->flags |= flag_published;
    bus->counters->matched.add();
    if (!bus->pending.push(header)) {
        bus->counters->drop(DropReason::error);
        drop(header);
        PyErr_NoMemory();
        return 0;
    }
    bus->pending_bytes += sizeof(Header) + header->size;
    bus->counters->depth.set(bus->pending.size());
    if (bus->room.head && bus->pending.size() < bus->pending_capacity) bus->room.wake_first();
    return schedule(bus) ? ordinal : 0;
}

}  // namespace

Header *take_pending(BusObject *bus) {
    Header *header = bus->pending.pop();
    bus->pending_bytes -= sizeof(Header) + header->size;
    return header;
}

// Serves pending messages until there are none (or `most`). Called by one thread at a time.
std::size_t drain(BusObject *bus, Frame *frame, std::size_t most) {
    std::size_t served = 0;
    while (served < most && !bus->pending.empty()) {
        Header *header = take_pending(bus);
        bus->counters->depth.set(bus->pending.size());
        if (bus->room.head) bus->room.wake_first();
        const std::uint64_t size = header->size;  // read before `dispatch`, which drops the message
        dispatch(frame, header);
        bus->counters->delivered.add();
        bus->counters->bytes.add(size);
        if (bus->flushers.head) bus->flushers.wake_all();
        if (frame->error) [[unlikely]] {
            PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(frame->error)), frame->error);
            Py_CLEAR(frame->error);
            PyErr_WriteUnraisable(as_object(bus));
        }
        if (++served % turn == 0) give_way();
    }
    return served;
}

namespace {

// Callbacks, then queues, then fifos; within a kind by priority, then by order of adding.
bool before(const SubscriberObject *a, const SubscriberObject *b) {
    if (a->kind != b->kind) return a->kind < b->kind;
    if (a->sorted_priority != b->sorted_priority) return a->sorted_priority < b->sorted_priority;
    return a->order < b->order;
}

// Headers of a list that are gathered and then delivered together: no Python code runs between the first and the last.
struct Gathered {
    static constexpr std::size_t most = 128;
    Header *headers[most];
    std::size_t count = 0;
};

// The one queue subscriber of a route, if that is all it has.
SubscriberObject *only_queue(Route *route) {
    SubscriberObject *subscriber = route && route->count == 1 ? route->entries[0] : nullptr;
    return subscriber && subscriber->kind == Kind::queue && !subscriber->predicate ? subscriber : nullptr;
}

// Publishes what was gathered; returns how many. After an error the rest is dropped unpublished.
std::size_t hand_out(Frame *frame, IdState *state, Gathered *gathered, std::int64_t now_ns) {
    const std::size_t count = std::exchange(gathered->count, 0);
    SubscriberObject *queue = count > 1 ? only_queue(state->route) : nullptr;
    if (queue && has_room(queue, count)) {
        for (std::size_t i = 0; i < count; ++i) {
            stamp(state, gathered->headers[i], now_ns);
            number(frame->bus, state, gathered->headers[i]);
        }
        for (std::size_t i = 0; state->history && i < count; ++i) keep(state, gathered->headers[i]);
        push_many(queue, gathered->headers, count);
        return count;
    }
    std::size_t published = 0;
    for (std::size_t i = 0; i < count; ++i) {
        if (frame->error) {
            drop(gathered->headers[i]);
            continue;
        }
        stamp(state, gathered->headers[i], now_ns);
        number(frame->bus, state, gathered->headers[i]);
        dispatch(frame, gathered->headers[i]);
        while (!frame->pending.empty()) dispatch(frame, frame->pending.pop());
        ++published;
    }
    return published;
}

}  // namespace

PyObject *publish_all(BusObject *bus, PublisherObject *publisher, AllocatorObject *allocator, std::uint16_t id,
                      PyObject *items) {
    constexpr std::size_t turn = 4096;  // few enough that other threads are not kept waiting
    IdState *state = state_of(bus, id);
    if (!state) return nullptr;
    bool listed = PyList_CheckExact(items) || PyTuple_CheckExact(items);
    PyObject *iterator = listed ? Py_NewRef(items) : PyObject_GetIter(items);
    if (!iterator) return nullptr;
    bool direct = !bus->queued && !frame_of(bus);
    const std::int64_t now_ns = wall_ns();
    constexpr std::uint32_t small = 4096;  // larger ones are published at once, not gathered
    std::size_t taken = 0, count = 0;
    std::uint64_t bytes = 0;
    Frame frame{bus};
    Gathered gathered;
    Py_INCREF(as_object(bus));
    if (direct) enter(&frame);
    while (true) {
        PyObject *item;
        if (!listed) item = PyIter_Next(iterator);
        else if (static_cast<Py_ssize_t>(taken) < PySequence_Fast_GET_SIZE(items))  // a handler may change the list
            item = Py_NewRef(PySequence_Fast_GET_ITEM(items, static_cast<Py_ssize_t>(taken)));
        else item = nullptr;
        if (!item) break;
        if (publisher && publisher->closed) raise_error("ClosedError", "this publisher was closed");
        Header *header = (publisher && publisher->closed) || !check_bus_open(bus) ? nullptr
                                                                                   : copy_in(bus, allocator, id, item);
        Py_DECREF(item);
        if (!header) [[unlikely]] break;
        ++taken;
        bytes += header->size;
        if (direct) {
            gathered.headers[gathered.count++] = header;
            // Handlers must have each message before the next one is copied; a queue may have them together.
            if (!listed || gathered.count == Gathered::most || header->size > small || taken % turn == 0 ||
                !only_queue(state->route))
                count += hand_out(&frame, state, &gathered, now_ns);
            if (frame.error) [[unlikely]] break;
        } else {
            bool committed = true;
            if (!publish_header(bus, header, &committed, now_ns)) {
                if (!committed) drop(header);
                break;
            }
            ++count;
        }
        if (taken % turn == 0) give_way();
    }
    bool fine = !PyErr_Occurred();
    if (direct) {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        count += hand_out(&frame, state, &gathered, now_ns);
        if (!fine) Py_CLEAR(frame.error);
        fine = finish(&frame) && fine;
        if (type) PyErr_Restore(type, value, trace);
    }
    if (publisher) {
        publisher->counters->matched.add(count);
        publisher->counters->delivered.add(count);
        publisher->counters->bytes.add(bytes);
    }
    Py_DECREF(as_object(bus));
    Py_DECREF(iterator);
    if (!fine) tell_published(count);
    return fine ? PyLong_FromSize_t(count) : nullptr;
}

bool would_wait(BusObject *bus, std::uint16_t id) {
    if (bus->queued) return bus->pending_capacity && bus->pending.size() >= bus->pending_capacity;
    for (SubscriberObject *subscriber : bus->subscribers)
        if (subscriber->kind == Kind::queue && subscriber->full == Full::block && matches(subscriber, id) &&
            !has_room(subscriber, 1))
            return true;
    return false;
}

bool check_set_up(BusObject *bus) {
    if (bus->heap) return true;
    raise_error("StateError", "this bus was not set up");
    return false;
}

bool check_bus_open(BusObject *bus) {
    if (!bus->closed && bus->heap) [[likely]] return true;
    if (check_set_up(bus)) raise_error("ClosedError", "bus %R was closed", bus->name);
    return false;
}

std::uint64_t publish_header(BusObject *bus, Header *header, bool *committed, std::int64_t now_ns) {
    IdState *state = state_of(bus, header->id);
    if (!state) {
        *committed = false;
        return 0;
    }
    stamp(state, header, now_ns ? now_ns : wall_ns());
    if (bus->queued) return publish_queued(bus, state, header, committed);
    std::uint64_t ordinal = number(bus, state, header);
    if (thread_frames) [[unlikely]] {
        if (Frame *frame = frame_of(bus)) {
            if (frame->pending.push(header)) return ordinal;
            drop(header);
            PyErr_NoMemory();
            return 0;
        }
    }
    Frame frame{bus};
    enter(&frame);
    dispatch(&frame, header);
    return finish(&frame) ? ordinal : 0;
}

bool publish_reference(BusObject *bus, std::uint16_t id, PyObject *message, Terms *terms) {
    IdState *state = state_of(bus, id);
    Route *route = state ? (state->route ? state->route : build_route(bus, state, id)) : nullptr;
    if (!route) return false;
    bus->counters->matched.add();
    bus->counters->delivered.add();
    bus->counters->bytes.add(static_cast<std::uint64_t>(reinterpret_cast<Message *>(message)->envelope.size));
    if (!route->count) return true;
    // A thread that already waits here (a signal handler interrupted it, or its predicate publishes) must not wait for
    // itself.
    const double first_timeout = thread_frames && frame_of(bus) ? 0 : own_timeout;
    Frame frame{bus};
    enter(&frame);
    ++route->users;
    frame.route = route;
    for (std::uint32_t i = 0; i < route->count; ++i) {
        SubscriberObject *subscriber = route->entries[i];
        if (!subscriber || subscriber->kind != Kind::queue) continue;
        double timeout = first_timeout;
        if (terms) {
            const Terms::Answer answer = terms->ask(subscriber, message, &timeout);
            if (answer == Terms::Answer::full) keep_error(&frame);
            if (!(subscriber = route->entries[i])) continue;  // it was removed while its predicate ran
            if (answer == Terms::Answer::full) {
                subscriber->counters->matched.add();
                subscriber->counters->drop(DropReason::overflow);
                continue;
            }
            if (answer != Terms::Answer::yes) {
                const bool failed = answer == Terms::Answer::failed;
                subscriber->counters->matched.add();
                subscriber->counters->drop(failed ? DropReason::error : DropReason::filtered);
                if (failed) subscriber->counters->errors.add();
                continue;
            }
        }
        subscriber->counters->matched.add();
        push_to(&frame, subscriber, Item::of(Py_NewRef(message)), timeout);
    }
    frame.route = nullptr;
    drop_route(route);
    return finish(&frame);
}

// Its counters get a name with its bus: BUS?subscriber=NAME, unless its own name begins with the bus.
bool name_counts(BusObject *bus, SubscriberObject *subscriber) {
    const char *place = PyUnicode_AsUTF8(bus->name), *own = PyUnicode_AsUTF8(subscriber->name);
    if (!place || !own) return false;
    std::string name(place);
    const std::string_view text(own);
    const bool named = text == name || (text.starts_with(name) && text[name.size()] == '?');
    counters_rename(subscriber->counters, named ? std::string(text) : name.append("?subscriber=").append(text));
    return true;
}

bool bus_add(BusObject *bus, SubscriberObject *subscriber) {
    if (!subscriber->counters) raise_error("StateError", "this subscriber was not set up");
    else if (subscriber->closed) raise_error("ClosedError", "subscriber %R was closed", subscriber->name);
    else if (subscriber->bus == bus) raise_error("StateError", "subscriber %R is on this bus already", subscriber->name);
    else if (subscriber->bus)
        raise_error("StateError", "subscriber %R is on bus %R; a subscriber is on one bus: remove it there first",
                    subscriber->name, subscriber->bus->name);
    else if (subscriber->kind == Kind::callback && !subscriber->handler)
        raise_error("StateError", "callback subscriber %R has no handler; set it before adding", subscriber->name);
    if (PyErr_Occurred() || !name_counts(bus, subscriber)) return false;
    subscriber->order = ++bus->added;
    subscriber->sorted_priority = subscriber->priority;
    subscriber->finished = false;
    auto &all = bus->subscribers;
    try {
        all.insert(std::upper_bound(all.begin(), all.end(), subscriber, before), subscriber);
    } catch (const std::bad_alloc &) {
        PyErr_NoMemory();
        return false;
    }
    subscriber->bus = reinterpret_cast<BusObject *>(Py_NewRef(as_object(bus)));
    Py_XSETREF(subscriber->channel, Py_NewRef(bus->name));
    if (subscriber->kind == Kind::callback) Py_INCREF(reinterpret_cast<PyObject *>(subscriber));
    bus_subscriptions_changed(bus, -1);
    for (std::size_t page = 0; page < 256; ++page)
        for (std::size_t i = 0; bus->pages[page] && i < 256; ++i)
            if (bus->pages[page][i].history) replay(bus, subscriber, static_cast<std::uint16_t>(page << 8 | i));
    return true;
}

bool bus_keep(BusObject *bus, std::uint16_t id, std::size_t most, std::int64_t age_ns, std::uint64_t bytes) {
    IdState *state = state_of(bus, id);
    if (!state) return false;
    const bool fresh = !state->history;
    if (fresh && !(state->history = new (std::nothrow) History)) {
        PyErr_NoMemory();
        return false;
    }
    History *history = state->history;
    history->age_ns = fresh || (history->age_ns && age_ns) ? std::max(history->age_ns, age_ns) : 0;
    history->most = std::max(history->most, most);
    history->most_bytes = std::max(history->most_bytes, bytes);
    return true;
}

bool bus_go_on(BusObject *bus, std::uint16_t id, std::uint64_t *ordinal) {
    IdState *state = state_of(bus, id);
    if (!state) return false;
    for (SubscriberObject *subscriber : bus->subscribers)
        if (matches(subscriber, id) && state->ordinal) {  // it has seen messages, and must not see their ordinals again
            *ordinal = state->ordinal = std::max(state->ordinal, *ordinal);
            return true;
        }
    if (History *history = state->history)
        while (!history->ring.empty()) forget_oldest(history);
    state->ordinal = *ordinal;
    return true;
}

void drop_history(IdState *state) {
    History *history = std::exchange(state->history, nullptr);
    if (!history) return;
    while (!history->ring.empty()) forget_oldest(history);
    delete history;
}

void replay(BusObject *bus, SubscriberObject *subscriber, std::uint16_t id) {
    IdState *state = state_of(bus, id);
    History *history = state ? state->history : nullptr;
    if (!history || subscriber->no_history || subscriber->kind != Kind::queue || subscriber->predicate ||
        !matches(subscriber, id))
        return;
    const std::int64_t since = history->age_ns ? wall_ns() - history->age_ns : INT64_MIN;
    for (std::size_t i = 0; i < history->ring.size(); ++i) {
        Header *header = history->ring.at(i);
        if (header->timestamp_ns < since) continue;
        subscriber->counters->matched.add();
        acquire(header);
        enqueue(subscriber, Item::of(header));
    }
}

void bus_remove(BusObject *bus, SubscriberObject *subscriber) {
    auto &all = bus->subscribers;
    auto place = std::find(all.begin(), all.end(), subscriber);
    if (place == all.end()) return;
    all.erase(place);
    for (Frame *frame = bus->frames; frame; frame = frame->next)
        for (std::uint32_t i = 0; frame->route && i < frame->route->count; ++i)
            if (frame->route->entries[i] == subscriber) frame->route->entries[i] = nullptr;
    bus_subscriptions_changed(bus, -1);
    forward_queued(bus, subscriber);
    subscriber->bus = nullptr;
    detach_wake(subscriber);
    if (subscriber->kind == Kind::callback) Py_DECREF(reinterpret_cast<PyObject *>(subscriber));
    Py_DECREF(as_object(bus));
}

void bus_subscriptions_changed(BusObject *bus, std::int32_t id) {
    if (id >= 0) {
        if (IdState *page = bus->pages[id >> 8]) drop_route(std::exchange(page[id & 255].route, nullptr));
    } else {
        for (IdState *page : bus->pages)
            for (int i = 0; page && i < 256; ++i) drop_route(std::exchange(page[i].route, nullptr));
    }
    bus->changed.wake_all();
}

void forward(BusObject *bus, SubscriberObject *subscriber, Item item) {
    auto id = static_cast<std::uint16_t>(item.id());
    IdState *state = state_of(bus, id);
    Route *route = state ? (state->route ? state->route : build_route(bus, state, id)) : nullptr;
    if (!route) PyErr_Clear();
    SubscriberObject *next = nullptr;
    for (std::uint32_t i = 0; route && i < route->count && !next; ++i) {
        SubscriberObject *entry = route->entries[i];
        if (entry && entry->kind == Kind::fifo && before(subscriber, entry)) next = entry;
    }
    if (!next) {
        item.give_back();
        return;
    }
    next->counters->matched.add();
    push(next, item, false);
}

}  // namespace penstock::bus
