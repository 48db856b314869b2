// penstock._core.journal.Writer.

#include <cerrno>
#include <fcntl.h>
#include <memory>
#include <mutex>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "gil.hpp"
#include "journal/disk.hpp"
#include "journal/python.hpp"
#include "journal/writer.hpp"

namespace penstock::journal {
namespace {

// Calls a simulated disk written in Python.
struct PythonDisk final : Disk {
    explicit PythonDisk(nb::object target) : target(std::move(target)) {}
    int write(int file, const std::uint8_t *data, std::size_t bytes, std::size_t zeros, std::uint64_t offset) override {
        nb::gil_scoped_acquire held;
        return errno_of([&] { target.attr("write")(file, nb::bytes(data, bytes), zeros, offset); });
    }
    int sync(int file) override {
        nb::gil_scoped_acquire held;
        return errno_of([&] { target.attr("sync")(file); });
    }
    template <typename Call>
    int errno_of(Call call) {
        if (!target.is_valid()) return EIO;  // the garbage collector has taken it
        try {
            call();
            return 0;
        } catch (nb::python_error &error) {
            nb::object number = nb::getattr(error.value(), "errno", nb::none());
            return nb::isinstance<nb::int_>(number) ? nb::cast<int>(number) : EIO;
        }
    }
    nb::object target;
};

constexpr std::uint64_t max_properties_bytes = 1u << 24;

class BoundWriter {
   public:
    BoundWriter(int frontier_file, std::uint64_t segment_bytes, std::uint64_t max_message_bytes, bool sync, nb::object disk,
                const std::string &name)
        : max_message_bytes_(max_message_bytes), place_(name) {
        struct stat status;
        if (fstat(frontier_file, &status) != 0 || static_cast<std::uint64_t>(status.st_size) < frontier_bytes)
            fail("CorruptionError", "the frontier file is too short");
        frontier_file_ = fcntl(frontier_file, F_DUPFD_CLOEXEC, 3);
        if (frontier_file_ < 0) fail_system(errno, "cannot keep the frontier file open", place_);
        frontier_ = mmap(nullptr, frontier_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, frontier_file_, 0);
        if (frontier_ == MAP_FAILED) {
            int error = errno;
            ::close(frontier_file_);
            fail_system(error, "cannot map the frontier file", place_);
        }
        if (disk.is_none()) disk_ = std::make_unique<SystemDisk>();
        else {
            auto called = std::make_unique<PythonDisk>(std::move(disk));
            python_disk_ = called.get();
            disk_ = std::move(called);
        }
        writer_ = std::make_unique<Writer>(*disk_, segment_bytes, sync, static_cast<std::uint8_t *>(frontier_), frontier_file_);
        counters_ = counters_take("journal", "writer", name);
        writer_->count_in(counters_);
    }
    ~BoundWriter() {
        writer_.reset();
        if (counters_) counters_give(counters_);
        if (frontier_ && frontier_ != MAP_FAILED) munmap(frontier_, frontier_bytes);
        if (frontier_file_ >= 0) ::close(frontier_file_);
    }

    // The disk's object for the garbage collector, or null. It may refer to whoever has this writer: an error that it keeps
    // has the frames of the journal.
    nb::object *disk_object() { return python_disk_ ? &python_disk_->target : nullptr; }

    std::uint32_t topic(std::string_view name, int flags) {
        check_process();
        const std::uint32_t number = writer_->topic(name, static_cast<std::uint8_t>(flags));
        if (number == 0)
            fail("CapacityError", "a journal has at most " + std::to_string(max_topics) + " topics, and at most " +
                                      std::to_string(max_unused_topics) + " of them without a message");
        return number;
    }
    void restore_topic(std::uint32_t id, std::string_view name, int flags, std::uint64_t next, std::int64_t time) {
        if (!writer_->restore_topic(id, name, static_cast<std::uint8_t>(flags), next, time))
            fail("CorruptionError", place_ + ": topic number " + std::to_string(id) + " cannot be: its record is damaged");
    }

