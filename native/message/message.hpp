// Message, Batch and Draft: the three Python types that every reach hands out, and the seam through which a room
// lends them memory. A room implements Owner (for what is read) or DraftOwner (for what is being written); nothing
// here knows where the bytes live.
//
// Rules
//   - All functions are called with the GIL held.
//   - An Owner's release is called exactly once per message, at the last of: release(), deallocation, the death of
//     the last view. It must not raise and may run on any thread (finalisers do).
//   - A message never changes after it is made; its bytes are exported read-only.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "platform/liveness.hpp"

namespace penstock {

struct Owner {
    // For memory that is shared with other processes: fork_generation() when it was lent. A forked child does not hold
    // it: what its parent releases is written over there too. 0: the memory is a process's own.
    std::uint32_t lent_generation = 0;
    bool inherited() const { return lent_generation && lent_generation != fork_generation(); }

    virtual void release(std::uint64_t token) noexcept = 0;
    // Called when a message is taken out of a batch and will hold its memory itself: there will be one more release of
    // this token. False: this owner cannot release messages one by one, so each message holds the whole batch.
    virtual bool retain(std::uint64_t) noexcept { return false; }
    // What a batch calls for all its messages at once.
    virtual void release_many(const std::uint64_t *tokens, std::size_t count) noexcept {
        for (std::size_t i = 0; i < count; ++i) release(tokens[i]);
    }

   protected:
    ~Owner() = default;
};

// The fields of a message. A negative id, vchan_id or position means that it has none.
struct Envelope {
    const std::uint8_t *data = nullptr;
    std::int64_t size = 0;
    std::uint64_t ordinal = 0;
    // Any time but one is a time, also 0 and those before 1970; no_time where nobody gave one.
    static constexpr std::int64_t no_time = INT64_MIN;
    std::int64_t timestamp_ns = no_time;
    std::int64_t position = -1;
    std::int32_t id = -1;
    std::int32_t vchan_id = -1;
    // Encoded properties (key NUL value NUL ...), inside memory that lives as long as data; decoded when asked for.
    const std::uint8_t *properties = nullptr;
    std::uint32_t properties_size = 0;
    std::uint32_t channel = 0;  // in a batch: index into its channel names
    std::uint64_t token = 0;    // handed back to the owner
    // Right behind the properties, where the reach keeps them: an id and a key that its user gave.
    std::uint16_t message_id_size = 0;
    std::uint16_t key_size = 0;
    // When a reach that stores messages stored it; not_stored where none did.
    static constexpr std::int64_t not_stored = INT64_MIN;
    std::int64_t stored_ns = not_stored;
    std::int8_t intact = -1;   // whether the checksum matches; -1: none was checked
    bool clocked = false;      // its time is that of its making: nobody gave it one (gateway)
    bool activation = false;   // published by opening the publisher, not by publish()
    std::uint32_t metadata_size = 0;
    const std::uint8_t *metadata = nullptr;  // metadata of the reach, in memory that lives as long as data

    std::int64_t shown_time_ns() const { return timestamp_ns == no_time ? 0 : timestamp_ns; }
    std::string_view encoded_properties() const { return at(0, properties_size); }
    std::string_view message_id() const { return at(properties_size, message_id_size); }
    std::string_view key() const { return at(std::size_t{properties_size} + message_id_size, key_size); }
    // Bytes of properties, message id and key together.
    std::size_t details_size() const { return std::size_t{properties_size} + message_id_size + key_size; }

   private:
    std::string_view at(std::size_t offset, std::size_t bytes) const {
        return bytes ? std::string_view{reinterpret_cast<const char *>(properties) + offset, bytes} : std::string_view{};
    }
};

struct Message {
    PyObject_HEAD
    Envelope envelope;
    Owner *owner;          // null once the memory has been given back
    PyObject *channel;     // str or null
    PyObject *properties;  // a dict made on first access, or null
    PyObject *source;      // whatever the room says it came from (a tcp session), or null
    PyObject *decoder;     // what makes its value, where its subscriber has a type, or null
    PyObject *weakrefs;
    std::uint32_t exports;  // live views
    bool released;          // release() was called; memory goes back when exports reaches 0
};

extern PyTypeObject *message_type;
extern PyTypeObject *batch_type;
extern PyTypeObject *draft_type;

// A new message over memory that `owner` holds. Takes its own references to channel and source (each may be null).
// Null with a Python error set on failure; the owner's release is then not called.
PyObject *message_new(const Envelope &envelope, Owner *owner, PyObject *channel, PyObject *source = nullptr);
// The same for a subtype of message_type (whose extra fields the caller fills).
PyObject *message_new_of(PyTypeObject *type, const Envelope &envelope, Owner *owner, PyObject *channel,
                         PyObject *source);
inline bool message_check(PyObject *object) { return PyObject_TypeCheck(object, message_type); }

// A new batch. `channels` is one str for all, or a tuple of str indexed by Envelope::channel, or null.
PyObject *batch_new(std::vector<Envelope> &&entries, Owner *owner, PyObject *channels, PyObject *source = nullptr);

// What a batch holds, for native code that goes over its messages (append, format) without making one of each. The
// entries live until the batch is released, which other threads may do: a caller that runs Python code meanwhile, or
// releases the GIL, pins them. Null with StateError set if the batch was released.
const std::vector<Envelope> *batch_entries(PyObject *batch);

// Keeps the entries of a batch alive, even if the batch is released. Made and destroyed with the GIL held.
class BatchPin {
   public:
    explicit BatchPin(PyObject *batch);
    ~BatchPin() {
        if (hold_) hold_->release(0);
    }
    BatchPin(const BatchPin &) = delete;
    BatchPin &operator=(const BatchPin &) = delete;
    // Null, with StateError set, where the batch was released before.
    const std::vector<Envelope> *entries() const { return entries_; }

