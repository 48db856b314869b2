// penstock._core.Counters and counters_read: the one file of this folder that knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <string_view>

#include "bindings.hpp"
#include "counters/counters.hpp"
#include "gil.hpp"
#include "text.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

struct Field {
    const char *name;
    Count Counters::*count;
};

constexpr Field fields[] = {
    {"matched", &Counters::matched},         {"delivered", &Counters::delivered}, {"bytes", &Counters::bytes},
    {"expired", &Counters::expired},         {"redelivered", &Counters::redelivered},
    {"errors", &Counters::errors},           {"depth", &Counters::depth},         {"capacity", &Counters::capacity},
    {"peers", &Counters::peers},             {"memory_bytes", &Counters::memory_bytes},
    {"last_ns", &Counters::last_ns},         {"latency_ns", &Counters::latency_ns}, {"lag", &Counters::lag},
    {"position", &Counters::position},
};

// A name that is not UTF-8, or a state that is being written at this moment, must not make the whole read fail.
nb::dict as_dict(const CountersCopy &copy) {
    nb::dict result, dropped;
    result["pid"] = copy.pid;
    result["here"] = copy.here;
    result["process"] = copy.process;
    result["program"] = readable_text(copy.program);
    result["index"] = copy.index;
    result["taking"] = copy.used;
    result["room"] = readable_text(copy.room);
    result["kind"] = readable_text(copy.kind);
    result["name"] = readable_text(copy.name);
    result["name_cut"] = copy.name_cut;
    result["state"] = readable_text(copy.state);
    result["opened_ns"] = copy.opened_ns;
    result["matched"] = copy.matched;
    result["delivered"] = copy.delivered;
    result["bytes"] = copy.bytes;
    result["expired"] = copy.expired;
    result["redelivered"] = copy.redelivered;
    result["errors"] = copy.errors;
    std::uint64_t lost = 0;
    for (std::size_t i = 0; i < drop_reason_count; ++i) {
        lost += copy.dropped[i];
        if (copy.dropped[i]) dropped[drop_reason_names[i]] = copy.dropped[i];
    }
    result["dropped"] = dropped;
    result["in_flight"] = static_cast<std::int64_t>(copy.matched - copy.delivered - lost - copy.expired);
    result["depth"] = copy.depth;
    result["capacity"] = copy.capacity;
    result["peers"] = copy.peers;
    result["memory_bytes"] = copy.memory_bytes;
    result["last_ns"] = copy.last_ns;
    result["latency_ns"] = copy.latency_ns;
    result["lag"] = copy.lag;
    result["position"] = copy.position;
    result["latency_sum_ns"] = copy.latency_sum_ns;
    nb::list counts;  // empty for a handle that measures nothing
    if (copy.latency_ns)
        for (std::uint64_t count : copy.latency_counts) counts.append(count);
    result["latency_counts"] = nb::tuple(counts);
    return result;
}

struct Handle {
    Counters *counters;
    Handle(std::string_view room, std::string_view kind, std::string_view name)
        : counters(counters_take(room, kind, name)) {}
    ~Handle() { counters_give(counters); }
    Handle(const Handle &) = delete;
    Handle &operator=(const Handle &) = delete;

    Counters &open() const {
        if (!counters) throw nb::value_error("these counters were closed");
        return *counters;
    }
    Count &count(std::string_view name) const {
        for (const Field &field : fields)
            if (name == field.name) return open().*field.count;
        throw nb::key_error(std::string(name).c_str());
    }
    // For handles written in Python that count in matched what arrives: all else is counted when a program reads.
    void deliver(std::uint64_t messages, std::uint64_t size, std::int64_t timestamp_ns) const {
        Counters &all = open();
        all.delivered.add_shared(messages);
        all.bytes.add_shared(size);
        std::int64_t waiting = all.in_flight();
        all.depth.set(waiting > 0 ? static_cast<std::uint64_t>(waiting) : 0);
        if (timestamp_ns)
            all.measure(timestamp_ns);
        else
            all.note_read();
    }
    void drop(std::string_view reason, std::uint64_t n) const {
        for (std::size_t i = 0; i < drop_reason_count; ++i)
            if (reason == drop_reason_names[i]) return open().dropped[i].add_shared(n);
        throw nb::key_error(std::string(reason).c_str());
    }
    void close() {
        counters_give(counters);
        counters = nullptr;
    }
};

}  // namespace

void bind_counters(nb::module_ &module) {
    nb::class_<Handle>(module, "Counters", "The counts of one handle, in memory that the monitor can read.")
        .def(nb::init<std::string_view, std::string_view, std::string_view>(), nb::arg("room"), nb::arg("kind"),
             nb::arg("name"))
        .def("add", [](Handle &self, std::string_view field, std::uint64_t n) { self.count(field).add_shared(n); },
             nb::arg("field"), nb::arg("n") = 1)
        .def("set", [](Handle &self, std::string_view field, std::uint64_t n) { self.count(field).set(n); },
             nb::arg("field"), nb::arg("n"))
        .def("get", [](Handle &self, std::string_view field) { return self.count(field).get(); }, nb::arg("field"))
        .def("deliver", &Handle::deliver, nb::arg("messages"), nb::arg("bytes"), nb::arg("timestamp_ns") = 0,
             "So many of what has arrived are handed to the program now; measured if the time of one is given.")
        .def("drop", &Handle::drop, nb::arg("reason"), nb::arg("n") = 1)
        .def("measure", [](Handle &self, std::int64_t timestamp_ns) { self.open().measure(timestamp_ns); },
             nb::arg("timestamp_ns"), "A message of that time is handed to its reader now: latency_ns and last_ns.")
        .def("note_latency", [](Handle &self, std::uint64_t nanoseconds) { self.open().note_latency(nanoseconds); },
             nb::arg("nanoseconds"), "So long a message was on its way, where the handle knows better than the clock.")
        .def("state", [](Handle &self, std::string_view text) { counters_state(&self.open(), text); }, nb::arg("text"))
        .def("snapshot", [](Handle &self) { return as_dict(counters_copy(&self.open())); })
        .def("close", &Handle::close);
    module.def(
        "counters_read",
        [] {
            std::vector<CountersCopy> copies;
            {
                GilReleased unlocked;
                copies = counters_read();
            }
            nb::list result;
            for (const CountersCopy &copy : copies) result.append(as_dict(copy));
            return result;
        },
        "Every handle of every live process on this machine whose counters may be read, as dicts.");
    module.def(
        "counters_name", [](std::string_view name) { return readable_text(counters_name(name)); }, nb::arg("name"),
        "A handle's name as counters_read gives it: one that is too long has its middle left out and a hash added.");
    module.def("counters_hide", &counters_hide,
               "From now on other processes do not see the handles that this one opens, and its end is no death.");
    module.def("counters_kind", &counters_kind, nb::arg("kind"),
               "The kind of whatever this thread opens from now on; an empty one ends that.");
    module.def("counters_directory", &counters_directory, "Where the pages of counters are.");
}

}  // namespace penstock
