// penstock._core.broker: the files bindings* and python.hpp are the only ones of this room that know Python.
#include "bindings.hpp"

#include "broker/python.hpp"

#include <sys/timerfd.h>

#include <cerrno>
#include <cmath>
#include <system_error>

namespace nb = nanobind;

namespace penstock {

namespace {

// A descriptor that becomes readable at a given time, for select, poll or an event loop.
int open_timer() {
    const int file = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (file < 0) throw std::system_error(errno, std::generic_category(), "timerfd_create");
    return file;
}

// Makes it readable after so many seconds; 0: never. Cancels an earlier setting.
void set_timer(int file, double seconds) {
    itimerspec once{};
    once.it_value.tv_sec = static_cast<time_t>(seconds);
    once.it_value.tv_nsec = static_cast<long>((seconds - std::floor(seconds)) * 1e9);
    timerfd_settime(file, 0, &once, nullptr);
}

}  // namespace

void bind_broker(nanobind::module_ &module) {
    broker::bind_scanner(module);
    broker::bind_outbox(module);
    broker::bind_ranges(module);
    broker::bind_queue_state(module);
    broker::bind_batches(module);
    broker::bind_publish(module);
    module.def("open_timer", &open_timer, "A timer's descriptor; to be closed by its user.");
    module.def("set_timer", &set_timer, nb::arg("descriptor"), nb::arg("seconds"),
               "Make it readable after so many seconds; 0: never.");
}

}  // namespace penstock
