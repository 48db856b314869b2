// Every byte of a shared-memory channel. No code here: channel.hpp is the algorithm, files.hpp knows where the memory
// comes from.
//
// A channel is a few files in the shared directory (NAME is the channel's name, percent-encoded; NONCE
// distinguishes a channel from an earlier one of the same name):
//
//   NAME.channel                 Header, wake-up bitmaps, Member records       written by all, size fixed when made
//   NAME.tables.NONCE            Tables, Slot records, ring, hints, metadata   made by the first publisher
//   NAME.vchans.NONCE            Vchan records                                 made by the first virtual member
//   NAME.payload.NONCE.K         payloads, slot_size(K) bytes a slot           K-th size of the channel; readers map it read-only
//   NAME.durable.NONCE           text: the directory where a publisher keeps the messages on disk
//   NAME.virtual.NONCE           empty: that name is a virtual channel of the multiplexer with that nonce
//   NAME.wake.NONCE.p3.7         FIFO of member 3 (publisher), 7th taking      written to when its owner sleeps
//
// Words that decide something (each fact stands in exactly one of them):
//
//   Slot::state      63..62 kind | 61..50 publisher | 49..0 sequence
//                    free(n)         owned by nobody; last held message n (0: none yet)
//                    owned(p, n)     publisher p writes it; it last held n
//                    claiming(p, n)  publisher p wants it; message n is still intact, any member may restore live(n)
//                    live(n)         holds message n
//   Slot::holders    bit r: subscriber r holds the slot, or is looking whether it may
//   ring[n mod R]    63..20 lap + 1 | 19..0 slot: message n = lap * R + index is in that slot. Its compare-and-swap is
//                    the moment of publishing.
//   Tables::tail     next sequence; follows the ring, anyone may help it forward
//   Member::cursor   next sequence that subscriber will look at
//   active, reliable bit r: subscriber r is there, and holds reliable publishers back
//   Header::sure     slots that all members together may always hold; Member::extra: slots that a subscriber has
//                    claimed beyond its own; exceeding, bit r: it has claimed some. A claim is stored, then checked.
//   Member::sleep    63..2 generation | 1 woken through its FIFO, else on this word | 0 asleep
//
// Hints, rebuilt by a scan: Tables::oldest, the bitmaps of maybe-free slots, Slot::skipped.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace penstock::shm {

// The test of schedules uses an atomic of its own here.
#ifdef PENSTOCK_SHM_ATOMIC
template <typename T>
using Atomic = PENSTOCK_SHM_ATOMIC<T>;
#else
template <typename T>
using Atomic = std::atomic<T>;
#endif
using Word = Atomic<std::uint64_t>;

inline constexpr std::uint64_t control_magic = 0x314d4853'4b545350ull;  // "PSTKSHM1"
inline constexpr std::uint64_t tables_magic = 0x31424154'4b545350ull;   // "PSTKTAB1"
inline constexpr std::uint32_t layout_version = 3;

inline constexpr std::uint32_t max_slots = 1u << 20;
inline constexpr std::uint32_t max_members = 4096;  // of each kind; 12 bits of Slot::state
inline constexpr std::uint32_t max_vchans = 1024;
inline constexpr std::uint32_t max_segments = 32;
inline constexpr std::uint32_t max_name_bytes = 180;
inline constexpr std::uint32_t max_vchan_name_bytes = 103;
inline constexpr std::uint32_t max_type_bytes = 119;
inline constexpr std::uint32_t max_metadata_bytes = 65536;
inline constexpr std::uint64_t max_slot_bytes = 1ull << 36;
inline constexpr std::uint64_t sequence_mask = (1ull << 50) - 1;

enum SlotKind : std::uint64_t { slot_free = 0, slot_owned = 1, slot_claiming = 2, slot_live = 3 };

constexpr std::uint64_t state_of(SlotKind kind, std::uint64_t member, std::uint64_t sequence) {
    return (std::uint64_t(kind) << 62) | (member << 50) | sequence;
}
constexpr std::uint64_t live(std::uint64_t sequence) { return state_of(slot_live, 0, sequence); }
constexpr SlotKind kind_of(std::uint64_t state) { return SlotKind(state >> 62); }
constexpr std::uint32_t member_of(std::uint64_t state) { return std::uint32_t(state >> 50) & 0xfff; }
constexpr std::uint64_t sequence_of(std::uint64_t state) { return state & sequence_mask; }

