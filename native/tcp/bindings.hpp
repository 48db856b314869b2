// What the Python files of this room share: errors, time-outs, buffers, turns, counts.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <cstdint>

#include "counters/counters.hpp"
#include "gil.hpp"
#include "message/message.hpp"
#include "tcp/inlet.hpp"

namespace penstock::tcp {

namespace nb = nanobind;

void bind_inlet(nb::module_ &module);
void bind_outlet(nb::module_ &module);

[[noreturn]] inline void fail(const char *name, const char *text) {
    raise_error(name, "%s", text);
    throw nb::python_error();
}

[[noreturn]] inline void fail_forked() {
    fail("StateError", "this handle was opened before a fork; open a new one in the child process");
}

// Nanoseconds; negative for ever.
inline std::int64_t timeout_ns_of(nb::handle timeout) {
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
    return seconds > 1e9 ? -1 : static_cast<std::int64_t>(seconds * 1e9);
}

// Monotonic deadline: negative for ever, 0 at once.
inline std::int64_t deadline_of(nb::handle timeout) {
    const std::int64_t ns = timeout_ns_of(timeout);
    return ns <= 0 ? ns : monotonic_ns() + ns;
}

// Holds the turn of an Inlet or Outlet. It is waited for without the GIL, which its holder may be waiting for.
template <typename Core>
class Turn {
   public:
    explicit Turn(Core &core) : core_(core) { take(); }
    ~Turn() { give(); }
    Turn(const Turn &) = delete;
    void take() {
        if (!core_.try_lock()) {
            GilReleased free;
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

// A turn for which the caller waits no longer than for a message, or for room. Without the turn it does nothing: the
// thread that has it is reading, or waiting for room too.
template <typename Core>
class PatientTurn {
   public:
    PatientTurn(Core &core, std::int64_t deadline) : core_(core), deadline_(deadline) { take(); }
    ~PatientTurn() { give(); }
    PatientTurn(const PatientTurn &) = delete;
    bool held() const { return held_; }
    bool take() {
        held_ = core_.try_lock();
        while (!held_) {
            {
                GilReleased free;
                held_ = core_.lock_for_a_moment(deadline_);
            }
            if (held_) break;
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
            if (deadline_ >= 0 && monotonic_ns() >= deadline_) break;
        }
        return held_;
    }
    void give() {
        if (held_) core_.unlock();
        held_ = false;
    }

   private:
    Core &core_;
    const std::int64_t deadline_;
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
        if (buffer_to_publish(object, &buffer, PyBUF_SIMPLE) != 0) throw nb::python_error();
        data = static_cast<const std::uint8_t *>(buffer.buf);
        size = static_cast<std::uint64_t>(buffer.len);
    }
    ~Bytes() {
        if (buffer.obj) PyBuffer_Release(&buffer);
    }
    Bytes(const Bytes &) = delete;
};

inline nb::dict drops_of(Counters *counters) {
    nb::dict drops;
    for (std::size_t i = 0; i < drop_reason_count; ++i)
        if (std::uint64_t n = counters->dropped[i].get()) drops[drop_reason_names[i]] = n;
    return drops;
}

inline nb::tuple ledger_of(Counters *counters, std::int64_t in_flight) {
    return nb::make_tuple(counters->matched.get(), counters->delivered.get(), drops_of(counters), in_flight);
}

}  // namespace penstock::tcp
