// Sleeping and waking between threads whose shared state is guarded by one lock (the GIL) that is not held asleep.
//
// Rules
//   - Lists are touched under the guard only; a sleeper joins a list under the guard, then sleeps without it. A waker
//     under the guard sees exactly who sleeps, so nobody is woken needlessly and no wake is lost.
//   - A woken sleeper stays on the list until it leaves by itself, so that a later one cannot overtake it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

namespace penstock::bus {

inline std::int64_t monotonic_ns() noexcept {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// A moment on the monotonic clock; never: wait for ever.
struct Deadline {
    static constexpr std::int64_t never = -1;
    std::int64_t at_ns = never;

    static Deadline after(double seconds) noexcept {
        constexpr double far = 1e9;  // some thirty years: no overflow, and nobody waits longer
        Deadline deadline;
        deadline.at_ns = monotonic_ns() + static_cast<std::int64_t>((seconds < far ? seconds : far) * 1e9);
        return deadline;
    }
    Deadline or_before(Deadline other) const noexcept {
        return at_ns == never || (other.at_ns != never && other.at_ns < at_ns) ? other : *this;
    }
    bool passed() const noexcept { return at_ns != never && monotonic_ns() >= at_ns; }
};

enum class Slept { woken, interrupted, timed_out };

struct SleeperList;

struct Sleeper {
    std::atomic<std::uint32_t> word{0};
    Sleeper *next = nullptr, *previous = nullptr;

    bool woken() const noexcept { return word.load(std::memory_order_acquire) != 0; }
    void rearm() noexcept { word.store(0, std::memory_order_relaxed); }
    void wake() noexcept {
        if (word.exchange(1, std::memory_order_release) == 0)
            syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
    }
    // Called without the guard.
    Slept sleep(Deadline deadline) noexcept {
        while (!woken()) {
            timespec until{deadline.at_ns / 1'000'000'000, deadline.at_ns % 1'000'000'000};
            // WAIT_BITSET takes an absolute time on the monotonic clock.
            long result = syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 0,
                                  deadline.at_ns == Deadline::never ? nullptr : &until, nullptr,
                                  FUTEX_BITSET_MATCH_ANY);
            if (result == 0 || errno == EAGAIN) continue;
            if (errno == ETIMEDOUT) return woken() ? Slept::woken : Slept::timed_out;
            return Slept::interrupted;
        }
        return Slept::woken;
    }
};

struct SleeperList {
    Sleeper *head = nullptr, *tail = nullptr;

    bool empty() const noexcept { return head == nullptr; }
    void join(Sleeper *sleeper) noexcept {
        sleeper->previous = tail;
        sleeper->next = nullptr;
        (tail ? tail->next : head) = sleeper;
        tail = sleeper;
    }
    void leave(Sleeper *sleeper) noexcept {
        (sleeper->previous ? sleeper->previous->next : head) = sleeper->next;
        (sleeper->next ? sleeper->next->previous : tail) = sleeper->previous;
    }
    void wake_first() noexcept {
        if (head) head->wake();
    }
    void wake_all() noexcept {
        for (Sleeper *sleeper = head; sleeper; sleeper = sleeper->next) sleeper->wake();
    }
    void forget() noexcept { head = tail = nullptr; }  // in a forked child, where the sleepers are not
};

}  // namespace penstock::bus
