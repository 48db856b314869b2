// Small things the three types share: numpy views, encoded properties, registration.
#pragma once

#include <Python.h>

#include <cstdint>

namespace penstock {

// numpy.frombuffer(self, dtype)[:product(shape)].reshape(shape); arguments are (shape=None, dtype='uint8').
// `root`: where it is to be had, the array over the buffer that every view of the result refers to (null for an empty one).
PyObject *array_over(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names,
                     PyObject **root = nullptr);

// A dict from "key NUL value NUL ..."; raises CorruptionError where it is not that.
PyObject *decode_properties(const std::uint8_t *data, std::uint32_t size);

bool message_ready(PyObject *module);
bool batch_ready(PyObject *module);
bool draft_ready(PyObject *module);

}  // namespace penstock
