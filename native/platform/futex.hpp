// Sleeping on a word of shared memory, across processes.
//
// Rules: any thread, no lock held. The word is the low half of a 64-bit atomic in a shared mapping.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdint>

namespace penstock {

static_assert(std::endian::native == std::endian::little, "the low half of a word comes first");

inline std::uint32_t *low_half(std::atomic<std::uint64_t> &word) noexcept {
    return reinterpret_cast<std::uint32_t *>(&word);
}

// Sleeps while the low half is `value`, for at most so long. 0 when woken, else EAGAIN (it is another value), ETIMEDOUT
// or EINTR.
inline int futex_wait(std::atomic<std::uint64_t> &word, std::uint64_t value, std::int64_t timeout_ns) noexcept {
    timespec time{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
    long result = syscall(SYS_futex, low_half(word), FUTEX_WAIT, std::uint32_t(value), &time, nullptr, 0);
    return result == 0 ? 0 : errno;
}

// Clears bit 0 and wakes the sleepers on the word in one system call, so that a process cannot die between the two.
inline void futex_clear_and_wake(std::atomic<std::uint64_t> &word) noexcept {
    constexpr std::uint32_t clear_bit_0 = FUTEX_OP(FUTEX_OP_ANDN, 1, FUTEX_OP_CMP_EQ, 0);
    if (syscall(SYS_futex, low_half(word), FUTEX_WAKE_OP, 1, nullptr, low_half(word), clear_bit_0) >= 0) return;
    word.fetch_and(~std::uint64_t(1));  // a sandbox that refuses this call: do it in two steps
    syscall(SYS_futex, low_half(word), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace penstock
