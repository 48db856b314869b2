// penstock._core.broker: the one file of this room that knows Python.
#include "bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>
#include <sys/socket.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "broker/outbox.hpp"
#include "broker/queue_state.hpp"
#include "broker/scanner.hpp"
#include "message/message.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using broker::Event;
using broker::Grammar;

// Keeps the block that a batch's messages lie in.
struct BlockOwner final : Owner {
    explicit BlockOwner(broker::Block *block) : block(block) { block->keep(); }
    void release(std::uint64_t) noexcept override { give_back(); }
    void release_many(const std::uint64_t *, std::size_t) noexcept override { give_back(); }  // once a batch
    void give_back() noexcept {
        block->drop();
        delete this;
    }
    broker::Block *block;
};

nb::object text_of(std::string_view text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

class Scanner {
   public:
    Scanner(const char *grammar, std::uint32_t max_message_bytes, std::uint32_t max_line_bytes)
        : scanner_(std::strcmp(grammar, "raw") == 0     ? Grammar::raw
                   : std::strcmp(grammar, "hello") == 0 ? Grammar::hello
                                                        : Grammar::deliveries,
                   max_message_bytes, max_line_bytes) {}

    // Bytes received, 0 at the end of the stream, None when there are none now.
    nb::object receive(int descriptor) {
        std::size_t room = 0;
        std::uint8_t *place = scanner_.inbox().space(scanner_.wanted(), room);
        if (!place) throw std::bad_alloc();
        ssize_t got;
        int error;
        {
            nb::gil_scoped_release unlocked;
            do {
                got = ::recv(descriptor, place, room, MSG_DONTWAIT);
                error = errno;
            } while (got < 0 && error == EINTR);
        }
        if (got < 0) {
            scanner_.inbox().rest();
            if (error == EAGAIN || error == EWOULDBLOCK) return nb::none();
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        scanner_.inbox().filled(static_cast<std::size_t>(got));
        if (got == 0) scanner_.inbox().rest();
        return nb::int_(static_cast<std::int64_t>(got));
    }

    void feed(nb::handle data) {
        Py_buffer view;
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto *at = static_cast<const std::uint8_t *>(view.buf);
        auto left = static_cast<std::size_t>(view.len);
        while (left) {
            std::size_t room = 0;
            std::uint8_t *place = scanner_.inbox().space(left, room);
            if (!place) break;
            const std::size_t now = room < left ? room : left;
            std::memcpy(place, at, now);
            scanner_.inbox().filled(now);
            at += now;
            left -= now;
        }
        PyBuffer_Release(&view);
        if (left) throw std::bad_alloc();
    }

    // Events that are no verb have names with a newline, which no line holds.
    nb::object next(std::size_t most) {
        switch (scanner_.next(most)) {
            case Event::more:
                scanner_.inbox().rest();
                return nb::none();
            case Event::run: return event(scanner_.head(), batch());
            case Event::line: return event(scanner_.head(), nb::none());
            case Event::topic: return nb::make_tuple("\n?", text_of(scanner_.head()), nb::none());
            case Event::refused: return nb::make_tuple("\n!", text_of(scanner_.head()), nb::none());
            default: return nb::make_tuple("\n#", text_of(scanner_.head()), nb::none());
        }
    }

    void allow(std::string_view topic) { scanner_.allow(topic); }
    void refuse(std::string_view topic) { scanner_.refuse(topic); }
    void forget_topics() { scanner_.forget_topics(); }
    std::size_t buffered() { return scanner_.inbox().size(); }
    std::size_t held() { return scanner_.inbox().held_bytes(); }
    std::uint64_t moved() { return scanner_.inbox().moved_bytes(); }

   private:
    static nb::object event(std::string_view head, nb::object batch) {
        const std::size_t blank = head.find(' ');
        std::string_view rest = blank == std::string_view::npos ? std::string_view{} : head.substr(blank + 1);
        return nb::make_tuple(text_of(head.substr(0, blank)), text_of(rest), batch);
    }

    nb::object batch() {
        std::vector<Envelope> entries;
        entries.reserve(scanner_.ranges().size());
        for (const broker::Range &range : scanner_.ranges()) {
            Envelope &entry = entries.emplace_back();
            entry.data = range.data;
            entry.size = range.size;
            entry.channel = range.topic;
            entry.ordinal = range.ordinal;
            entry.timestamp_ns = range.timestamp_ns;
            entry.position = scanner_.grammar() == Grammar::deliveries ? range.position : -1;
            entry.properties = range.properties;
            entry.properties_size = range.properties_size;
        }
        if (generation_ != scanner_.generation() || !channels_.is_valid()) {
            const auto &topics = scanner_.topics();
            channels_ = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(topics.empty() ? 1 : topics.size())));
            for (std::size_t i = 0; i < topics.size(); ++i)
                PyTuple_SET_ITEM(channels_.ptr(), static_cast<Py_ssize_t>(i), text_of(topics[i]).release().ptr());
            if (topics.empty()) PyTuple_SET_ITEM(channels_.ptr(), 0, Py_NewRef(Py_None));
            generation_ = scanner_.generation();
        }
        auto *owner = new BlockOwner(scanner_.inbox().block());
        PyObject *made = batch_new(std::move(entries), owner, channels_.ptr());
        if (!made) {
            owner->give_back();
            throw nb::python_error();
        }
        return nb::steal(made);
    }

    broker::Scanner scanner_;
    nb::object channels_;
    std::uint64_t generation_ = 0;
};

