// penstock._core.journal.Reader, TopicFilter and Watch.

#include <cstring>
#include <memory>
#include <mutex>

#include "gil.hpp"
#include "journal/python.hpp"
#include "journal/reader.hpp"

namespace penstock::journal {
namespace {

// Holds the mapped file for the messages of one read.
struct MappingOwner final : Owner {
    MappingOwner(std::shared_ptr<Mapping> mapping, std::size_t left) : mapping(std::move(mapping)), left(left) {}
    void release(std::uint64_t) noexcept override {
        if (--left == 0) delete this;
    }
    bool retain(std::uint64_t) noexcept override { return ++left; }
    void release_many(const std::uint64_t *, std::size_t count) noexcept override {
        if ((left -= count) == 0) delete this;
    }
    std::shared_ptr<Mapping> mapping;
    std::size_t left;
};

Envelope envelope_of(const Found &found) {
    RecordHeader record;
    std::memcpy(&record, found.record, sizeof record);
    Envelope envelope;
    envelope.data = found.record + sizeof record;
    envelope.size = record.data_bytes;
    envelope.ordinal = record.ordinal;
    envelope.timestamp_ns = record.timestamp_ns;
    envelope.stored_ns = record.stored_ns;
    envelope.position = static_cast<std::int64_t>(found.position);
    envelope.properties = envelope.data + record.data_bytes;
    envelope.properties_size = record.properties_bytes;
    envelope.message_id_size = record.id_bytes;
    envelope.key_size = record.key_bytes;
    envelope.channel = record.topic;
    return envelope;
}

nb::object new_bytes(std::size_t size, char *&at) {
    PyObject *made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (!made) throw nb::python_error();
    at = PyBytes_AS_STRING(made);
    return nb::steal(made);
}

// One number of each entry.
template <typename Number, typename Get>
nb::object numbers_of(const std::vector<IndexEntry> &entries, Get get) {
    char *at;
    nb::object made = new_bytes(entries.size() * sizeof(Number), at);
    for (const IndexEntry &entry : entries) {
        const Number number = static_cast<Number>(get(entry));
        std::memcpy(at, &number, sizeof number);
        at += sizeof number;
    }
    return made;
}

// One part of each message in the form of Arrow's binary values: offsets, and the concatenated bytes.
template <typename Stretch>
nb::object gathered(const std::vector<Found> &found, Stretch stretch) {
    std::size_t total = 0;
    for (const Found &item : found) total += stretch(envelope_of(item)).size();
    if (total > INT32_MAX)  // one message alone: a batch of several is smaller
        fail("CapacityError", "the message at position " + std::to_string(found[0].position) + " is too long for a column");
    char *offset, *at;
    nb::object offsets = new_bytes((found.size() + 1) * sizeof(std::int32_t), offset), bytes = new_bytes(total, at);
    std::int32_t reached = 0;
    std::memcpy(offset, &reached, sizeof reached);
    {
        GilReleased released;
        for (const Found &item : found) {
            const std::string_view part = stretch(envelope_of(item));
            if (!part.empty()) std::memcpy(at + reached, part.data(), part.size());
            reached += static_cast<std::int32_t>(part.size());
            offset += sizeof reached;
            std::memcpy(offset, &reached, sizeof reached);
        }
    }
    return nb::make_tuple(offsets, bytes);
}

void check_problem(const Problem &problem) {
    if (problem.kind == Problem::none) return;
    if (problem.kind == Problem::system) fail_system(problem.error, problem.text, problem.place);
    if (problem.kind == Problem::version) fail("InvalidArgument", problem.place + " " + problem.text);
    nb::object kind = nb::module_::import_("penstock.errors").attr("CorruptionError");
    nb::object error = kind(problem.text + " (" + problem.place + ")", problem.place);
    if (problem.next > problem.first) error.attr("positions") = nb::make_tuple(problem.first, problem.next);
    PyErr_SetObject(kind.ptr(), error.ptr());
    throw nb::python_error();
}

class BoundReader {
   public:
    BoundReader(const std::string &directory, std::uint64_t segment_bytes) {
        Problem problem;
        reader_ = Reader::open(directory, segment_bytes, problem);
        check_problem(problem);
    }

    nb::tuple read_many(std::uint64_t start, std::uint64_t most, std::uint64_t most_bytes, TopicFilter *filter) {
        ReadResult result = look({start, most, most_bytes, filter});
        check_problem(result.problem);
        std::vector<Envelope> entries;
        entries.reserve(result.found.size());
        std::uint32_t greatest = 0;
        bool known = true;
        for (const Found &found : result.found) {
            entries.push_back(envelope_of(found));
            greatest = std::max(greatest, found.topic);
            known = known && is_named(found.topic);
        }
        nb::object names = channels(greatest, known);
        auto *owner = entries.empty() ? nullptr : new MappingOwner(result.mapping, entries.size());
        nb::object batch = nb::steal(batch_new(std::move(entries), owner, names.ptr()));
        if (!batch.is_valid()) throw nb::python_error();
        return nb::make_tuple(batch, result.next, result.skipped);
    }

