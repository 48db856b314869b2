// Inlet for Python: messages that lie in pooled chunks, and the sessions they come from.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "tcp/bindings.hpp"

namespace penstock::tcp {

namespace {

struct ChunkOwner final : Owner {
    void release(std::uint64_t token) noexcept override { chunk_drop(reinterpret_cast<Chunk *>(token)); }
    bool retain(std::uint64_t token) noexcept override {
        reinterpret_cast<Chunk *>(token)->references.fetch_add(1, std::memory_order_relaxed);
        return true;
    }
    void release_many(const std::uint64_t *tokens, std::size_t count) noexcept override {
        std::size_t first = 0;  // a batch lies in one or two chunks: release each run of entries by one decrement
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

// The source and channel of the messages of one connection.
struct Names {
    std::uint32_t session;
    PyObject *channel;
    PyObject *source;
};

struct InletHandle {
    Inlet core;
    std::unordered_map<std::uint64_t, Names> names;  // by the connection's serial number
    std::vector<std::uint64_t> ended;                // read to their end; the reader may still be creating a message of theirs
    std::string refused;                             // why no session is left, where a publisher has refused the last one
    PyObject *on_lost = nullptr;

    InletHandle(std::uint64_t max_message_size, std::size_t held, const std::string &name)
        : core(max_message_size, held, name) {}
    ~InletHandle() { clear(); }
    void clear() {
        auto before = std::move(names);
        names.clear();
        for (auto &[serial, name] : before) {
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
    PyObject *result = calling_python([&] {
        return PyObject_CallFunction(function, "IKsiK", lost.session, static_cast<unsigned long long>(lost.serial),
                                     lost.reason, lost.error, static_cast<unsigned long long>(lost.messages));
    });
    Py_DECREF(function);
    if (!result) throw nb::python_error();
    Py_DECREF(result);
}

template <typename Which>
std::vector<Names> take_names(InletHandle &self, Which which) {
    std::vector<Names> gone;
    for (auto at = self.names.begin(); at != self.names.end();) {
        if (which(at->first, at->second)) {
            gone.push_back(at->second);
            at = self.names.erase(at);
        } else {
            ++at;
        }
    }
    return gone;
}

// Dropping a reference may run any code: do it neither while iterating the map nor while holding the turn.
void drop_names(const std::vector<Names> &gone) {
    for (const Names &names : gone) {
        Py_XDECREF(names.channel);
        Py_XDECREF(names.source);
    }
}

using ReadingTurn = PatientTurn<Inlet>;

// Connections that had been read to their end before this read began.
void forget_ended(InletHandle &self, ReadingTurn &turn) {
    if (!turn.held() || self.ended.empty() || self.core.has_kept()) return;
    auto ended = std::move(self.ended);
    self.ended.clear();
    auto gone = take_names(self, [&](std::uint64_t serial, const Names &) {
        return std::find(ended.begin(), ended.end(), serial) != ended.end();
    });
    turn.give();
    drop_names(gone);
    turn.take();
}

// Reads until there is a message: true, and the turn is held; or the time is over: false.
bool next_message(InletHandle &self, ReadingTurn &turn, std::int64_t deadline, Received &received) {
    if (!turn.held()) {
        check_usable(self);
        return false;
    }
    Read result = self.core.take(received);
    for (;;) {
        if (result == Read::nothing) {
            GilReleased free;
            result = self.core.fetch(deadline, received);
            if (result == Read::nothing) return false;
        }
        switch (result) {
            case Read::message:
                return true;
            case Read::nothing:
                return false;
            // Python code (even creating an error may run the garbage collector) runs without the turn: a signal
            // handler or a finaliser may close this subscriber.
            case Read::closed:
                turn.give();
                fail("ClosedError", "this subscriber was closed");
            case Read::ended:
                turn.give();
                if (!self.refused.empty()) fail("RefusedError", self.refused.c_str());
                fail("ClosedError", "every session of this subscriber has ended; add_session gives it a new one");
            case Read::full:
                turn.give();
                fail("CapacityError",
                     "messages that are still held use up this subscriber's receive memory; release them (or open it "
                     "with a larger held_bytes)");
            case Read::interrupted:
                turn.give();
                if (PyErr_CheckSignals() != 0) throw nb::python_error();
                if (!turn.take()) return false;
                break;
            case Read::knocked:
                turn.give();
                if (!turn.take()) return false;
                break;
            case Read::lost: {
                Lost lost = self.core.lost();
                turn.give();
                self.ended.push_back(lost.serial);
                tell_lost(self, lost);
                if (!turn.take()) return false;
                break;
            }
        }
        result = Read::nothing;
    }
}

Names names_of(InletHandle &self, const Received &received) {
    auto found = self.names.find(received.serial);
    return found == self.names.end() ? Names{received.session, nullptr, nullptr} : found->second;
}

PyObject *make_message(InletHandle &self, const Received &received) {
    Names names = names_of(self, received);
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
    ReadingTurn turn(self.core, deadline);
    forget_ended(self, turn);
    if (!next_message(self, turn, deadline, received)) return nb::none();
    self.core.count(received, true);
    return nb::steal(make_message(self, received));
}

nb::object inlet_read_newest(InletHandle &self, nb::handle timeout) {
    std::int64_t deadline = deadline_of(timeout);
    check_usable(self);
    Received newest, received;
    ReadingTurn turn(self.core, deadline);
    forget_ended(self, turn);
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
    if (!turn.held()) {
        GilReleased free;
        self.core.lock();
        self.core.count(newest, true);
        self.core.unlock();
    } else {
        self.core.count(newest, true);
    }
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
    Names names{0, nullptr, nullptr};
    ReadingTurn turn(self.core, deadline);
    forget_ended(self, turn);
    if (next_message(self, turn, deadline, received)) {
        std::uint32_t session = received.session;
        entries.reserve(static_cast<std::size_t>(std::min<Py_ssize_t>(most, 512)));
        names = names_of(self, received);
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
    ReadingTurn turn(self.core, deadline);
    forget_ended(self, turn);
    if (turn.held() && self.core.has_kept()) return true;
    if (!next_message(self, turn, deadline, received)) return false;
    self.core.keep(received);
    return true;
}

std::uint64_t inlet_come(InletHandle &self) {
    check_usable(self);
    Turn<Inlet> turn(self.core);
    return self.core.come();
}

bool inlet_given(InletHandle &self, std::uint64_t come) {
    check_usable(self);
    Turn<Inlet> turn(self.core);
    return self.core.given(come);
}

std::uint64_t inlet_attach(InletHandle &self, std::uint32_t session, int fd, bool extended, bool fresh,
                           std::uint64_t next_ordinal, std::uint64_t past, nb::handle channel, nb::handle source) {
    std::uint64_t serial = self.core.next_serial();
    self.names[serial] = {session, Py_NewRef(channel.ptr()), Py_NewRef(source.ptr())};
    GilReleased free;
    self.core.attach(serial, session, fd, extended, fresh, next_ordinal, past);
    return serial;
}

void inlet_detach(InletHandle &self, std::uint32_t session) {
    {
        GilReleased free;
        self.core.detach(session);
    }
    drop_names(take_names(self, [&](std::uint64_t, const Names &names) { return names.session == session; }));
}

void inlet_close(InletHandle &self) {
    if (self.core.forked()) return;
    {
        GilReleased free;
        self.core.close();
    }
    self.clear();
}

int inlet_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    InletHandle *handle = nb::inst_ptr<InletHandle>(self);
    for (auto &[serial, names] : handle->names) {
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

}  // namespace

void bind_inlet(nb::module_ &module) {
    nb::class_<InletHandle>(module, "Inlet", nb::type_slots(inlet_slots))
        .def(nb::init<std::uint64_t, std::size_t, const std::string &>(), nb::arg("max_message_size"),
             nb::arg("held_bytes"), nb::arg("name"))
        .def("read", inlet_read, nb::arg("timeout").none() = nb::none())
        .def("read_newest", inlet_read_newest, nb::arg("timeout").none() = nb::none())
        .def("read_many", inlet_read_many, nb::arg("most") = 1024, nb::arg("timeout").none() = nb::none())
        .def("wait", inlet_wait, nb::arg("timeout").none() = nb::none())
        .def("fileno", [](InletHandle &self) { return self.core.descriptor(); })
        .def("come", inlet_come)
        .def("given", inlet_given)
        .def("attach", inlet_attach)
        .def("detach", inlet_detach)
        .def("last_ordinal",
             [](InletHandle &self, std::uint32_t session) {
                 GilReleased free;
                 return self.core.last_ordinal(session);
             })
        .def("finish",
             [](InletHandle &self, bool ended, const std::string &refused) {
                 self.refused = refused;
                 GilReleased free;
                 self.core.finish(ended);
             })
        .def("close", inlet_close)
        .def("on_lost", [](InletHandle &self, nb::handle function) { Py_XSETREF(self.on_lost, Py_NewRef(function.ptr())); })
        .def_prop_ro("closed", [](InletHandle &self) { return self.core.closed(); })
        .def("ledger", [](InletHandle &self) { return ledger_of(self.core.counters(), 0); })
        .def("peers", [](InletHandle &self, std::uint64_t n) { self.core.counters()->peers.set(n); })
        .def("error", [](InletHandle &self) { self.core.counters()->errors.add_shared(1); })
        .def_prop_ro("held_bytes", [](InletHandle &self) { return self.core.budget()->held_bytes.load(); });
}

}  // namespace penstock::tcp
