// What the binding files of the broker share: batches looked into without a step in Python for each message.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string_view>
#include <vector>

#include "message/message.hpp"

namespace penstock::broker {

void bind_scanner(nanobind::module_ &module);
void bind_outbox(nanobind::module_ &module);
void bind_ranges(nanobind::module_ &module);
void bind_queue_state(nanobind::module_ &module);
void bind_batches(nanobind::module_ &module);
void bind_publish(nanobind::module_ &module);

// They live as long as the caller's reference to the batch; a Python error is thrown where it is none or was released.
const std::vector<Envelope> &entries_of(nanobind::handle batch);
// A batch whose messages lie in memory that `keep` holds.
nanobind::object batch_over(std::vector<Envelope> &&entries, PyObject *keep, PyObject *channels);
nanobind::object text_of(std::string_view text);

// Where a property's value begins in encoded properties, or null.
const char *property(const Envelope &entry, std::string_view wanted, std::size_t &size);
std::int64_t number_property(const Envelope &entry, std::string_view wanted);
// What a message of any reach brings along: nothing where it is the broker's own ('$' in front) or not well formed.
std::string_view foreign_properties(const Envelope &entry);

}  // namespace penstock::broker
