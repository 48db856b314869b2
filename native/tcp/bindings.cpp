// penstock._core.tcp: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_tcp(nanobind::module_ &) {}

}  // namespace penstock