void release_object(void *hold) { Py_DECREF(static_cast<PyObject *>(hold)); }

// One entry of a range fetch; docs/formats.md has the table.
struct FetchEntry {
    std::int64_t position;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::uint64_t offset;  // of the data in what follows the index; the properties stand right after the data
    std::uint32_t length;
    std::uint32_t topic;
    std::uint32_t properties_length;
    std::uint32_t reserved;
};
static_assert(sizeof(FetchEntry) == 48);

// The index of a range fetch, and how many bytes of data and properties follow it.
nb::tuple fetch_index(nb::handle batch) {
    if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
    const std::vector<Envelope> *entries = batch_entries(batch.ptr());
    if (!entries) throw nb::python_error();
    PyObject *made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(entries->size() * sizeof(FetchEntry)));
    if (!made) throw nb::python_error();
    char *at = PyBytes_AS_STRING(made);
    std::uint64_t offset = 0;
    for (const Envelope &entry : *entries) {
        const FetchEntry row{entry.position, entry.ordinal, entry.timestamp_ns, offset,
                             static_cast<std::uint32_t>(entry.size), entry.channel, entry.properties_size, 0};
        std::memcpy(at, &row, sizeof row);
        at += sizeof row;
        offset += static_cast<std::uint64_t>(entry.size) + entry.properties_size;
    }
    return nb::make_tuple(nb::steal<nb::bytes>(made), offset);
}

// The words of ACK for the messages begin to end of a batch of deliveries: a range for rows of first deliveries, a
// position for each one that was delivered before.
nb::bytes ack_words(nb::handle batch, std::size_t begin, std::size_t end) {
    if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
    const std::vector<Envelope> *entries = batch_entries(batch.ptr());
    if (!entries) throw nb::python_error();
    std::string words;
    std::int64_t first = -1, last = -1;
    const auto put = [&words](std::int64_t from, std::int64_t to) {
        words.append(1, ' ').append(std::to_string(from));
        if (to != from) words.append(1, '-').append(std::to_string(to));
    };
    constexpr std::string_view once{"deliveries\0001\0", 13};
    for (std::size_t i = begin; i < end && i < entries->size(); ++i) {
        const Envelope &entry = (*entries)[i];
        const bool fresh = std::string_view(reinterpret_cast<const char *>(entry.properties), entry.properties_size) == once;
        if (fresh && first >= 0 && entry.position > last) {
            last = entry.position;
            continue;
        }
        if (first >= 0) put(first, last);
        first = last = -1;
        if (fresh) first = last = entry.position;
        else put(entry.position, entry.position);
    }
    if (first >= 0) put(first, last);
    return nb::bytes(words.data(), words.size());
}

