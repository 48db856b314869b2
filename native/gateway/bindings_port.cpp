// Port: how a module's messages enter the broker's bus, by reference and without a lock.
#include <Python.h>
#include <structmember.h>

#include <cstring>

#include "gateway/objects.hpp"
#include "gil.hpp"

namespace penstock::gateway {

PyTypeObject *port_type = nullptr;

namespace {

PortObject *as_port(PyObject *self) { return reinterpret_cast<PortObject *>(self); }

// Applies the rules to each sink while one message is delivered.
struct LinkTerms final : bus::Terms {
    PortObject *port;
    PyObject *rules;  // held: they may be replaced while a predicate runs
    bool inside;      // the caller is in the module's receive

    LinkTerms(PortObject *from, PyObject *held, bool in) : port(from), rules(held), inside(in) {}

    Answer ask(bus::SubscriberObject *subscriber, PyObject *message, double *timeout) override {
        PyObject *rule = PyDict_GetItemWithError(rules, reinterpret_cast<PyObject *>(subscriber));
        if (!rule) return PyErr_Occurred() ? tell() : Answer::yes;
        PyObject *predicate = PyTuple_GET_ITEM(rule, 0), *seconds = PyTuple_GET_ITEM(rule, 1);
        if (inside && seconds != Py_None) *timeout = PyFloat_AsDouble(seconds);
        if (predicate == Py_None) return Answer::yes;
        Py_INCREF(predicate);
        PyObject *said = calling_python([&] { return PyObject_CallOneArg(predicate, message); });
        Py_DECREF(predicate);
        const int yes = said ? PyObject_IsTrue(said) : -1;
        Py_XDECREF(said);
        if (yes == 0) count_refusal(rule, message);
        if (yes < 0) return is_full(rule) ? Answer::full : tell();
        return yes ? Answer::yes : Answer::no;
    }

    // Whether the error is the one by which a link's own bound says that it stayed full.
    static bool is_full(PyObject *rule) {
        PyObject *full = PyTuple_GET_SIZE(rule) > 3 ? PyTuple_GET_ITEM(rule, 3) : Py_None;
        return full != Py_None && PyErr_ExceptionMatches(full);
    }

    // The link's own counts, which the flow reads: a bytearray of two numbers, messages and bytes.
    static void count_refusal(PyObject *rule, PyObject *message) {
        std::uint64_t numbers[2];
        PyObject *count = PyTuple_GET_SIZE(rule) > 2 ? PyTuple_GET_ITEM(rule, 2) : Py_None;
        if (!PyByteArray_CheckExact(count) || PyByteArray_GET_SIZE(count) != sizeof numbers) return;
        std::memcpy(numbers, PyByteArray_AS_STRING(count), sizeof numbers);
        ++numbers[0];
        numbers[1] += static_cast<std::uint64_t>(reinterpret_cast<Message *>(message)->envelope.size);
        std::memcpy(PyByteArray_AS_STRING(count), numbers, sizeof numbers);
    }

