// Channels seen from outside: their members, what these hold, and what dead processes left behind.
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <optional>
#include <set>

#include "counters/counters.hpp"
#include "platform/shared_directory.hpp"
#include "shm/deaths.hpp"
#include "shm/membership.hpp"

namespace penstock::shm {

namespace {

constexpr const char *suffix = ".channel";

// In order; with `begin` only those that begin with it.
std::vector<std::string> names_in_directory(const std::string &begin = "") {
    std::vector<std::string> names;
    DIR *listing = opendir(shared_directory_path().c_str());
    if (!listing) return names;
    while (dirent *entry = readdir(listing))
        if (std::strncmp(entry->d_name, begin.c_str(), begin.size()) == 0) names.emplace_back(entry->d_name);
    closedir(listing);
    std::sort(names.begin(), names.end());
    return names;
}

bool is_control(const std::string &name) {
    return name.size() > std::strlen(suffix) && name.rfind(suffix) == name.size() - std::strlen(suffix);
}

// A control block that is inspected without joining. Empty problem: it is valid.
struct Look {
    File file;
    Mapping memory;
    Channel channel;
    std::string problem;
};

Look look_at(const std::string &file_name, bool writable) {
    Look look;
    Access any;
    any.shared = true;
    try {
        look.file = open_file(file_name, any, writable);
        if (!look.file) {
            look.problem = "gone";
            return look;
        }
        std::uint64_t size = file_size(look.file);
        if (size < sizeof(Header)) throw Error(Fault::corruption, "too short to be a channel");
        look.memory = Mapping(look.file.get(), size, writable);
        auto *header = reinterpret_cast<Header *>(look.memory.data());
        std::uint32_t p = header->publisher_capacity, s = header->subscriber_capacity;
        if (header->magic == control_magic && header->version != layout_version)
            throw Error(Fault::refused, "it is of another version of Penstock (layout " + std::to_string(header->version) +
                                            ", this is " + std::to_string(layout_version) + ")");
        if (header->magic != control_magic || header->version != layout_version || !p || !s || p % 64 || s % 64 ||
            p > max_members || s > max_members || size != ControlPlaces(p, s).total)
            throw Error(Fault::corruption, "its control block is damaged");
        look.channel.attach_control(look.memory.data(), p, s);
    } catch (const Error &error) {
        look.problem = error.what();
    }
    return look;
}

// Whether the channel has a member that is alive, or with `alive` false one that is dead.
bool has_member(const Channel &channel, bool alive) {
    std::map<std::uint64_t, bool> known;
    auto found_in = [&](const Member &member) {
        if (!member.taken.load()) return false;
        std::uint64_t token = member.process.load();
        auto found = known.find(token);
        if (found == known.end()) found = known.emplace(token, process_alive(token)).first;
        return found->second == alive;
    };
    for (std::uint32_t i = 0; i < channel.publisher_capacity; ++i)
        if (found_in(channel.publishers[i])) return true;
    for (std::uint32_t i = 0; i < channel.subscriber_capacity; ++i)
        if (found_in(channel.subscribers[i])) return true;
    return false;
}

bool any_alive(const Channel &channel) { return has_member(channel, true); }

// The 16 hexadecimal digits in NAME.kind.NONCE..., or empty.
std::string nonce_in(const std::string &name) {
    for (const char *kind : {".tables.", ".vchans.", ".payload.", ".virtual.", ".wake.", ".schema.", ".durable."}) {
        std::size_t at = name.find(kind);
        if (at != std::string::npos) return name.substr(at + std::strlen(kind), 16);
    }
    return "";
}

std::string hexadecimal(std::uint64_t word) {
    char text[24];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(word));
    return text;
}

// The channel's tables, attached read-only; empty if there are none.
Mapping look_at_tables(const std::string &name, Channel &channel) {
    Access any;
    any.shared = true;
    std::uint32_t slots = channel.header->slots.load();
    auto stride = std::uint32_t(round_up(channel.header->metadata_size.load(), 16));
    if (!channel.header->ready.load() || slots < 2 || slots > max_slots || stride > max_metadata_bytes) return {};
    File file = open_file(name + ".tables." + hexadecimal(channel.header->nonce), any, false);
    std::uint64_t size = TablePlaces(slots, channel.subscriber_words(), stride).total;
    if (!file || file_size(file) != size) return {};
    Mapping memory(file.get(), size, false);
    channel.attach_tables(memory.data(), slots, stride);
    return memory;
}

void note_deaths_in(const std::string &encoded, Channel channel) {
    try {
        Mapping tables = look_at_tables(encoded, channel);
        note_deaths(encoded, channel);
    } catch (const Error &) {  // its tables are damaged, or another user's
        note_deaths(encoded, channel);
    }
}

// What is in the slots for a subscriber, and what was overwritten since it last counted. Publishers and the subscriber go
// on meanwhile: only while its own words stay the same, what is gone was not read.
void view_unread(const Channel &channel, MemberView &member) {
    const Member &self = channel.subscribers[member.index];
    const bool is_virtual = member.vchan >= 0;
    if (is_virtual && (!channel.vchans || member.vchan >= std::int32_t(max_vchans))) return;
    std::uint64_t uncounted = self.uncounted().load();
    member.cursor = self.cursor.load();
    for (int turns = 0; turns < 8; ++turns) {
        const std::uint64_t last_ordinal = is_virtual ? channel.vchans[member.vchan].tail.load() : 0;
        const std::uint64_t end = channel.tail(), last = is_virtual ? last_ordinal : end - 1;
        const std::uint64_t first = is_virtual ? uncounted : std::max(member.cursor, uncounted);
        const std::uint64_t first_in_ring = channel.first_in_ring();
        const std::uint64_t due = uncounted && last >= first ? last + 1 - first : 0;
        std::uint64_t there = 0;
        member.waiting = 0;
        for (std::uint32_t s = 0; s < channel.slot_count && (member.cursor < end || due); ++s) {
            const Slot &slot = channel.slots[s];
            auto sequence = [&] {  // of the message that is whole in the slot; 0: none
                std::uint64_t state = slot.state.load();
                bool whole = kind_of(state) == slot_live || kind_of(state) == slot_claiming;
                return whole ? sequence_of(state) : 0;
            };
            const std::uint64_t n = sequence(), ordinal = slot.ordinal.load();
            // The ordinals of a virtual channel are a step ahead of the tail.
            if (!n || (is_virtual ? slot.vchan.load() != member.vchan : n >= end)) continue;
            if (n < first_in_ring && !(member.reliable && slot.flags.load() & message_reliable)) continue;
            const std::uint64_t place = is_virtual ? ordinal : n;
            if (sequence() != n) continue;
            if (n >= member.cursor) ++member.waiting;
            if (place >= first && place <= last) ++there;
        }
        member.overwritten = due > there ? due - there : 0;
        const std::uint64_t cursor = self.cursor.load(), counted = self.uncounted().load();
        if (cursor == member.cursor && counted == uncounted) return;
        member.cursor = cursor;
        uncounted = counted;
    }
    // It reads so fast that nothing stands still: only what is more than the slots can hold was surely lost.
    const std::uint64_t end = channel.tail(), behind = end > member.cursor ? end - member.cursor : 0;
    member.overwritten = !is_virtual && behind > channel.slot_count ? behind - channel.slot_count : 0;
    member.waiting = std::min(member.waiting, behind);
}

void view_slots(const std::string &name, ChannelView &view, const Channel &control) {
    try {
        Channel channel = control;
        Mapping memory = look_at_tables(name, channel);
        if (!memory) return;
        std::uint32_t slots = channel.slot_count;
        view.messages = channel.tail() - 1;
        view.last_ns = channel.tables->last_timestamp_ns.load();
        for (std::uint32_t s = 0; s < slots; ++s) {
            SlotKind kind = kind_of(channel.slots[s].state.load());
            (kind == slot_free ? view.free_slots : kind == slot_owned ? view.owned_slots : view.live_slots) += 1;
            if (channel.is_held(s)) ++view.held_slots;
            for (MemberView &member : view.members) {
                if (member.is_publisher || member.index >= channel.subscriber_capacity) continue;
                if (!(channel.holder_word(s, member.index / 64).load() & (1ull << (member.index % 64)))) continue;
                std::int64_t published_ns = channel.slots[s].timestamp_ns.load();
                if (!member.held++ || published_ns < member.oldest_held_ns) member.oldest_held_ns = published_ns;
            }
        }
        for (MemberView &member : view.members)
            if (!member.is_publisher) view_unread(channel, member);
    } catch (const Error &error) {
        view.problem = error.what();
    }
}

// The table of virtual channels, attached read-only; empty if there is none.
Mapping view_vchans(const std::string &name, ChannelView &view, Channel &channel) {
    const Header &header = *channel.header;
    if (!header.vchans_ready.load()) return {};
    Access any;
    any.shared = true;
    try {
        File file = open_file(name + ".vchans." + hexadecimal(header.nonce), any, false);
        if (!file || file_size(file) != sizeof(Vchan) * max_vchans) return {};
        Mapping memory(file.get(), sizeof(Vchan) * max_vchans, false);
        auto *vchans = channel.vchans = reinterpret_cast<Vchan *>(memory.data());
        for (std::uint32_t id = 0; id < max_vchans; ++id) {
            if (!vchans[id].used.load()) continue;
            view.vchans.emplace_back(id, read_text(vchans[id].name, sizeof vchans[id].name));
            std::string type = read_text(vchans[id].type, sizeof vchans[id].type);
            if (!type.empty()) view.vchan_types.emplace_back(id, type);
        }
        return memory;
    } catch (const Error &error) {
        view.problem = error.what();
        return {};
    }
}

// The text in a file of the channel; empty if there is none.
std::string text_in(const std::string &name) {
    Access any;
    any.shared = true;
    try {
        File file = open_file(name, any, false);
        const std::uint64_t size = file ? std::min<std::uint64_t>(file_size(file), max_schema_bytes) : 0;
        if (!size) return "";
        Mapping memory(file.get(), size, false);
        return std::string(reinterpret_cast<const char *>(memory.data()), size);
    } catch (const Error &) {  // another user's, or just being replaced: the channel itself is valid
        return "";
    }
}

}  // namespace