// flags of a message
inline constexpr std::uint32_t message_activation = 1;
inline constexpr std::uint32_t message_checksummed = 2;
inline constexpr std::uint32_t message_reliable = 4;  // of a reliable publisher

struct alignas(64) Slot {
    Word state;                              //  0
    Word holders;                            //  8  subscribers 0..63; the others' words stand apart
    Atomic<std::int64_t> timestamp_ns;       // 16
    Word ordinal;                            // 24
    Word size;                               // 32
    Atomic<std::uint32_t> segment;           // 40
    Atomic<std::int32_t> vchan;              // 44  -1: none
    Atomic<std::uint32_t> checksum;          // 48
    Atomic<std::uint32_t> flags;             // 52
    Atomic<std::uint32_t> skipped;           // 56  a publisher skipped it while held: whoever releases it sets the hint
    std::uint32_t zero;                      // 60
};
static_assert(sizeof(Slot) == 64);

// Flags of a member
inline constexpr std::uint32_t member_reliable = 1;
inline constexpr std::uint32_t member_closing = 2;  // closed, but messages of it are still held
inline constexpr std::uint32_t member_local = 4;
inline constexpr std::uint32_t member_default_sure = 8;  // a subscriber opened without max_active_messages
inline constexpr std::uint32_t member_retirement = 16;   // a publisher that asks which messages all have released

// Bits of Member::sleep
inline constexpr std::uint64_t asleep = 1;
inline constexpr std::uint64_t asleep_on_descriptor = 2;

struct alignas(128) Member {
    Word taken;              //  0  0: free, else a number new for each member (names the FIFO); under the file lock
    Word process;            //  8  liveness token
    std::uint32_t pid;       // 16
    std::uint32_t most_held; // 20  slots it may always hold
    std::int32_t vchan;      // 24  -1: none (a subscriber then sees all)
    std::uint32_t flags;     // 28
    Word sleep;              // 32
    std::uint64_t joined_ns; // 40
    Word wanted_cursor;      // 48  a sleeping publisher: do not wake it before a reader has come this far (hint)
                             //     a subscriber: see uncounted
    Word extra;              // 56  a subscriber: slots that it has claimed beyond those
    alignas(64) Word cursor; // 64  the next sequence to read, or after the last published; written at each message
    Word count;              // 72  messages published or read, for statistics
    Word bytes;              // 80
    Word dropped;            // 88
    char program[32];        // 96  program of its process; may be cut, ends with a zero

    // Of a subscriber: the first message that it has not counted as read or lost, by its sequence or, on a virtual
    // channel, its ordinal. The monitor, in another process, counts losses from there; 0: not known.
    Word &uncounted() { return wanted_cursor; }
    const Word &uncounted() const { return wanted_cursor; }
};
static_assert(sizeof(Member) == 128 && offsetof(Member, cursor) == 64);

struct Segment {
    Word slot_size;
    Atomic<std::uint32_t> gone;  // 1: no slot refers to it any more and its memory was released
    std::uint32_t zero;
};
static_assert(sizeof(Segment) == 16);

inline constexpr std::uint32_t channel_fixed_size = 1;
inline constexpr std::uint32_t channel_mux = 2;
inline constexpr std::uint32_t channel_local = 4;
inline constexpr std::uint64_t max_schema_bytes = 262144;  // of all versions together

