// How long a thread may sleep before it checks for signals again. A signal that arrived right before the sleep, or that
// the system gave to another thread, does not interrupt the sleep.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace penstock {

inline constexpr std::int64_t signal_slice_ns = 100'000'000;
inline constexpr int signal_slice_ms = 100;

// Only the main thread has to check: Python runs signal handlers there.
inline bool is_main_thread() { return getpid() == gettid(); }

}  // namespace penstock