    std::uint64_t stage(std::uint32_t id, nb::handle data, nb::handle properties, nb::handle message_id, nb::handle key,
                        std::int64_t timestamp_ns) {
        check_process();
        View body(data), encoded(properties), identity(message_id), name(key);
        return put(id, content(body, encoded, identity, name, timestamp_ns));
    }

    // (position, ordinal), on disk.
    std::pair<std::uint64_t, std::uint64_t> append(std::uint32_t id, nb::handle data, nb::handle properties,
                                                   nb::handle message_id, nb::handle key, std::int64_t timestamp_ns) {
        check_process();
        View body(data), encoded(properties), identity(message_id), name(key);
        Content what = content(body, encoded, identity, name, timestamp_ns);
        std::uint64_t position, ordinal, ticket;
        {
            std::lock_guard lock(writer_->staging_lock());
            position = put(id, what);
            ordinal = writer_->topic_at(id).next_ordinal - 1;
            ticket = writer_->ticket();
        }
        finish(ticket);
        return {position, ordinal};
    }

    // A sequence of buffers of one topic, in one batch.
    nb::tuple stage_buffers(std::uint32_t id, nb::handle sequence, nb::handle properties, std::int64_t timestamp_ns, bool commit) {
        check_process();
        nb::object items = nb::steal(PySequence_Fast(sequence.ptr(), "append_many takes an iterable of buffers"));
        if (!items.is_valid()) throw nb::python_error();
        Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
        PyObject **objects = PySequence_Fast_ITEMS(items.ptr());
        View encoded(properties);
        std::vector<View> views;
        std::vector<std::uint64_t> addresses(static_cast<std::size_t>(count)), lengths(static_cast<std::size_t>(count));
        std::uint64_t total = 0;
        for (Py_ssize_t i = 0; i < count; ++i) {
            std::size_t k = static_cast<std::size_t>(i);
            if (PyBytes_CheckExact(objects[i])) {
                addresses[k] = reinterpret_cast<std::uint64_t>(PyBytes_AS_STRING(objects[i]));
                lengths[k] = static_cast<std::uint64_t>(PyBytes_GET_SIZE(objects[i]));
            } else {
                views.emplace_back(objects[i]);
                addresses[k] = reinterpret_cast<std::uint64_t>(views.back().data());
                lengths[k] = views.back().size();
            }
            check_length(lengths[k]);
            total += padded(sizeof(RecordHeader) + lengths[k] + encoded.size());
        }
        std::uint64_t first, ticket;
        {
            std::lock_guard lock(writer_->staging_lock());
            check_room(total);
            if (encoded.size() || timestamp_ns != time_now) {
                first = writer_->next_position();
                for (std::size_t k = 0; k < lengths.size(); ++k)
                    put(id, {reinterpret_cast<const std::uint8_t *>(addresses[k]), lengths[k], encoded.text(), {}, {}, timestamp_ns});
            } else {  // addresses are offsets from nowhere
                check_topic(id);
                first = writer_->stage_many(&id, 0, nullptr, addresses.data(), lengths.data(), lengths.size());
            }
            ticket = writer_->ticket();
        }
        if (commit) finish(ticket);
        return nb::make_tuple(first, first + static_cast<std::uint64_t>(count) - 1);
    }

