// penstock._core.shm. The files bindings* are the only ones of this room that know Python.
#include "shm/bindings.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstdlib>
#include <map>
#include <mutex>

#include "bindings.hpp"
#include "counters/counters.hpp"
#include "message/message.hpp"
#include "platform/checksum.hpp"
#include "platform/deaths.hpp"
#include "shm/bindings_handle.hpp"
#include "text.hpp"

namespace penstock::shm {

PyObject *raise(const Error &error) {
    const char *names[] = {"", "InvalidArgument", "CapacityError", "CorruptionError", "RefusedError", "StateError", "ClosedError"};
    if (error.fault == Fault::timeout) return PyErr_Format(PyExc_TimeoutError, "%s", error.what());
    if (error.fault == Fault::system) {
        PyObject *arguments = Py_BuildValue("is", error.number, error.what());
        if (arguments) PyErr_SetObject(PyExc_OSError, arguments);
        Py_XDECREF(arguments);
        return nullptr;
    }
    return raise_error(names[int(error.fault)], "%s", error.what());
}

PyObject *raise_current() {
    try {
        throw;
    } catch (const Error &error) {
        return raise(error);
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory();
    } catch (const std::system_error &error) {
        return raise(Error(Fault::system, error.what(), error.code().value()));
    } catch (const std::exception &error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
}

std::atomic<bool> interpreter_gone{false};

namespace {

struct Open {
    void (*stop)(void *);
    bool (*leave)(void *);
};

struct OpenHandles {
    std::mutex mutex;
    std::map<void *, Open> all;

    static OpenHandles &get() {
        static auto *made = new OpenHandles;  // never destroyed: threads may still be inside while the process ends
        return *made;
    }
};

// Runs after the interpreter has ended: no Python code runs any more, so no new wait begins and no error can be raised.
void leave_all() {
    constexpr std::int64_t longest_ns = 1'000'000'000;
    if (interpreter_gone.exchange(true)) return;
    std::lock_guard lock(OpenHandles::get().mutex);
    auto &all = OpenHandles::get().all;
    for (auto &[object, open] : all) open.stop(object);
    std::int64_t deadline = monotonic_ns() + longest_ns;
    for (auto &[object, open] : all)
        while (!open.leave(object) && monotonic_ns() < deadline) usleep(200);
}

}  // namespace

bool leave_at_exit(void *object, void (*stop)(void *), bool (*leave)(void *)) {
    static const bool registered = Py_AtExit(leave_all) == 0 || std::atexit(leave_all) == 0;
    if (!registered) return PyErr_Format(PyExc_RuntimeError, "no place for a function at exit"), false;
    try {
        std::lock_guard lock(OpenHandles::get().mutex);
        OpenHandles::get().all[object] = {stop, leave};
    } catch (const std::bad_alloc &) {
        return PyErr_NoMemory(), false;
    }
    return true;
}

void forget_at_exit(void *object) {
    std::lock_guard lock(OpenHandles::get().mutex);
    OpenHandles::get().all.erase(object);
}

bool read_timeout(PyObject *object, std::int64_t &deadline_ns) {
    if (!object || object == Py_None) {
        deadline_ns = -1;
        return true;
    }
    if (PyBool_Check(object) || !(PyFloat_Check(object) || PyLong_Check(object))) {
        PyErr_Format(PyExc_TypeError, "timeout must be seconds as a number or None, not %s", Py_TYPE(object)->tp_name);
        return false;
    }
    double seconds = PyFloat_AsDouble(object);
    if (seconds == -1.0 && PyErr_Occurred()) return false;
    if (!(seconds >= 0)) {
        raise_error("InvalidArgument", "timeout=%R must be 0 or more seconds, or None to wait for ever", object);
        return false;
    }
    if (seconds > 1e9) deadline_ns = -1;
    else deadline_ns = seconds == 0 ? 0 : monotonic_ns() + std::int64_t(std::ceil(seconds * 1e9));
    return true;
}

bool read_bool(PyObject *dictionary, const char *key, bool &value) {
    PyObject *object = PyDict_GetItemString(dictionary, key);
    if (!object || object == Py_None) return true;
    if (PyUnicode_Check(object) || PyBytes_Check(object) || PyFloat_Check(object)) {  // "no" would be true
        PyErr_Format(PyExc_TypeError, "%s must be True or False, not %R", key, object);
        return false;
    }
    int truth = PyObject_IsTrue(object);
    value = truth > 0;
    return truth >= 0;
}

bool read_number(PyObject *dictionary, const char *key, long long low, long long high, long long &value) {
    PyObject *object = PyDict_GetItemString(dictionary, key);
    if (!object || object == Py_None) return true;
    if (PyBool_Check(object) || !PyLong_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an int, not %s", key, Py_TYPE(object)->tp_name);
        return false;
    }
    int overflow = 0;
    value = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow || value < low || value > high) {
        PyObject *name = PyDict_GetItemString(dictionary, "name");
        raise_error("InvalidArgument", "channel %R: %s=%R must be between %lld and %lld", name ? name : Py_None, key, object,
                    low, high);
        return false;
    }
    return true;
}

static bool read_string(PyObject *dictionary, const char *key, std::string &value) {
    PyObject *object = PyDict_GetItemString(dictionary, key);
    if (!object || object == Py_None) return true;
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a str, not %s", key, Py_TYPE(object)->tp_name);
        return false;
    }
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(object, &size);
    if (!text) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return false;
        PyErr_Clear();
        raise_error("InvalidArgument", "%s=%A cannot be written as UTF-8", key, object);
        return false;
    }
    value.assign(text, size_t(size));
    return true;
}