// Memory for a draft of a publisher that copies: publishing calls a function with what was written.
struct HeapDraft final : DraftOwner {
    HeapDraft(PyObject *function, std::size_t size) : function(Py_NewRef(function)), data(new std::uint8_t[size ? size : 1]()) {}
    PyObject *publish(PyObject *, std::uint64_t, std::int64_t size) override {
        PyObject *bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(data.get()), size);
        if (!bytes) return nullptr;
        PyObject *result = PyObject_CallOneArg(function, bytes);
        Py_DECREF(bytes);
        if (result) finish();
        return result;
    }
    void cancel(std::uint64_t) noexcept override { finish(); }
    void finish() noexcept {
        Py_DECREF(function);
        delete this;
    }
    PyObject *function;
    std::unique_ptr<std::uint8_t[]> data;
};

nb::object reserve(nb::object function, std::int64_t size) {
    if (size < 0) {
        raise_error("InvalidArgument", "size %zd must be 0 or more bytes", static_cast<Py_ssize_t>(size));
        throw nb::python_error();
    }
    auto *owner = new HeapDraft(function.ptr(), static_cast<std::size_t>(size));
    PyObject *draft = draft_new(owner->data.get(), size, owner, 0, nullptr);
    if (!draft) {
        owner->finish();
        throw nb::python_error();
    }
    return nb::steal(draft);
}

nb::object batch_names(nb::handle batch) {
    if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
    PyObject *channels = batch_channels(batch.ptr());
    if (!channels) return nb::make_tuple();
    if (PyTuple_Check(channels)) return nb::borrow(channels);
    return nb::make_tuple(nb::borrow(channels));
}

// Where a property's value begins in encoded properties, or null.
const char *property(const Envelope &entry, std::string_view wanted, std::size_t &size) {
    const char *at = reinterpret_cast<const char *>(entry.properties);
    const char *end = at + entry.properties_size;
    while (at < end) {
        std::string_view parts[2];
        for (std::string_view &part : parts) {
            const auto *nul = static_cast<const char *>(std::memchr(at, 0, static_cast<std::size_t>(end - at)));
            if (!nul) return nullptr;
            part = {at, static_cast<std::size_t>(nul - at)};
            at = nul + 1;
        }
        if (parts[0] != wanted) continue;
        size = parts[1].size();
        return parts[1].data();
    }
    return nullptr;
}

std::int64_t number_property(const Envelope &entry, std::string_view wanted) {
    std::size_t size = 0;
    const char *text = property(entry, wanted, size);
    std::int64_t value = 0;
    if (text) std::from_chars(text, text + size, value);
    return value;
}

class Outbox {
   public:
    Outbox() : outbox_(release_object) {}

    void text(nb::bytes bytes) { outbox_.text({bytes.c_str(), bytes.size()}); }

