// penstock._core.tcp: the one file of this room that knows Python.
#include "bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <unordered_map>

#include "message/message.hpp"
#include "tcp/inlet.hpp"
#include "tcp/loop.hpp"
#include "tcp/outlet.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

using namespace penstock::tcp;

[[noreturn]] void fail(const char *name, const char *text) {
    raise_error(name, "%s", text);
    throw nb::python_error();
}

[[noreturn]] void fail_forked() {
    fail("StateError", "this handle was opened before a fork; open a new one in the child process");
}

// Monotonic deadline: negative for ever, 0 at once.
std::int64_t deadline_of(nb::handle timeout) {
    if (timeout.is_none()) return -1;
    if (PyBool_Check(timeout.ptr()) || !(PyFloat_Check(timeout.ptr()) || PyLong_Check(timeout.ptr()))) {
        PyErr_Format(PyExc_TypeError, "timeout must be seconds as a number or None, not %s",
                     Py_TYPE(timeout.ptr())->tp_name);
        throw nb::python_error();
    }
    double seconds = PyFloat_AsDouble(timeout.ptr());
    if (seconds == -1.0 && PyErr_Occurred()) throw nb::python_error();
    if (!(seconds >= 0)) {
        raise_error("InvalidArgument", "timeout=%R must be 0 or more seconds, or None to wait for ever", timeout.ptr());
        throw nb::python_error();
    }
    if (seconds == 0) return 0;
    if (seconds > 1e9) return -1;
    return monotonic_ns() + static_cast<std::int64_t>(seconds * 1e9);
}

// Holds an Inlet's or Outlet's turn. Never waits for it with the GIL: its holder may be waiting for that.
template <typename Core>
class Turn {
   public:
    explicit Turn(Core &core) : core_(core) { take(); }
    ~Turn() { give(); }
    Turn(const Turn &) = delete;
    void take() {
        if (!core_.try_lock()) {
            nb::gil_scoped_release free;
            core_.lock();
        }
        held_ = true;
    }
    void give() {
        if (held_) core_.unlock();
        held_ = false;
    }

   private:
    Core &core_;
    bool held_ = false;
};

struct Bytes {
    Py_buffer buffer{};
    const std::uint8_t *data;
    std::uint64_t size;
    explicit Bytes(PyObject *object) {
        if (PyBytes_CheckExact(object)) {
            data = reinterpret_cast<const std::uint8_t *>(PyBytes_AS_STRING(object));
            size = static_cast<std::uint64_t>(PyBytes_GET_SIZE(object));
            return;
        }
        if (PyObject_GetBuffer(object, &buffer, PyBUF_SIMPLE) != 0) {
            if (PyUnicode_Check(object)) {
                PyErr_Clear();
                PyErr_SetString(PyExc_TypeError, "publish takes bytes or a buffer, not str; encode it first");
            }
            throw nb::python_error();
        }
        data = static_cast<const std::uint8_t *>(buffer.buf);
        size = static_cast<std::uint64_t>(buffer.len);
    }
    ~Bytes() {
        if (buffer.obj) PyBuffer_Release(&buffer);
    }
    Bytes(const Bytes &) = delete;
};

struct ChunkOwner final : Owner {
    void release(std::uint64_t token) noexcept override { chunk_drop(reinterpret_cast<Chunk *>(token)); }
    void release_many(const std::uint64_t *tokens, std::size_t count) noexcept override {
        std::size_t first = 0;  // a batch lies in one or two chunks: one count down for each run
        for (std::size_t i = 1; i <= count; ++i) {
            if (i < count && tokens[i] == tokens[first]) continue;
            chunk_drop(reinterpret_cast<Chunk *>(tokens[first]), static_cast<std::uint32_t>(i - first));
            first = i;
        }
    }
};
ChunkOwner chunk_owner;

Envelope envelope_of(const Received &received) {
    Envelope envelope;
    envelope.data = received.data;
    envelope.size = static_cast<std::int64_t>(received.header.data_size);
    envelope.ordinal = received.header.ordinal;
    envelope.timestamp_ns = received.header.timestamp_ns;
    envelope.vchan_id = static_cast<std::int32_t>(received.header.vchan_plus_one) - 1;
    envelope.properties = received.properties;
    envelope.properties_size = received.header.properties_size;
    envelope.token = reinterpret_cast<std::uint64_t>(received.chunk);
    return envelope;
}

