#include "journal/bound_queue_state.hpp"
#include "journal/python.hpp"

namespace penstock::journal {

namespace {

nb::bytes bytes_of(const std::string &record) { return nb::bytes(record.data(), record.size()); }

std::int64_t position_of(nb::handle item) {
    if (message_check(item.ptr())) return reinterpret_cast<Message *>(item.ptr())->envelope.position;
    const long long position = PyLong_AsLongLong(item.ptr());
    if (position == -1 && PyErr_Occurred()) throw nb::python_error();
    return position;
}

// A message or a position, a batch, or a list or tuple of messages and positions.
std::vector<std::int64_t> positions_of(nb::handle messages) {
    std::vector<std::int64_t> found;
    if (batch_check(messages.ptr())) {
        for (const Envelope &entry : entries_of(messages)) found.push_back(entry.position);
    } else if (PyList_Check(messages.ptr()) || PyTuple_Check(messages.ptr())) {
        found.reserve(static_cast<std::size_t>(PySequence_Fast_GET_SIZE(messages.ptr())));
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(messages.ptr()); ++i)
            found.push_back(position_of(PySequence_Fast_GET_ITEM(messages.ptr(), i)));
    } else {
        found.push_back(position_of(messages));
    }
    return found;
}

class JournalQueueState : public BoundQueueState {
   public:
    using BoundQueueState::BoundQueueState;

    // Takes the messages read up to `following`; returns a batch of those to deliver, or None.
    nb::object take(nb::handle batch, std::int64_t following, std::uint32_t consumer, std::int64_t deadline_ns,
                    std::int64_t now_ns, std::uint32_t most_deliveries) {
        auto [sent, counts] = chosen(batch, [&](const Envelope &entry, std::uint32_t &deliveries) {
            return state_.deliver(entry.position, consumer, deadline_ns, deliveries, now_ns, most_deliveries);
        });
        state_.look_from(following);
        return sent;
    }
};

nb::list listed(const std::vector<Waiting> &waiting) {
    nb::list found;
    for (const Waiting &item : waiting) found.append(nb::make_tuple(item.position, item.deliveries));
    return found;
}

}  // namespace

void bind_queue_state(nb::module_ &module) {
    using Bound = BoundQueueState;
    nb::class_<Bound>(module, "AnyQueueState")
        .def("look_from", [](Bound &self, std::int64_t cursor) { self.state().look_from(cursor); })
        .def("acknowledge",
             [](Bound &self, std::uint32_t consumer, std::int64_t first, std::int64_t last, bool exact) {
                 return self.state().acknowledge(consumer, first, last, exact);
             },
             nb::arg("consumer"), nb::arg("first"), nb::arg("last"), nb::arg("exact") = false)
        .def("acknowledge_each", [](Bound &self, nb::handle messages) { return self.state().acknowledge_each(positions_of(messages)); })
        .def("open", [](Bound &self, std::int64_t position) { return self.state().open(position); })
        .def("put_back", [](Bound &self, std::int64_t position, std::uint32_t deliveries, std::int64_t due_ns) {
            self.state().put_back(position, deliveries, due_ns);
        })
        .def("postpone", [](Bound &self, std::int64_t position, std::int64_t due_ns) { return self.state().postpone(position, due_ns); })
        .def("return_message",
             [](Bound &self, std::uint32_t consumer, std::int64_t position, std::int64_t due_ns, bool lasting) {
                 return self.state().return_message(consumer, position, due_ns, lasting);
             },
             nb::arg("consumer"), nb::arg("position"), nb::arg("due_ns"), nb::arg("lasting") = false)
        .def("take_back", [](Bound &self, std::int64_t position, std::int64_t now_ns) { return self.state().take_back(position, now_ns); })
        .def("extend", [](Bound &self, std::int64_t position, std::int64_t deadline_ns) { return self.state().extend(position, deadline_ns); })
        .def("heard",
             [](Bound &self, std::uint32_t consumer, std::int64_t first, std::int64_t last, std::int64_t deadline_ns) {
                 self.state().heard(consumer, first, last, deadline_ns);
             })
        .def("drop_consumer",
             [](Bound &self, std::uint32_t consumer, std::int64_t now_ns, bool delivered) {
                 return self.state().drop_consumer(consumer, now_ns, delivered);
             },
             nb::arg("consumer"), nb::arg("now_ns"), nb::arg("delivered") = true)
        .def("expire", [](Bound &self, std::int64_t now_ns, std::int64_t latest_ns) { return self.state().expire(now_ns, latest_ns); },
             nb::arg("now_ns"), nb::arg("latest_ns") = INT64_MAX)
        .def("due", [](Bound &self, std::int64_t now_ns, std::size_t most) { return listed(self.state().due(now_ns, most)); })
        .def("waiting_from", [](Bound &self, std::int64_t position, std::size_t most) { return listed(self.state().waiting_from(position, most)); })
        .def("finish_ahead", [](Bound &self, std::int64_t position) { return self.state().finish_ahead(position); })
        .def("reopen", [](Bound &self, std::int64_t position) { self.state().reopen(position); })
        .def("redeliver",
             [](Bound &self, std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns) {
                 std::uint32_t deliveries = 0;
                 return self.state().redeliver(position, consumer, deadline_ns, deliveries) ? deliveries : 0;
             })
        .def("reset", [](Bound &self, std::int64_t start) { self.state().reset(start); })
        .def("deliveries", [](Bound &self, std::int64_t position) { return self.state().deliveries(position); })
        .def("delta", [](Bound &self) { return bytes_of(self.state().delta()); })
        .def("snapshot", [](Bound &self) { return bytes_of(self.state().snapshot()); })
        .def("done_record", [](Bound &self, std::int64_t position) { return bytes_of(self.state().done_record(position)); })
        .def("apply", [](Bound &self, nb::bytes record) { return self.state().apply({record.c_str(), record.size()}); })
        .def("apply_note", [](Bound &self, int kind, std::uint64_t first, std::uint64_t second) {
            self.state().apply_note(kind, static_cast<std::int64_t>(first), static_cast<std::int64_t>(second));
        })
        .def("recovered", [](Bound &self) { self.state().recovered(); })
        .def_prop_ro("next_time_ns", [](Bound &self) { return self.state().next_time_ns(); })
        .def_prop_ro("floor", [](Bound &self) { return self.state().floor(); })
        .def_prop_ro("cursor", [](Bound &self) { return self.state().cursor(); })
        .def_prop_ro("runs", [](Bound &self) { return self.state().runs(); })
        .def_prop_ro("outstanding", [](Bound &self) { return self.state().outstanding(); })
        .def_prop_ro("in_flight", [](Bound &self) { return self.state().in_flight(); })
        .def_prop_ro("waiting", [](Bound &self) { return self.state().waiting(); })
        .def("in_flight_of", [](Bound &self, std::uint32_t consumer) { return self.state().in_flight_of(consumer); })
        .def_prop_ro("changed", [](Bound &self) { return self.state().changed(); });
    nb::class_<JournalQueueState, Bound>(module, "QueueState")
        .def(nb::init<std::int64_t>(), nb::arg("start"))
        .def("take", &JournalQueueState::take);
}

}  // namespace penstock::journal
