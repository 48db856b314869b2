#include "broker/python.hpp"

#include <charconv>
#include <cstring>
#include <memory>
#include <string>

namespace nb = nanobind;

namespace penstock::broker {

namespace {

// The words of ACK for the messages begin to end of a batch of deliveries: a range for runs of first deliveries, a
// position for each message that was delivered before.
nb::bytes ack_words(nb::handle batch, std::size_t begin, std::size_t end) {
    const std::vector<Envelope> &entries = entries_of(batch);
    std::string words;
    std::int64_t first = -1, last = -1;
    const auto put = [&words](std::int64_t from, std::int64_t to) {
        words.append(1, ' ').append(std::to_string(from));
        if (to != from) words.append(1, '-').append(std::to_string(to));
    };
    for (std::size_t i = begin; i < end && i < entries.size(); ++i) {
        const Envelope &entry = entries[i];
        const bool fresh = entry.token == 1;
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

// How often a message that came by MSG was delivered, this time included.
std::uint64_t delivery_count(nb::handle message) {
    if (!message_check(message.ptr())) throw nb::type_error("a Message is needed");
    return reinterpret_cast<Message *>(message.ptr())->envelope.token;
}

// How many messages of a batch that came by MSG were delivered before.
std::size_t redelivered_count(nb::handle batch) {
    std::size_t found = 0;
    for (const Envelope &entry : entries_of(batch)) found += entry.token > 1;
    return found;
}

nb::object batch_names(nb::handle batch) {
    if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
    PyObject *channels = batch_channels(batch.ptr());
    if (!channels) return nb::make_tuple();
    if (PyTuple_Check(channels)) return nb::borrow(channels);
    return nb::make_tuple(nb::borrow(channels));
}

// A compact copy of a batch, which does not hold the memory in which the messages arrived.
struct CopyOwner final : Owner {
    explicit CopyOwner(std::size_t bytes) : memory(new std::uint8_t[bytes ? bytes : 1]) {}
    void release(std::uint64_t) noexcept override { delete this; }
    void release_many(const std::uint64_t *, std::size_t) noexcept override { delete this; }
    std::unique_ptr<std::uint8_t[]> memory;
};

// Bytes of data, properties, message ids and keys.
std::size_t batch_bytes(nb::handle batch) {
    const std::vector<Envelope> &entries = entries_of(batch);
    std::size_t total = 0;
    for (const Envelope &entry : entries) total += static_cast<std::size_t>(entry.size) + entry.details_size();
    return total;
}

nb::object kept_part(std::vector<Envelope> &&copies, std::size_t bytes, PyObject *channels) {
    auto *owner = new CopyOwner(bytes);
    std::uint8_t *at = owner->memory.get();
    for (Envelope &entry : copies) {
        if (entry.size) std::memcpy(at, entry.data, static_cast<std::size_t>(entry.size));
        entry.data = at;
        at += entry.size;
        if (const std::size_t details = entry.details_size()) {
            std::memcpy(at, entry.properties, details);
            entry.properties = at;
            at += details;
        }
    }
    PyObject *made = batch_new(std::move(copies), owner, channels);
    if (!made) {
        delete owner;
        throw nb::python_error();
    }
    return nb::steal(made);
}

// Copies a batch in parts of at most so many messages and bytes (but at least one message).
nb::list kept(nb::handle batch, std::size_t most_messages, std::size_t most_bytes) {
    const std::vector<Envelope> &entries = entries_of(batch);
    nb::list parts;
    for (auto at = entries.begin(); at != entries.end();) {
        const auto begin = at;
        std::size_t bytes = 0;
        do bytes += static_cast<std::size_t>(at->size) + at->details_size();
        while (++at != entries.end() && static_cast<std::size_t>(at - begin) < most_messages && bytes < most_bytes);
        parts.append(kept_part({begin, at}, bytes, batch_channels(batch.ptr())));
    }
    return parts;
}

// One batch of the messages of several, in their order, over the same memory.
nb::object joined(nb::list batches) {
    std::vector<Envelope> entries;
    nb::list channels;
    nb::dict known;
    for (nb::handle batch : batches) {
        nb::object names = batch_names(batch);
        std::vector<std::int64_t> numbers(std::max<std::size_t>(1, nb::len(names)), -1);
        for (const Envelope &entry : entries_of(batch)) {
            std::int64_t &number = numbers[nb::len(names) > 1 ? entry.channel : 0];
            if (number < 0) {
                nb::object name = nb::len(names) ? nb::object(names[nb::len(names) > 1 ? entry.channel : 0]) : nb::none();
                if (!known.contains(name)) {
                    known[name] = nb::int_(nb::len(channels));
                    channels.append(name);
                }
                number = nb::cast<std::int64_t>(known[name]);
            }
            entries.push_back(entry);
            entries.back().channel = static_cast<std::uint32_t>(number);
        }
    }
    if (!nb::len(channels)) channels.append(nb::none());
    return batch_over(std::move(entries), batches.ptr(), nb::tuple(channels).ptr());
}

// A batch made of single messages.
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

bool is_own(PyObject *channels, std::uint32_t index) {
    PyObject *name = channels && PyTuple_Check(channels) ? PyTuple_GET_ITEM(channels, index) : channels;
    return name && PyUnicode_Check(name) && PyUnicode_GET_LENGTH(name) > 0 && PyUnicode_READ_CHAR(name, 0) == '$';
}

// The messages whose topics are not the broker's own ('$' in front; with `own_too` all), and the topics they have:
// number to name.
nb::tuple public_part(nb::handle batch, bool own_too) {
    const std::vector<Envelope> &entries = entries_of(batch);
    PyObject *channels = batch_channels(batch.ptr());
    nb::dict topics;
    std::vector<Envelope> kept;
    std::int64_t channel = -1;
    bool own = false;
    for (const Envelope &entry : entries) {
        if (static_cast<std::int64_t>(entry.channel) != channel) {
            channel = entry.channel;
            own = !own_too && is_own(channels, entry.channel);
            if (!own && channels && PyTuple_Check(channels))
                topics[nb::int_(entry.channel)] = nb::borrow(PyTuple_GET_ITEM(channels, entry.channel));
        }
        if (!own) kept.push_back(entry);
    }
    nb::object found = nb::borrow(batch);
    if (kept.size() != entries.size()) found = batch_over(std::move(kept), batch.ptr(), channels);
    return nb::make_tuple(found, topics);
}

}  // namespace

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

std::string_view foreign_properties(const Envelope &entry) {
    const char *at = reinterpret_cast<const char *>(entry.properties);
    const char *const end = at + entry.properties_size;
    const char *const begin = at;
    for (bool key = true; at < end; key = !key) {
        // the broker's own properties come last
        if (key && *at == '$') return {begin, static_cast<std::size_t>(at - begin)};
        const auto *nul = static_cast<const char *>(std::memchr(at, 0, static_cast<std::size_t>(end - at)));
        if (!nul || (key && nul + 1 == end)) return {};
        at = nul + 1;
    }
    return {begin, entry.properties_size};
}

std::int64_t number_property(const Envelope &entry, std::string_view wanted) {
    std::size_t size = 0;
    const char *text = property(entry, wanted, size);
    std::int64_t value = 0;
    if (text) std::from_chars(text, text + size, value);
    return value;
}

void bind_batches(nb::module_ &module) {
    module.def("gather", &gather);
    module.def("public_part", &public_part, nb::arg("batch"), nb::arg("own_too") = false);
    module.def("ack_words", &ack_words);
    module.def("delivery_count", &delivery_count);
    module.def("redelivered_count", &redelivered_count);
    module.def("kept", &kept);
    module.def("joined", &joined);
    module.def("batch_bytes", &batch_bytes);
    module.def("batch_names", &batch_names);
}

}  // namespace penstock::broker
