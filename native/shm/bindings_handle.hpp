// What the Python objects of a publisher and of a subscriber share: whether they may be used, waiting without the GIL,
// closing while another thread waits, the end of the interpreter.
//
// An Object derives from HandleObject and says by `kind` what people call it.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <atomic>

#include "message/message.hpp"
#include "shm/bindings.hpp"

namespace penstock::shm {

template <typename Native>
struct HandleObject {
    PyObject_HEAD
    Native *handle;
    std::int64_t spin_ns;
    std::uint32_t waiting;  // threads and tasks that still use the handle: it is closed when they are done
    bool close_pending;
    std::atomic<std::uint32_t> inside;  // threads in native code without the GIL
};

// Registers the handle, so that it leaves its channel at the end of the interpreter. False with an error set.
bool leave_at_exit(void *object, void (*stop)(void *), bool (*leave)(void *));
void forget_at_exit(void *object);
extern std::atomic<bool> interpreter_gone;

// Runs it without the GIL. Once the interpreter has ended it never returns: there is no GIL to take.
template <typename Object, typename Function>
auto run_inside(Object *self, Function &&function) {
    struct Outside {
        Object *self;
        ~Outside() {
            self->inside.fetch_sub(1);
            while (interpreter_gone.load()) pause();
        }
    };
    self->inside.fetch_add(1);  // with the GIL held, so that the end of the interpreter sees it
    GilReleased released;
    Outside outside{self};
    return function();
}

// The handle if it may be used, else null with an error set. Asked after everything that runs other Python code (the
// conversion of an argument, an iterable, a warning, a signal's function), which may have closed it.
template <typename Object>
auto usable(Object *self) -> decltype(self->handle) {
    auto *handle = self->handle;
    if (handle && !handle->closed.load(std::memory_order_relaxed) && handle->member.belongs_here()) [[likely]]
        return handle;
    if (handle && !handle->member.belongs_here())
        raise_error("StateError", "%s was opened before this process was forked; open it again in the child",
                    handle->member.describe().c_str());
    else
        raise_error("ClosedError", "this %s is closed", Object::kind);
    return nullptr;
}

// Closes the handle once no thread waits any more.
template <typename Object>
void settle_close(Object *self) {
    if (!self->close_pending || self->waiting) return;
    self->close_pending = false;
    run_inside(self, [&] { self->handle->close(false); });
}

// Runs it without the GIL; a close by another thread waits until it is over.
template <typename Object, typename Function>
auto run_without_gil(Object *self, Function &&function) {
    struct Away {
        Object *self;
        ~Away() {
            --self->waiting;
            settle_close(self);
        }
    } away{self};
    ++self->waiting;
    return run_inside(self, function);
}

// Runs a wait without the GIL. False with an error set.
template <typename Object, typename Function>
bool wait_with(Object *self, Woken &woken, Function &&function) {
    for (;;) {
        if (PyErr_CheckSignals() != 0) return false;  // before each sleep: a signal that came earlier interrupts none
        if (!usable(self)) return false;
        try {
            woken = run_without_gil(self, function);
        } catch (...) {
            raise_current();
            return false;
        }
        if (woken == Woken::closed || self->handle->closed.load())
            return raise_error("ClosedError", "this %s was closed while it waited", Object::kind), false;
        if (woken != Woken::look) return true;
    }
}

inline std::int64_t spin_until(std::int64_t spin_ns) { return spin_ns > 0 ? monotonic_ns() + spin_ns : 0; }

// wait(timeout, descriptor) as both have it: reads the arguments, then waits.
template <typename Object>
PyObject *wait_method(PyObject *object, PyObject *arguments, PyObject *names) {
    auto *self = reinterpret_cast<Object *>(object);
    static const char *keywords[] = {"timeout", "descriptor", nullptr};
    PyObject *timeout = Py_None, *extra = Py_None;
    std::int64_t deadline;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "|OO", const_cast<char **>(keywords), &timeout, &extra) ||
        !read_timeout(timeout, deadline))
        return nullptr;
    int descriptor = extra == Py_None ? -1 : PyObject_AsFileDescriptor(extra);
    if (PyErr_Occurred()) return nullptr;
    auto *handle = usable(self);
    if (!handle) return nullptr;
    Woken woken = Woken::timeout;
    try {
        if (descriptor >= 0) handle->member.bells.own();
    } catch (...) {
        return raise_current();
    }
    // A time-out of 0 only checks, the other descriptor too.
    if (deadline == 0) deadline = monotonic_ns() + (descriptor >= 0);
    std::int64_t until = spin_until(self->spin_ns);
    if (!wait_with(self, woken, [&] { return handle->wait(deadline, until, descriptor); })) return nullptr;
    return PyBool_FromLong(woken == Woken::ready);
}

template <typename Object>
PyObject *close_method(PyObject *object, PyObject *) {
    auto *self = reinterpret_cast<Object *>(object);
    auto *handle = self->handle;
    if (!handle || handle->closed.load()) Py_RETURN_NONE;
    if constexpr (requires { handle->update_counters(); }) handle->update_counters();
    handle->closed.store(true);
    counters_retire(handle->counters);
    if (handle->member.belongs_here()) handle->wake();
    self->close_pending = true;
    settle_close(self);
    Py_RETURN_NONE;
}

