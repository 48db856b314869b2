// The Python objects of the bus and what its binding files share. All of it is guarded by the GIL, which is released
// only while a thread sleeps: so there is no lock that a signal handler or a finaliser could find taken.
#pragma once

#include <Python.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bus/header.hpp"
#include "bus/pool.hpp"
#include "bus/ring.hpp"
#include "bus/sleeper.hpp"
#include "counters/counters.hpp"
#include "message/message.hpp"

namespace penstock::bus {

// ---- messages (bindings_message.cpp)

struct BusMessage {
    Message base;
    std::uint32_t acquired;  // explicit references that this object holds beside its own
};

extern PyTypeObject *bus_message_type;
inline Header *header_of(PyObject *message) {
    return reinterpret_cast<Header *>(reinterpret_cast<Message *>(message)->envelope.token);
}
// A message over `header`, whose one reference it takes over; null with an error set, the reference then untouched.
PyObject *wrap(Header *header, PyObject *channel);
// Whether an object that was delivered is unchanged, so that it can be reused for the next message.
inline bool untouched(PyObject *message) {
    auto *object = reinterpret_cast<BusMessage *>(message);
    return Py_REFCNT(message) == 1 && !object->base.released && !object->acquired;
}

// A message in memory of the user. `out` of its pool is 1 while it has references; the object then holds itself.
struct StaticObject;
struct StaticPool final : Pool {
    struct {
        Header header;
        std::uint8_t *data;
    } block{};
    Py_buffer buffer{};
    PyObject *callback = nullptr;
    StaticObject *self = nullptr;

    std::uint32_t most_bytes() const noexcept override { return block.header.capacity; }
    Header *get(std::uint32_t) noexcept override { return nullptr; }
    void put(Header *) noexcept override {}
    void give(Header *header) noexcept override;
    std::vector<Header *> list_out() override { return {}; }
};
struct StaticObject {
    PyObject_HEAD
    StaticPool *pool;
};
extern PyTypeObject *static_type;
bool static_acquire(StaticObject *object);
// Takes one acquired reference for publishing; null with an error set where there is none or it is still in flight.
Header *static_take(StaticObject *object);

// ---- allocators (bindings_allocator.cpp)

struct BusObject;
struct AllocatorObject {
    PyObject_HEAD
    Pool *pool;
    PyObject *name;
    BusObject *bus;    // the one it was added to: strong, or null
    PyObject *places;  // in debug mode: where messages were taken, by number of taking; or null
    bool is_static;
};
extern PyTypeObject *allocator_type;
// A header with one reference; None-like null without an error where there was none in time.
Header *allocate(AllocatorObject *allocator, std::uint16_t id, std::int64_t size, Deadline deadline, bool poll);
extern DraftOwner *draft_owner;
// Publishes a draft on `bus` if it is of it (or of a static allocator); the ordinal, or null with an error set.
PyObject *publish_draft_on(BusObject *bus, Draft *draft);
// The one reference of an open draft, for publishing to one subscriber; null with an error set.
Header *take_from_draft(Draft *draft);

// ---- subscribers (their Python type: bindings_subscriber.cpp)

// What a queue holds: one reference to a message, which becomes an object when it is read (so that the reading thread
// creates and frees it in its own cache), or an object of a room above.
class Item {
   public:
    static Item of(Header *header) { return Item(reinterpret_cast<std::uintptr_t>(header)); }
    static Item of(PyObject *object) { return Item(reinterpret_cast<std::uintptr_t>(object) | object_bit); }
    Item forwarded() const { return Item(bits_ | forwarded_bit); }  // for a fifo: it was passed on already

    bool was_forwarded() const { return bits_ & forwarded_bit; }
    PyObject *object() const { return bits_ & object_bit ? reinterpret_cast<PyObject *>(pointer()) : nullptr; }
    Header *header() const {
        return bits_ & object_bit ? header_of(object()) : reinterpret_cast<Header *>(pointer());
    }
    std::int32_t id() const {
        return bits_ & object_bit ? reinterpret_cast<Message *>(pointer())->envelope.id : header()->id;
    }
    void give_back() const {
        if (bits_ & object_bit) Py_DECREF(object());
        else drop(header());
    }
    void mark_queued(bool queued) const {
        if (bits_ & object_bit || !(header()->flags & flag_external)) return;
        std::uint8_t &flags = header()->flags;
        flags = static_cast<std::uint8_t>(queued ? flags | flag_queued : flags & ~flag_queued);
    }

