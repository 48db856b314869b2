// What the bindings of this room share: raising errors, and access to buffers.
#pragma once

#include <nanobind/nanobind.h>
// All type casters are included in one place: a file that misses one compiles, but fails at run time.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <string>
#include <string_view>
#include <utility>

#include "message/message.hpp"

namespace penstock::journal {

namespace nb = nanobind;

void bind_writer(nb::module_ &module);
void bind_reader(nb::module_ &module);
void bind_queue_state(nb::module_ &module);

// Becomes a Python exception after the stack is unwound: making one runs Python, which must not happen under a lock that
// another thread takes while it holds the GIL.
struct Refused {
    const char *name;  // of an error of penstock.errors
    std::string text;
};

[[noreturn]] inline void fail(const char *name, std::string text) { throw Refused{name, std::move(text)}; }

inline void raise_refused(const std::exception_ptr &problem, void *) {
    try {
        std::rethrow_exception(problem);
    } catch (const Refused &refused) {
        raise_error(refused.name, "%s", refused.text.c_str());
    }
}

[[noreturn]] inline void fail_system(int error, const std::string &text, const std::string &place = {}) {
    PyObject *arguments = place.empty() ? Py_BuildValue("(is)", error, text.c_str())
                                        : Py_BuildValue("(iss)", error, text.c_str(), place.c_str());
    if (arguments) PyErr_SetObject(PyExc_OSError, arguments);
    Py_XDECREF(arguments);
    throw nb::python_error();
}

// A read-only view of any object with the buffer protocol.
class View {
   public:
    explicit View(nb::handle object) {
        if (buffer_to_publish(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    View(View &&other) noexcept : buffer_(other.buffer_) { other.buffer_.obj = nullptr; }
    ~View() {
        if (buffer_.obj) PyBuffer_Release(&buffer_);
    }
    const std::uint8_t *data() const { return static_cast<const std::uint8_t *>(buffer_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(buffer_.len); }
    std::string_view text() const { return {static_cast<const char *>(buffer_.buf), size()}; }

   private:
    Py_buffer buffer_{};
};

// Numbers out of any contiguous buffer of them (numpy, array, memoryview).
template <typename Number>
std::pair<const Number *, std::size_t> numbers(const View &view, const char *what) {
    if (view.size() % sizeof(Number)) fail("InvalidArgument", std::string(what) + " is no whole number of items");
    return {reinterpret_cast<const Number *>(view.data()), view.size() / sizeof(Number)};
}

}  // namespace penstock::journal
