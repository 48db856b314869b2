// penstock._core.journal: the one file of this room that knows Python.
#include "bindings.hpp"

namespace penstock {

void bind_journal(nanobind::module_ &) {}

}  // namespace penstock
