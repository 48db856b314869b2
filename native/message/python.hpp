// For binding files: reading and creating batches without a Python step for each message.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>
#include <vector>

#include "message/message.hpp"

namespace penstock {

// They live as long as the caller's reference to the batch; a Python error is thrown where it is none or was released.
const std::vector<Envelope> &entries_of(nanobind::handle batch);
// A batch whose messages lie in memory that `keep` holds.
nanobind::object batch_over(std::vector<Envelope> &&entries, PyObject *keep, PyObject *channels);
nanobind::object text_of(std::string_view text);

}  // namespace penstock
