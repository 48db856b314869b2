// Deaths: what is known of a process that died with handles open. Whoever finds it dead records this in a file of the
// user before recovering what it left. `penstock autopsy` reads it. shm/deaths.cpp knows what channels tell of their
// dead members, counters/counters.cpp what a page of counters tells of all other handles.
//
// The file is $XDG_STATE_HOME/penstock/deaths (or ~/.local/state/penstock/deaths), of mode 0600: 32 records of 16384
// bytes, one for each process; the oldest is written over. All numbers are of this machine's byte order. A process
// whose record was overwritten is not recorded again when another of its handles is found: otherwise 33 processes that
// died together would overwrite each other, channel by channel, and only what the last channel knew would be left.
//
//   record   0 number of the record, from 1, rising; an empty record is all zeros   8 liveness token   16 when it was found dead (ns since 1970)
//           24 pid, u32   28 pid of the finder, u32   32 members written, u32   36 members left out, u32
//           40 its program, 32 bytes   72 the finder's program, 32 bytes   104 CRC-32C of all else, u32   108 zero
//          128 members   16128 tokens of the last 32 processes that were written over here
//   member   0 reliable, u8   1 zero   4 virtual channel, i32: -1 none   8 messages   16 bytes   24 dropped
//           32 opened (ns)   40 the channel's last ordinal
//           48 a publisher: ordinal of its last message still in the channel; a subscriber: first ordinal not read
//           56 when the last message was published, or the oldest held one (ns); not of shm: its last message
//           64 size of the last message   72 slots held or reserved, u32   76 bytes of the beginning, u32
//           80 ordinals before the first   88 not of shm: messages that waited in it
//           96 room, 16 bytes   112 kind, 16 bytes   128 name, 432 bytes
//          560 the beginning of the last message, 64 bytes   624 not of shm: messages neither delivered nor lost   632 two marks of members left out, u32
//
// A death is found again at each look until somebody recovers what it left. So that a member that there is no room for is
// counted once, its hash is kept in the marks; when all of them are taken, further ones are not counted.
//
// Rules: any thread. Nothing here throws or waits for long: if it cannot be written (no directory, no space, another
// process writes for more than 20 ms) it is skipped, because the recovery itself matters more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace penstock {

inline constexpr std::uint32_t most_deaths = 32;
inline constexpr std::uint32_t death_bytes = 16384;
inline constexpr std::uint32_t most_members_of_death = 25;
inline constexpr std::uint32_t most_left_out = 2 * most_members_of_death;  // so many, or more
inline constexpr std::uint32_t most_members_outside_shm = 15;  // the other entries are kept for shm, which knows more

struct MemberRecord {
    std::uint8_t reliable = 0, zero[3] = {};
    std::int32_t vchan = -1;
    std::uint64_t count = 0, bytes = 0, dropped = 0, opened_ns = 0, tail = 0, ordinal = 0;
    std::int64_t time_ns = 0;
    std::uint64_t size = 0;
    std::uint32_t held = 0, beginning_size = 0;
    std::uint64_t before = 0, waiting = 0;
    char room[16] = {}, kind[16] = {}, name[432] = {};
    std::uint8_t beginning[64] = {};
    std::uint64_t in_flight = 0;
    std::uint32_t left_out_marks[2] = {};  // not of this member, but of the death: see below
};
static_assert(sizeof(MemberRecord) == 640 && offsetof(MemberRecord, room) == 96 && offsetof(MemberRecord, beginning) == 560);

struct DeathRecord {
    std::uint64_t number = 0, token = 0, found_ns = 0;
    std::uint32_t pid = 0, finder = 0, members = 0, left_out = 0;
    char program[32] = {}, finder_program[32] = {};
    std::uint32_t sum = 0, zero[5] = {};
    MemberRecord member[most_members_of_death];
    std::uint64_t replaced[32] = {};  // tokens, the newest first
};
static_assert(sizeof(DeathRecord) == death_bytes && offsetof(DeathRecord, member) == 128 && offsetof(DeathRecord, sum) == 104);

struct Dead {
    std::uint32_t pid = 0;
    std::string program;
    std::vector<MemberRecord> members;
};

// Records what is known of these processes, by their liveness tokens; adds to what was recorded before.
void write_deaths(const std::map<std::uint64_t, Dead> &dead) noexcept;

struct Deaths {
    std::vector<DeathRecord> records;  // the newest first
    std::uint32_t damaged = 0;         // damaged records, which are ignored
    std::string path;                  // of the file; empty where no directory is named
    std::string problem;               // why nothing can be written there; empty: it can
};
Deaths read_deaths();

}  // namespace penstock
