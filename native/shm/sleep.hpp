// Waiting for something in shared memory: spin for as long as asked, then sleep on the member's mark, or on its FIFO where
// another descriptor may end the wait too.
//
// Rules: no GIL is held here. A wait is cut into slices, after each of which shared memory is looked at again, so that
// even a waker that died before it rang delays nobody for longer than a slice. Between two slices the caller is given the
// word (Woken::look): a signal that came right before the sleep has interrupted nothing, and a spin is never interrupted.
#pragma once

#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "platform/futex.hpp"
#include "platform/signals.hpp"
#include "shm/membership.hpp"

namespace penstock::shm {

// look: nothing has happened yet; the caller sees to its signals and waits on.
enum class Woken { ready, timeout, look, extra, closed };

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Long enough to catch the next message of a stream, short enough to be wasted.
inline constexpr std::int64_t short_spin_ns = 20'000;

// How long a signal may wait to be seen that comes in a spin.
inline constexpr std::int64_t signal_spin_ns = 10'000'000;

// Looks again and again until `until_ns`. A long spin gives way between looks after a few microseconds, for whoever must
// act first may need this very core; a short one does not, for on a busy machine giving way costs a time slice.
// `patience`: breaths between two looks. Who reads batches lets them grow: each look takes the line that the publisher
// is writing.
template <typename Ready>
bool spin(std::int64_t begin_ns, std::int64_t until_ns, int patience, Ready &&ready) {
    bool gives_way = until_ns - begin_ns > short_spin_ns;
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            for (int breath = 0; breath < patience; ++breath) relax();
            if (patience > 8) break;
        }
        std::int64_t now = monotonic_ns();
        if (now > until_ns) return false;
        if (gives_way && now - begin_ns > 3'000) sched_yield();
    }
}

struct Wait {
    std::int64_t deadline_ns = -1;  // monotonic; -1: for ever
    std::int64_t spin_until_ns = 0;
    int patience = 1;
    std::int64_t slice_ns = look_again_ns;
    int extra = -1;  // another descriptor that ends the wait
    const std::atomic<bool> *closed = nullptr;
};

template <typename Ready>
Woken sleep_until(Membership &member, const Wait &wait, Ready &&ready) {
    if (ready()) return Woken::ready;
    std::int64_t now = wait.deadline_ns < 0 && !wait.spin_until_ns ? 0 : monotonic_ns();
    if (wait.deadline_ns >= 0 && wait.deadline_ns <= now) return Woken::timeout;
    if (wait.spin_until_ns > now) {
        std::int64_t until = wait.deadline_ns < 0 ? wait.spin_until_ns : std::min(wait.spin_until_ns, wait.deadline_ns);
        if (spin(now, std::min(until, now + signal_spin_ns), wait.patience, ready)) return Woken::ready;
        if (until - now > signal_spin_ns) return wait.closed && wait.closed->load() ? Woken::closed : Woken::look;
    }
    bool on_descriptor = wait.extra >= 0;
    pollfd places[2] = {{on_descriptor ? member.bells.own() : -1, POLLIN, 0}, {wait.extra, POLLIN, 0}};
    Woken result = Woken::look;
    do {  // one slice
        std::uint64_t mark = member.arm(on_descriptor);
        if (wait.closed && wait.closed->load()) {  // who closes says so first and wakes after that
            result = Woken::closed;
            break;
        }
        if (ready()) {
            result = Woken::ready;
            break;
        }
        std::int64_t slice = is_main_thread() ? std::min(wait.slice_ns, signal_slice_ns) : wait.slice_ns;
        bool last = false;
        if (wait.deadline_ns >= 0) {
            std::int64_t left = wait.deadline_ns - monotonic_ns();
            last = left <= slice;
            slice = std::clamp<std::int64_t>(left, 0, slice);
        }
        PENSTOCK_STEP("sleep.before_poll");
        bool interrupted;
        if (on_descriptor) {
            timespec time{slice / 1'000'000'000, slice % 1'000'000'000};
            interrupted = ppoll(places, 2, &time, nullptr) < 0;
            if (!interrupted && places[0].revents) member.bells.drain();
        } else {
            interrupted = futex_wait(member.self().sleep, mark, slice) == EINTR;
        }
        if (interrupted) break;
        if (ready()) result = Woken::ready;
        else if (on_descriptor && places[1].revents) result = Woken::extra;
        else if (last && monotonic_ns() >= wait.deadline_ns) result = Woken::timeout;
    } while (false);
    member.disarm();
    return result;
}

}  // namespace penstock::shm