   private:
    Owner *hold_ = nullptr;
    const std::vector<Envelope> *entries_ = nullptr;
};

// Borrowed: one str for all, a tuple indexed by Envelope::channel, or null.
PyObject *batch_channels(PyObject *batch);
inline bool batch_check(PyObject *object) { return Py_IS_TYPE(object, batch_type); }

struct Draft;

struct DraftOwner {
    // As of Owner.
    std::uint32_t lent_generation = 0;
    bool inherited() const { return lent_generation && lent_generation != fork_generation(); }

    // An array that array() returned outlives the publishing: keep its memory readable until let_go. Called before
    // publish; let_go follows once, whether publish succeeds or not.
    virtual void hold(std::uint64_t) noexcept {}
    virtual void let_go(std::uint64_t) noexcept {}
    // Publishes the first `size` bytes; what it returns is what draft.publish() returns. Meanwhile the draft counts as
    // published: it may wait without the GIL, or call Python. On an error (null, with a Python error set) the draft is
    // open again and may be published or cancelled later, unless its memory was taken (memory_held is false).
    virtual PyObject *publish(PyObject *draft, std::uint64_t token, std::int64_t size) = 0;
    virtual void cancel(std::uint64_t token) noexcept = 0;
    // Cancelled while a view could still write into it: the memory must not be reused yet, but the draft no longer
    // counts as reserved. cancel is called with the token that this returns, once no view is left.
    virtual std::uint64_t strand(std::uint64_t token) noexcept { return token; }

    // Whether the publisher that lent the memory was closed: nothing more is written into the draft then. It may run
    // Python, and another thread may publish the draft meanwhile, which may end this owner.
    virtual bool closed(const Draft *) const { return false; }

   protected:
    ~DraftOwner() = default;
};

// For publish_many, with an error set: adds the attribute `published`, the number of messages published before it.
void tell_published(std::size_t count);

enum class DraftState : std::uint8_t { open, published, cancelled };

struct Draft {
    PyObject_HEAD
    std::uint8_t *data;
    std::int64_t size;
    DraftOwner *owner;
    std::uint64_t token;
    PyObject *keep;    // what must outlive the draft (the publisher), or null
    PyObject *views;   // weak references to the memoryviews that view() gave
    PyObject *arrays;  // weak references to the arrays that array() gave and to the array each is a view of
    PyObject *weakrefs;
    std::uint32_t exports;
    DraftState state;
    bool memory_held;  // false once publish or cancel of the owner was called
    bool lent;         // the owner holds the memory for arrays that outlive the publishing
};

// DraftOwner::closed where the draft keeps a publisher written in Python: its attribute `closed`.
bool keeper_closed(const Draft *draft);

// For a room that publishes drafts in another way than draft.publish(). Begin: checks that the draft is open, ends the
// views that Penstock gave, and checks that nobody else can write; otherwise false with an error set and the draft
// unchanged. End: passes `result` on; without a result the draft is open again, unless its memory was taken.
bool draft_begin_publish(Draft *draft);
PyObject *draft_end_publish(Draft *draft, PyObject *result);

PyObject *draft_new(std::uint8_t *data, std::int64_t size, DraftOwner *owner, std::uint64_t token, PyObject *keep);

// Raises penstock.errors.NAME with a formatted text; returns null for `return raise(...)`.
PyObject *raise_error(const char *name, const char *format, ...);

// PyObject_GetBuffer for what a user publishes: the error for an object without a buffer says what to do instead.
int buffer_to_publish(PyObject *object, Py_buffer *view, int flags);

}  // namespace penstock
