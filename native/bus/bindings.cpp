// penstock._core.bus: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_bus(nanobind::module_ &) {}

}  // namespace penstock
