// penstock._core.gateway: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_gateway(nanobind::module_ &) {}

}  // namespace penstock
