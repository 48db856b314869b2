// Receive buffers: pooled, reference counted, given back with the last message that lies in them.
//
// Rules: take and drop may be called on any thread, with or without the GIL. A chunk is written only by the stream that
// fills it, and only past what it has handed out as messages. Large chunks are mapped, so that their memory becomes
// real only as bytes arrive: a header that announces a gigabyte costs addresses, no memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace penstock::tcp {

constexpr std::size_t small_chunk_size = 128 * 1024;

struct Budget;

struct Chunk {
    std::atomic<std::uint32_t> references;
    std::size_t capacity;
    Budget *budget;
    Chunk *next;  // in the pool's list
    std::uint8_t *data() noexcept { return reinterpret_cast<std::uint8_t *>(this) + 64; }
};
static_assert(sizeof(Chunk) <= 64);

// What one subscriber may hold in chunks; lives until its last chunk is gone.
struct Budget {
    std::atomic<std::size_t> held_bytes{0};
    std::atomic<std::uint32_t> references{1};
    std::size_t limit_bytes;
    explicit Budget(std::size_t limit) : limit_bytes(limit) {}
    void drop() noexcept {
        if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
    }
};

// A chunk of at least `capacity` bytes with one reference, or null: the budget is used up, or there is no memory.
Chunk *chunk_take(std::size_t capacity, Budget *budget) noexcept;
void chunk_drop(Chunk *chunk, std::uint32_t references = 1) noexcept;

// Subscribers that are open: while there are any, dropped chunks are kept for the next ones; with the last one they go.
void chunk_users(int more) noexcept;

// For tests and documentation: bytes that lie unused in the pool, and its bound.
std::size_t chunk_pool_bytes() noexcept;
constexpr std::size_t chunk_pool_limit_bytes = 64 * 1024 * 1024;

}  // namespace penstock::tcp
