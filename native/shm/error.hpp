// What this room's native code throws; bindings turn it into penstock.errors, the C library into a code and a text.
#pragma once

#include <stdexcept>
#include <string>

namespace penstock::shm {

enum class Fault { invalid = 1, capacity, corruption, refused, state, closed, timeout, system };

struct Error : std::runtime_error {
    Fault fault;
    int number;  // errno, for Fault::system
    Error(Fault kind, const std::string &text, int error = 0) : std::runtime_error(text), fault(kind), number(error) {}
};

}  // namespace penstock::shm
