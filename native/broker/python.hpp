// What the binding files of the broker share: the properties that the broker gives a message.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "message/python.hpp"

namespace penstock::broker {

void bind_scanner(nanobind::module_ &module);
void bind_outbox(nanobind::module_ &module);
void bind_ranges(nanobind::module_ &module);
void bind_queue_state(nanobind::module_ &module);
void bind_batches(nanobind::module_ &module);
void bind_publish(nanobind::module_ &module);

// Where a property's value begins in encoded properties, or null.
const char *property(const Envelope &entry, std::string_view wanted, std::size_t &size);
std::int64_t number_property(const Envelope &entry, std::string_view wanted);
// The properties of a message of any reach; none if they are the broker's own ('$' in front) or not well formed.
std::string_view foreign_properties(const Envelope &entry);

}  // namespace penstock::broker