// ---- receiving

struct Names {
    PyObject *channel;
    PyObject *source;
};

struct InletHandle {
    Inlet core;
    std::unordered_map<std::uint32_t, Names> names;
    PyObject *on_lost = nullptr;

    InletHandle(std::uint64_t max_message_size, std::size_t held, const std::string &name)
        : core(max_message_size, held, name) {}
    ~InletHandle() { clear(); }
    void clear() {
        auto before = std::move(names);
        names.clear();
        for (auto &[session, name] : before) {
            Py_XDECREF(name.channel);
            Py_XDECREF(name.source);
        }
        Py_CLEAR(on_lost);
    }
};

void check_usable(InletHandle &self) {
    if (self.core.forked()) fail_forked();
    if (self.core.closed()) fail("ClosedError", "this subscriber is closed");
}

void tell_lost(InletHandle &self, const Lost &lost) {
    if (!self.on_lost) return;
    PyObject *function = Py_NewRef(self.on_lost);
    PyObject *result =
        PyObject_CallFunction(function, "IKsiK", lost.session, static_cast<unsigned long long>(lost.serial), lost.reason,
                              lost.error, static_cast<unsigned long long>(lost.messages));
    Py_DECREF(function);
    if (!result) throw nb::python_error();
    Py_DECREF(result);
}

// Reads until there is a message: true; or the time is over: false.
bool next_message(InletHandle &self, Turn<Inlet> &turn, std::int64_t deadline, Received &received) {
    Read result = self.core.take(received);
    for (;;) {
        if (result == Read::nothing) {
            nb::gil_scoped_release free;
            result = self.core.fetch(deadline, received);
            if (result == Read::nothing) return false;
        }
        switch (result) {
            case Read::message:
                return true;
            case Read::nothing:
                return false;
            case Read::closed:
                fail("ClosedError", "this subscriber was closed");
            case Read::ended:
                fail("ClosedError", "every session of this subscriber has ended; add_session gives it a new one");
            case Read::full:
                fail("CapacityError",
                     "messages that are still held use up this subscriber's receive memory; release them (or open it "
                     "with a larger held_bytes)");
            case Read::interrupted:
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
                break;
            case Read::knocked:
                turn.give();
                turn.take();
                break;
            case Read::lost: {
                Lost lost = self.core.lost();
                turn.give();
                tell_lost(self, lost);
                turn.take();
                break;
            }
        }
        result = Read::nothing;
    }
}

Names names_of(InletHandle &self, std::uint32_t session) {
    auto found = self.names.find(session);
    return found == self.names.end() ? Names{nullptr, nullptr} : found->second;
}

PyObject *make_message(InletHandle &self, const Received &received) {
    Names names = names_of(self, received.session);
    PyObject *message = message_new(envelope_of(received), &chunk_owner, names.channel, names.source);
    if (!message) {
        chunk_drop(received.chunk);
        throw nb::python_error();
    }
    return message;
}

nb::object inlet_read(InletHandle &self, nb::handle timeout) {
    std::int64_t deadline = deadline_of(timeout);
    check_usable(self);
    Received received;
    Turn<Inlet> turn(self.core);
    if (!next_message(self, turn, deadline, received)) return nb::none();
    self.core.count(received, true);
    return nb::steal(make_message(self, received));
}

nb::object inlet_read_newest(InletHandle &self, nb::handle timeout) {
    std::int64_t deadline = deadline_of(timeout);
    check_usable(self);
    Received newest, received;
    Turn<Inlet> turn(self.core);
    if (!next_message(self, turn, deadline, newest)) return nb::none();
    for (int more = 0; more < 100'000; ++more) {
        bool found;
        try {
            found = next_message(self, turn, 0, received);
        } catch (...) {
            chunk_drop(newest.chunk);
            throw;
        }
        if (!found) break;
        self.core.count(newest, false);
        chunk_drop(newest.chunk);
        newest = received;
    }
    self.core.count(newest, true);
    return nb::steal(make_message(self, newest));
}

