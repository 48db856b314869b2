#include "broker/python.hpp"

#include <algorithm>
#include <string>

#include "journal/bound_queue_state.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

using journal::BoundQueueState;

// Knows which topics are internal to the broker, and until when a message is valid.
class BrokerQueueState : public BoundQueueState {
   public:
    using BoundQueueState::BoundQueueState;

    // Selects what to send to `consumer` from the messages that were read: (batch or None, counts or None, expired).
    // `internal` are the topics with '$' in front that belong to this queue; other such topics belong to none. A
    // message that was delivered `most_deliveries` times before a restart (0: no limit) is due at once, to become a
    // dead letter.
    nb::object take(nb::handle batch, std::uint32_t consumer, std::int64_t deadline_ns, std::int64_t now_ns,
                    std::int64_t ttl_ns, nb::tuple internal, std::uint64_t most_deliveries) {
        const auto most = static_cast<std::uint32_t>(std::min<std::uint64_t>(most_deliveries, UINT32_MAX));
        Wanted wanted(batch, internal);
        std::size_t expired = 0;
        auto [sent, counts] = chosen(batch, [&](const Envelope &entry, std::uint32_t &deliveries) {
            const bool over = wanted(entry) && is_expired(entry, now_ns, ttl_ns);
            expired += over;
            if (!over && wanted(entry))
                return state_.deliver(entry.position, consumer, deadline_ns, deliveries, now_ns, most);
            state_.pass(entry.position);
            return false;
        });
        return nb::make_tuple(sent, counts, expired);
    }

    // How many of these belong to this queue and are still to be delivered.
    std::size_t count(nb::handle batch, nb::tuple internal) {
        Wanted wanted(batch, internal);
        std::size_t found = 0;
        for (const Envelope &entry : entries_of(batch)) found += wanted(entry) && state_.open(entry.position);
        return found;
    }

    // Adds delayed messages that were read: each waits until its property $due_ns.
    void hold(nb::handle batch) {
        for (const Envelope &entry : entries_of(batch)) state_.hold(entry.position, number_property(entry, "$due_ns"));
    }

   private:
    // Called once for each run of messages of one topic.
    class Wanted {
       public:
        Wanted(nb::handle batch, const nb::tuple &internal) : channels_(batch_channels(batch.ptr())), internal_(internal) {}
        bool operator()(const Envelope &entry) {
            if (static_cast<std::int64_t>(entry.channel) != channel_) {
                channel_ = entry.channel;
                wanted_ = look(entry.channel);
            }
            return wanted_;
        }

       private:
        bool look(std::uint32_t index) const {
            if (!channels_ || channels_ == Py_None) return true;
            PyObject *name = PyTuple_Check(channels_) ? PyTuple_GET_ITEM(channels_, index) : channels_;
            if (!PyUnicode_Check(name) || PyUnicode_GET_LENGTH(name) == 0 || PyUnicode_READ_CHAR(name, 0) != '$') return true;
            return PySequence_Contains(internal_.ptr(), name) == 1;
        }

        PyObject *channels_;
        const nb::tuple &internal_;
        std::int64_t channel_ = -1;
        bool wanted_ = true;
    };

    static bool is_expired(const Envelope &entry, std::int64_t now_ns, std::int64_t ttl_ns) {
        const std::int64_t until = entry.properties_size ? number_property(entry, "$expires_ns") : 0;
        const std::int64_t since_ns = entry.stored_ns == Envelope::not_stored ? entry.timestamp_ns : entry.stored_ns;
        return (ttl_ns > 0 && since_ns + ttl_ns < now_ns) || (until > 0 && until < now_ns);
    }
};

}  // namespace

void bind_queue_state(nb::module_ &module) {
    nb::class_<BrokerQueueState, BoundQueueState>(module, "QueueState")
        .def(nb::init<std::int64_t>(), nb::arg("start"))
        .def("take", &BrokerQueueState::take, nb::arg("batch"), nb::arg("consumer"), nb::arg("deadline_ns"),
             nb::arg("now_ns"), nb::arg("ttl_ns") = 0, nb::arg("internal") = nb::make_tuple(), nb::arg("most_deliveries") = 0)
        .def("hold", &BrokerQueueState::hold)
        .def("count", &BrokerQueueState::count);
}

}  // namespace penstock::broker