bool read_options(PyObject *dictionary, Options &options) {
    long long vchan = -1, slots = 0, slot_size = 0, most_held = 0, metadata = -1, publishers = 0, subscribers = 0,
              mode = -1, group = -1, kept = 0, kept_ns = 0, kept_bytes = 0, kept_slots = 0, before = 0;
    bool read = read_string(dictionary, "name", options.name) && read_string(dictionary, "mux", options.mux) &&
                read_string(dictionary, "type", options.type) && read_bool(dictionary, "reliable", options.reliable) &&
                read_bool(dictionary, "fixed_size", options.fixed_size) && read_bool(dictionary, "local", options.local) &&
                read_bool(dictionary, "history", options.history) &&
                read_number(dictionary, "history_messages", 0, INT64_MAX, kept) &&
                read_number(dictionary, "history_ns", 0, INT64_MAX, kept_ns) &&
                read_number(dictionary, "history_bytes", 0, INT64_MAX, kept_bytes) &&
                read_number(dictionary, "history_slots", 0, max_slots - default_slots, kept_slots) &&
                read_number(dictionary, "before", 0, INT64_MAX, before) &&
                read_number(dictionary, "vchan_id", 0, max_vchans - 1, vchan) &&
                read_number(dictionary, "slots", min_slots, max_slots, slots) &&
                read_number(dictionary, "slot_size", 1, max_slot_bytes, slot_size) &&
                read_number(dictionary, "max_reserved", 1, max_slots, most_held) &&
                read_number(dictionary, "max_active_messages", 1, max_slots, most_held) &&
                read_number(dictionary, "metadata_size", 0, max_metadata_bytes, metadata) &&
                read_number(dictionary, "max_publishers", 1, max_members, publishers) &&
                read_number(dictionary, "max_subscribers", 1, max_members, subscribers) &&
                read_number(dictionary, "mode", 0, 0777, mode) && read_number(dictionary, "group", 0, 0x7fffffff, group);
    if (!read) return false;
    options.history_messages = std::uint64_t(kept);
    options.history_ns = std::uint64_t(kept_ns);
    options.history_bytes = std::uint64_t(kept_bytes);
    options.history_slots = std::uint32_t(kept_slots);
    options.before = std::uint64_t(before);
    options.vchan_id = std::int32_t(vchan);
    options.slots = std::uint32_t(slots);
    options.slot_size = std::uint64_t(slot_size);
    options.most_held = std::uint32_t(most_held);
    options.metadata_size = metadata < 0 ? not_given : std::uint32_t(metadata);
    options.max_publishers = std::uint32_t(publishers);
    options.max_subscribers = std::uint32_t(subscribers);
    options.access.shared = mode >= 0 || group >= 0;
    if (mode >= 0) options.access.mode = mode_t(mode) | 0600;
    else if (group >= 0) options.access.mode = 0660;
    options.access.has_group = group >= 0;
    if (group >= 0) options.access.group = gid_t(group);
    return true;
}

}  // namespace penstock::shm