nb::object inlet_read_many(InletHandle &self, nb::handle most_object, nb::handle timeout) {
    Py_ssize_t most = PyNumber_AsSsize_t(most_object.ptr(), PyExc_OverflowError);
    if (most == -1 && PyErr_Occurred()) throw nb::python_error();
    if (most < 1) {
        raise_error("InvalidArgument", "most=%zd must be at least 1", most);
        throw nb::python_error();
    }
    std::int64_t deadline = deadline_of(timeout);
    check_usable(self);
    std::vector<Envelope> entries;
    Received received;
    Names names{nullptr, nullptr};
    Turn<Inlet> turn(self.core);
    if (next_message(self, turn, deadline, received)) {
        std::uint32_t session = received.session;
        entries.reserve(static_cast<std::size_t>(std::min<Py_ssize_t>(most, 512)));
        names = names_of(self, session);
        do {
            self.core.count(received, true);
            entries.push_back(envelope_of(received));
        } while (static_cast<Py_ssize_t>(entries.size()) < most &&
                 self.core.take_message(received, session));
    }
    PyObject *batch = batch_new(std::move(entries), &chunk_owner, names.channel, names.source);
    if (!batch) throw nb::python_error();
    return nb::steal(batch);
}

bool inlet_wait(InletHandle &self, nb::handle timeout) {
    std::int64_t deadline = deadline_of(timeout);
    check_usable(self);
    Received received;
    Turn<Inlet> turn(self.core);
    if (self.core.has_kept()) return true;
    if (!next_message(self, turn, deadline, received)) return false;
    self.core.keep(received);
    return true;
}

std::uint64_t inlet_attach(InletHandle &self, std::uint32_t session, int fd, bool extended, bool fresh,
                           std::uint64_t next_ordinal, nb::handle channel, nb::handle source) {
    auto found = self.names.find(session);
    if (found == self.names.end()) {
        self.names[session] = {Py_NewRef(channel.ptr()), Py_NewRef(source.ptr())};
    } else {
        PyObject *before = found->second.channel;
        found->second.channel = Py_NewRef(channel.ptr());
        Py_XDECREF(before);
    }
    nb::gil_scoped_release free;
    return self.core.attach(session, fd, extended, fresh, next_ordinal);
}

void inlet_detach(InletHandle &self, std::uint32_t session) {
    {
        nb::gil_scoped_release free;
        self.core.detach(session);
    }
    auto found = self.names.find(session);
    if (found == self.names.end()) return;
    Names names = found->second;
    self.names.erase(found);
    Py_XDECREF(names.channel);
    Py_XDECREF(names.source);
}

void inlet_close(InletHandle &self) {
    if (self.core.forked()) return;
    {
        nb::gil_scoped_release free;
        self.core.close();
    }
    self.clear();
}

nb::dict drops_of(Counters *counters) {
    nb::dict drops;
    for (std::size_t i = 0; i < drop_reason_count; ++i)
        if (std::uint64_t n = counters->dropped[i].get()) drops[drop_reason_names[i]] = n;
    return drops;
}

nb::tuple ledger_of(Counters *counters, std::int64_t in_flight) {
    return nb::make_tuple(counters->matched.get(), counters->delivered.get(), drops_of(counters), in_flight);
}

int inlet_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    InletHandle *handle = nb::inst_ptr<InletHandle>(self);
    for (auto &[session, names] : handle->names) {
        Py_VISIT(names.channel);
        Py_VISIT(names.source);
    }
    Py_VISIT(handle->on_lost);
    return 0;
}

int inlet_clear(PyObject *self) {
    nb::inst_ptr<InletHandle>(self)->clear();
    return 0;
}

PyType_Slot inlet_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(inlet_traverse)},
                             {Py_tp_clear, reinterpret_cast<void *>(inlet_clear)},
                             {0, nullptr}};

// ---- sending

struct LoopHandle {
    std::shared_ptr<Loop> core = std::make_shared<Loop>();
    ~LoopHandle() { core->stop(); }
};