// The interpreter has ended: tell waiting threads to stop, and leave the channel once no thread is inside. The memory
// stays mapped, because the process ends anyway. If a thread stays inside, other processes find this one dead.
template <typename Object>
void stop_object(void *object) {
    auto *handle = static_cast<Object *>(object)->handle;
    if (!handle->member.belongs_here()) return;
    handle->closed.store(true);
    if (handle->member.joined()) handle->wake();
}
template <typename Object>
bool leave_object(void *object) {
    auto *self = static_cast<Object *>(object);
    if (self->handle->member.belongs_here() && self->inside.load()) return false;
    self->handle->member.leave(true);
    return true;
}
template <typename Object>
bool remember_handle(Object *self) {
    return leave_at_exit(self, stop_object<Object>, leave_object<Object>);
}

// A task of an event loop waits for the descriptor: a close takes effect when the task has checked once more.
template <typename Object>
PyObject *begin_wait_method(PyObject *object, PyObject *) {
    auto *self = reinterpret_cast<Object *>(object);
    if (!usable(self)) return nullptr;
    ++self->waiting;
    Py_RETURN_NONE;
}
template <typename Object>
PyObject *end_wait_method(PyObject *object, PyObject *) {
    auto *self = reinterpret_cast<Object *>(object);
    if (self->waiting) --self->waiting;
    settle_close(self);
    Py_RETURN_NONE;
}

template <typename Object>
PyObject *get_closed(PyObject *object, void *) {
    auto *handle = reinterpret_cast<Object *>(object)->handle;
    return PyBool_FromLong(!handle || handle->closed.load());
}

template <typename Object>
PyObject *get_vchan(PyObject *object, void *) {
    auto *handle = reinterpret_cast<Object *>(object)->handle;
    if (!handle || handle->member.vchan < 0) Py_RETURN_NONE;
    return PyLong_FromLong(handle->member.vchan);
}

// What a getter that needs an open handle reads by function(handle), which gives a Python object.
template <typename Object, typename Function>
PyObject *read_property(PyObject *object, Function &&function) {
    auto *handle = usable(reinterpret_cast<Object *>(object));
    if (!handle) return nullptr;
    try {
        return function(*handle);
    } catch (...) {
        return raise_current();
    }
}

// _durable(directory): where the messages are kept on disk; empty only asks.
template <typename Object>
PyObject *durable_method(PyObject *object, PyObject *argument) {
    auto *self = reinterpret_cast<Object *>(object);
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(argument, &size);
    auto *handle = text ? usable(self) : nullptr;
    if (!handle) return nullptr;
    std::string given(text, std::size_t(size));
    try {
        std::string there = run_without_gil(self, [&] { return handle->member.durable(given); });
        return PyUnicode_DecodeUTF8(there.data(), Py_ssize_t(there.size()), "surrogateescape");
    } catch (...) {
        return raise_current();
    }
}

// _agree_on_schema(name, text, replaced): what the channel carries, and the text that describes it.
template <typename Object>
PyObject *agree_on_schema_method(PyObject *object, PyObject *arguments) {
    auto *self = reinterpret_cast<Object *>(object);
    PyObject *words[2];
    Py_ssize_t name_size, text_size;
    PyObject *replaced;  // the text that is there as far as the caller knows; None: nothing is replaced
    if (!PyArg_ParseTuple(arguments, "UUO", &words[0], &words[1], &replaced)) return nullptr;
    const char *name = PyUnicode_AsUTF8AndSize(words[0], &name_size);
    const char *text = name ? PyUnicode_AsUTF8AndSize(words[1], &text_size) : nullptr;
    if (!text) return nullptr;
    Py_ssize_t old_size = 0;
    const char *old_text = replaced == Py_None ? "" : PyUnicode_AsUTF8AndSize(replaced, &old_size);
    auto *handle = old_text ? usable(self) : nullptr;
    if (!handle) return nullptr;
    if (std::uint64_t(text_size) > max_schema_bytes || std::size_t(name_size) >= sizeof(Header::type) || (name_size && !text_size))
        return raise_error("InvalidArgument", "%s: a schema has a name of at most %zu bytes and 1 to %llu bytes of text",
                           handle->member.describe().c_str(), sizeof(Header::type) - 1,
                           static_cast<unsigned long long>(max_schema_bytes));
    std::string given(name, std::size_t(name_size)), described(text, std::size_t(text_size));
    std::string old(old_text, std::size_t(old_size));
    try {
        auto [there, known] = run_without_gil(
            self, [&] { return handle->member.agree_on_schema(given, described, replaced == Py_None ? nullptr : &old); });
        return Py_BuildValue("NN", PyUnicode_DecodeUTF8(there.data(), Py_ssize_t(there.size()), "replace"),
                             PyUnicode_DecodeUTF8(known.data(), Py_ssize_t(known.size()), "replace"));
    } catch (...) {
        return raise_current();
    }
}

template <typename Object>
void destroy_handle(Object *self) {
    auto *handle = self->handle;
    if (!handle) return;
    self->handle = nullptr;
    forget_at_exit(self);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    without_gil([&] { delete handle; return 0; });
    PyErr_Restore(kind, value, trace);
}

template <typename Function>
PyCFunction method(Function *function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace penstock::shm