    void framed(nb::bytes queue, nb::handle batch, nb::handle deliveries) {
        std::vector<broker::Delivery> rows = deliveries_of(batch, deliveries);
        outbox_.framed({queue.c_str(), queue.size()}, rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    void bare(nb::handle batch) {
        std::vector<broker::Delivery> rows = deliveries_of(batch, nb::none());
        outbox_.bare(rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    // Data and properties of each message, as fetch_index describes them.
    void payloads(nb::handle batch) {
        if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
        const std::vector<Envelope> *entries = batch_entries(batch.ptr());
        if (!entries) throw nb::python_error();
        std::vector<broker::Delivery> rows;
        for (const Envelope &entry : *entries) {
            rows.push_back({entry.data, static_cast<std::size_t>(entry.size), {}, 0, 0, 0, 0});
            if (entry.properties_size) rows.push_back({entry.properties, entry.properties_size, {}, 0, 0, 0, 0});
        }
        outbox_.payloads(rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    void lent(nb::bytes data) {
        outbox_.lent(reinterpret_cast<const std::uint8_t *>(data.c_str()), data.size(), data.inc_ref().ptr());
    }

    std::int64_t send(int descriptor) {
        std::int64_t sent;
        int error;
        {
            nb::gil_scoped_release unlocked;
            sent = outbox_.send(descriptor);
            error = errno;
        }
        outbox_.settle();
        if (sent < 0) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        return sent;
    }

    nb::bytes front(std::size_t most) {
        std::string_view piece = outbox_.front();
        return nb::bytes(piece.data(), piece.size() < most ? piece.size() : most);
    }
    void advance(std::size_t bytes) {
        if (bytes > outbox_.pending_bytes()) throw nb::value_error("more bytes than are pending");
        outbox_.advance(bytes);
        outbox_.settle();
    }
    void clear() { outbox_.clear(); }
    std::size_t pending() { return outbox_.pending_bytes(); }
    std::vector<std::pair<std::int64_t, std::int64_t>> take_sent() { return outbox_.take_sent(); }

   private:
    static std::vector<broker::Delivery> deliveries_of(nb::handle batch, nb::handle counts) {
        if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
        const std::vector<Envelope> *entries = batch_entries(batch.ptr());
        if (!entries) throw nb::python_error();
        std::vector<std::string_view> topics = topics_of(batch_channels(batch.ptr()));
        std::vector<broker::Delivery> rows;
        rows.reserve(entries->size());
        for (const Envelope &entry : *entries) {
            std::string_view topic = topics.empty() ? std::string_view{"default"}
                                                    : topics[topics.size() == 1 ? 0 : entry.channel];
            if (topic.starts_with('$') && entry.properties_size) {  // moved here by the broker: told as where it came from
                std::size_t size = 0;
                if (const char *original = property(entry, "topic", size)) topic = {original, size};
            }
            rows.push_back({entry.data, static_cast<std::size_t>(entry.size), topic, entry.position, entry.ordinal,
                            entry.timestamp_ns, 1});
        }
        if (!counts.is_none()) fill_counts(counts, rows);
        return rows;
    }

    static void fill_counts(nb::handle counts, std::vector<broker::Delivery> &rows) {
        Py_buffer view;
        if (PyObject_GetBuffer(counts.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const bool fits = static_cast<std::size_t>(view.len) == rows.size() * sizeof(std::uint32_t);
        for (std::size_t i = 0; fits && i < rows.size(); ++i)
            std::memcpy(&rows[i].deliveries, static_cast<const char *>(view.buf) + i * sizeof(std::uint32_t),
                        sizeof(std::uint32_t));
        PyBuffer_Release(&view);
        if (!fits) throw nb::value_error("counts must be one unsigned 32-bit number a message");
    }

    static std::string_view utf8(PyObject *text) {
        if (!PyUnicode_Check(text)) return "default";
        Py_ssize_t size = 0;
        const char *data = PyUnicode_AsUTF8AndSize(text, &size);
        if (!data) throw nb::python_error();
        return {data, static_cast<std::size_t>(size)};
    }

    static std::vector<std::string_view> topics_of(PyObject *channels) {
        std::vector<std::string_view> topics;
        if (!channels || channels == Py_None) return topics;
        if (PyUnicode_Check(channels)) return {utf8(channels)};
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(channels); ++i) topics.push_back(utf8(PyTuple_GET_ITEM(channels, i)));
        return topics;
    }

    broker::Outbox outbox_;
};

// Keeps Python objects whose memory a batch made here refers to.
struct ObjectOwner final : Owner {
    explicit ObjectOwner(PyObject *object) : object(Py_NewRef(object)) {}
    void release(std::uint64_t) noexcept override { give_back(); }
    void release_many(const std::uint64_t *, std::size_t) noexcept override { give_back(); }
    void give_back() noexcept {
        Py_DECREF(object);
        delete this;
    }
    PyObject *object;
};

nb::object batch_over(std::vector<Envelope> &&entries, PyObject *keep, PyObject *channels) {
    auto *owner = new ObjectOwner(keep);
    PyObject *made = batch_new(std::move(entries), owner, channels);
    if (!made) {
        owner->give_back();
        throw nb::python_error();
    }
    return nb::steal(made);
}

// A batch of messages that are at hand one by one.
nb::object gather(nb::list messages) {
    std::vector<Envelope> entries;
    nb::list channels;
    nb::dict known;
    for (nb::handle item : messages) {
        if (!message_check(item.ptr())) throw nb::type_error("gather takes messages");
        auto *message = reinterpret_cast<Message *>(item.ptr());
        if (message->released) throw nb::value_error("a message was released");
        nb::object channel = nb::borrow(message->channel ? message->channel : Py_None);
        if (!known.contains(channel)) {
            known[channel] = nb::int_(nb::len(channels));
            channels.append(channel);
        }
        entries.push_back(message->envelope);
        entries.back().channel = nb::cast<std::uint32_t>(known[channel]);
        entries.back().token = 0;
    }
    if (!nb::len(channels)) channels.append(nb::none());
    return batch_over(std::move(entries), messages.ptr(), nb::tuple(channels).ptr());
}

class QueueState {
   public:
    explicit QueueState(std::int64_t start) : state_(start) {}

    // Of what a look forward found, what is to be sent to `consumer`: (batch or None, counts or None, expired).
    // `internal` are the topics with '$' in front that are this queue's; other such topics are nobody's.
    nb::object take(nb::handle batch, std::uint32_t consumer, std::int64_t deadline_ns, std::int64_t now_ns,
                    std::int64_t ttl_ns, nb::tuple internal) {
        const std::vector<Envelope> &entries = entries_of(batch);
        PyObject *channels = batch_channels(batch.ptr());
        std::vector<Envelope> kept;
        std::string counts;
        std::size_t expired = 0;
        bool repeated = false;
        std::int64_t channel = -1;
        bool wanted = true;
        for (const Envelope &entry : entries) {
            if (static_cast<std::int64_t>(entry.channel) != channel) {
                channel = entry.channel;
                wanted = is_wanted(channels, entry.channel, internal);
            }
            if (!wanted) {
                state_.pass(entry.position);
                continue;
            }
            const std::int64_t until = entry.properties_size ? number_property(entry, "expires_ns") : 0;
            if ((ttl_ns > 0 && entry.timestamp_ns + ttl_ns < now_ns) || (until > 0 && until < now_ns)) {
                state_.pass(entry.position);
                ++expired;
                continue;
            }
            std::uint32_t deliveries = 0;
            if (!state_.deliver(entry.position, consumer, deadline_ns, deliveries)) continue;
            repeated |= deliveries > 1;
            kept.push_back(entry);
            counts.append(reinterpret_cast<const char *>(&deliveries), sizeof deliveries);
        }
        nb::object sent = nb::none();
        if (kept.size() == entries.size()) sent = nb::borrow(batch);
        else if (!kept.empty()) sent = batch_over(std::move(kept), batch.ptr(), channels);
        return nb::make_tuple(sent, repeated ? nb::object(nb::bytes(counts.data(), counts.size())) : nb::none(), expired);
    }

    // How many of these are this queue's and still to be delivered.
    std::size_t count(nb::handle batch, nb::tuple internal) {
        PyObject *channels = batch_channels(batch.ptr());
        std::size_t found = 0;
        std::int64_t channel = -1;
        bool wanted = true;
        for (const Envelope &entry : entries_of(batch)) {
            if (static_cast<std::int64_t>(entry.channel) != channel) {
                channel = entry.channel;
                wanted = is_wanted(channels, entry.channel, internal);
            }
            found += wanted && state_.open(entry.position);
        }
        return found;
    }

    // Delayed messages that a look forward found: each waits for its property due_ns.
    void hold(nb::handle batch) {
        for (const Envelope &entry : entries_of(batch)) state_.hold(entry.position, number_property(entry, "due_ns"));
    }

    nb::list due(std::int64_t now_ns, std::size_t most) {
        nb::list found;
        for (const broker::Waiting &item : state_.due(now_ns, most))
            found.append(nb::make_tuple(item.position, item.deliveries));
        return found;
    }
    std::uint32_t redeliver(std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns) {
        std::uint32_t deliveries = 0;
        return state_.redeliver(position, consumer, deadline_ns, deliveries) ? deliveries : 0;
    }
    nb::bytes delta() {
        std::string record = state_.delta();
        return nb::bytes(record.data(), record.size());
    }
    nb::bytes snapshot() {
        std::string record = state_.snapshot();
        return nb::bytes(record.data(), record.size());
    }
    bool apply(nb::bytes record) { return state_.apply({record.c_str(), record.size()}); }
    broker::QueueState &state() { return state_; }

   private:
    static const std::vector<Envelope> &entries_of(nb::handle batch) {
        if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
        const std::vector<Envelope> *entries = batch_entries(batch.ptr());
        if (!entries) throw nb::python_error();
        return *entries;
    }

    static bool is_wanted(PyObject *channels, std::uint32_t index, nb::tuple internal) {
        if (!channels || channels == Py_None) return true;
        PyObject *name = PyTuple_Check(channels) ? PyTuple_GET_ITEM(channels, index) : channels;
        if (!PyUnicode_Check(name) || PyUnicode_GET_LENGTH(name) == 0 || PyUnicode_READ_CHAR(name, 0) != '$') return true;
        return PySequence_Contains(internal.ptr(), name) == 1;
    }

    broker::QueueState state_;
};

// A buffer of one item of publish_lines, released at the end.
struct Item {
    const char *data;
    Py_ssize_t size;
};

struct Views {
    std::vector<Py_buffer> held;
    ~Views() {
        for (Py_buffer &view : held) PyBuffer_Release(&view);
    }
};

Item item_of(PyObject *object, Views &views) {
    if (PyBytes_CheckExact(object)) return {PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object)};
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    views.held.push_back(view);
    return {static_cast<const char *>(view.buf), view.len};
}

std::vector<Item> items_of(nb::handle items, Views &views, nb::object &keep) {
    std::vector<Item> found;
    if (batch_check(items.ptr())) {
        const std::vector<Envelope> *entries = batch_entries(items.ptr());
        if (!entries) throw nb::python_error();
        for (const Envelope &entry : *entries)
            found.push_back({reinterpret_cast<const char *>(entry.data), static_cast<Py_ssize_t>(entry.size)});
        return found;
    }
    keep = nb::steal(PySequence_Fast(items.ptr(), "publish_many takes an iterable of bytes-like objects"));
    if (!keep.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(keep.ptr());
    found.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) found.push_back(item_of(PySequence_Fast_GET_ITEM(keep.ptr(), i), views));
    return found;
}

// "head length tail\ndata\n" of each item, one after the other.
nb::bytes publish_lines(nb::bytes head, nb::handle items, nb::bytes tail, std::size_t max_message_bytes) {
    Views views;
    nb::object keep;
    std::vector<Item> found = items_of(items, views, keep);
    std::size_t total = 0;
    char digits[24];
    for (const Item &item : found) {
        if (static_cast<std::size_t>(item.size) > max_message_bytes) {
            raise_error("InvalidArgument", "a message of %zd bytes is larger than the %zu bytes allowed", item.size,
                        max_message_bytes);
            throw nb::python_error();
        }
        auto length = static_cast<std::size_t>(std::to_chars(digits, digits + 24, item.size).ptr - digits);
        total += head.size() + 1 + length + tail.size() + 1 + static_cast<std::size_t>(item.size) + 1;
    }
    nb::bytes result = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total)));
    if (!result.is_valid()) throw nb::python_error();
    char *at = PyBytes_AS_STRING(result.ptr());
    for (const Item &item : found) {
        std::memcpy(at, head.c_str(), head.size());
        at += head.size();
        *at++ = ' ';
        at = std::to_chars(at, at + 24, item.size).ptr;
        std::memcpy(at, tail.c_str(), tail.size());
        at += tail.size();
        *at++ = '\n';
        if (item.size) std::memcpy(at, item.data, static_cast<std::size_t>(item.size));
        at += item.size;
        *at++ = '\n';
    }
    return result;
}

}  // namespace

void bind_broker(nb::module_ &module) {
    nb::class_<Scanner>(module, "Scanner")
        .def(nb::init<const char *, std::uint32_t, std::uint32_t>(), nb::arg("grammar"), nb::arg("max_message_bytes"),
             nb::arg("max_line_bytes") = 4096)
        .def("receive", &Scanner::receive)
        .def("feed", &Scanner::feed)
        .def("next", &Scanner::next, nb::arg("most") = 16384)
        .def("allow", &Scanner::allow)
        .def("refuse", &Scanner::refuse)
        .def("forget_topics", &Scanner::forget_topics)
        .def_prop_ro("buffered_bytes", &Scanner::buffered)
        .def_prop_ro("held_bytes", &Scanner::held)
        .def_prop_ro("moved_bytes", &Scanner::moved);
    nb::class_<Outbox>(module, "Outbox")
        .def(nb::init<>())
        .def("text", &Outbox::text)
        .def("framed", &Outbox::framed, nb::arg("queue"), nb::arg("batch"), nb::arg("deliveries").none() = nb::none())
        .def("bare", &Outbox::bare)
        .def("payloads", &Outbox::payloads)
        .def("lent", &Outbox::lent)
        .def("send", &Outbox::send)
        .def("front", &Outbox::front, nb::arg("most") = 65536)
        .def("advance", &Outbox::advance)
        .def("clear", &Outbox::clear)
        .def("take_sent", &Outbox::take_sent)
        .def_prop_ro("pending_bytes", &Outbox::pending);
    nb::class_<QueueState>(module, "QueueState")
        .def(nb::init<std::int64_t>(), nb::arg("start"))
        .def("take", &QueueState::take, nb::arg("batch"), nb::arg("consumer"), nb::arg("deadline_ns"),
             nb::arg("now_ns"), nb::arg("ttl_ns") = 0, nb::arg("internal") = nb::make_tuple())
        .def("hold", &QueueState::hold)
        .def("count", &QueueState::count)
        .def("look_from", [](QueueState &self, std::int64_t cursor) { self.state().look_from(cursor); })
        .def("acknowledge",
             [](QueueState &self, std::uint32_t consumer, std::int64_t first, std::int64_t last, bool exact) {
                 return self.state().acknowledge(consumer, first, last, exact);
             },
             nb::arg("consumer"), nb::arg("first"), nb::arg("last"), nb::arg("exact") = false)
        .def("return_message", [](QueueState &self, std::uint32_t consumer, std::int64_t position,
                                  std::int64_t due_ns) { return self.state().return_message(consumer, position, due_ns); })
        .def("drop_consumer",
             [](QueueState &self, std::uint32_t consumer, std::int64_t now_ns, bool delivered) {
                 return self.state().drop_consumer(consumer, now_ns, delivered);
             },
             nb::arg("consumer"), nb::arg("now_ns"), nb::arg("delivered") = true)
        .def("expire", [](QueueState &self, std::int64_t now_ns) { return self.state().expire(now_ns); })
        .def("due", &QueueState::due)
        .def("redeliver", &QueueState::redeliver)
        .def("reset", [](QueueState &self, std::int64_t start) { self.state().reset(start); })
        .def("delta", &QueueState::delta)
        .def("snapshot", &QueueState::snapshot)
        .def("apply", &QueueState::apply)
        .def("recovered", [](QueueState &self) { self.state().recovered(); })
        .def_prop_ro("next_time_ns", [](QueueState &self) { return self.state().next_time_ns(); })
        .def_prop_ro("floor", [](QueueState &self) { return self.state().floor(); })
        .def_prop_ro("cursor", [](QueueState &self) { return self.state().cursor(); })
        .def_prop_ro("outstanding", [](QueueState &self) { return self.state().outstanding(); })
        .def_prop_ro("in_flight", [](QueueState &self) { return self.state().in_flight(); })
        .def_prop_ro("waiting", [](QueueState &self) { return self.state().waiting(); })
        .def("in_flight_of", [](QueueState &self, std::uint32_t consumer) { return self.state().in_flight_of(consumer); })
        .def_prop_ro("changed", [](QueueState &self) { return self.state().changed(); });
    module.def("gather", &gather);
    module.def("ack_words", &ack_words);
    module.def("reserve", &reserve);
    module.def("fetch_index", &fetch_index);
    module.def("batch_names", &batch_names);
    module.def("publish_lines", &publish_lines, nb::arg("head"), nb::arg("items"), nb::arg("tail") = nb::bytes("", 0),
               nb::arg("max_message_bytes") = 0xffffffff);
}

}  // namespace penstock