    nb::tuple stage_many(nb::handle topics, nb::handle buffer, nb::handle offsets, nb::handle lengths) {
        check_process();
        View body(buffer), offset_view(offsets), length_view(lengths);
        const bool one_topic = PyLong_Check(topics.ptr());
        const std::uint32_t topic = one_topic ? nb::cast<std::uint32_t>(topics) : 0;
        const nb::bytes nothing("", 0);
        View topic_view(one_topic ? nb::handle(nothing) : topics);
        auto [starts, count] = numbers<std::uint64_t>(offset_view, "offsets");
        auto [sizes, size_count] = numbers<std::uint64_t>(length_view, "lengths");
        if (count != size_count) fail("InvalidArgument", "offsets and lengths differ in number");
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < count; ++i) {
            check_length(sizes[i]);
            if (starts[i] > body.size() || sizes[i] > body.size() - starts[i])
                fail("InvalidArgument", "message " + std::to_string(i) + " lies outside the buffer");
            total += padded(sizeof(RecordHeader) + sizes[i]);
        }
        std::unique_lock lock(writer_->staging_lock());
        check_room(total);
        std::uint64_t first;
        if (one_topic) {
            check_topic(topic);
            first = writer_->stage_many(&topic, 0, body.data(), starts, sizes, count);
        } else {
            auto [ids, id_count] = numbers<std::uint32_t>(topic_view, "topic_ids");
            if (id_count != count) fail("InvalidArgument", "topic_ids and offsets differ in number");
            for (std::size_t i = 0; i < count; ++i) check_topic(ids[i]);
            first = writer_->stage_many(ids, 1, body.data(), starts, sizes, count);
        }
        lock.unlock();
        return nb::make_tuple(first, first + count - 1);
    }

    // A batch of messages, whose channels are numbered as topic_ids is (one id: it is that of all), without a step in
    // Python for each. Properties and message id, where given, are those of every message; otherwise each keeps its own,
    // and always its key. `more` (encoded too) is added to the properties. `timestamps_ns`: one a message, or none (then
    // it is the time of storing).
    nb::tuple stage_batch(nb::handle batch, nb::handle topic_ids, nb::handle properties, nb::handle message_id,
                          nb::handle more, nb::handle timestamps_ns) {
        check_process();
        if (!batch_check(batch.ptr())) throw nb::type_error("stage_batch takes a Batch");
        const std::vector<Envelope> *entries = batch_entries(batch.ptr());
        if (!entries) throw nb::python_error();
        const nb::bytes nothing("", 0);
        View topic_view(topic_ids), encoded(properties.is_none() ? nb::handle(nothing) : properties), identity(message_id),
            added(more);
        const bool own = properties.is_none();
        View time_view(timestamps_ns);
        auto [given, given_count] = numbers<std::int64_t>(time_view, "timestamps_ns");
        if (given_count && given_count != entries->size()) fail("InvalidArgument", "timestamps_ns has not one for each message");
        const std::int64_t *times = given_count ? given : nullptr;
        auto [ids, id_count] = numbers<std::uint32_t>(topic_view, "topic_ids");
        const std::uint64_t common = encoded.size() + identity.size() + added.size();
        bool bare = common == 0;
        std::vector<std::uint32_t> topics(entries->size());
        std::vector<std::uint64_t> addresses(entries->size()), lengths(entries->size());
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < entries->size(); ++i) {
            const Envelope &entry = (*entries)[i];
            const std::size_t channel = id_count == 1 ? 0 : entry.channel;
            if (channel >= id_count) fail("InvalidArgument", "a message's channel has no topic id");
            topics[i] = ids[channel];
            addresses[i] = reinterpret_cast<std::uint64_t>(entry.data);
            lengths[i] = static_cast<std::uint64_t>(entry.size);
            check_length(lengths[i]);
            const std::uint64_t extra = common + entry.details_size() - (own ? 0 : entry.properties_size);
            bare = bare && extra == 0;
            total += padded(sizeof(RecordHeader) + lengths[i] + extra);
        }
        std::unique_lock lock(writer_->staging_lock());
        check_room(total);
        for (std::size_t i = 0; i < id_count; ++i) check_topic(ids[i]);
        std::uint64_t first = writer_->next_position();
        if (!bare) {
            std::string joined;
            for (std::size_t i = 0; i < lengths.size(); ++i) {
                const Envelope &entry = (*entries)[i];
                std::string_view chosen = encoded.text();
                if (own) chosen = entry.encoded_properties();
                if (added.size()) chosen = joined.assign(chosen).append(added.text());
                const std::string_view name = identity.size() ? identity.text() : entry.message_id();
                put(topics[i], {entry.data, lengths[i], chosen, name, entry.key(), times ? times[i] : time_now});
            }
        } else {
            first = writer_->stage_many(topics.data(), 1, nullptr, addresses.data(), lengths.data(), lengths.size(), times);
        }
        lock.unlock();
        return nb::make_tuple(first, first + lengths.size() - 1);
    }

