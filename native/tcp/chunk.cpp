#include "tcp/chunk.hpp"

#include <pthread.h>
#include <sys/mman.h>

#include <bit>
#include <mutex>
#include <new>

namespace penstock::tcp {

namespace {

constexpr int class_count = 32;
std::mutex pool_mutex;
// A child that is forked while another thread holds it could never lock it again.
[[maybe_unused]] const int registered =
    ::pthread_atfork([] { pool_mutex.lock(); }, [] { pool_mutex.unlock(); }, [] { pool_mutex.unlock(); });
Chunk *pool[class_count];
std::size_t pool_bytes = 0;
int users = 0;

int class_of(std::size_t capacity) noexcept {
    return std::bit_width((capacity + 64 - 1) / small_chunk_size);  // class k holds small_chunk_size << k bytes
}

void unmap(Chunk *chunk) noexcept { ::munmap(chunk, chunk->capacity + 64); }

Chunk *map(std::size_t bytes) noexcept {
    void *memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    auto *chunk = new (memory) Chunk;
    chunk->capacity = bytes - 64;
    return chunk;
}

}  // namespace

Chunk *chunk_take(std::size_t capacity, Budget *budget) noexcept {
    int index = class_of(capacity);
    if (index >= class_count) return nullptr;
    std::size_t bytes = small_chunk_size << index;
    if (budget->held_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes > budget->limit_bytes) {
        budget->held_bytes.fetch_sub(bytes, std::memory_order_relaxed);
        return nullptr;
    }
    Chunk *chunk;
    {
        std::lock_guard lock(pool_mutex);
        chunk = pool[index];
        if (chunk) {
            pool[index] = chunk->next;
            pool_bytes -= bytes;
        }
    }
    if (!chunk) chunk = map(bytes);
    if (!chunk) {
        budget->held_bytes.fetch_sub(bytes, std::memory_order_relaxed);
        return nullptr;
    }
    budget->references.fetch_add(1, std::memory_order_relaxed);
    chunk->budget = budget;
    chunk->references.store(1, std::memory_order_relaxed);
    return chunk;
}

void chunk_drop(Chunk *chunk, std::uint32_t references) noexcept {
    if (chunk->references.fetch_sub(references, std::memory_order_acq_rel) != references) return;
    std::size_t bytes = chunk->capacity + 64;
    Budget *budget = chunk->budget;
    budget->held_bytes.fetch_sub(bytes, std::memory_order_relaxed);
    budget->drop();
    {
        std::lock_guard lock(pool_mutex);
        if (users && pool_bytes + bytes <= chunk_pool_limit_bytes) {
            int index = class_of(chunk->capacity);
            chunk->next = pool[index];
            pool[index] = chunk;
            pool_bytes += bytes;
            return;
        }
    }
    unmap(chunk);
}

void chunk_users(int more) noexcept {
    std::lock_guard lock(pool_mutex);
    users += more;
    if (users) return;
    for (Chunk *&first : pool)
        while (Chunk *chunk = first) {
            first = chunk->next;
            unmap(chunk);
        }
    pool_bytes = 0;
}

std::size_t chunk_pool_bytes() noexcept {
    std::lock_guard lock(pool_mutex);
    return pool_bytes;
}

}  // namespace penstock::tcp
