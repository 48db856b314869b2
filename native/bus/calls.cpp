// Calls the handlers and predicates of subscribers, and handles their exceptions.
#include <Python.h>

#include "bus/objects.hpp"
#include "gil.hpp"

namespace penstock::bus {

namespace {

PyObject *as_object(SubscriberObject *self) { return reinterpret_cast<PyObject *>(self); }

// Counts an exception of a handler and reports it to the subscriber. False, with the error set, if it is no Exception.
[[gnu::cold, gnu::noinline]] bool failed(SubscriberObject *self, PyObject *message) {
    self->counters->errors.add();
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace) PyException_SetTraceback(value, trace);
    PyObject *told = calling_python([&] { return PyObject_CallMethod(as_object(self), "_failed", "OO", message, value); });
    if (!told) PyErr_WriteUnraisable(as_object(self));
    Py_XDECREF(told);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return true;
}

}  // namespace

bool call(SubscriberObject *self, PyObject *handler, PyObject *message) {
    PyObject *stack[2] = {nullptr, message};
    PyObject *result = calling_python(
        [&] { return PyObject_Vectorcall(handler, stack + 1, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr); });
    if (result) [[likely]] {
        Py_DECREF(result);
        return true;
    }
    return failed(self, message);
}

bool call_handler(SubscriberObject *self, PyObject *message) {
    PyObject *handler = Py_NewRef(self->handler);  // it may be replaced or dropped while it runs
    bool fine = call(self, handler, message);
    Py_DECREF(handler);
    return fine;
}

int ask_predicate(SubscriberObject *self, PyObject *message) {
    PyObject *predicate = Py_NewRef(self->predicate);
    PyObject *answer = calling_python([&] { return PyObject_CallOneArg(predicate, message); });
    Py_DECREF(predicate);
    int matching = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    bool counted = self->kind == Kind::fifo;  // it matched when it was queued
    if (counted && matching == 0) self->counters->drop(DropReason::filtered);
    if (matching >= 0) return matching;
    if (!counted) self->counters->matched.add();
    self->counters->drop(DropReason::error);
    if (!failed(self, message)) PyErr_WriteUnraisable(as_object(self));
    return -1;
}

}  // namespace penstock::bus
