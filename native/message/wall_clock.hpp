// The wall clock that stamps what this process publishes over its buses and gateways. A replay sets it to a recorded
// moment (`stop_wall_clock`) and moves it from there; messages that other processes read are stamped by the real one.
#pragma once

#include <time.h>

#include <atomic>
#include <cstdint>

namespace penstock {

inline std::int64_t real_wall_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

using WallClock = std::int64_t (*)();
inline std::atomic<WallClock> wall_clock{real_wall_ns};
inline std::atomic<std::int64_t> stopped_at_ns{0};

inline std::int64_t wall_ns() { return wall_clock.load(std::memory_order_relaxed)(); }

inline void stop_wall_clock(std::int64_t ns) {
    stopped_at_ns.store(ns);
    wall_clock.store([] { return stopped_at_ns.load(std::memory_order_relaxed); });
}
inline void run_wall_clock() { wall_clock.store(real_wall_ns); }

}  // namespace penstock