    // Messages and states (kind, flags, data) in one batch. An item of `messages` is one message (topic id, data,
    // properties, message id, key, time) or many: (Batch, topic ids as stage_batch takes them), each with all it has,
    // its time too.
    nb::tuple stage_all(nb::handle messages, nb::handle states) {
        check_process();
        std::vector<View> views;
        std::vector<Part> parts;
        std::uint64_t total = 0, count = 0;
        for (nb::handle item : messages) {
            if (nb::len(item) == 2) {
                Part &part = parts.emplace_back();
                total += batch_part(item[0], item[1], part);
                count += part.entries->size();
                continue;
            }
            parts.push_back({nb::cast<std::uint32_t>(item[0]), nb::cast<std::int64_t>(item[5]), views.size(), nullptr, {}});
            check_topic(parts.back().topic);
            for (int field = 1; field <= 4; ++field) {
                views.emplace_back(nb::object(item[field]));
                total += views.back().size() + 64;
            }
            ++count;
        }
        std::size_t message_views = views.size();
        std::vector<std::pair<std::uint32_t, std::uint8_t>> kinds;
        for (nb::handle item : states) {
            kinds.emplace_back(nb::cast<std::uint32_t>(item[0]), static_cast<std::uint8_t>(nb::cast<int>(item[1])));
            views.emplace_back(nb::object(item[2]));
            total += views.back().size() + 64;
        }
        std::vector<Content> contents;  // all are checked before the first is staged
        for (const Part &part : parts) {
            const View *at = views.data() + part.view;
            if (!part.entries) contents.push_back(content(at[0], at[1], at[2], at[3], part.time));
        }
        std::uint64_t first, ticket;
        {
            std::lock_guard lock(writer_->staging_lock());
            check_room(total);
            first = writer_->next_position();
            auto next = contents.begin();
            for (const Part &part : parts) {
                if (part.entries) put_batch(part);
                else put(part.topic, *next++);
            }
            for (std::size_t i = 0; i < kinds.size(); ++i) {
                const View &view = views[message_views + i];
                writer_->stage_state(kinds[i].first, kinds[i].second, view.data(), view.size());
            }
            ticket = writer_->ticket();
        }
        return nb::make_tuple(first, first + count - 1, ticket);
    }

    void stage_state(std::uint32_t kind, nb::handle data, int flags) {
        check_process();
        View view(data);
        std::lock_guard lock(writer_->staging_lock());
        check_room(view.size());
        writer_->stage_state(kind, static_cast<std::uint8_t>(flags), view.data(), view.size());
    }

    bool commit(std::uint64_t ticket) { return finish(ticket); }

    bool take_lead(bool only_if_full) {
        check_process();
        GilReleased released;
        return writer_->take_lead(only_if_full);
    }
    void give_lead() { writer_->give_lead(); }

    void replace_segment(int log, int index, int sums, std::uint64_t nonce, std::uint64_t first, std::uint64_t end,
                         std::uint64_t zeroed, std::uint64_t entries, std::uint32_t block_crc,
                         std::uint64_t next_position, std::uint64_t states) {
        ActiveSegment segment;
        segment.log = log;
        segment.index = index;
        segment.sums = sums;
        segment.nonce = nonce;
        segment.first_position = first;
        segment.end = end;
        segment.zeroed = zeroed;
        segment.entries = entries;
        segment.block_crc = block_crc;
        segment.states = states;
        writer_->replace_segment(segment, next_position);
    }

    void commit_records(nb::handle records, std::uint32_t count, std::uint32_t flags) {
        View view(records);
        std::vector<std::uint8_t> bytes(view.data(), view.data() + view.size());
        CommitResult result;
        {
            GilReleased released;
            result = writer_->commit_records(bytes, count, flags);
        }
        check(result);
    }

