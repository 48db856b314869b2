// Ranges: many messages as an index of fixed width and the bytes that it describes (docs/formats.md, "Range fetch").
// FETCH answers with one, LOAD brings one; everything in it is checked before it is used.
#include <cstring>
#include <string>
#include <unordered_map>

#include "broker/python.hpp"
#include "broker/scanner.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

struct RangeEntry {
    std::int64_t position;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::uint64_t offset;  // of the data in what follows the index; properties, message id and key stand right after it
    std::uint32_t length;
    std::uint32_t topic;
    std::uint32_t properties_length;
    std::uint16_t message_id_length;
    std::uint16_t key_length;
};
static_assert(sizeof(RangeEntry) == 48);

// The index of a batch, and how many bytes follow it.
nb::tuple fetch_index(nb::handle batch) {
    const std::vector<Envelope> &entries = entries_of(batch);
    PyObject *made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(entries.size() * sizeof(RangeEntry)));
    if (!made) throw nb::python_error();
    char *at = PyBytes_AS_STRING(made);
    std::uint64_t offset = 0;
    for (const Envelope &entry : entries) {
        const RangeEntry row{entry.position,
                             entry.ordinal,
                             entry.timestamp_ns,
                             offset,
                             static_cast<std::uint32_t>(entry.size),
                             entry.channel,
                             entry.properties_size,
                             entry.message_id_size,
                             entry.key_size};
        std::memcpy(at, &row, sizeof row);
        at += sizeof row;
        offset += static_cast<std::uint64_t>(entry.size) + entry.details_size();
    }
    return nb::make_tuple(nb::steal<nb::bytes>(made), offset);
}

[[noreturn]] void refuse(std::size_t number, const char *why) {
    raise_error("InvalidArgument", "message %zu of the range %s", number, why);
    throw nb::python_error();
}

bool is_text(std::string_view bytes) {
    PyObject *text = PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), nullptr);
    if (!text) PyErr_Clear();
    Py_XDECREF(text);
    return text != nullptr;
}

// A view of any buffer, held as long as this object lives.
class Look {
   public:
    explicit Look(nb::handle object) : view_(nb::steal(PyMemoryView_FromObject(object.ptr()))) {
        if (!view_.is_valid()) throw nb::python_error();
        const Py_buffer *buffer = PyMemoryView_GET_BUFFER(view_.ptr());
        if (!PyBuffer_IsContiguous(buffer, 'C')) throw nb::buffer_error("the bytes of a range lie in one piece");
        data = static_cast<const std::uint8_t *>(buffer->buf);
        size = static_cast<std::size_t>(buffer->len);
    }
    PyObject *keep() const { return view_.ptr(); }
    const std::uint8_t *data;
    std::size_t size;

   private:
    nb::object view_;
};

// The inverse of fetch_index: messages over `data`, which is kept. `topics` gives the names of topic numbers. With
// `foreign` it came from a peer: no properties with '$' in front, none longer than a publish may have.
nb::object range_batch(nb::handle index, nb::handle data, nb::dict topics, std::uint64_t max_message_bytes, bool foreign) {
    const Look head(index), body(data);
    if (head.size % sizeof(RangeEntry)) {
        raise_error("InvalidArgument", "the index of a range has %zu bytes: no whole number of entries", head.size);
        throw nb::python_error();
    }
    struct Topic {
        nb::handle name;
        std::int64_t channel = -1;  // a topic that is named but not used is not part of the batch
    };
    std::unordered_map<std::uint32_t, Topic> known;
    for (auto [number, name] : topics) known.emplace(nb::cast<std::uint32_t>(number), Topic{name});
    nb::list names;
    const std::size_t count = head.size / sizeof(RangeEntry);
    std::vector<Envelope> entries;
    entries.reserve(count);
    std::uint64_t reached = 0;
    for (std::size_t i = 0; i < count; ++i) {
        RangeEntry row;
        std::memcpy(&row, head.data + i * sizeof row, sizeof row);
        const std::uint64_t details = std::uint64_t{row.properties_length} + row.message_id_length + row.key_length;
        if (row.offset < reached || row.offset > body.size || body.size - row.offset < row.length + details)
            refuse(i, "lies outside of its bytes or over another one");
        reached = row.offset + row.length + details;
        if (row.length > max_message_bytes) refuse(i, "is larger than a message may be");
        const auto found = known.find(row.topic);
        if (found == known.end()) refuse(i, "has a topic that is not named");
        Topic &topic = found->second;
        if (topic.channel < 0) {
            if (!PyUnicode_Check(topic.name.ptr())) throw nb::type_error("a topic's name is a str");
            topic.channel = static_cast<std::int64_t>(nb::len(names));
            names.append(topic.name);
        }
        Envelope &entry = entries.emplace_back();
        entry.data = body.data + row.offset;
        entry.size = row.length;
        entry.ordinal = row.ordinal;
        entry.timestamp_ns = row.timestamp_ns;
        entry.position = row.position;
        entry.properties = entry.data + row.length;
        entry.properties_size = row.properties_length;
        entry.message_id_size = row.message_id_length;
        entry.key_size = row.key_length;
        entry.channel = static_cast<std::uint32_t>(topic.channel);
        if (foreign && row.properties_length > Scanner::max_properties_bytes) refuse(i, "has too long properties");
        if (!good_properties(entry.properties, entry.properties_size, foreign)) refuse(i, "has bad properties");
        if (!is_text(entry.message_id()) || !is_text(entry.key())) refuse(i, "has a message id or key that is no UTF-8");
    }
    if (!count) names.append(nb::none());
    return batch_over(std::move(entries), body.keep(), nb::tuple(names).ptr());
}

// (index, message id) of those that have one no longer than `most_bytes`, the last `most` of them.
nb::list message_ids(nb::handle batch, std::size_t most, std::size_t most_bytes) {
    const std::vector<Envelope> &entries = entries_of(batch);
    std::size_t from = entries.size();
    for (std::size_t found = 0; from && found < most; --from)
        found += entries[from - 1].message_id_size != 0 && entries[from - 1].message_id_size <= most_bytes;
    nb::list result;
    for (std::size_t i = from; i < entries.size(); ++i) {
        const std::string_view name = entries[i].message_id();
        if (name.empty() || name.size() > most_bytes) continue;
        nb::object text = text_of(name);
        if (!text.is_valid()) throw nb::python_error();
        result.append(nb::make_tuple(i, text));
    }
    return result;
}

// (message id, key) of each message.
nb::list details(nb::handle batch) {
    nb::list result;
    for (const Envelope &entry : entries_of(batch)) {
        const std::string_view name = entry.message_id(), key = entry.key();
        result.append(nb::make_tuple(nb::bytes(name.data(), name.size()), nb::bytes(key.data(), key.size())));
    }
    return result;
}

}  // namespace

void bind_ranges(nb::module_ &module) {
    module.def("fetch_index", &fetch_index);
    module.def("range_batch", &range_batch, nb::arg("index"), nb::arg("data"), nb::arg("topics"),
               nb::arg("max_message_bytes") = 0xffffffff, nb::arg("foreign") = true);
    module.def("message_ids", &message_ids);
    module.def("batch_details", &details);
}

}  // namespace penstock::broker
