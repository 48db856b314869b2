// The header in front of every message of a bus: who it is, who holds it and where its memory goes back to.
//
//   offset size
//    0     8   next               link of the list it is on: free, or out
//    8     8   previous           link of the list of messages out (heap)
//   16     4   reference_count    0: idle or free; one for each holder
//   20     2   id                 0..65535
//   22     1   allocator_id       0 heap, 1..127 static, 128..254 run-time, 255 none (memory of the user)
//   23     1   flags              bits below
//   24     4   size               bytes of payload in use
//   28     4   capacity           bytes of payload there are
//   32     8   ordinal            number among the messages of its bus and id, from 1
//   40     8   timestamp_ns       realtime
//   48     8   pool               where the memory goes back to
//   56     4   generation         which start of a delayed message this is
//   60     4   taken              number of the taking, for finding leaks
//   64         payload
//
// The least that a reader may rely on is the 16-bit id, the 8-bit allocator id and a reference count; the count has 32
// bits here, so that it cannot run over into its neighbours. All fields are guarded by the GIL.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::bus {

struct Pool;

enum Flag : std::uint8_t {
    flag_published = 1,
    flag_writable = 2,   // its one receiver may write
    flag_cancelled = 4,  // aborted after it was queued
    flag_out = 8,        // taken from its pool
    flag_external = 16,  // the payload is elsewhere: a pointer to it follows the header
    flag_queued = 32,    // waits in a subscriber's queue (kept for external ones only)
};

struct Header {
    Header *next;
    Header *previous;
    std::uint32_t reference_count;
    std::uint16_t id;
    std::uint8_t allocator_id;
    std::uint8_t flags;
    std::uint32_t size;
    std::uint32_t capacity;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    Pool *pool;
    std::uint32_t generation;
    std::uint32_t taken;
};

inline constexpr std::size_t header_size = 64;
inline constexpr std::int64_t max_id = 65535;
inline constexpr std::int64_t max_message_bytes = std::int64_t{1} << 31;
inline constexpr std::uint8_t heap_allocator_id = 0, first_static_id = 1, last_static_id = 127, first_runtime_id = 128,
                              last_runtime_id = 254, no_allocator_id = 255;

static_assert(sizeof(void *) == 8, "the layout is that of 64-bit machines");
static_assert(sizeof(Header) == header_size);
static_assert(offsetof(Header, reference_count) == 16 && sizeof(Header::reference_count) == 4);
static_assert(offsetof(Header, id) == 20 && sizeof(Header::id) == 2);
static_assert(offsetof(Header, allocator_id) == 22 && sizeof(Header::allocator_id) == 1);
static_assert(offsetof(Header, flags) == 23);
static_assert(offsetof(Header, size) == 24 && offsetof(Header, capacity) == 28);
static_assert(offsetof(Header, ordinal) == 32 && offsetof(Header, timestamp_ns) == 40);
static_assert(offsetof(Header, pool) == 48 && offsetof(Header, generation) == 56 && offsetof(Header, taken) == 60);

inline std::uint8_t *payload(Header *header) noexcept {
    auto *after = reinterpret_cast<std::uint8_t *>(header) + header_size;
    return header->flags & flag_external ? *reinterpret_cast<std::uint8_t **>(after) : after;
}

}  // namespace penstock::bus