    void commit_sealed(nb::handle batch) {
        check_process();
        View view(batch);
        std::vector<std::uint8_t> bytes(view.data(), view.data() + view.size());
        CommitResult result;
        bool taken;
        {
            GilReleased released;
            taken = writer_->commit_sealed(bytes, result);
        }
        if (!taken) fail("CorruptionError", "a batch is not whole, or does not belong here");
        check(result);
    }

    void in_group(CommitResult (Writer::*call)()) {
        check_process();
        CommitResult result;
        {
            GilReleased released;
            result = (writer_.get()->*call)();
        }
        check(result);
    }

    void publish_frontier(std::uint64_t first, std::uint64_t step) { writer_->publish_frontier(first, step); }
    void close() {
        {
            GilReleased released;
            writer_->close();
        }
        writer_->count_in(nullptr);  // no further commits
        if (counters_) counters_give(std::exchange(counters_, nullptr));
    }

    nb::list topics() {
        check_process();
        std::vector<std::pair<std::uint32_t, Topic>> committed;  // copied: no Python object is made under the lock
        std::int64_t last_stored_ns;
        {
            std::lock_guard lock(writer_->staging_lock());
            last_stored_ns = writer_->last_stored_ns();
            for (std::uint32_t id = 1; id <= writer_->topic_count(); ++id)
                if (writer_->topic_at(id).committed) committed.emplace_back(id, writer_->topic_at(id));
        }
        nb::list result;
        for (const auto &[id, topic] : committed)
            result.append(nb::make_tuple(id, nb::bytes(topic.name.data(), topic.name.size()), static_cast<int>(topic.flags),
                                         topic.committed_ordinal, last_stored_ns));
        return result;
    }

    Writer &writer() { return *writer_; }

   private:
    // In a forked child a lock may be held by a thread that does not exist there.
    void check_process() {
        if (writer_->forked()) fail("StateError", "this journal was opened before a fork: open it again in the child");
    }
    void check_topic(std::uint32_t id) {
        if (id == 0 || id > writer_->topic_count()) fail("InvalidArgument", "there is no topic with id " + std::to_string(id));
    }
    // One item of stage_all.
    struct Part {
        std::uint32_t topic = 0;
        std::int64_t time = 0;
        std::size_t view = 0;  // the first of its four
        const std::vector<Envelope> *entries = nullptr;  // of a batch: what stands above is not used then
        std::vector<std::uint32_t> topics;
    };

    // Fills `part` with the messages of a batch, all of them checked; returns the space that they need at most.
    std::uint64_t batch_part(nb::handle batch, nb::handle topic_ids, Part &part) {
        if (!batch_check(batch.ptr())) throw nb::type_error("stage_all takes a Batch and its topics' ids");
        part.entries = batch_entries(batch.ptr());
        if (!part.entries) throw nb::python_error();
        View topic_view(topic_ids);
        auto [ids, id_count] = numbers<std::uint32_t>(topic_view, "topic_ids");
        part.topics.assign(ids, ids + id_count);
        for (std::uint32_t id : part.topics) check_topic(id);
        std::uint64_t total = 0;
        for (const Envelope &entry : *part.entries) {
            if (entry.channel >= id_count && id_count != 1) fail("InvalidArgument", "a message's channel has no topic id");
            check_length(static_cast<std::uint64_t>(entry.size));
            if (entry.properties_size > max_properties_bytes) fail("InvalidArgument", "properties are at most 16 MiB");
            total += padded(sizeof(RecordHeader) + static_cast<std::uint64_t>(entry.size) + entry.details_size());
        }
        return total;
    }

    void put_batch(const Part &part) {
        for (const Envelope &entry : *part.entries)
            put(part.topics[part.topics.size() == 1 ? 0 : entry.channel],
                {entry.data, static_cast<std::uint64_t>(entry.size), entry.encoded_properties(), entry.message_id(),
                 entry.key(), entry.timestamp_ns});
    }

