#include "broker/python.hpp"

#include <string>

#include "broker/queue_state.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

class BoundQueueState {
   public:
    explicit BoundQueueState(std::int64_t start) : state_(start) {}

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
            const std::int64_t until = entry.properties_size ? number_property(entry, "$expires_ns") : 0;
            const std::int64_t since_ns = entry.stored_ns == Envelope::not_stored ? entry.timestamp_ns : entry.stored_ns;
            if ((ttl_ns > 0 && since_ns + ttl_ns < now_ns) || (until > 0 && until < now_ns)) {
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
        if (kept.empty()) return nb::make_tuple(sent, nb::none(), expired);
        if (kept.size() == entries.size()) sent = nb::borrow(batch);
        else sent = batch_over(std::move(kept), batch.ptr(), channels);
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

    // Delayed messages that a look forward found: each waits for its property $due_ns.
    void hold(nb::handle batch) {
        for (const Envelope &entry : entries_of(batch)) state_.hold(entry.position, number_property(entry, "$due_ns"));
    }

    nb::list due(std::int64_t now_ns, std::size_t most) {
        nb::list found;
        for (const Waiting &item : state_.due(now_ns, most))
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
    QueueState &state() { return state_; }

   private:
    static bool is_wanted(PyObject *channels, std::uint32_t index, nb::tuple internal) {
        if (!channels || channels == Py_None) return true;
        PyObject *name = PyTuple_Check(channels) ? PyTuple_GET_ITEM(channels, index) : channels;
        if (!PyUnicode_Check(name) || PyUnicode_GET_LENGTH(name) == 0 || PyUnicode_READ_CHAR(name, 0) != '$') return true;
        return PySequence_Contains(internal.ptr(), name) == 1;
    }

    QueueState state_;
};

}  // namespace

void bind_queue_state(nb::module_ &module) {
    nb::class_<BoundQueueState>(module, "QueueState")
        .def(nb::init<std::int64_t>(), nb::arg("start"))
        .def("take", &BoundQueueState::take, nb::arg("batch"), nb::arg("consumer"), nb::arg("deadline_ns"),
             nb::arg("now_ns"), nb::arg("ttl_ns") = 0, nb::arg("internal") = nb::make_tuple())
        .def("hold", &BoundQueueState::hold)
        .def("count", &BoundQueueState::count)
        .def("look_from", [](BoundQueueState &self, std::int64_t cursor) { self.state().look_from(cursor); })
        .def("acknowledge",
             [](BoundQueueState &self, std::uint32_t consumer, std::int64_t first, std::int64_t last, bool exact) {
                 return self.state().acknowledge(consumer, first, last, exact);
             },
             nb::arg("consumer"), nb::arg("first"), nb::arg("last"), nb::arg("exact") = false)
        .def("open", [](BoundQueueState &self, std::int64_t position) { return self.state().open(position); })
        .def("put_back", [](BoundQueueState &self, std::int64_t position, std::uint32_t deliveries,
                            std::int64_t due_ns) { self.state().put_back(position, deliveries, due_ns); })
        .def("postpone", [](BoundQueueState &self, std::int64_t position, std::int64_t due_ns) {
            return self.state().postpone(position, due_ns);
        })
        .def("return_message", [](BoundQueueState &self, std::uint32_t consumer, std::int64_t position,
                                  std::int64_t due_ns) { return self.state().return_message(consumer, position, due_ns); })
        .def("drop_consumer",
             [](BoundQueueState &self, std::uint32_t consumer, std::int64_t now_ns, bool delivered) {
                 return self.state().drop_consumer(consumer, now_ns, delivered);
             },
             nb::arg("consumer"), nb::arg("now_ns"), nb::arg("delivered") = true)
        .def("expire", [](BoundQueueState &self, std::int64_t now_ns) { return self.state().expire(now_ns); })
        .def("due", &BoundQueueState::due)
        .def("redeliver", &BoundQueueState::redeliver)
        .def("reset", [](BoundQueueState &self, std::int64_t start) { self.state().reset(start); })
        .def("delta", &BoundQueueState::delta)
        .def("snapshot", &BoundQueueState::snapshot)
        .def("apply", &BoundQueueState::apply)
        .def("recovered", [](BoundQueueState &self) { self.state().recovered(); })
        .def_prop_ro("next_time_ns", [](BoundQueueState &self) { return self.state().next_time_ns(); })
        .def_prop_ro("floor", [](BoundQueueState &self) { return self.state().floor(); })
        .def_prop_ro("cursor", [](BoundQueueState &self) { return self.state().cursor(); })
        .def_prop_ro("outstanding", [](BoundQueueState &self) { return self.state().outstanding(); })
        .def_prop_ro("in_flight", [](BoundQueueState &self) { return self.state().in_flight(); })
        .def_prop_ro("waiting", [](BoundQueueState &self) { return self.state().waiting(); })
        .def("in_flight_of", [](BoundQueueState &self, std::uint32_t consumer) { return self.state().in_flight_of(consumer); })
        .def_prop_ro("changed", [](BoundQueueState &self) { return self.state().changed(); });
}

}  // namespace penstock::broker