    // A predicate that raises costs only its own link the message.
    Answer tell() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        PyErr_NormalizeException(&type, &value, &trace);
        if (PyObject *function = Py_XNewRef(port->on_error)) {  // it may be replaced while it runs
            PyObject *told = calling_python([&] { return PyObject_CallOneArg(function, value); });
            Py_DECREF(function);
            if (!told) PyErr_WriteUnraisable(reinterpret_cast<PyObject *>(port));
            Py_XDECREF(told);
        }
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(trace);
        return Answer::failed;
    }
};

// A message that was published before goes out under a new envelope over the same memory.
PyObject *stamped(PortObject *self, PyObject *message) {
    Message *base = reinterpret_cast<Message *>(message);
    if (base->envelope.ordinal) {
        message = share(message);
        if (!message) return nullptr;
        base = reinterpret_cast<Message *>(message);
    } else {
        Py_INCREF(message);
    }
    Envelope &envelope = base->envelope;
    envelope.id = self->id;
    envelope.ordinal = ++self->ordinal;
    self->bytes += static_cast<std::uint64_t>(envelope.size);
    if (self->receiving != PyThread_get_thread_ident()) ++self->outside;
    if (envelope.clocked) {  // a time that was given stays
        if (envelope.timestamp_ns < self->timestamp) envelope.timestamp_ns = self->timestamp;
        self->timestamp = envelope.timestamp_ns;
    }
    Py_XSETREF(base->channel, Py_NewRef(self->name));
    Py_XSETREF(base->source, Py_NewRef(reinterpret_cast<PyObject *>(self)));
    return message;
}

PyObject *port_publish(PyObject *object, PyObject *message) {
    PortObject *self = as_port(object);
    if (!PyObject_TypeCheck(message, message_type)) {
        if (message == Py_None) return raise_error("InvalidArgument", "publish takes a message, not None");
        return PyErr_Format(PyExc_TypeError, "publish takes a GatewayMessage, not %s", Py_TYPE(message)->tp_name);
    }
    if (!bus::check_bus_open(self->bus)) return nullptr;
    message = stamped(self, message);
    if (!message) return nullptr;
    bool fine;
    if (!self->rules) {
        fine = bus::publish_reference(self->bus, self->id, message, nullptr);
    } else {
        LinkTerms terms(self, Py_NewRef(self->rules), self->worker == PyThread_get_thread_ident());
        fine = bus::publish_reference(self->bus, self->id, message, &terms);
        Py_DECREF(terms.rules);
    }
    Py_DECREF(message);
    if (fine) Py_RETURN_NONE;
    ++self->refused;
    return nullptr;
}

RouterObject *as_router(PyObject *self) { return reinterpret_cast<RouterObject *>(self); }

// A time-out is reported to the broker; whatever it does, the caller gets the error too.
PyObject *told_timeout(PyObject *self, PyObject *port) {
    if (!PyErr_ExceptionMatches(PyExc_TimeoutError)) return nullptr;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *told = PyObject_CallMethod(self, "_timed_out", "OO", port, value);
    if (!told) PyErr_WriteUnraisable(self);
    Py_XDECREF(told);
    PyErr_Restore(type, value, trace);
    return nullptr;
}

PyObject *router_publish(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "publish takes a module and a message, not %zd arguments", count);
    PyObject *key = PyLong_FromVoidPtr(arguments[0]);
    if (!key) return nullptr;
    PyObject *port = Py_XNewRef(PyDict_GetItemWithError(as_router(self)->ports, key));
    Py_DECREF(key);
    if (!port) {
        if (PyErr_Occurred()) return nullptr;
        return PyObject_CallMethod(self, "_refuse", "OO", arguments[0], arguments[1]);
    }
    PyObject *done = port_publish(port, arguments[1]);
    if (!done) [[unlikely]] told_timeout(self, port);
    Py_DECREF(port);
    return done;
}

PyObject *router_new(PyTypeObject *type, PyObject *, PyObject *) {
    auto *self = as_router(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->ports = PyDict_New();
    if (self->ports) return reinterpret_cast<PyObject *>(self);
    Py_DECREF(reinterpret_cast<PyObject *>(self));
    return nullptr;
}

int router_traverse(PyObject *self, visitproc visit, void *argument) {
    if (int stop = visit(reinterpret_cast<PyObject *>(Py_TYPE(self)), argument)) return stop;
    return as_router(self)->ports ? visit(as_router(self)->ports, argument) : 0;
}

int router_clear(PyObject *self) {
    if (as_router(self)->ports) PyDict_Clear(as_router(self)->ports);
    return 0;
}

void router_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_CLEAR(as_router(self)->ports);
    type->tp_free(self);
    Py_DECREF(type);
}

PyObject *get_ports(PyObject *self, void *) { return Py_NewRef(as_router(self)->ports); }