    void check_length(std::uint64_t bytes) {
        if (bytes > max_message_bytes_)
            fail("InvalidArgument", "a message of " + std::to_string(bytes) + " bytes is longer than max_message_bytes=" +
                                        std::to_string(max_message_bytes_));
    }
    void check_room(std::uint64_t bytes) {
        if (writer_->staged_bytes() + bytes + (1 << 20) > max_batch_bytes)
            fail("CapacityError", "more than 1 GiB would stand in one batch; append in smaller parts");
    }
    Content content(const View &data, const View &properties, const View &message_id, const View &key, std::int64_t time) {
        check_length(data.size());
        if (properties.size() > max_properties_bytes || message_id.size() > 65535 || key.size() > 65535)
            fail("InvalidArgument", "properties are at most 16 MiB, a message id and a key at most 65535 bytes");
        return {data.data(), data.size(), properties.text(), message_id.text(), key.text(), time};
    }
    std::uint64_t put(std::uint32_t id, const Content &what) {
        check_topic(id);
        check_room(what.bytes + what.properties.size() + what.message_id.size() + what.key.size());
        return writer_->stage(id, what);
    }
    bool finish(std::uint64_t ticket) {
        CommitResult result;
        {
            GilReleased released;
            result = writer_->commit(ticket);
        }
        check(result);
        return result.full;
    }
    void check(const CommitResult &result) {
        if (result.failure == Failure::write && result.error == ENOMEM) {
            PyErr_SetString(PyExc_MemoryError, "no memory for the journal's batch, nothing of it is stored");
            throw nb::python_error();
        }
        switch (result.failure) {
            case Failure::none: return;
            case Failure::write: fail_system(result.error, "the journal's batch was not written, nothing of it is stored", place_);
            case Failure::sync:
                if (result.error == ENOENT)
                    fail_system(result.error, "the journal's directory was removed: nothing is stored until it is opened again", place_);
                fail_system(result.error, "a sync of the journal failed: nothing is acknowledged until it is opened again", place_);
            case Failure::closed: fail("ClosedError", "the journal was closed");
            case Failure::forked: fail("StateError", "this journal was opened before a fork: open it again in the child");
        }
    }

    std::uint64_t max_message_bytes_;
    std::string place_;  // the directory, named in errors
    int frontier_file_ = -1;
    void *frontier_ = nullptr;
    Counters *counters_ = nullptr;
    std::unique_ptr<Disk> disk_;
    PythonDisk *python_disk_ = nullptr;  // disk_, if that is one
    std::unique_ptr<Writer> writer_;
};

nb::object *disk_object_of(PyObject *object) {
    return nb::inst_ready(object) ? nb::inst_ptr<BoundWriter>(object)->disk_object() : nullptr;
}

int writer_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(object));
    if (nb::object *disk = disk_object_of(object)) Py_VISIT(disk->ptr());
    return 0;
}

int writer_clear(PyObject *object) {
    if (nb::object *disk = disk_object_of(object)) nb::object(std::move(*disk));  // taken first: freeing it runs Python code
    return 0;
}

PyType_Slot writer_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(writer_traverse)},
                              {Py_tp_clear, reinterpret_cast<void *>(writer_clear)},
                              {0, nullptr}};

}  // namespace

