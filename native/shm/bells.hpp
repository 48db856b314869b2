// How a sleeping member is woken: through its mark in shared memory (a futex) if it waits for nothing else, through a
// FIFO if it also waits for another descriptor, or if select or asyncio wait for it.
//
// Rules: one thread at a time; wake_self() by any thread. No descriptor is made before one is needed, and close() gives
// all of them back.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shm/channel.hpp"
#include "shm/files.hpp"

namespace penstock::shm {

// Longest sleep before shared memory is checked again: a publisher may have been killed before it rang the bell.
inline constexpr std::int64_t look_again_ns = 500'000'000;

class Bells {
   public:
    // `prefix`: what the names of the channel's FIFOs begin with.
    void belong_to(const Channel &channel, std::string prefix, bool is_publisher, std::uint32_t index,
                   std::uint64_t taken, const Access &access);

    // The own FIFO, to poll beside another descriptor.
    int own();
    // A descriptor for select, poll and asyncio: readable when the FIFO is, and when set_tick's time is over.
    int watched();
    void drain() noexcept;
    bool is_readable() noexcept;
    // Makes the watched descriptor readable by itself after look_again_ns.
    void set_tick() noexcept;
    // Makes the descriptors readable, and ends a sleep of another thread of this process.
    void wake_self() noexcept;
    void ring(bool publisher, std::uint32_t member, bool by_descriptor) noexcept;
    void close() noexcept;

    static std::string name_of(const std::string &prefix, bool publisher, std::uint32_t member, std::uint64_t taken);

   private:
    struct Bell {
        std::uint64_t taken = 0;
        File file;
    };
    Member *publishers_ = nullptr, *subscribers_ = nullptr, *self_ = nullptr;
    std::string prefix_, own_name_;
    Access access_;
    File own_, tick_, watched_;
    std::vector<Bell> reader_bells_, publisher_bells_;
};

}  // namespace penstock::shm