   private:
    static constexpr std::uintptr_t forwarded_bit = 1, object_bit = 2;
    explicit Item(std::uintptr_t bits) : bits_(bits) {}
    std::uintptr_t pointer() const { return bits_ & ~(forwarded_bit | object_bit); }
    std::uintptr_t bits_;
};

enum class Kind : std::uint8_t { callback, queue, fifo };
enum class Full : std::uint8_t { block, drop_oldest, drop_newest };

struct SubscriberObject {
    PyObject_HEAD
    BusObject *bus;       // strong, or null
    PyObject *handler;    // or null
    PyObject *predicate;  // or null
    PyObject *name;
    PyObject *channel;  // name of the bus it was on last, or null
    Counters *counters;
    Kind kind;
    Full full;
    std::uint8_t priority, sorted_priority;  // as set; as it was when added
    bool closed, finished;  // closed by its owner; its bus was closed
    bool armed, signalled;  // the descriptor: to be written at the next message; was written
    bool no_history;        // it begins with new messages
    bool interrupted;       // the next wait for a message ends at once
    int descriptor;
    std::int32_t max_public_id, max_peer_id, drop_above;
    std::uint32_t subscribed;  // how many ids
    double timeout;            // of block; negative: for ever
    std::size_t capacity;
    std::uint64_t order;  // when it was added
    std::vector<std::uint64_t> bits;
    Ring<Item> ring;
    SleeperList readers, writers;
};
extern PyTypeObject *subscriber_type;

// Its last reference is gone, but its attributes are being dropped first, which may run any code: it is still on its
// bus,
    // and nobody may take a new reference to it.
inline bool dying(SubscriberObject *subscriber) { return Py_REFCNT(reinterpret_cast<PyObject *>(subscriber)) == 0; }

struct Writer : Sleeper {
    SubscriberObject *subscriber = nullptr;  // null once that has gone
};

// The delivering thread while it sleeps: it holds no reference to the bus meanwhile.
struct Drainer : Sleeper {
    bool gone = false;  // the bus has
};

inline bool matches(const SubscriberObject *subscriber, std::uint32_t id) {
    if (static_cast<std::int32_t>(id) > subscriber->max_public_id) return false;
    if ((subscriber->bits[id >> 6] >> (id & 63)) & 1) return true;
    return subscriber->predicate && !subscriber->subscribed;
}

// ---- queues of subscribers (queue.cpp)

enum class Pushed { queued, dropped, timed_out, failed };
// Puts `item` (taken over) in the queue; may sleep without the GIL where the overflow is block and `wait` is set.
// failed: with an error set. The subscriber may be gone afterwards.
// A `timeout` that is not own_timeout takes the place of the subscriber's.
inline constexpr double own_timeout = -2;
Pushed push(SubscriberObject *subscriber, Item item, bool wait, double timeout = own_timeout);
void enqueue(SubscriberObject *subscriber, Item item);  // only where it has room
// Whether `count` messages can be queued at once: room for all of them, and nobody waits.
bool has_room(SubscriberObject *subscriber, std::size_t count);
void push_many(SubscriberObject *subscriber, Header *const *headers, std::size_t count);  // only where it has
// The next message, or null when there is none (or, with an error set, no memory for its object). `waited`: it is measured.
PyObject *pop(SubscriberObject *subscriber, bool waited = false);
// Fills the list from a queue that has enough, counting once; how far it came.
Py_ssize_t take_all(SubscriberObject *subscriber, PyObject *list, bool waited);
// 1: something is there; 0: the time is over; -1: an error is set (closed, or a signal handler raised).
int wait_for_message(SubscriberObject *subscriber, Deadline deadline, bool poll);
// Drops what is queued and counts it as lost by closing; returns how many.
std::size_t discard(SubscriberObject *subscriber);
// Called when many messages were freed at once with their handle: returns their memory to the system.
void give_memory_back(std::size_t messages);
PyObject *raise_closed(SubscriberObject *subscriber);  // null, with ClosedError set
bool wake_reader(SubscriberObject *subscriber);         // whether there was one who slept
void signal_descriptor(SubscriberObject *subscriber);
void detach_wake(SubscriberObject *subscriber);
// A fifo subscriber leaves: passes what it holds on to the next ones now.
void forward_queued(BusObject *bus, SubscriberObject *subscriber);
void forget_sleepers(SubscriberObject *subscriber);  // in a forked child

// ---- calling what users gave (calls.cpp)

// Calls the handler with a borrowed message; an error goes to the subscriber's _failed, unless it is no Exception: then
// false, with it set. `call`: the handler is held by the caller.
bool call(SubscriberObject *subscriber, PyObject *handler, PyObject *message);
bool call_handler(SubscriberObject *subscriber, PyObject *message);
// 1: the message matches; 0: it does not; -1: the predicate raised, which was reported and counted.
int ask_predicate(SubscriberObject *subscriber, PyObject *message);

// ---- the bus (dispatch.cpp; its Python type: bindings_bus.cpp)

struct Route {
    std::uint32_t users, count;
    SubscriberObject *entries[];  // borrowed: null once removed (see bus_remove)
};
// The last messages of an id, kept for later subscribers within all three bounds (the newest always).
struct History {
    Ring<Header *> ring;
    std::size_t most = 0;
    std::int64_t age_ns = 0;  // 0: however old
    std::uint64_t most_bytes = 0, bytes = 0;
};
struct IdState {
    Route *route;
    History *history;  // or null
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
};

// One running dispatch on one thread.
struct Frame {
    BusObject *bus;
    Route *route = nullptr;
    Frame *next = nullptr, *previous = nullptr;  // of the bus
    Frame *outer = nullptr;                      // of the thread
    Ring<Header *> pending;                      // published by handlers meanwhile
    PyObject *error = nullptr;                   // raised to the publisher at the end
};

struct BusObject {
    PyObject_HEAD
    PyObject *name;
    PyObject *weakrefs;
    Counters *counters;
    HeapPool *heap;
    bool queued;     // a thread or executor delivers, not the caller
    bool scheduled;  // a thread is delivering or was asked to
    bool closed, stopping;
    bool held;       // a reference held by the pending messages; the delivering thread takes it over
    unsigned long drainer;  // thread that delivers, 0: none
    std::vector<SubscriberObject *> subscribers;  // in order of delivery; callback ones are strong references
    std::uint64_t added, version;
    IdState *pages[256];
    Frame *frames;
    Ring<Header *> pending;
    std::size_t pending_capacity;  // in messages; 0: no bound
    std::uint64_t pending_bytes, pending_most_bytes;
    double stuck_after;  // seconds after which a full subscriber is reported
    Full pending_full;
    double pending_timeout;
    SleeperList drainers, room, changed, flushers;
};
extern PyTypeObject *bus_type;
inline void give_hold(BusObject *bus) {
    if (std::exchange(bus->held, false)) Py_DECREF(reinterpret_cast<PyObject *>(bus));
}

// The frame of this thread's dispatch on the bus, if there is one; beginning and ending one.
Frame *frame_of(BusObject *bus);
void enter(Frame *frame);
void leave(Frame *frame);
void keep_own_frames(BusObject *bus);  // in a forked child: those of other threads are gone
void drop_route(Route *route);
Header *take_pending(BusObject *bus);  // the oldest of a queue that has some
// Delivers up to `most` of what is queued, in the frame; how many.
std::size_t drain(BusObject *bus, Frame *frame, std::size_t most);
// Publishes a header, taking over one reference. The ordinal, or 0 with an error set. `committed` tells whether the
// message went out even so (a time-out at one subscriber, Ctrl-C while waiting).
std::uint64_t publish_header(BusObject *bus, Header *header, bool *committed, std::int64_t now_ns = 0);
// What a room above decides for each subscriber while one of its messages is delivered. It may change `timeout`: how
// long to wait for room, in seconds. failed: the error was reported already. full: it waited for room in vain, and the
// error is set, which the publisher gets.
struct Terms {
    enum class Answer { yes, no, failed, full };
    virtual Answer ask(SubscriberObject *subscriber, PyObject *message, double *timeout) = 0;