struct OutletHandle {
    std::shared_ptr<Outlet> core;
};

void check_usable(Outlet &core) {
    if (core.forked()) fail_forked();
    if (core.closed()) fail("ClosedError", "this publisher is closed");
}

// Calls `step`, which waits without the GIL, until it is done; true, or an error is raised.
template <typename Step>
void send_until_done(Outlet &core, Step step) {
    std::int64_t timeout = core.block_timeout_ns();
    std::int64_t deadline = timeout < 0 ? -1 : monotonic_ns() + timeout;
    for (;;) {
        Sent sent;
        {
            nb::gil_scoped_release free;
            sent = step(deadline);
        }
        switch (sent) {
            case Sent::done:
                return;
            case Sent::closed:
                fail("ClosedError", "this publisher was closed");
            case Sent::timed_out:
                PyErr_Format(PyExc_TimeoutError,
                             "a subscriber's queue stayed full for %lld ms; nothing was published (overflow='block')",
                             static_cast<long long>(timeout / 1'000'000));
                throw nb::python_error();
            case Sent::interrupted:
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
    }
}

std::uint64_t send_one(Outlet &core, const Outgoing &message, bool more) {
    std::uint64_t ordinal = 0;
    switch (core.quick(message, ordinal, more)) {
        case Quick::done:
            return ordinal;
        case Quick::flush: {
            nb::gil_scoped_release free;
            core.flush();
            return ordinal;
        }
        case Quick::closed:
            fail("ClosedError", "this publisher is closed");
        case Quick::slow:
            break;
    }
    send_until_done(core, [&](std::int64_t deadline) { return core.publish(message, ordinal, deadline); });
    return ordinal;
}

std::uint64_t outlet_publish(OutletHandle &self, nb::handle data) {
    Outlet &core = *self.core;
    if (core.forked()) fail_forked();
    Bytes bytes(data.ptr());
    Outgoing message;
    message.data = bytes.data;
    message.size = bytes.size;
    Turn<Outlet> turn(core);
    return send_one(core, message, false);
}

// key NUL value NUL ..., UTF-8.
std::string encode_properties(nb::handle properties) {
    std::string out;
    if (properties.is_none()) return out;
    if (!PyDict_Check(properties.ptr())) {
        PyErr_Format(PyExc_TypeError, "properties must be a dict of str to str, not %s",
                     Py_TYPE(properties.ptr())->tp_name);
        throw nb::python_error();
    }
    PyObject *texts[2];
    Py_ssize_t at = 0;
    while (PyDict_Next(properties.ptr(), &at, &texts[0], &texts[1])) {
        for (PyObject *text : texts) {
            if (!PyUnicode_Check(text)) {
                PyErr_Format(PyExc_TypeError, "properties are text to text, not %R", text);
                throw nb::python_error();
            }
            nb::object bytes = nb::steal(PyUnicode_AsEncodedString(text, "utf-8", "surrogateescape"));
            if (!bytes.is_valid()) throw nb::python_error();
            std::string_view view(PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())));
            if (view.find('\0') != view.npos) fail("InvalidArgument", "a property holds no NUL character");
            out.append(view);
            out.push_back('\0');
        }
    }
    if (out.size() > max_properties_size) {
        raise_error("InvalidArgument", "encoded properties of %zu bytes do not fit a frame's header (at most %zu)",
                    out.size(), max_properties_size);
        throw nb::python_error();
    }
    return out;
}

std::int64_t number_or(nb::handle value, std::int64_t otherwise, std::int64_t most, const char *name) {
    if (value.is_none()) return otherwise;
    std::int64_t number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    if (number < 0 || number > most) {
        raise_error("InvalidArgument", "%s=%R must be from 0 to %lld", name, value.ptr(), static_cast<long long>(most));
        throw nb::python_error();
    }
    return number;
}

