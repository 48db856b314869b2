// The Python objects of the gateway and what its binding files share. All of it is guarded by the GIL.
#pragma once

#include <Python.h>

#include "bus/objects.hpp"
#include "message/message.hpp"

namespace penstock::gateway {

// ---- messages (bindings_message.cpp)

extern PyTypeObject *message_type;
// A new message over the memory of `message`, not yet published. Null with an error set.
PyObject *share(PyObject *message);
bool message_types(PyObject *module);

// ---- ports (bindings_port.cpp)

// A module as a source: its id on the broker's bus and the rules of its links. Messages in flight hold their
// port (Message::source), so an id is free again only when its port is gone.
struct PortObject {
    PyObject_HEAD
    bus::BusObject *bus;  // strong
    PyObject *name;
    // dict: subscriber to (predicate or None, seconds or None, what was refused: messages and bytes, the error
    // by which the predicate says that the link stayed full, or None); or null: no rules
    PyObject *rules;
    PyObject *on_error;  // told when a predicate raised, or null
    PyObject *weakrefs;
    std::uint64_t ordinal;    // of the last message
    std::int64_t timestamp;   // of the last message
    std::uint64_t bytes;      // of all messages
    std::uint64_t refused;    // publishes that ended in a time-out
    std::uint64_t outside;    // publishes by others than the thread that is in the module's receive
    unsigned long receiving;  // that thread; 0: none is
    unsigned long worker;     // thread that calls the module's receive; 0: none
    std::uint16_t id;
};
extern PyTypeObject *port_type;
bool port_types(PyObject *module);

// Finds the port of a module; the part of a broker that is native because it runs once per message.
struct RouterObject {
    PyObject_HEAD
    PyObject *ports;  // dict: id(module) to Port
};

}  // namespace penstock::gateway
