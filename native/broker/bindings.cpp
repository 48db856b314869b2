// penstock._core.broker: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_broker(nanobind::module_ &) {}

}  // namespace penstock
