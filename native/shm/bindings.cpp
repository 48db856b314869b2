// penstock._core.shm: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_shm(nanobind::module_ &) {}

}  // namespace penstock