   protected:
    ~Terms() = default;
};
// Delivers `message`, an object of a room above whose token is a header, by reference to the queue subscribers of `id`,
// in the caller's thread. False, with an error set, if one of them stayed full; the others have got it.
bool publish_reference(BusObject *bus, std::uint16_t id, PyObject *message, Terms *terms);
bool bus_add(BusObject *bus, SubscriberObject *subscriber);
// Sets how much of the id is kept from now on; never less than before. False with an error set.
bool bus_keep(BusObject *bus, std::uint16_t id, std::size_t most, std::int64_t age_ns, std::uint64_t bytes);
// The id's next message has the ordinal after this one; a greater one where subscribers have seen that. False with an error set.
bool bus_go_on(BusObject *bus, std::uint16_t id, std::uint64_t *ordinal);
void drop_history(IdState *state);
// Gives the kept messages of the id to a queue subscriber that joins: those whose dispatch has begun. The others will
// reach it anyway.
void replay(BusObject *bus, SubscriberObject *subscriber, std::uint16_t id);
void bus_remove(BusObject *bus, SubscriberObject *subscriber);
void bus_subscriptions_changed(BusObject *bus, std::int32_t id);  // negative: all ids
// Passes an item (taken over) that `subscriber` has finished or cannot take to the next fifo subscriber.
void forward(BusObject *bus, SubscriberObject *subscriber, Item item);
bool check_set_up(BusObject *bus);
bool check_bus_open(BusObject *bus);

// ---- small things (bindings.cpp)

// None waits for ever, 0 polls. False with an error set.
bool parse_timeout(PyObject *timeout, Deadline *deadline, bool *poll);
bool parse_id(PyObject *number, std::uint16_t *id);
// Sleeps without the GIL; false with an error set where a signal handler raised.
bool sleep_without_gil(Sleeper *sleeper, Deadline deadline);
void give_way();  // lets other threads run
bool ready_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **type, PyTypeObject *base = nullptr);
bool message_types(PyObject *module);
bool allocator_types(PyObject *module);
bool subscriber_types(PyObject *module);
bool bus_types(PyObject *module);
bool publisher_types(PyObject *module);

