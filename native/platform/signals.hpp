// How long a thread may sleep before it looks at its signals again. One that came right before the sleep, or that the
// system gave to another thread, has interrupted nothing.
#pragma once

#include <unistd.h>

#include <cstdint>

namespace penstock {

inline constexpr std::int64_t signal_slice_ns = 100'000'000;
inline constexpr int signal_slice_ms = 100;

// The main thread alone has signals to see to: Python calls their functions there.
inline bool is_main_thread() { return getpid() == gettid(); }

}  // namespace penstock
