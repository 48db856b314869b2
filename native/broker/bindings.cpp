// penstock._core.broker: the binding files of this room, bindings*.cpp, are the ones that know Python.
#include "bindings.hpp"

#include "broker/python.hpp"

namespace penstock {

void bind_broker(nanobind::module_ &module) {
    broker::bind_scanner(module);
    broker::bind_outbox(module);
    broker::bind_ranges(module);
    broker::bind_queue_state(module);
    broker::bind_batches(module);
    broker::bind_publish(module);
}

}  // namespace penstock
