// Bytes that should be UTF-8, from files, memory and command lines of others, as text for people: what is none is replaced.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

namespace penstock {

inline nanobind::object readable_text(std::string_view text) {
    PyObject *made = PyUnicode_DecodeUTF8(text.data(), Py_ssize_t(text.size()), "replace");
    if (!made) throw nanobind::python_error();
    return nanobind::steal(made);
}

}  // namespace penstock
