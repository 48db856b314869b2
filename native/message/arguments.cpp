#include "message/arguments.hpp"

#include <cstring>

#include "message/message.hpp"

namespace penstock {

// Whether a buffer's format, as in "O" or "T{i:a:O:b:}", has a reference to a Python object.
static bool has_object(const char *format) {
    bool in_name = false;
    for (; format && *format; ++format) {
        if (*format == ':') in_name = !in_name;
        else if (*format == 'O' && !in_name) return true;
    }
    return false;
}

// Whether the bytes of an object with a buffer are addresses of Python objects: a numpy array or a memoryview of them,
// or whatever else gives its format unasked.
static bool holds_objects(PyObject *object, const Py_buffer *view) {
    if (PyBytes_CheckExact(object) || PyByteArray_CheckExact(object)) [[likely]] return false;
    if (has_object(PyMemoryView_Check(object) ? PyMemoryView_GET_BUFFER(object)->format : view->format)) return true;
    static PyObject *name = PyUnicode_InternFromString("dtype");
    if (!name || !_PyType_Lookup(Py_TYPE(object), name)) return false;
    PyObject *kind = PyObject_GetAttr(object, name);
    PyObject *found = kind ? PyObject_GetAttrString(kind, "hasobject") : nullptr;
    Py_XDECREF(kind);
    if (!found) PyErr_Clear();  // not numpy's
    const bool holds = found == Py_True;
    Py_XDECREF(found);
    return holds;
}

int buffer_to_publish(PyObject *object, Py_buffer *view, int flags) {
    if (PyObject_CheckBuffer(object)) [[likely]] {
        if (PyObject_GetBuffer(object, view, flags) != 0) return -1;
        if (!holds_objects(object, view)) [[likely]] return 0;
        PyBuffer_Release(view);
        PyErr_Format(PyExc_TypeError,
                     "publish takes bytes or a buffer of values, not %s of Python objects (dtype object): it holds their "
                     "addresses in this process; convert it, as in array.astype(float)",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    view->obj = nullptr;
    PyErr_Format(PyExc_TypeError,
                 "publish takes bytes or a buffer, not %s; encode it, or open the publisher with type= (docs/types.md)",
                 Py_TYPE(object)->tp_name);
    return -1;
}

PyObject *array_over(PyObject *self, PyObject *const *arguments, Py_ssize_t count, PyObject *names,
                     PyObject **root) {
    PyObject *shape = nullptr, *dtype = nullptr;
    if (count > 2) return PyErr_Format(PyExc_TypeError, "array() takes a shape and a dtype, not %zd arguments", count);
    if (count > 0) shape = arguments[0];
    if (count > 1) dtype = arguments[1];
    for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); ++i) {
        PyObject *name = PyTuple_GET_ITEM(names, i);
        PyObject **place = PyUnicode_CompareWithASCIIString(name, "shape") == 0   ? &shape
                           : PyUnicode_CompareWithASCIIString(name, "dtype") == 0 ? &dtype
                                                                                  : nullptr;
        if (!place || *place) return PyErr_Format(PyExc_TypeError, "array() got an unexpected argument %R", name);
        *place = arguments[count + i];
    }
    PyObject *numpy = PyImport_ImportModule("numpy");
    if (!numpy) return nullptr;
    PyObject *kind = dtype ? PyObject_CallMethod(numpy, "dtype", "O", dtype)
                           : PyObject_CallMethod(numpy, "dtype", "s", "uint8");
    PyObject *flat = nullptr, *result = nullptr;
    if (kind && (!shape || shape == Py_None)) {
        flat = PyObject_CallMethod(numpy, "frombuffer", "OO", self, kind);
        if (flat) result = PyObject_CallMethod(flat, "view", nullptr);
    } else if (kind) {
        PyObject *items = PyObject_CallMethod(numpy, "prod", "OOs", shape, Py_None, "int64");
        PyObject *number = items ? PyNumber_Long(items) : nullptr;
        Py_XDECREF(items);
        if (number && PyObject_IsTrue(number) == 0)  // frombuffer refuses an empty buffer
            result = PyObject_CallMethod(numpy, "empty", "OO", shape, kind);
        else if (number)
            flat = PyObject_CallMethod(numpy, "frombuffer", "OOO", self, kind, number);
        Py_XDECREF(number);
        if (flat) result = PyObject_CallMethod(flat, "reshape", "O", shape);
    }
    if (root && result) *root = Py_XNewRef(flat);
    Py_XDECREF(flat);
    Py_XDECREF(kind);
    Py_DECREF(numpy);
    return result;
}

PyObject *decode_properties(const std::uint8_t *data, std::uint32_t size) {
    PyObject *result = PyDict_New();
    if (!result) return nullptr;
    const char *at = reinterpret_cast<const char *>(data);
    const char *end = at + size;
    while (at < end) {
        const char *texts[2];
        Py_ssize_t lengths[2];
        for (int part = 0; part < 2; ++part) {
            const void *nul = std::memchr(at, 0, static_cast<std::size_t>(end - at));
            if (!nul) {
                Py_DECREF(result);
                return raise_error("CorruptionError", "encoded properties end without NUL");
            }
            texts[part] = at;
            lengths[part] = static_cast<const char *>(nul) - at;
            at = static_cast<const char *>(nul) + 1;
        }
        PyObject *key = PyUnicode_DecodeUTF8(texts[0], lengths[0], "surrogateescape");
        PyObject *value = key ? PyUnicode_DecodeUTF8(texts[1], lengths[1], "surrogateescape") : nullptr;
        int failed = value ? PyDict_SetItem(result, key, value) : -1;
        Py_XDECREF(key);
        Py_XDECREF(value);
        if (failed) {
            Py_DECREF(result);
            return nullptr;
        }
    }
    return result;
}

}  // namespace penstock
