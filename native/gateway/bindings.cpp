// penstock._core.gateway: the files bindings* and objects.hpp are the only ones of this room that know Python.
#include "bindings.hpp"

#include <nanobind/nanobind.h>

#include "gateway/lifeline.hpp"
#include "gateway/objects.hpp"

namespace penstock {

void bind_gateway(nanobind::module_ &module) {
    if (!gateway::message_types(module.ptr()) || !gateway::port_types(module.ptr())) throw nanobind::python_error();
    module.def("exit_when_hung_up", &gateway::exit_when_hung_up, nanobind::arg("descriptor"), nanobind::arg("grace_ms"),
               "End this process `grace_ms` after the other end of `descriptor` has closed.");
}

}  // namespace penstock