    // Messages from `start` up to but without `stop` by column, of one segment: ({name: bytes or (offsets, bytes)}, names
    // of topics by number, where to go on). Numbers are int64; topics, by number, uint32; offsets, one more than there are
    // messages, int32. Where no column comes from the records only the index is read.
    nb::tuple columns(std::uint64_t start, std::uint64_t stop, std::uint64_t most, std::uint64_t most_bytes,
                      TopicFilter *filter, nb::handle wanted) {
        auto is_wanted = [&](const char *name) { return PySequence_Contains(wanted.ptr(), nb::str(name).ptr()) == 1; };
        const bool records = is_wanted("payload") || is_wanted("properties") || is_wanted("message_id") || is_wanted("key");
        most_bytes = std::min<std::uint64_t>(most_bytes, 1 << 30);  // offsets have 31 bits, and one message may be longer
        ReadResult result = look({start, most, most_bytes, filter, stop, records, true, true});
        check_problem(result.problem);
        nb::dict found;
        auto number = [&]<typename Number>(const char *name, Number IndexEntry::*field) {
            using Wide = std::conditional_t<sizeof(Number) == 8, Number, std::int64_t>;
            if (is_wanted(name)) found[name] = numbers_of<Wide>(result.entries, [&](const IndexEntry &entry) { return entry.*field; });
        };
        number("position", &IndexEntry::position);
        number("ordinal", &IndexEntry::ordinal);
        number("timestamp_ns", &IndexEntry::timestamp_ns);
        number("stored_ns", &IndexEntry::stored_ns);
        number("size", &IndexEntry::length);
        auto part = [&](const char *name, auto stretch) {
            if (is_wanted(name)) found[name] = gathered(result.found, stretch);
        };
        part("payload", [](const Envelope &message) {
            return std::string_view(reinterpret_cast<const char *>(message.data), static_cast<std::size_t>(message.size));
        });
        part("properties", [](const Envelope &message) { return message.encoded_properties(); });
        part("message_id", [](const Envelope &message) { return message.message_id(); });
        part("key", [](const Envelope &message) { return message.key(); });
        nb::object names = nb::make_tuple();
        if (is_wanted("topic")) {
            found["topic"] = numbers_of<std::uint32_t>(result.entries, [](const IndexEntry &entry) { return entry.topic; });
            std::uint32_t greatest = 0;
            bool known = true;
            for (const Found &item : result.found) {
                greatest = std::max(greatest, item.topic);
                known = known && is_named(item.topic);
            }
            names = channels(greatest, known);
        }
        return nb::make_tuple(found, names, result.found.size(), result.next);
    }

    nb::list holes() {
        const char *reasons[] = {"retention", "compaction", "lost"};
        auto found = with_reader([&](Problem &problem) { return reader_->holes(problem); });
        nb::list result;
        for (const Hole &hole : found) result.append(nb::make_tuple(hole.first, hole.last, reasons[hole.reason]));
        return result;
    }

    nb::object read(std::uint64_t position) {
        ReadResult result = look({position, 1, ~std::uint64_t{0}});
        if (!result.found.empty() && result.found[0].position != position) result.found.clear();
        else check_problem(result.problem);
        if (result.found.empty()) return nb::none();
        nb::object names = channels(result.found[0].topic, is_named(result.found[0].topic));
        auto *owner = new MappingOwner(result.mapping, 1);
        PyObject *message =
            message_new(envelope_of(result.found[0]), owner, PyTuple_GET_ITEM(names.ptr(), result.found[0].topic));
        if (!message) {
            delete owner;
            throw nb::python_error();
        }
        return nb::steal(message);
    }

    // (message id, key) or None.
    nb::object details(std::uint64_t position) {
        ReadResult result = look({position, 1, ~std::uint64_t{0}});
        if (result.found.empty() || result.found[0].position != position) {
            check_problem(result.problem);
            return nb::none();
        }
        RecordHeader record;
        std::memcpy(&record, result.found[0].record, sizeof record);
        const std::uint8_t *at = result.found[0].record + sizeof record + record.data_bytes + record.properties_bytes;
        return nb::make_tuple(nb::bytes(at, record.id_bytes), nb::bytes(at + record.id_bytes, record.key_bytes));
    }