std::uint64_t outlet_publish_as(OutletHandle &self, nb::handle data, nb::handle properties, nb::handle vchan_id,
                                nb::handle ordinal, nb::handle timestamp_ns, std::uint64_t drops) {
    Outlet &core = *self.core;
    check_usable(core);
    Bytes bytes(data.ptr());
    std::string encoded = encode_properties(properties);
    Outgoing message;
    message.data = bytes.data;
    message.size = bytes.size;
    message.ordinal = static_cast<std::uint64_t>(number_or(ordinal, 0, INT64_MAX, "ordinal"));
    message.timestamp_ns = number_or(timestamp_ns, 0, INT64_MAX, "timestamp_ns");
    message.vchan_plus_one = static_cast<std::uint32_t>(number_or(vchan_id, -1, INT32_MAX - 1, "vchan_id") + 1);
    message.properties = reinterpret_cast<const std::uint8_t *>(encoded.data());
    message.properties_size = static_cast<std::uint32_t>(encoded.size());
    message.drops = drops;
    Turn<Outlet> turn(core);
    return send_one(core, message, false);
}

// Flushes what publish_many has gathered, however it ends.
struct FlushAtEnd {
    Outlet &core;
    ~FlushAtEnd() {
        nb::gil_scoped_release free;
        core.flush();
    }
};

std::uint64_t send_batch(Outlet &core, PyObject *batch, bool carry) {
    const std::vector<Envelope> *entries = batch_entries(batch);
    if (!entries) throw nb::python_error();
    FlushAtEnd flush{core};
    for (const Envelope &entry : *entries) {
        Outgoing message;
        message.data = entry.data;
        message.size = static_cast<std::uint64_t>(entry.size);
        if (carry) {
            message.ordinal = entry.ordinal;
            message.timestamp_ns = entry.timestamp_ns;
        }
        message.vchan_plus_one = static_cast<std::uint32_t>(entry.vchan_id + 1);
        if (entry.properties_size <= max_properties_size) {
            message.properties = entry.properties;
            message.properties_size = entry.properties_size;
        }
        send_one(core, message, true);
    }
    return entries->size();
}

std::uint64_t outlet_publish_many(OutletHandle &self, nb::handle batch, bool carry) {
    Outlet &core = *self.core;
    check_usable(core);
    if (batch_check(batch.ptr())) {
        Turn<Outlet> turn(core);
        return send_batch(core, batch.ptr(), carry);
    }
    nb::object iterator = nb::steal(PyObject_GetIter(batch.ptr()));
    if (!iterator.is_valid()) throw nb::python_error();
    std::uint64_t count = 0;
    FlushAtEnd flush{core};
    for (;;) {  // the turn is taken anew for each: the iterator may be anybody's code
        nb::object item = nb::steal(PyIter_Next(iterator.ptr()));
        if (!item.is_valid()) break;
        Bytes bytes(item.ptr());
        Outgoing message;
        message.data = bytes.data;
        message.size = bytes.size;
        Turn<Outlet> turn(core);
        send_one(core, message, true);
        ++count;
    }
    if (PyErr_Occurred()) throw nb::python_error();
    return count;
}

struct FrameDraft final : DraftOwner {
    std::shared_ptr<Outlet> outlet;
    PyObject *publish(PyObject *, std::uint64_t token, std::int64_t size) override {
        std::uint64_t ordinal = 0;
        try {
            check_usable(*outlet);
            Turn<Outlet> turn(*outlet);
            send_until_done(*outlet, [&](std::int64_t deadline) {
                return outlet->publish_frame(reinterpret_cast<Frame *>(token), static_cast<std::uint64_t>(size),
                                             ordinal, deadline);
            });
        } catch (nb::python_error &error) {
            error.restore();
            return nullptr;
        }
        delete this;
        return PyLong_FromUnsignedLongLong(ordinal);
    }
    void cancel(std::uint64_t token) noexcept override {
        if (!outlet->forked()) outlet->drop_frame(reinterpret_cast<Frame *>(token));
        delete this;
    }
};

