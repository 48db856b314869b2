// The module penstock._core: each room binds its own classes in its own bindings.cpp.
#include <exception>
#include <system_error>

#include <nanobind/nanobind.h>

#include <cstdlib>

#include "bindings.hpp"
#include "counters/counters.hpp"
#include "message/arguments.hpp"
#include "message/wall_clock.hpp"
#include "platform/liveness.hpp"

namespace {

// After Ctrl-C Python ends by the signal, and nothing that C runs at the end of a process is run.
void take_files_away() {
    penstock::counters_end();
    penstock::process_end();
}

}  // namespace

NB_MODULE(_core, module) {
    Py_AtExit(take_files_away);  // the first one registered: run after the handles have left their channels
    // A program may end with open handles and daemon threads: nothing is wrong then. The tests want to know.
    nanobind::set_leak_warnings(std::getenv("PENSTOCK_LEAK_WARNINGS") != nullptr);
    nanobind::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const std::system_error &error) {  // a directory or file that cannot be used
            PyObject *arguments = Py_BuildValue("is", error.code().value(), error.what());
            if (arguments) PyErr_SetObject(PyExc_OSError, arguments);
            Py_XDECREF(arguments);
        }
    });
    module.doc() = "The native core of penstock: what is done once a message.";
    if (!penstock::message_ready(module.ptr()) || !penstock::batch_ready(module.ptr()) ||
        !penstock::draft_ready(module.ptr()))
        throw nanobind::python_error();
    module.def("stop_wall_clock", &penstock::stop_wall_clock, nanobind::arg("ns"),
               "Stamp what buses and gateways of this process publish with this moment, for a replay.");
    module.def("run_wall_clock", &penstock::run_wall_clock, "Stamp it with the machine's time again.");
    penstock::bind_counters(module);
    auto bus = module.def_submodule("bus");
    penstock::bind_bus(bus);
    auto shm = module.def_submodule("shm");
    penstock::bind_shm(shm);
    auto tcp = module.def_submodule("tcp");
    penstock::bind_tcp(tcp);
    auto journal = module.def_submodule("journal");
    penstock::bind_journal(journal);
    auto broker = module.def_submodule("broker");
    penstock::bind_broker(broker);
    auto gateway = module.def_submodule("gateway");
    penstock::bind_gateway(gateway);
}
