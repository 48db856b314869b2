// Waiting for something in shared memory: spin for as long as asked, then sleep on the member's mark, or on its FIFO where
// another descriptor may end the wait too.
//
// Rules: the GIL is not held here. A wait is cut into slices, after each of which shared memory is checked again, so
// that even a waker that died before it rang delays nobody for longer than a slice. Between two slices control returns
// to the caller (Woken::look): a signal right before the sleep does not interrupt it, and a spin is never interrupted.
#pragma once

#include <fcntl.h>
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

// look: nothing has happened yet; the caller checks for signals and waits on.
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

// How long a signal that arrives during a spin may remain unnoticed.
inline constexpr std::int64_t signal_spin_ns = 10'000'000;

// Checks repeatedly until `until_ns`. A long spin yields between checks after a few microseconds, because the thread
// that must act first may need this core; a short one does not, because on a busy machine yielding costs a time slice.
// `patience`: pauses between two checks. A reader of batches lets it grow: each check takes the cache line that the
// publisher is writing.
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

[[noreturn]] inline void refuse_closed(int descriptor) {
    throw Error(Fault::invalid, "descriptor " + std::to_string(descriptor) + " is not open");
}

template <typename Ready>
Woken sleep_until(Membership &member, const Wait &wait, Ready &&ready) {
    // Always, also where there is no need to wait: a mistake shows itself at the first call.
    if (wait.extra >= 0 && fcntl(wait.extra, F_GETFD) < 0) refuse_closed(wait.extra);
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
        if (wait.closed && wait.closed->load()) {  // closing sets this first and wakes afterwards
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
    // It was closed meanwhile. Nothing can ever come by it: who waits again and again would spin.
    if (on_descriptor && places[1].revents & POLLNVAL && result == Woken::extra) refuse_closed(wait.extra);
    return result;
}

}  // namespace penstock::shm
