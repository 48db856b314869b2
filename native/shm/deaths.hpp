// Deaths: what was known of a member that died, written into a file of the user who finds it dead, before its place in
// the channel is put right. `penstock autopsy` reads it.
//
// The file is $XDG_STATE_HOME/penstock/deaths (or ~/.local/state/penstock/deaths), of mode 0600: 32 records of 4096
// bytes, one for each process; the oldest is written over. All numbers are of this machine's byte order. A process that
// was written over is no new death when another of its channels is looked at: else 33 that died together would drive
// each other out, channel by channel, and nothing would be left but what the last channel knew.
//
//   record   0 number of the record, rising; 0: none   8 liveness token   16 when it was found dead (ns since 1970)
//           24 pid, u32   28 pid of the finder, u32   32 members written, u32   36 members left out, u32
//           40 its program, 24 bytes   64 members   3904 tokens of the last 24 processes that were written over here
//   member   0 kind, u8: 1 publisher, 2 subscriber   1 reliable, u8   4 virtual channel, i32: -1 none
//            8 messages   16 bytes   24 dropped   32 joined (ns)   40 the channel's last ordinal
//           48 a publisher: ordinal of its last message still in the channel; a subscriber: first ordinal not read
//           56 when the last message was published, or the oldest held one (ns)   64 size of the last message
//           72 slots held or reserved, u32   76 bytes of the beginning, u32   80 ordinals before the first
//           96 the channel's name, 216 bytes   312 the beginning of the last message, 64 bytes   376 8 bytes of zero
//
// Rules: any thread. Nothing here throws or waits for long: who cannot write (no directory, no room, somebody else is
// writing for more than 20 ms) leaves it, for putting the channel right is what matters.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "shm/channel.hpp"

namespace penstock::shm {

inline constexpr std::uint32_t most_deaths = 32;
inline constexpr std::uint32_t death_bytes = 4096;
inline constexpr std::uint32_t most_members_of_death = 10;

struct MemberRecord {
    std::uint8_t kind = 0, reliable = 0, zero[2] = {};
    std::int32_t vchan = -1;
    std::uint64_t count = 0, bytes = 0, dropped = 0, joined_ns = 0, tail = 0, ordinal = 0;
    std::int64_t time_ns = 0;
    std::uint64_t size = 0;
    std::uint32_t held = 0, beginning_size = 0;
    std::uint64_t before = 0, zeros = 0;
    char name[216] = {};
    std::uint8_t beginning[64] = {};
    std::uint64_t end = 0;
};
static_assert(sizeof(MemberRecord) == 384 && offsetof(MemberRecord, name) == 96 && offsetof(MemberRecord, held) == 72);

struct alignas(64) DeathRecord {
    std::uint64_t number = 0, token = 0, found_ns = 0;
    std::uint32_t pid = 0, finder = 0, members = 0, left_out = 0;
    char program[24] = {};
    MemberRecord member[most_members_of_death];
    std::uint64_t replaced[24] = {};  // tokens, the newest first
};
static_assert(sizeof(DeathRecord) == death_bytes && offsetof(DeathRecord, replaced) == 3904);

// Notes the dead ones among a channel's members, if there are any. `channel` has its control block, and its tables if
// they are there. `encoded` is the channel's file name.
void note_deaths(const std::string &encoded, const Channel &channel) noexcept;

// The newest first; what no program of ours can have written is cut to its bounds.
std::vector<DeathRecord> read_deaths();

}  // namespace penstock::shm
