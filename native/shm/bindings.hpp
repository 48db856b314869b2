// What the Python files of this room share: turning errors, reading arguments.
#pragma once

#include <Python.h>

#include <cstdint>

#include "gil.hpp"
#include "shm/error.hpp"
#include "shm/membership.hpp"
#include "shm/sleep.hpp"

namespace penstock::shm {

// Sets the Python exception that describes this error. Returns null, so that callers can write `return raise(error)`.
PyObject *raise(const Error &error);
PyObject *raise_current();  // of the exception being handled

// Seconds to a monotonic deadline: None is -1 (for ever), 0 or less is 0 (do not wait). False with an error set.
bool read_timeout(PyObject *object, std::int64_t &deadline_ns);

// Keyword options that publishers and subscribers share. False with an error set.
bool read_options(PyObject *dictionary, Options &options);
bool read_bool(PyObject *dictionary, const char *key, bool &value);
bool read_number(PyObject *dictionary, const char *key, long long low, long long high, long long &value);

template <typename Function>
auto without_gil(Function &&function) {
    GilReleased released;
    return function();
}

bool publisher_ready(PyObject *module);
bool subscriber_ready(PyObject *module);

}  // namespace penstock::shm
