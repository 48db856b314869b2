// Outlet and Loop for Python: publishing out of any buffer, drafts, batches.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "tcp/bindings.hpp"
#include "tcp/loop.hpp"
#include "tcp/outlet.hpp"

namespace penstock::tcp {

namespace {

struct LoopHandle {
    std::shared_ptr<Loop> core = std::make_shared<Loop>();
    ~LoopHandle() { core->stop(); }
};

struct OutletHandle {
    std::shared_ptr<Outlet> core;
    // The publisher, until it is closed: a user who keeps only `publisher.publish`, a method of this object, keeps it
    // alive.
    PyObject *owner = nullptr;

    explicit OutletHandle(std::shared_ptr<Outlet> outlet) : core(std::move(outlet)) {}
    OutletHandle(const OutletHandle &) = delete;
    ~OutletHandle() { Py_CLEAR(owner); }
};

void check_usable(Outlet &core) {
    if (core.forked()) fail_forked();
    if (core.closed()) fail("ClosedError", "this publisher is closed");
}

// How long a call waits for room: as long as it says itself, all its messages together, or as long as the publisher was
// opened with, each message.
struct Patience {
    std::int64_t timeout_ns;  // negative: for ever
    std::int64_t deadline;    // as_opened_deadline: timeout_ns from the moment that a message begins to wait
    bool wait = true;         // false: not at all, and BlockingIOError says so
};

constexpr std::int64_t as_opened_deadline = -2;
constexpr const char *as_opened = "as opened";  // the default of timeout=: what the publisher was opened with

Patience patience_of(Outlet &core, nb::handle timeout, bool wait = true) {
    const bool own = PyUnicode_Check(timeout.ptr()) && PyUnicode_CompareWithASCIIString(timeout.ptr(), as_opened) == 0;
    const std::int64_t ns = own ? core.block_timeout_ns() : timeout_ns_of(timeout);
    if (!wait) return {ns, 0, false};
    if (own) return {ns, as_opened_deadline};
    return {ns, ns <= 0 ? ns : monotonic_ns() + ns};
}

Patience as_opened_patience(Outlet &core) { return {core.block_timeout_ns(), as_opened_deadline}; }

using SendingTurn = PatientTurn<Outlet>;

// Until when a call that begins now waits; negative: for ever.
std::int64_t end_of(const Patience &patience) {
    if (patience.deadline != as_opened_deadline) return patience.deadline;
    return patience.timeout_ns <= 0 ? patience.timeout_ns : monotonic_ns() + patience.timeout_ns;
}

[[noreturn]] void fail_full(const Patience &patience) {
    if (!patience.wait) {
        PyErr_SetNone(PyExc_BlockingIOError);
        throw nb::python_error();
    }
    PyErr_Format(PyExc_TimeoutError,
                 "a subscriber's queue stayed full for %lld ms; the message was not published (overflow='block')",
                 static_cast<long long>(patience.timeout_ns / 1'000'000));
    throw nb::python_error();
}

void check_turn(Outlet &core, const SendingTurn &turn, const Patience &patience) {
    if (turn.held()) return;
    check_usable(core);
    fail_full(patience);
}

// Calls `step`, which waits without the GIL, until it is done, or an error is raised. The turn is held, but not while a
// signal handler runs: that may publish too.
template <typename Step>
void send_until_done(SendingTurn &turn, Step step, const Patience &patience) {
    const std::int64_t deadline = end_of(patience);
    for (;;) {
        Sent sent;
        {
            GilReleased free;
            sent = step(deadline);
        }
        switch (sent) {
            case Sent::done:
                return;
            case Sent::closed:
                fail("ClosedError", "this publisher was closed");
            case Sent::timed_out:
                fail_full(patience);
            case Sent::interrupted:
                turn.give();
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
                if (!turn.take()) fail_full(patience);
        }
    }
}

std::uint64_t send_one(Outlet &core, SendingTurn &turn, const Outgoing &message, bool more, const Patience &patience) {
    std::uint64_t ordinal = 0;
    switch (core.quick(message, ordinal, more)) {
        case Quick::done:
            return ordinal;
        case Quick::flush: {
            GilReleased free;
            core.flush();
            return ordinal;
        }
        case Quick::closed:
            fail("ClosedError", "this publisher is closed");
        case Quick::slow:
            break;
    }
    send_until_done(turn, [&](std::int64_t deadline) { return core.publish(message, ordinal, deadline); }, patience);
    return ordinal;
}

std::uint64_t outlet_publish(OutletHandle &self, nb::handle data) {
    Outlet &core = *self.core;
    if (core.forked()) fail_forked();
    Bytes bytes(data.ptr());
    Outgoing message;
    message.data = bytes.data;
    message.size = bytes.size;
    const Patience patience = as_opened_patience(core);
    SendingTurn turn(core, end_of(patience));
    check_turn(core, turn, patience);
    return send_one(core, turn, message, false, patience);
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

std::int64_t time_or_now(nb::handle value) {
    if (value.is_none()) return Outgoing::no_time;
    std::int64_t number = PyLong_AsLongLong(value.ptr());
    if (number == -1 && PyErr_Occurred()) throw nb::python_error();
    return number;
}

std::uint64_t outlet_publish_as(OutletHandle &self, nb::handle data, nb::handle properties, nb::handle vchan_id,
                                nb::handle ordinal, nb::handle timestamp_ns, std::uint64_t drops, nb::handle timeout,
                                bool wait) {
    Outlet &core = *self.core;
    check_usable(core);
    const Patience patience = patience_of(core, timeout, wait);
    Bytes bytes(data.ptr());
    std::string encoded = encode_properties(properties);
    Outgoing message;
    message.data = bytes.data;
    message.size = bytes.size;
    message.ordinal = static_cast<std::uint64_t>(number_or(ordinal, 0, INT64_MAX, "ordinal"));
    message.timestamp_ns = time_or_now(timestamp_ns);
    message.vchan_plus_one = static_cast<std::uint32_t>(number_or(vchan_id, -1, INT32_MAX - 1, "vchan_id") + 1);
    message.properties = reinterpret_cast<const std::uint8_t *>(encoded.data());
    message.properties_size = static_cast<std::uint32_t>(encoded.size());
    message.drops = drops;
    SendingTurn turn(core, end_of(patience));
    check_turn(core, turn, patience);
    return send_one(core, turn, message, false, patience);
}

// Flushes what publish_many has gathered, however it ends.
struct FlushAtEnd {
    Outlet &core;
    ~FlushAtEnd() {
        GilReleased free;
        core.flush();
    }
};

void send_batch(Outlet &core, SendingTurn &turn, PyObject *batch, bool carry, const Patience &patience,
                std::uint64_t &count) {
    BatchPin pin(batch);  // the GIL is released while sending: another thread could release the batch
    if (!pin.entries()) throw nb::python_error();
    FlushAtEnd flush{core};
    for (const Envelope &entry : *pin.entries()) {
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
        send_one(core, turn, message, true, patience);
        ++count;
    }
}

void send_items(Outlet &core, nb::handle batch, const Patience &patience, std::uint64_t &count) {
    nb::object iterator = nb::steal(PyObject_GetIter(batch.ptr()));
    if (!iterator.is_valid()) throw nb::python_error();
    FlushAtEnd flush{core};
    for (;;) {  // take the turn for each item, not for all: the iterator may run any Python code
        nb::object item = nb::steal(calling_python([&] { return PyIter_Next(iterator.ptr()); }));
        if (!item.is_valid()) break;
        Bytes bytes(item.ptr());
        Outgoing message;
        message.data = bytes.data;
        message.size = bytes.size;
        SendingTurn turn(core, end_of(patience));
        check_turn(core, turn, patience);
        send_one(core, turn, message, true, patience);
        ++count;
    }
    if (PyErr_Occurred()) throw nb::python_error();
}

std::uint64_t outlet_publish_many(OutletHandle &self, nb::handle batch, bool carry, nb::handle timeout) {
    Outlet &core = *self.core;
    check_usable(core);
    const Patience patience = patience_of(core, timeout);
    std::uint64_t count = 0;
    try {
        if (batch_check(batch.ptr())) {
            SendingTurn turn(core, end_of(patience));
            check_turn(core, turn, patience);
            send_batch(core, turn, batch.ptr(), carry, patience, count);
        } else {
            send_items(core, batch, patience, count);
        }
    } catch (nb::python_error &error) {
        error.restore();
        tell_published(count);
        throw nb::python_error();
    }
    return count;
}

struct FrameDraft final : DraftOwner {
    std::shared_ptr<Outlet> outlet;
    int users = 1;  // the draft until it is published, plus arrays that outlive it
    PyObject *publish(PyObject *, std::uint64_t token, std::int64_t size) override {
        std::uint64_t ordinal = 0;
        auto *frame = reinterpret_cast<Frame *>(token);
        bool read_on = users > 1;  // an array would keep the frame from counting as sent: send a copy
        try {
            check_usable(*outlet);
            if (read_on) {
                frame = outlet->reserve(static_cast<std::uint64_t>(size));
                std::memcpy(frame->payload(), reinterpret_cast<Frame *>(token)->payload(), static_cast<std::size_t>(size));
            }
            const Patience patience = as_opened_patience(*outlet);
            SendingTurn turn(*outlet, end_of(patience));
            check_turn(*outlet, turn, patience);
            auto step = [&](std::int64_t deadline) {
                return outlet->publish_frame(frame, static_cast<std::uint64_t>(size), ordinal, deadline);
            };
            send_until_done(turn, step, patience);
        } catch (nb::python_error &error) {
            if (read_on && frame != reinterpret_cast<Frame *>(token)) outlet->drop_frame(frame);
            error.restore();
            return nullptr;
        } catch (const std::bad_alloc &) {
            return PyErr_NoMemory();
        }
        if (read_on) let_go(token);
        else delete this;
        return PyLong_FromUnsignedLongLong(ordinal);
    }
    void cancel(std::uint64_t token) noexcept override { let_go(token); }
    void hold(std::uint64_t) noexcept override { ++users; }
    bool closed(const Draft *) const override { return outlet->closed(); }
    void let_go(std::uint64_t token) noexcept override {
        if (--users) return;
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
    std::memset(frame->payload(), 0, std::size_t(size));  // what is not written leaves the process too: no old memory
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
    if (deadline == 0) deadline = 1;  // a time in the past: send what can be sent now, without waiting
    for (;;) {
        Sent sent;
        {
            GilReleased free;
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
    for (const Gone &gone : self.core->take_gone()) list.append(nb::make_tuple(gone.id, gone.error, gone.lost, gone.dropped_overflow));
    return list;
}

std::shared_ptr<Outlet> make_outlet(LoopHandle &loop, const std::string &overflow, std::uint64_t messages,
                                    std::uint64_t bytes, double block_timeout, const std::string &name, const Kept &kept) {
    OverflowChoice choice = overflow == "block"         ? OverflowChoice::block
                            : overflow == "drop_oldest" ? OverflowChoice::drop_oldest
                                                        : OverflowChoice::drop_newest;
    std::int64_t timeout = block_timeout < 0 || block_timeout > 1e9 ? -1 : static_cast<std::int64_t>(block_timeout * 1e9);
    return std::make_shared<Outlet>(loop.core, choice, messages, bytes, timeout, name, kept);
}

int outlet_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) Py_VISIT(nb::inst_ptr<OutletHandle>(self)->owner);
    return 0;
}

int outlet_clear(PyObject *self) {
    Py_CLEAR(nb::inst_ptr<OutletHandle>(self)->owner);
    return 0;
}

PyType_Slot outlet_slots[] = {{Py_tp_traverse, reinterpret_cast<void *>(outlet_traverse)},
                              {Py_tp_clear, reinterpret_cast<void *>(outlet_clear)},
                              {0, nullptr}};

}  // namespace

void bind_outlet(nb::module_ &module) {
    nb::class_<LoopHandle>(module, "Loop").def(nb::init<>()).def("stop", [](LoopHandle &self) {
        GilReleased free;
        self.core->stop();
    });

    nb::class_<OutletHandle>(module, "Outlet", nb::type_slots(outlet_slots))
        .def("__init__",
             [](OutletHandle *self, LoopHandle &loop, const std::string &overflow, std::uint64_t messages,
                std::uint64_t bytes, double block_timeout, const std::string &name, std::uint64_t kept_messages,
                std::int64_t kept_ns, std::uint64_t kept_bytes) {
                 const Kept kept{kept_messages, kept_ns, kept_bytes};
                 new (self) OutletHandle(make_outlet(loop, overflow, messages, bytes, block_timeout, name, kept));
             })
        .def("hold", [](OutletHandle &self, nb::handle owner) { Py_XSETREF(self.owner, Py_NewRef(owner.ptr())); })
        .def("publish", outlet_publish, nb::arg("data").none())
        .def("publish", outlet_publish_as, nb::arg("data").none(), nb::kw_only(), nb::arg("properties").none() = nb::none(),
             nb::arg("vchan_id").none() = nb::none(), nb::arg("ordinal").none() = nb::none(),
             nb::arg("timestamp_ns").none() = nb::none(), nb::arg("drops") = 0,
             nb::arg("timeout").none() = as_opened, nb::arg("wait") = true)
        .def("publish_many", outlet_publish_many, nb::arg("batch"), nb::arg("carry") = false, nb::kw_only(),
             nb::arg("timeout").none() = as_opened)
        .def("reserve", [](nb::handle self, nb::handle size) { return outlet_reserve(self, size); }, nb::arg("size"))
        .def("drain", outlet_drain, nb::arg("timeout").none())
        .def("add", [](OutletHandle &self, int fd, bool extended, nb::bytes answer, std::size_t ordinal_offset,
                       bool past) {
                 return self.core->add(fd, extended, std::string(answer.c_str(), answer.size()), ordinal_offset, past);
             })
        .def("drop_silent",
             [](OutletHandle &self, double seconds) {
                 return self.core->drop_silent(static_cast<std::uint32_t>(std::min(seconds * 1000, 4e9)));
             })
        .def("remove", [](OutletHandle &self, std::uint64_t id) { return self.core->remove(id); })
        .def("close",
             [](OutletHandle &self) {
                 if (self.core->forked()) return;
                 {
                     GilReleased free;
                     self.core->close();
                 }
                 Py_CLEAR(self.owner);
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
}

}  // namespace penstock::tcp