struct PublisherObject {
    PyObject_HEAD
    BusObject *bus;
    Counters *counters;
    AllocatorObject *allocator;  // or null: the bus's heap
    std::uint16_t id;
    bool closed;
};
extern PyTypeObject *publisher_type;
// Marks that a publisher publishes in this thread: its waits end when another thread closes it, or its time is over.
class Publishing {
   public:
    explicit Publishing(PublisherObject *publisher, Deadline deadline = {}) noexcept;
    ~Publishing();
    Publishing(const Publishing &) = delete;
    Publishing &operator=(const Publishing &) = delete;
    static bool ended() noexcept;         // whether the one of this thread was closed
    static Deadline deadline() noexcept;  // the deadline of the publish that is running in this thread

   private:
    PublisherObject *publisher_;
    Deadline deadline_;
    Publishing *outer_;
};
// Whether publishing this id now would have to wait; false with an error set if that is not known.
bool would_wait(BusObject *bus, std::uint16_t id);
// The header of a copy of `data`, ready to publish; null with an error set.
Header *allocate_heap(BusObject *bus, std::uint16_t id, std::int64_t size);
// Publishes a copy of each of `items`; how many, or null with an error set. They share one look at the clock.
PyObject *publish_all(BusObject *bus, PublisherObject *publisher, AllocatorObject *allocator, std::uint16_t id,
                      PyObject *items);
Header *copy_in(BusObject *bus, AllocatorObject *allocator, std::uint16_t id, PyObject *data);

}  // namespace penstock::bus