std::vector<ChannelView> list_channels() {
    std::vector<ChannelView> found;
    std::vector<std::string> names = names_in_directory();
    for (const std::string &file_name : names) {
        if (!is_control(file_name)) continue;
        std::string encoded = file_name.substr(0, file_name.size() - std::strlen(suffix));
        ChannelView view;
        view.name = decode_name(encoded);
        Look look = look_at(file_name, false);
        view.problem = look.problem;
        if (look.problem == "gone") continue;
        if (look.problem.empty()) {
            const Header &header = *look.channel.header;
            view.type = read_text(header.type, sizeof header.type);
            view.slots = header.slots.load();
            view.metadata_size = header.metadata_size.load();
            view.flags = header.flags.load();
            view.mode = header.mode;
            view.made_ns = header.made_ns;
            std::uint32_t segments = std::min(header.segments.load(), max_segments);
            if (segments) view.slot_size = header.segment[segments - 1].slot_size.load();
            auto add = [&](bool publishers, const Member *members, std::uint32_t capacity) {
                for (std::uint32_t i = 0; i < capacity; ++i) {
                    const Member &member = members[i];
                    if (!member.taken.load()) continue;
                    MemberView seen;
                    seen.is_publisher = publishers;
                    seen.reliable = member.flags & member_reliable;
                    seen.process = member.process.load();
                    std::optional<int> pid = process_holder(seen.process);
                    seen.alive = pid.has_value();
                    seen.here = pid.value_or(0) != 0;
                    seen.asleep = member.sleep.load() & asleep;
                    seen.index = i;
                    seen.pid = seen.here ? std::uint32_t(*pid) : member.pid;
                    seen.most_held = member.most_held;
                    seen.vchan = member.vchan;
                    seen.count = member.count.load();
                    seen.bytes = member.bytes.load();
                    seen.dropped = member.dropped.load();
                    seen.joined_ns = member.joined_ns;
                    seen.cursor = member.cursor.load();
                    view.members.push_back(seen);
                }
            };
            add(true, look.channel.publishers, look.channel.publisher_capacity);
            add(false, look.channel.subscribers, look.channel.subscriber_capacity);
            Mapping vchans = view_vchans(encoded, view, look.channel);
            view_slots(encoded, view, look.channel);
            view.durable = text_in(encoded + ".durable." + hexadecimal(header.nonce));
        }
        for (const std::string &other : names) {
            struct stat status {};
            if (other.compare(0, encoded.size() + 1, encoded + ".") == 0 &&
                fstatat(shared_directory(), other.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
                view.memory_bytes += std::uint64_t(status.st_blocks) * 512;
                if (other == file_name) view.owner = status.st_uid;
            }
        }
        found.push_back(std::move(view));
    }
    return found;
}

std::string described_type(const std::string &name) {
    const std::string encoded = encode_name(name);
    Look look = look_at(encoded + suffix, false);
    return look.problem.empty() ? text_in(encoded + ".schema." + hexadecimal(look.channel.header->nonce)) : "";
}

void look_for_deaths() {
    for (const std::string &file_name : names_in_directory()) {
        if (!is_control(file_name)) continue;
        Look look = look_at(file_name, false);
        if (look.problem.empty()) note_deaths_in(file_name.substr(0, file_name.size() - std::strlen(suffix)), look.channel);
    }
}

std::string channel_in_use(const std::string &encoded) {
    Look look = look_at(encoded + suffix, false);
    if (!look.problem.empty() || !any_alive(look.channel)) return "";
    return look.channel.header->flags.load() & channel_mux ? "a multiplexer" : "an ordinary channel";
}

std::string multiplexer_of(const std::string &encoded, std::uint64_t own_nonce) {
    for (const std::string &file : names_in_directory(encoded + ".virtual.")) {  // few, and none as a rule
        if (nonce_in(file) == hexadecimal(own_nonce)) continue;
        for (const std::string &control : names_in_directory()) {
            if (!is_control(control)) continue;
            Look look = look_at(control, false);
            if (look.problem.empty() && hexadecimal(look.channel.header->nonce) == nonce_in(file) && any_alive(look.channel))
                return decode_name(control.substr(0, control.size() - std::strlen(suffix)));
        }
    }
    return "";
}

Cleaned clean_channels() {
    Cleaned cleaned;
    // List files before channels: a file whose channel is missing now had one when it was created, and that is gone.
    std::vector<std::string> files = names_in_directory();
    std::set<std::string> nonces, kept;
    std::vector<std::string> with_dead;
    for (const std::string &file_name : names_in_directory()) {
        if (!is_control(file_name)) continue;
        std::string encoded = file_name.substr(0, file_name.size() - std::strlen(suffix));
        struct stat status {};
        bool ours = fstatat(shared_directory(), file_name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
                    S_ISREG(status.st_mode) && (status.st_uid == geteuid() || geteuid() == 0);
        Look look;
        if (ours) look = look_at(file_name, true);
        if (!ours || !look.problem.empty()) {  // it is not known who uses it: leave all of it alone
            kept.insert(encoded);
            continue;
        }
        FileLock lock(look.file, file_name, false);
        bool dead = lock.held() && has_name(look.file) && look.channel.header->takings.load() && !any_alive(look.channel);
        // Created by a process that died before joining: nobody else has it open, and it is not brand-new.
        if (!dead && lock.held() && !look.channel.header->takings.load() && time(nullptr) - status.st_mtime > 60) dead = true;
        if (dead) {
            note_deaths_in(encoded, look.channel);
            remove_file(file_name);
            cleaned.removed.push_back(decode_name(encoded));
        } else {
            nonces.insert(hexadecimal(look.channel.header->nonce));
            if (has_member(look.channel, false)) with_dead.push_back(encoded);
        }
    }
    for (const std::string &encoded : with_dead) try {
            if (Membership::recover_without_joining(encoded)) cleaned.recovered.push_back(decode_name(encoded));
        } catch (const Error &) {  // its tables are damaged: its own members say so
        }
    for (const std::string &file : files) {
        std::string nonce = nonce_in(file);
        if (file[0] != '%' || nonce.empty() || nonces.count(nonce) || kept.count(file.substr(0, file.find('.')))) continue;
        struct stat status {};
        if (fstatat(shared_directory(), file.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
        if (status.st_uid == geteuid() || geteuid() == 0) remove_file(file);
    }
    counters_sweep();
    return cleaned;
}

}  // namespace penstock::shm