namespace penstock {

namespace nb = nanobind;

static nb::dict member_dictionary(const shm::MemberView &member) {
    nb::dict entry;
    entry["kind"] = member.is_publisher ? "publisher" : "subscriber";
    entry["index"] = member.index;
    entry["pid"] = member.pid;
    entry["here"] = member.here;
    entry["process"] = member.process;
    entry["alive"] = member.alive;
    entry["reliable"] = member.reliable;
    entry["asleep"] = member.asleep;
    entry["most_held"] = member.most_held;
    entry["vchan_id"] = member.vchan;
    entry["messages"] = member.count;
    entry["total_bytes"] = member.bytes;
    entry["dropped"] = member.dropped;
    entry["joined_ns"] = member.joined_ns;
    entry["next_ordinal"] = member.cursor;
    entry["held"] = member.held;
    entry["oldest_held_ns"] = member.oldest_held_ns;
    entry["waiting"] = member.waiting;
    entry["overwritten"] = member.overwritten;
    return entry;
}

// A damaged control block may contain bytes that are no text.
static nb::list channels() {
    std::vector<shm::ChannelView> views;
    {
        GilReleased released;
        views = shm::list_channels();
    }
    nb::list all;
    for (const shm::ChannelView &view : views) {
        nb::dict entry;
        nb::list members;
        for (const auto &member : view.members) members.append(member_dictionary(member));
        nb::dict vchans, vchan_types;
        for (const auto &[id, name] : view.vchans) vchans[nb::int_(id)] = readable_text(name);
        for (const auto &[id, type] : view.vchan_types) vchan_types[nb::int_(id)] = readable_text(type);
        entry["name"] = readable_text(view.name);
        entry["type"] = readable_text(view.type);
        entry["problem"] = readable_text(view.problem);
        entry["durable"] = readable_text(view.durable);
        entry["slots"] = view.slots;
        entry["slot_size"] = view.slot_size;
        entry["metadata_size"] = view.metadata_size;
        entry["mux"] = bool(view.flags & shm::channel_mux);
        entry["fixed_size"] = bool(view.flags & shm::channel_fixed_size);
        entry["local"] = bool(view.flags & shm::channel_local);
        entry["mode"] = view.mode;
        entry["owner"] = view.owner;
        entry["memory_bytes"] = view.memory_bytes;
        entry["published"] = view.messages;
        entry["made_ns"] = view.made_ns;
        entry["free_slots"] = view.free_slots;
        entry["owned_slots"] = view.owned_slots;
        entry["live_slots"] = view.live_slots;
        entry["held_slots"] = view.held_slots;
        entry["last_ns"] = view.last_ns;
        entry["members"] = members;
        entry["vchans"] = vchans;
        entry["vchan_types"] = vchan_types;
        all.append(entry);
    }
    return all;
}

static nb::dict deaths() {
    Deaths found;
    {
        GilReleased released;
        shm::look_for_deaths();
        counters_look_for_deaths();
        found = read_deaths();
    }
    nb::list all;
    for (const DeathRecord &death : found.records) {
        nb::list members;
        for (std::uint32_t m = 0; m < death.members; ++m) {
            const MemberRecord &member = death.member[m];
            nb::dict entry;
            entry["room"] = readable_text(member.room);
            entry["kind"] = readable_text(member.kind);
            entry["channel"] = readable_text(member.name);
            entry["reliable"] = bool(member.reliable);
            entry["vchan_id"] = member.vchan;
            entry["messages"] = member.count;
            entry["total_bytes"] = member.bytes;
            entry["dropped"] = member.dropped;
            entry["joined_ns"] = member.opened_ns;
            entry["before"] = member.before;
            entry["tail"] = member.tail;
            entry["ordinal"] = member.ordinal;
            entry["time_ns"] = member.time_ns;
            entry["size"] = member.size;
            entry["held"] = member.held;
            entry["waiting"] = member.waiting;
            entry["in_flight"] = member.in_flight;
            entry["beginning"] = nb::bytes(member.beginning, member.beginning_size);
            members.append(entry);
        }
        nb::dict entry;
        entry["pid"] = death.pid;
        entry["program"] = readable_text(death.program);
        entry["found_by"] = death.finder;
        entry["found_by_program"] = readable_text(death.finder_program);
        entry["found_ns"] = death.found_ns;
        entry["left_out"] = death.left_out;
        entry["members"] = members;
        all.append(entry);
    }
    nb::dict result;
    result["deaths"] = all;
    result["damaged"] = found.damaged;
    result["path"] = readable_text(found.path);
    result["problem"] = readable_text(found.problem);
    return result;
}

void bind_shm(nb::module_ &module) {
    module.attr("MAX_VCHAN_ID") = shm::max_vchans;
    module.attr("MAX_SLOTS") = shm::max_slots;
    module.def("channels", &channels);
    module.def("described_type", [](const std::string &name) { return readable_text(shm::described_type(name)); });
    module.def("deaths", &deaths);
    module.def("clean", [] {
        shm::Cleaned cleaned;
        {
            GilReleased released;
            cleaned = shm::clean_channels();
        }
        nb::list removed, recovered;
        for (const std::string &name : cleaned.removed) removed.append(readable_text(name));
        for (const std::string &name : cleaned.recovered) recovered.append(readable_text(name));
        return nb::make_tuple(removed, recovered);
    });
    module.def("fork_generation", &fork_generation);
    if (!shm::publisher_ready(module.ptr()) || !shm::subscriber_ready(module.ptr())) throw nb::python_error();
}

}  // namespace penstock