nb::object outlet_reserve(nb::handle handle, nb::handle size_object) {
    auto &self = *nb::inst_ptr<OutletHandle>(handle);
    check_usable(*self.core);
    Py_ssize_t size = PyNumber_AsSsize_t(size_object.ptr(), PyExc_OverflowError);
    if (size == -1 && PyErr_Occurred()) throw nb::python_error();
    if (size < 0) {
        raise_error("InvalidArgument", "size=%zd must be 0 or more bytes", size);
        throw nb::python_error();
    }
    auto *owner = new FrameDraft;
    owner->outlet = self.core;
    Frame *frame;
    try {
        frame = self.core->reserve(static_cast<std::uint64_t>(size));
    } catch (const std::bad_alloc &) {
        delete owner;
        throw;
    }
    PyObject *draft = draft_new(frame->payload(), size, owner, reinterpret_cast<std::uint64_t>(frame), handle.ptr());
    if (!draft) {
        owner->cancel(reinterpret_cast<std::uint64_t>(frame));
        throw nb::python_error();
    }
    return nb::steal(draft);
}

bool outlet_drain(OutletHandle &self, nb::handle timeout) {
    std::int64_t deadline = deadline_of(timeout);
    if (self.core->forked() || self.core->closed()) return true;
    if (deadline == 0) deadline = 1;  // a moment long past: send what can be sent now
    for (;;) {
        Sent sent;
        {
            nb::gil_scoped_release free;
            sent = self.core->drain(deadline);
        }
        if (sent != Sent::interrupted) return sent == Sent::done;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

nb::list outlet_peers(OutletHandle &self) {
    nb::list list;
    if (self.core->forked()) return list;
    for (const PeerCount &count : self.core->peer_counts())
        list.append(nb::make_tuple(count.id, count.extended, count.matched, count.delivered, count.dropped_overflow,
                                   count.dropped_closed, count.depth, count.bytes));
    return list;
}

nb::list outlet_take_gone(OutletHandle &self) {
    nb::list list;
    for (const Gone &gone : self.core->take_gone()) list.append(nb::make_tuple(gone.id, gone.error, gone.lost));
    return list;
}

std::shared_ptr<Outlet> make_outlet(LoopHandle &loop, const std::string &overflow, std::uint64_t messages,
                                    std::uint64_t bytes, double block_timeout, const std::string &name) {
    OverflowChoice choice = overflow == "block"         ? OverflowChoice::block
                            : overflow == "drop_oldest" ? OverflowChoice::drop_oldest
                                                        : OverflowChoice::drop_newest;
    std::int64_t timeout = block_timeout < 0 || block_timeout > 1e9 ? -1 : static_cast<std::int64_t>(block_timeout * 1e9);
    return std::make_shared<Outlet>(loop.core, choice, messages, bytes, timeout, name);
}

// For tests: the frames in `data` as (type, header_size, data_size), and the state at the end.
nb::tuple scan_frames(nb::handle data, std::uint64_t max_message_size, bool extended) {
    Bytes bytes(data.ptr());
    nb::list frames;
    std::uint64_t at = 0;
    const char *state = "end";
    while (at < bytes.size) {
        Header header;
        Scan result = scan_header(bytes.data + at, bytes.size - at, max_message_size, extended, header);
        if (result != Scan::frame) {
            state = result == Scan::more ? "more" : result == Scan::bad_header ? "bad_header" : "too_large";
            break;
        }
        std::uint64_t total = header.header_size + header.data_size;
        if (bytes.size - at < total) {
            state = "more";
            break;
        }
        frames.append(nb::make_tuple(header.type, header.header_size, header.data_size, header.ordinal));
        at += total;
    }
    return nb::make_tuple(frames, state);
}

}  // namespace

void bind_tcp(nb::module_ &module) {
    nb::class_<InletHandle>(module, "Inlet", nb::type_slots(inlet_slots))
        .def(nb::init<std::uint64_t, std::size_t, const std::string &>(), nb::arg("max_message_size"),
             nb::arg("held_bytes"), nb::arg("name"))
        .def("read", inlet_read, nb::arg("timeout").none() = nb::none())
        .def("read_newest", inlet_read_newest, nb::arg("timeout").none() = nb::none())
        .def("read_many", inlet_read_many, nb::arg("most") = 1024, nb::arg("timeout").none() = nb::none())
        .def("wait", inlet_wait, nb::arg("timeout").none() = nb::none())
        .def("fileno", [](InletHandle &self) { return self.core.descriptor(); })
        .def("attach", inlet_attach)
        .def("detach", inlet_detach)
        .def("finish",
             [](InletHandle &self, bool ended) {
                 nb::gil_scoped_release free;
                 self.core.finish(ended);
             })
        .def("close", inlet_close)
        .def("on_lost", [](InletHandle &self, nb::handle function) { Py_XSETREF(self.on_lost, Py_NewRef(function.ptr())); })
        .def_prop_ro("closed", [](InletHandle &self) { return self.core.closed(); })
        .def("ledger", [](InletHandle &self) { return ledger_of(self.core.counters(), 0); })
        .def("peers", [](InletHandle &self, std::uint64_t n) { self.core.counters()->peers.set(n); })
        .def("error", [](InletHandle &self) { self.core.counters()->errors.add_shared(1); })
        .def_prop_ro("held_bytes", [](InletHandle &self) { return self.core.budget()->held_bytes.load(); });

    nb::class_<LoopHandle>(module, "Loop").def(nb::init<>()).def("stop", [](LoopHandle &self) {
        nb::gil_scoped_release free;
        self.core->stop();
    });

    nb::class_<OutletHandle>(module, "Outlet")
        .def("__init__",
             [](OutletHandle *self, LoopHandle &loop, const std::string &overflow, std::uint64_t messages,
                std::uint64_t bytes, double block_timeout, const std::string &name) {
                 new (self) OutletHandle{make_outlet(loop, overflow, messages, bytes, block_timeout, name)};
             })
        .def("publish", outlet_publish, nb::arg("data"))
        .def("publish", outlet_publish_as, nb::arg("data"), nb::kw_only(), nb::arg("properties").none() = nb::none(),
             nb::arg("vchan_id").none() = nb::none(), nb::arg("ordinal").none() = nb::none(),
             nb::arg("timestamp_ns").none() = nb::none(), nb::arg("drops") = 0)
        .def("publish_many", outlet_publish_many, nb::arg("batch"), nb::arg("carry") = false)
        .def("reserve", [](nb::handle self, nb::handle size) { return outlet_reserve(self, size); }, nb::arg("size"))
        .def("drain", outlet_drain, nb::arg("timeout").none())
        .def("add", [](OutletHandle &self, int fd, bool extended, nb::bytes answer, std::size_t ordinal_offset) {
                 return self.core->add(fd, extended, std::string(answer.c_str(), answer.size()), ordinal_offset);
             })
        .def("drop_silent",
             [](OutletHandle &self, double seconds) {
                 return self.core->drop_silent(static_cast<std::uint32_t>(std::min(seconds * 1000, 4e9)));
             })
        .def("remove", [](OutletHandle &self, std::uint64_t id) { return self.core->remove(id); })
        .def("close",
             [](OutletHandle &self) {
                 if (self.core->forked()) return;
                 nb::gil_scoped_release free;
                 self.core->close();
             })
        .def_prop_ro("closed", [](OutletHandle &self) { return self.core->closed(); })
        .def_prop_ro("subscriber_count",
                     [](OutletHandle &self) { return self.core->forked() ? 0 : self.core->peer_count(); })
        .def_prop_ro("last_ordinal", [](OutletHandle &self) { return self.core->last_ordinal(); })
        .def_prop_ro("memory_bytes", [](OutletHandle &self) { return self.core->memory_bytes(); })
        .def("peers", outlet_peers)
        .def("take_gone", outlet_take_gone)
        .def("gone_fileno", [](OutletHandle &self) { return self.core->gone_descriptor(); })
        .def("error", [](OutletHandle &self) { self.core->counters()->errors.add_shared(1); })
        .def("ledger", [](OutletHandle &self) {
            return ledger_of(self.core->counters(), self.core->counters()->in_flight());
        });

    module.def("scan_frames", scan_frames, nb::arg("data"), nb::arg("max_message_size"), nb::arg("extended"));
    module.def("chunk_pool_bytes", [] { return chunk_pool_bytes(); });
}

}  // namespace penstock
