#include "shm/deaths.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>

#include "platform/deaths.hpp"
#include "shm/files.hpp"

namespace penstock::shm {

namespace {

// The beginning of the message in slot s, read from the file: its segment may not be mapped here.
void read_beginning(const std::string &encoded, const Channel &channel, std::uint32_t s, MemberRecord &record) {
    const Slot &slot = channel.slots[s];
    std::uint32_t segment = slot.segment.load();
    if (segment >= max_segments) return;
    char text[48];
    std::snprintf(text, sizeof text, ".payload.%016llx.%u", static_cast<unsigned long long>(channel.header->nonce), segment);
    Access any;
    any.shared = true;
    File file = open_file(encoded + text, any, false);
    if (!file) return;
    auto wanted = std::size_t(std::min<std::uint64_t>(slot.size.load(), sizeof record.beginning));
    off_t at = off_t(channel.header->segment[segment].slot_size.load() * s);
    ssize_t got = pread(file.get(), record.beginning, wanted, at);
    record.beginning_size = got > 0 ? std::uint32_t(got) : 0;
}

// The last message that a publisher has published, as far as its slot still holds it.
void look_at_last(const std::string &encoded, const Channel &channel, std::uint64_t sequence, MemberRecord &record) {
    for (std::uint32_t s = 0; s < channel.slot_count; ++s) {
        const Slot &slot = channel.slots[s];
        if (slot.state.load() != live(sequence)) continue;
        record.ordinal = slot.ordinal.load();
        record.time_ns = slot.timestamp_ns.load();
        record.size = slot.size.load();
        read_beginning(encoded, channel, s, record);
        return;
    }
}

void look_at_slots(const std::string &encoded, const Channel &channel, bool publisher, std::uint32_t index,
                   const Member &member, MemberRecord &record) {
    record.tail = channel.tail() - 1;
    for (std::uint32_t s = 0; s < channel.slot_count; ++s) {
        const Slot &slot = channel.slots[s];
        std::uint64_t state = slot.state.load();
        if (publisher) {
            SlotKind kind = kind_of(state);
            if ((kind == slot_owned || kind == slot_claiming) && member_of(state) == index) ++record.held;
        } else if (channel.holder_word(s, index / 64).load() >> (index % 64) & 1) {
            std::int64_t published_ns = slot.timestamp_ns.load();
            if (!record.held++ || published_ns < record.time_ns) record.time_ns = published_ns;
        }
    }
    if (publisher && member.count.load()) look_at_last(encoded, channel, member.cursor.load() - 1, record);
}

MemberRecord record_of(const std::string &encoded, const Channel &channel, bool publisher, std::uint32_t index) {
    const Member &member = (publisher ? channel.publishers : channel.subscribers)[index];
    MemberRecord record;
    copy_text(record.room, sizeof record.room, "shm");
    copy_text(record.kind, sizeof record.kind, publisher ? "publisher" : "subscriber");
    record.reliable = member.flags & member_reliable ? 1 : 0;
    record.vchan = member.vchan;
    record.count = member.count.load();
    record.bytes = member.bytes.load();
    record.dropped = member.dropped.load();
    record.opened_ns = member.joined_ns;
    record.before = channel.header->before.load();
    if (!publisher) record.ordinal = member.cursor.load();
    copy_text(record.name, sizeof record.name, decode_name(encoded));
    if (channel.tables) look_at_slots(encoded, channel, publisher, index, member, record);
    return record;
}

}  // namespace

void note_deaths(const std::string &encoded, const Channel &channel) noexcept {
    try {
        std::map<std::uint64_t, bool> lives;
        std::map<std::uint64_t, Dead> dead;
        auto look = [&](bool publisher, const Member *members, std::uint32_t capacity) {
            for (std::uint32_t i = 0; i < capacity; ++i) {
                if (!members[i].taken.load()) continue;
                std::uint64_t token = members[i].process.load();
                auto found = lives.find(token);
                if (found == lives.end()) found = lives.emplace(token, process_alive(token)).first;
                if (found->second) continue;
                Dead &one = dead[token];
                one.pid = members[i].pid;
                one.program.assign(members[i].program, strnlen(members[i].program, sizeof members[i].program));
                one.members.push_back(record_of(encoded, channel, publisher, i));
            }
        };
        look(true, channel.publishers, channel.publisher_capacity);
        look(false, channel.subscribers, channel.subscriber_capacity);
        write_deaths(dead);
    } catch (...) {
    }
}

}  // namespace penstock::shm
