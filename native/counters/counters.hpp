// Counters that a handle keeps for its ledger, placed in a page that other processes can map: the monitor reads what
// the publish path writes anyway, so watching costs the path nothing.
//
// A page is one file per process in the shared directory, read by others, written by its owner alone:
//
//   0      8   magic "PENSCNT4"
//   8      4   page size in bytes       12  4   block size in bytes (1152)
//   16     4   number of blocks         20  4   pid
//   24     8   start time of the process (clock ticks since boot; 0 where unknown): tells a reused pid apart
//   32    32   program name, NUL-padded
//   64  1088   zero
//   1152       blocks (struct Counters)
//
// A name identifies a handle, so it is never simply truncated: of one that is too long, the beginning and the end are
// kept for display, and a hash of all of it, so that two such names differ.
//
// Rules: take and give may be called by any thread. A counter has one writer at a time (its handle, under whatever the
// handle is guarded by), so it is counted with a plain load and store; use add_shared where several threads write.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace penstock {

enum class DropReason : std::uint8_t { overflow, closed, filtered, expired, error, gap, too_large, refused };
inline constexpr std::size_t drop_reason_count = 8;
inline constexpr const char *drop_reason_names[drop_reason_count] = {"overflow", "closed", "filtered", "expired",
                                                                    "error",    "gap",    "too_large", "refused"};

inline constexpr std::uint64_t measured_every = 1024;

// Latencies are counted by size, two buckets to a doubling: 0 up to 1,024 ns, then 1,024 to 1,536, 1,536 to 2,048 and so
// on, the last from 2^35 ns (34 s) on.
inline constexpr std::size_t latency_bucket_count = 52;

constexpr std::size_t latency_bucket(std::uint64_t latency_ns) noexcept {
    int width = std::bit_width(latency_ns);
    if (width < 11) return 0;
    std::size_t found = 1 + 2 * std::size_t(width - 11) + (latency_ns >> (width - 2) & 1);
    return found < latency_bucket_count ? found : latency_bucket_count - 1;
}
static_assert(latency_bucket(1023) == 0 && latency_bucket(1024) == 1 && latency_bucket(1536) == 2);
static_assert(latency_bucket(2048) == 3 && latency_bucket((1ull << 35) - 1) == 50 && latency_bucket(~0ull) == 51);

struct Count {
    std::atomic<std::uint64_t> value{0};

    void add(std::uint64_t n = 1) noexcept {
        value.store(value.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
    }
    void add_shared(std::uint64_t n = 1) noexcept { value.fetch_add(n, std::memory_order_relaxed); }
    void set(std::uint64_t n) noexcept { value.store(n, std::memory_order_relaxed); }
    std::uint64_t get() const noexcept { return value.load(std::memory_order_relaxed); }
};

// One handle. in_flight follows from the ledger's equation, so it is not kept; depth is what the handle itself holds.
struct alignas(64) Counters {
    std::atomic<std::uint64_t> used;  // 0: free, else a number that is new each time the block is taken; retired: see below
    std::uint64_t opened_ns;          // realtime
    Count matched, delivered, bytes, expired, redelivered, errors;
    Count dropped[drop_reason_count];
    Count depth, capacity;  // messages waiting here, and the bound on them (0: none)
    Count peers;            // subscribers of a publisher, publishers of a subscriber, consumers of a queue
    Count memory_bytes;
    Count last_ns;     // realtime of the last message
    Count latency_ns;  // of the last message that was measured: from its timestamp to its delivery
    Count lag;         // messages behind the end of what is stored
    Count position;    // of a reader of stored messages: where it continues
    Count latency_sum_ns;  // of all that were measured
    Count latency_counts[latency_bucket_count];
    char room[16];
    char kind[16];
    char name[400];
    std::uint64_t name_hash;  // of a name that is too long for name; else 0
    char state[96];  // a short text for the user: "connected", "stuck in receive"

    void drop(DropReason reason, std::uint64_t n = 1) noexcept { dropped[static_cast<std::size_t>(reason)].add(n); }
    // Records the latency of a message that is delivered now. This reads the clock, so it is called for a reader that
    // has just waited, and for one message in measured_every of a stream; never by a publisher.
    void measure(std::int64_t timestamp_ns) noexcept;
    // Sets last_ns, to within a few milliseconds, when a reader reads: the coarse clock costs a fifth of the exact one.
    // Called at every read, for a batch once.
    void note_read() noexcept;
    void note_latency(std::uint64_t nanoseconds) noexcept {
        latency_ns.set(nanoseconds);
        latency_sum_ns.add(nanoseconds);
        latency_counts[latency_bucket(nanoseconds)].add();
    }
    std::uint64_t lost() const noexcept {
        std::uint64_t sum = 0;
        for (const Count &count : dropped) sum += count.get();
        return sum;
    }
    // Signed: a reader may catch the fields between two stores.
    std::int64_t in_flight() const noexcept {
        return static_cast<std::int64_t>(matched.get() - delivered.get() - lost() - expired.get());
    }
};
static_assert(sizeof(Counters) == 1152 && alignof(Counters) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

// A zeroed block. Where no shared page can be made (no such file system, no space) it is private memory: counting goes
// on, but other processes do not see it. Never null.
Counters *counters_take(std::string_view room, std::string_view kind, std::string_view name);
// From now on every block that this thread takes has this kind, whatever the caller says; an empty kind ends that. For
// viewers that only look at messages, so that they do not count as readers of the program.
void counters_kind(std::string_view kind);
// Renames the block of a handle. Readers of the page see a new block, with the counts of the old one.
void counters_rename(Counters *counters, std::string_view name);
void counters_give(Counters *counters) noexcept;
// From now on new pages are private memory: other processes see no handles of this one, and when it ends with handles
// open that is no death. For helper processes, whose parent sees to them.
void counters_hide() noexcept;
// The handle is closed and its program may still read its ledger: the block stays its own, and nobody else is shown it.
void counters_retire(Counters *counters) noexcept;
// Removes this process's pages, as its end does.
void counters_end() noexcept;
void counters_state(Counters *counters, std::string_view text) noexcept;
// A name as readers get it: itself, or, where it is too long, its beginning, its end and its hash.
std::string counters_name(std::string_view name);

// A copy of one block of a process on this machine.
struct CountersCopy {
    int pid = 0;        // as it is numbered here; where it has no number here, as it is numbered in its own namespace
    bool here = true;   // /proc of this process shows it under that pid
    std::uint64_t process = 0;  // its token: unique, also among containers whose programs all have pid 1
    std::uint32_t index = 0;
    std::string program, room, kind, name, state;
    bool name_cut = false;  // the name is as counters_name gives it
    std::uint64_t used = 0, opened_ns = 0;
    std::uint64_t matched = 0, delivered = 0, bytes = 0, expired = 0, redelivered = 0, errors = 0;
    std::uint64_t dropped[drop_reason_count] = {};
    std::uint64_t depth = 0, capacity = 0, peers = 0, memory_bytes = 0, last_ns = 0, latency_ns = 0, lag = 0, position = 0;
    std::uint64_t latency_sum_ns = 0, latency_counts[latency_bucket_count] = {};
};

// Every block in use in every live process whose page may be read; pages of dead processes are removed on the way.
std::vector<CountersCopy> counters_read();
CountersCopy counters_copy(const Counters *counters);
// Removes the files of dead processes, after recording what their pages say (platform/deaths.hpp).
void counters_sweep();
// Records what the pages of dead processes say; removes nothing.
void counters_look_for_deaths();

// The directory of the pages (the shared directory); empty if none can be written.
std::string counters_directory();

}  // namespace penstock
