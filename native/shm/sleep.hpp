// Waiting for something in shared memory: spin for as long as asked, then sleep on the member's mark, or on its FIFO where
// another descriptor may end the wait too.
//
// Rules: no GIL is held here. A sleep is cut into slices, after each of which shared memory is looked at again, so that
// even a waker that died before it rang delays nobody for longer than a slice.
#pragma once

#include <poll.h>
#include <sched.h>

#include <atomic>
#include <cerrno>

#include "platform/futex.hpp"
#include "shm/membership.hpp"

namespace penstock::shm {

enum class Woken { ready, timeout, interrupted, extra, closed };

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Long enough to catch the next message of a stream, short enough to be wasted.
inline constexpr std::int64_t short_spin_ns = 20'000;

// Looks again and again for `spin_ns`. A long spin gives way between looks after a few microseconds, for whoever must
// act first may need this very core; a short one does not, for on a busy machine giving way costs a time slice.
// `patience`: breaths between two looks. Who reads batches lets them grow: each look takes the line that the publisher
// is writing.
template <typename Ready>
bool spin(std::int64_t spin_ns, int patience, Ready &&ready) {
    if (spin_ns <= 0) return false;
    std::int64_t begin = monotonic_ns();
    for (;;) {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            for (int breath = 0; breath < patience; ++breath) relax();
            if (patience > 8) break;
        }
        std::int64_t spent = monotonic_ns() - begin;
        if (spent > spin_ns) return false;
        if (spent > 3'000 && spin_ns > short_spin_ns) sched_yield();
    }
}

struct Wait {
    std::int64_t deadline_ns = -1;  // monotonic; -1: for ever
    std::int64_t spin_ns = 0;
    int patience = 1;
    std::int64_t slice_ns = look_again_ns;
    int extra = -1;  // another descriptor that ends the wait
    const std::atomic<bool> *closed = nullptr;
};

template <typename Ready>
Woken sleep_until(Membership &member, const Wait &wait, Ready &&ready) {
    if (ready()) return Woken::ready;
    std::int64_t left = wait.deadline_ns < 0 ? -1 : wait.deadline_ns - monotonic_ns();
    if (wait.deadline_ns >= 0 && left <= 0) return Woken::timeout;
    if (spin(left >= 0 && left < wait.spin_ns ? left : wait.spin_ns, wait.patience, ready)) return Woken::ready;
    bool on_descriptor = wait.extra >= 0;
    pollfd places[2] = {{on_descriptor ? member.bells.own() : -1, POLLIN, 0}, {wait.extra, POLLIN, 0}};
    Woken result = Woken::timeout;
    for (;;) {
        std::uint64_t mark = member.arm(on_descriptor);
        if (wait.closed && wait.closed->load()) {  // who closes says so first and wakes after that
            result = Woken::closed;
            break;
        }
        if (ready()) {
            result = Woken::ready;
            break;
        }
        std::int64_t slice = wait.slice_ns;
        if (wait.deadline_ns >= 0) {
            left = wait.deadline_ns - monotonic_ns();
            if (left <= 0) break;
            if (left < slice) slice = left;
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
        if (interrupted) {
            result = Woken::interrupted;
            break;
        }
        if (ready()) {
            result = Woken::ready;
            break;
        }
        if (on_descriptor && places[1].revents) {
            result = Woken::extra;
            break;
        }
    }
    member.disarm();
    return result;
}

}  // namespace penstock::shm