void bind_writer(nb::module_ &module) {
    nb::class_<BoundWriter>(module, "Writer", nb::type_slots(writer_slots))
        .def(nb::init<int, std::uint64_t, std::uint64_t, bool, nb::object, const std::string &>(), nb::arg("frontier_file"), nb::arg("segment_bytes"),
             nb::arg("max_message_bytes"), nb::arg("sync"), nb::arg("disk").none() = nb::none(), nb::arg("name") = "")
        .def("topic", &BoundWriter::topic, nb::arg("name"), nb::arg("flags") = 0)
        .def("restore_topic", &BoundWriter::restore_topic)
        .def("topics", &BoundWriter::topics)
        .def("append", &BoundWriter::append, nb::arg("topic_id"), nb::arg("data").none(), nb::arg("properties") = nb::bytes("", 0),
             nb::arg("message_id") = nb::bytes("", 0), nb::arg("key") = nb::bytes("", 0), nb::arg("timestamp_ns") = time_now)
        .def("stage", &BoundWriter::stage, nb::arg("topic_id"), nb::arg("data").none(), nb::arg("properties") = nb::bytes("", 0),
             nb::arg("message_id") = nb::bytes("", 0), nb::arg("key") = nb::bytes("", 0), nb::arg("timestamp_ns") = time_now)
        .def("stage_buffers", &BoundWriter::stage_buffers, nb::arg("topic_id"), nb::arg("buffers"),
             nb::arg("properties") = nb::bytes("", 0), nb::arg("timestamp_ns") = time_now, nb::arg("commit") = false)
        .def("stage_many", &BoundWriter::stage_many, nb::arg("topic_ids"), nb::arg("buffer"), nb::arg("offsets"), nb::arg("lengths"))
        .def("stage_batch", &BoundWriter::stage_batch, nb::arg("batch"), nb::arg("topic_ids"),
             nb::arg("properties").none() = nb::none(), nb::arg("message_id") = nb::bytes("", 0),
             nb::arg("more") = nb::bytes("", 0), nb::arg("timestamps_ns") = nb::bytes("", 0))
        .def("stage_all", &BoundWriter::stage_all, nb::arg("messages"), nb::arg("states"))
        .def("stage_state", &BoundWriter::stage_state, nb::arg("kind"), nb::arg("data"), nb::arg("flags") = 0)
        .def("commit", &BoundWriter::commit, nb::arg("ticket") = 0)
        .def("take_lead", &BoundWriter::take_lead, nb::arg("only_if_full") = false)
        .def("give_lead", &BoundWriter::give_lead)
        .def("replace_segment", &BoundWriter::replace_segment, nb::arg("log"), nb::arg("index"), nb::arg("sums"), nb::arg("nonce"),
             nb::arg("first"), nb::arg("end"), nb::arg("zeroed"), nb::arg("entries"),
             nb::arg("block_crc"), nb::arg("next_position"), nb::arg("states") = 0)
        .def("restore_segment", [](BoundWriter &self) { self.writer().restore_segment(); })
        .def("commit_sealed", &BoundWriter::commit_sealed, nb::arg("batch"))
        .def("commit_records", &BoundWriter::commit_records, nb::arg("records"), nb::arg("count"), nb::arg("flags"))
        .def("open_group", [](BoundWriter &self) { self.writer().open_group(); })
        .def("commit_part", [](BoundWriter &self) { self.in_group(&Writer::commit_part); })
        .def("close_group", [](BoundWriter &self) { self.in_group(&Writer::close_group); })
        .def("drop_group", [](BoundWriter &self) { self.writer().drop_group(); })
        .def("publish_frontier", &BoundWriter::publish_frontier, nb::arg("first"), nb::arg("generation_step"))
        .def("fail", [](BoundWriter &self, int error) { self.writer().fail(error); }, nb::arg("error"))
        .def("close", &BoundWriter::close)
        .def_prop_ro("staged_bytes", [](BoundWriter &self) { return self.writer().staged_bytes(); })
        .def_prop_ro("next_position", [](BoundWriter &self) { return self.writer().next_position(); })
        .def_prop_ro("committed_position", [](BoundWriter &self) { return self.writer().committed_position(); })
        .def_prop_ro("end", [](BoundWriter &self) { return self.writer().segment().end; })
        .def_prop_ro("entries", [](BoundWriter &self) { return self.writer().segment().entries; })
        .def_prop_ro("block_crc", [](BoundWriter &self) { return self.writer().segment().block_crc; })
        .def_prop_ro("states", [](BoundWriter &self) { return self.writer().segment().states; })
        .def_prop_ro("sums_whole", [](BoundWriter &self) { return self.writer().segment().sums_whole; })
        .def_prop_ro("commits", [](BoundWriter &self) { return self.writer().commits.load(); })
        .def_prop_ro("failures", [](BoundWriter &self) { return self.writer().failures.load(); })
        .def_prop_ro("failed", [](BoundWriter &self) { return self.writer().failed(); });
}

}  // namespace penstock::journal