struct alignas(64) Header {
    std::uint64_t magic;                       //   0
    std::uint32_t version;                     //   8
    std::uint32_t publisher_capacity;          //  12  multiple of 64
    std::uint32_t subscriber_capacity;         //  16  multiple of 64
    std::uint32_t mode;                        //  20
    std::uint64_t nonce;                       //  24
    std::uint64_t made_ns;                     //  32
    char name[216];                            //  40
    // Written under the file lock:
    char type[120];                            // 256  of an ordinary channel; virtual channels have their own
    Atomic<std::uint32_t> flags;               // 376
    Atomic<std::uint32_t> ready;               // 380  1: the tables are there
    Atomic<std::uint32_t> slots;               // 384
    Atomic<std::uint32_t> metadata_size;       // 388
    Atomic<std::uint32_t> max_publishers;      // 392
    Atomic<std::uint32_t> max_subscribers;     // 396
    Atomic<std::uint32_t> vchans_ready;        // 400
    Atomic<std::uint32_t> segments;            // 404  how many there have been
    Word takings;                              // 408
    Word sure;                                 // 416
    // The history for members that join later; all 0: none.
    Word history;                              // 424  slots for the history, beyond those that may be held
    Word history_messages;                     // 432
    Word history_ns;                           // 440  0: however old
    Word history_bytes;                        // 448
    Word lowered;                              // 456  how often a reliable subscriber has begun with the history
    Word before;                               // 464  the ordinal before its first message
    std::uint64_t zero[5];                     // 472
    Segment segment[max_segments];             // 512
};
static_assert(sizeof(Header) == 1024 && offsetof(Header, segment) == 512 && offsetof(Header, type) == 256 &&
              offsetof(Header, takings) == 408);

struct alignas(64) Tables {
    std::uint64_t magic;
    std::uint32_t slots;
    std::uint32_t subscriber_words;
    std::uint64_t ring_size;
    std::uint32_t metadata_stride;
    std::uint32_t zero;
    alignas(64) Word tail;                         //  64  sequences start at 1
    Atomic<std::int64_t> last_timestamp_ns;        //  72
    Word oldest;                                   //  80
};
static_assert(sizeof(Tables) == 128 && offsetof(Tables, tail) == 64);

struct alignas(128) Vchan {
    Word tail;                               //   0  last ordinal
    Atomic<std::uint32_t> used;              //   8
    Atomic<std::uint32_t> published;         //  12  1: it has had a publisher, which has set its type
    char name[104];                          //  16  stays when the id is returned, for a member that comes back
    Word given_back;                         // 120  tail at that moment
    char type[120];                          // 128  written under the file lock
    Word since;                              // 248  messages before that sequence belonged to another name
};
static_assert(sizeof(Vchan) == 256 && offsetof(Vchan, type) == 128);

// Text in a field of fixed size, filled up with zeros.
inline void copy_text(char *to, std::size_t room, const std::string &text) {
    std::memset(to, 0, room);
    std::memcpy(to, text.data(), text.size() < room ? text.size() : room - 1);
}
inline std::string read_text(const char *text, std::size_t room) { return std::string(text, strnlen(text, room)); }

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }

// Offsets in the control file, computed from the two capacities only.
struct ControlPlaces {
    std::uint64_t reader_sleepers, publisher_sleepers, active, reliable, exceeding, publishers, subscribers, total;
    constexpr ControlPlaces(std::uint64_t publisher_capacity, std::uint64_t subscriber_capacity)
        : reader_sleepers(sizeof(Header)),
          publisher_sleepers(reader_sleepers + round_up(subscriber_capacity / 8, 64)),
          active(publisher_sleepers + round_up(publisher_capacity / 8, 64)),
          reliable(active + round_up(subscriber_capacity / 8, 64)),
          exceeding(reliable + round_up(subscriber_capacity / 8, 64)),
          publishers(round_up(exceeding + round_up(subscriber_capacity / 8, 64), 128)),
          subscribers(publishers + publisher_capacity * sizeof(Member)),
          total(subscribers + subscriber_capacity * sizeof(Member)) {}
};

constexpr std::uint64_t ring_size_for(std::uint64_t slots) {
    std::uint64_t size = 64;
    while (size < 2 * slots) size *= 2;
    return size;
}

// Offsets in the tables file.
struct TablePlaces {
    std::uint64_t slots, more_holders, ring, hints, hint_summary, metadata, total;
    constexpr TablePlaces(std::uint64_t count, std::uint64_t subscriber_words, std::uint64_t metadata_stride)
        : slots(sizeof(Tables)),
          more_holders(slots + count * sizeof(Slot)),
          ring(more_holders + round_up(count * (subscriber_words - 1) * 8, 64)),
          hints(ring + ring_size_for(count) * 8),
          hint_summary(hints + round_up(count, 4096) / 8),
          metadata(hint_summary + round_up(round_up(count, 4096) / 64 / 8, 64)),
          total(metadata + count * metadata_stride) {}
};

}  // namespace penstock::shm