    std::uint64_t find_time(std::int64_t stored_ns, std::uint32_t topic) {
        return with_reader([&](Problem &problem) { return reader_->find_time(stored_ns, topic, problem); });
    }
    std::uint64_t find_ordinal(std::uint32_t topic, std::uint64_t ordinal) {
        return with_reader([&](Problem &problem) { return reader_->find_ordinal(topic, ordinal, problem); });
    }
    std::uint32_t topic_id(std::string_view name) {
        return with_reader([&](Problem &problem) { return reader_->topic_id(name, problem); });
    }
    nb::list topics() {
        std::vector<std::string> names = with_reader([&](Problem &problem) { return reader_->topics(problem); });
        nb::list result;
        for (std::size_t id = 1; id < names.size(); ++id)
            if (!names[id].empty()) result.append(nb::make_tuple(id, nb::bytes(names[id].data(), names[id].size())));
        return result;
    }
    nb::list segments() {
        auto places = with_reader([&](Problem &problem) { return reader_->places(problem); });
        nb::list result;
        for (const auto &place : places) result.append(nb::make_tuple(place.first, place.next, place.revision));
        return result;
    }
    std::uint64_t first() {
        return with_reader([&](Problem &problem) { return reader_->first(problem); });
    }
    std::uint64_t frontier() { return words().frontier; }
    nb::tuple frontier_words() {
        FrontierWords found = words();
        return nb::make_tuple(found.frontier, found.segment, found.end, found.generation);
    }
    nb::bytes uuid() { return nb::bytes(reader_->uuid(), 16); }

   private:
    // Without the lock: only the mapped file is looked at.
    FrontierWords words() {
        Problem problem;
        FrontierWords found = reader_->frontier(problem);
        check_problem(problem);
        return found;
    }
    ReadResult look(const Pass &pass) {
        GilReleased released;
        std::lock_guard lock(mutex_);
        return reader_->read(pass);
    }
    template <typename Call>
    auto with_reader(Call call) -> std::decay_t<decltype(call(std::declval<Problem &>()))> {
        Problem problem;
        std::decay_t<decltype(call(problem))> result;
        {
            GilReleased released;
            std::lock_guard lock(mutex_);
            result = call(problem);
        }
        check_problem(problem);
        return result;
    }

    // Topics are numbered when they are asked for and defined when they are first used, so a lower id may come later.
    bool is_named(std::uint32_t topic) const { return topic < named_.size() && named_[topic]; }

    // All names so far, by topic id.
    nb::object channels(std::uint32_t greatest, bool known_already) {
        if (names_.is_valid() && known_already) return names_;
        std::vector<std::string> known;
        {
            GilReleased released;
            std::lock_guard lock(mutex_);
            Problem problem;  // concerns only the names: the messages are there
            known = reader_->topics(problem);
        }
        std::size_t count = std::max<std::size_t>(known.size(), greatest + std::size_t{1});
        nb::object names = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
        if (!names.is_valid()) throw nb::python_error();
        std::vector<bool> named(count);
        for (std::size_t id = 0; id < count; ++id) {
            std::string name = id < known.size() ? known[id] : std::string();
            named[id] = !name.empty();
            if (name.empty()) name = Reader::unknown_name(static_cast<std::uint32_t>(id));  // its record was damaged
            PyObject *text = PyUnicode_DecodeUTF8(name.data(), static_cast<Py_ssize_t>(name.size()), "replace");
            if (!text) throw nb::python_error();
            PyTuple_SET_ITEM(names.ptr(), static_cast<Py_ssize_t>(id), text);
        }
        names_ = names;
        named_ = std::move(named);
        return names;
    }

    std::mutex mutex_;
    std::unique_ptr<Reader> reader_;
    nb::object names_;
    std::vector<bool> named_;  // which of them are known
};

}  // namespace

void bind_reader(nb::module_ &module) {
    nb::class_<TopicFilter>(module, "TopicFilter").def(nb::init<std::vector<std::string>>()).def("matches", &TopicFilter::matches);
    nb::class_<Watch>(module, "Watch")
        .def(nb::init<const std::string &>())
        .def("fileno", &Watch::file)
        .def("wait", &Watch::wait, nb::arg("timeout_ms"), nb::call_guard<GilReleased>())
        .def("drain", &Watch::drain)
        .def("wake", &Watch::wake);
    nb::class_<BoundReader>(module, "Reader")
        .def(nb::init<const std::string &, std::uint64_t>(), nb::arg("directory"), nb::arg("segment_bytes"))
        .def("read", &BoundReader::read, nb::arg("position"))
        .def("read_many", &BoundReader::read_many, nb::arg("start"), nb::arg("most"), nb::arg("most_bytes"),
             nb::arg("filter").none() = nb::none())
        .def("columns", &BoundReader::columns, nb::arg("start"), nb::arg("stop"), nb::arg("most"), nb::arg("most_bytes"),
             nb::arg("filter").none(), nb::arg("wanted"))
        .def("holes", &BoundReader::holes)
        .def("details", &BoundReader::details, nb::arg("position"))
        .def("find_time", &BoundReader::find_time, nb::arg("stored_ns"), nb::arg("topic_id") = 0)
        .def("find_ordinal", &BoundReader::find_ordinal, nb::arg("topic_id"), nb::arg("ordinal"))
        .def("topic_id", &BoundReader::topic_id, nb::arg("name"))
        .def("topics", &BoundReader::topics)
        .def("segments", &BoundReader::segments)
        .def_prop_ro("uuid", &BoundReader::uuid)
        .def_prop_ro("first", &BoundReader::first)
        .def_prop_ro("frontier", &BoundReader::frontier)
        .def("frontier_words", &BoundReader::frontier_words);
}

}  // namespace penstock::journal