PyMethodDef router_methods[] = {
    {"publish", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(router_publish)), METH_FASTCALL,
     "publish(source, message)\n--\n\nSend a message from an attached module to every sink linked to it."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef router_getset[] = {{"_ports", get_ports, nullptr, nullptr, nullptr}, {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot router_slots[] = {{Py_tp_doc, const_cast<char *>("Finds the port of a module and publishes through it.")},
                              {Py_tp_new, reinterpret_cast<void *>(router_new)},
                              {Py_tp_dealloc, reinterpret_cast<void *>(router_dealloc)},
                              {Py_tp_traverse, reinterpret_cast<void *>(router_traverse)},
                              {Py_tp_clear, reinterpret_cast<void *>(router_clear)},
                              {Py_tp_methods, router_methods},
                              {Py_tp_getset, router_getset},
                              {0, nullptr}};

PyType_Spec router_spec = {"penstock._core.gateway.Router", sizeof(RouterObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, router_slots};

PyObject *port_new(PyTypeObject *type, PyObject *arguments, PyObject *) {
    PyObject *bus, *name;
    int id;
    if (!PyArg_ParseTuple(arguments, "O!iU", bus::bus_type, &bus, &id, &name)) return nullptr;
    if (id < 0 || id > bus::max_id) return raise_error("InvalidArgument", "source id %d is not one of 0 to 65535", id);
    auto *self = as_port(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->bus = reinterpret_cast<bus::BusObject *>(Py_NewRef(bus));
    self->name = Py_NewRef(name);
    self->id = static_cast<std::uint16_t>(id);
    return reinterpret_cast<PyObject *>(self);
}

int port_traverse(PyObject *object, visitproc visit, void *argument) {
    PortObject *self = as_port(object);
    auto look = [&](PyObject *held) { return held ? visit(held, argument) : 0; };
    for (PyObject *held : {reinterpret_cast<PyObject *>(Py_TYPE(object)), reinterpret_cast<PyObject *>(self->bus),
                           self->rules, self->on_error})
        if (int stop = look(held)) return stop;
    return 0;
}

int port_clear(PyObject *object) {
    PortObject *self = as_port(object);
    Py_CLEAR(self->rules);
    Py_CLEAR(self->on_error);
    return 0;
}

void port_dealloc(PyObject *object) {
    PortObject *self = as_port(object);
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    if (self->weakrefs) PyObject_ClearWeakRefs(object);
    port_clear(object);
    Py_CLEAR(self->bus);
    Py_CLEAR(self->name);
    type->tp_free(object);
    Py_DECREF(type);
}

bool valid_rule(PyObject *key, PyObject *value) {
    if (PyObject_TypeCheck(key, bus::subscriber_type) && PyTuple_Check(value) &&
        PyTuple_GET_SIZE(value) >= 2 && PyTuple_GET_SIZE(value) <= 4) {
        PyObject *predicate = PyTuple_GET_ITEM(value, 0), *seconds = PyTuple_GET_ITEM(value, 1);
        PyObject *full = PyTuple_GET_SIZE(value) > 3 ? PyTuple_GET_ITEM(value, 3) : Py_None;
        if ((predicate == Py_None || PyCallable_Check(predicate)) && (seconds == Py_None || PyFloat_Check(seconds)) &&
            (full == Py_None || PyExceptionClass_Check(full)))
            return true;
    }
    PyErr_SetString(PyExc_TypeError,
                    "a rule is subscriber: (predicate or None, seconds as float or None, count, error of a full link)");
    return false;
}

PyObject *get_rules(PyObject *self, void *) { return Py_NewRef(as_port(self)->rules ? as_port(self)->rules : Py_None); }
int set_rules(PyObject *self, PyObject *value, void *) {
    if (!value || value == Py_None) {
        Py_CLEAR(as_port(self)->rules);
        return 0;
    }
    if (!PyDict_CheckExact(value)) {
        PyErr_SetString(PyExc_TypeError, "rules are a dict or None");
        return -1;
    }
    PyObject *key, *rule;
    Py_ssize_t at = 0;
    while (PyDict_Next(value, &at, &key, &rule))
        if (!valid_rule(key, rule)) return -1;
    PyObject *copy = PyDict_Copy(value);
    if (!copy) return -1;
    Py_XSETREF(as_port(self)->rules, copy);
    return 0;
}
PyObject *get_on_error(PyObject *self, void *) {
    return Py_NewRef(as_port(self)->on_error ? as_port(self)->on_error : Py_None);
}
int set_on_error(PyObject *self, PyObject *value, void *) {
    Py_XSETREF(as_port(self)->on_error, !value || value == Py_None ? nullptr : Py_NewRef(value));
    return 0;
}
PyObject *get_worker(PyObject *self, void *) { return PyLong_FromUnsignedLong(as_port(self)->worker); }
int set_worker(PyObject *self, PyObject *value, void *) {
    const unsigned long worker = value ? PyLong_AsUnsignedLong(value) : 0;
    if (worker == static_cast<unsigned long>(-1) && PyErr_Occurred()) return -1;
    as_port(self)->worker = worker;
    return 0;
}
PyObject *get_receiving(PyObject *self, void *) { return PyLong_FromUnsignedLong(as_port(self)->receiving); }
int set_receiving(PyObject *self, PyObject *value, void *) {
    const unsigned long thread = value ? PyLong_AsUnsignedLong(value) : 0;
    if (thread == static_cast<unsigned long>(-1) && PyErr_Occurred()) return -1;
    as_port(self)->receiving = thread;
    return 0;
}
PyObject *get_id(PyObject *self, void *) { return PyLong_FromLong(as_port(self)->id); }
PyObject *get_name(PyObject *self, void *) { return Py_NewRef(as_port(self)->name); }
PyObject *get_published(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_port(self)->ordinal); }
int set_published(PyObject *self, PyObject *value, void *) {
    const unsigned long long number = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return -1;
    as_port(self)->ordinal = number;
    return 0;
}
PyObject *get_bytes(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_port(self)->bytes); }
PyObject *get_outside(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_port(self)->outside); }
PyObject *get_refused(PyObject *self, void *) { return PyLong_FromUnsignedLongLong(as_port(self)->refused); }
PyObject *port_repr(PyObject *self) {
    return PyUnicode_FromFormat("<Port %U, id %d>", as_port(self)->name, static_cast<int>(as_port(self)->id));
}

PyMethodDef methods[] = {
    {"publish", port_publish, METH_O, "publish(message)\n--\n\nHand a message to every sink of this source, by reference."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef getset[] = {
    {"rules", get_rules, set_rules, "What is special about links: queue to (predicate, seconds), or None.", nullptr},
    {"on_error", get_on_error, set_on_error, "Called with what a predicate raised, or None.", nullptr},
    {"worker", get_worker, set_worker, "The thread that calls the module's receive, or 0.", nullptr},
    {"id", get_id, nullptr, "The source's number on the broker's bus.", nullptr},
    {"name", get_name, nullptr, "The module's name.", nullptr},
    {"published", get_published, set_published, "Messages published: the ordinal of the last one.", nullptr},
    {"bytes", get_bytes, nullptr, "Their bytes.", nullptr},
    {"outside", get_outside, nullptr, "Those of them that were not published inside the module's receive.", nullptr},
    {"receiving", get_receiving, set_receiving, "The thread that is in the module's receive, or 0.", nullptr},
    {"refused", get_refused, nullptr, "Publishes that a full sink ended.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMemberDef members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(PortObject, weakrefs), READONLY, nullptr},
                         {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_doc, const_cast<char *>("A module as a source of messages.")},
                       {Py_tp_new, reinterpret_cast<void *>(port_new)},
                       {Py_tp_dealloc, reinterpret_cast<void *>(port_dealloc)},
                       {Py_tp_traverse, reinterpret_cast<void *>(port_traverse)},
                       {Py_tp_clear, reinterpret_cast<void *>(port_clear)},
                       {Py_tp_repr, reinterpret_cast<void *>(port_repr)},
                       {Py_tp_methods, methods},
                       {Py_tp_getset, getset},
                       {Py_tp_members, members},
                       {0, nullptr}};

PyType_Spec spec = {"penstock._core.gateway.Port", sizeof(PortObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

bool port_types(PyObject *module) {
    port_type = reinterpret_cast<PyTypeObject *>(PyType_FromSpec(&spec));
    PyObject *router = PyType_FromSpec(&router_spec);
    const bool fine = port_type && router &&
                      PyModule_AddObjectRef(module, "Port", reinterpret_cast<PyObject *>(port_type)) == 0 &&
                      PyModule_AddObjectRef(module, "Router", router) == 0;
    Py_XDECREF(router);
    return fine;
}

}  // namespace penstock::gateway
