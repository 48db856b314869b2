#pragma once

#include <nanobind/nanobind.h>

namespace penstock {

void bind_counters(nanobind::module_ &module);
void bind_bus(nanobind::module_ &module);
void bind_shm(nanobind::module_ &module);
void bind_tcp(nanobind::module_ &module);
void bind_journal(nanobind::module_ &module);
void bind_broker(nanobind::module_ &module);
void bind_gateway(nanobind::module_ &module);

}  // namespace penstock
