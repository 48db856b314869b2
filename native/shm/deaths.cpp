#include "shm/deaths.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>

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
    record.kind = publisher ? 1 : 2;
    record.reliable = member.flags & member_reliable ? 1 : 0;
    record.vchan = member.vchan;
    record.count = member.count.load();
    record.bytes = member.bytes.load();
    record.dropped = member.dropped.load();
    record.joined_ns = member.joined_ns;
    record.before = channel.header->before.load();
    if (!publisher) record.ordinal = member.cursor.load();
    copy_text(record.name, sizeof record.name, decode_name(encoded));
    if (channel.tables) look_at_slots(encoded, channel, publisher, index, member, record);
    return record;
}

// The user's file of deaths; -1 where there is none and none can be made.
int open_deaths(bool make) {
    const char *state = secure_getenv("XDG_STATE_HOME"), *home = secure_getenv("HOME");
    std::string path = state && *state == '/' ? state : home && *home == '/' ? std::string(home) + "/.local/state" : "";
    if (path.empty()) return -1;
    path += "/penstock";
    for (std::size_t slash = path.find('/', 1); make; slash = path.find('/', slash + 1)) {
        mkdir(path.substr(0, slash).c_str(), 0700);
        if (slash == std::string::npos) break;
    }
    path += "/deaths";
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | (make ? O_CREAT : 0);
    int file = open(path.c_str(), flags, 0600);
    if (file < 0) return -1;
    struct stat status {};
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == geteuid()) return file;
    close(file);
    return -1;
}

bool lock_soon(int file) {
    for (int turns = 0; turns < 20; ++turns) {
        if (flock(file, LOCK_EX | LOCK_NB) == 0) return true;
        timespec pause{0, 1'000'000};
        nanosleep(&pause, nullptr);
    }
    return false;
}

bool same(const MemberRecord &one, const MemberRecord &other) {
    return one.kind == other.kind && one.joined_ns == other.joined_ns && one.vchan == other.vchan &&
           std::strncmp(one.name, other.name, sizeof one.name) == 0;
}

void add(DeathRecord &death, const MemberRecord &member) {
    for (std::uint32_t i = 0; i < death.members; ++i)
        if (same(death.member[i], member)) {  // somebody has looked before it was put right
            death.member[i] = member;
            return;
        }
    if (death.members < most_members_of_death) death.member[death.members++] = member;
    else ++death.left_out;
}

struct Dead {
    std::uint32_t pid = 0;
    std::string program;
    std::vector<MemberRecord> members;
};

// Under the lock: into the record of that process, or over the oldest one.
void store(int file, std::uint64_t token, const Dead &dead) {
    std::uint64_t newest = 0, oldest = ~0ull;
    std::uint32_t place = 0;
    DeathRecord death, found;
    bool known = false;
    for (std::uint32_t i = 0; i < most_deaths && !known; ++i) {
        if (pread(file, &found, sizeof found, off_t(i) * death_bytes) != ssize_t(sizeof found)) found = DeathRecord();
        newest = std::max(newest, found.number);
        if (found.number && found.token == token) {
            known = true;
        } else if (found.number && std::find(std::begin(found.replaced), std::end(found.replaced), token) !=
                                       std::end(found.replaced)) {
            return;  // written down before, and written over since
        } else if (found.number < oldest) {
            oldest = found.number;
        } else {
            continue;
        }
        place = i;
        death = found;
    }
    if (!known) {
        DeathRecord before = death;
        death = DeathRecord();
        death.number = newest + 1;
        death.token = token;
        death.found_ns = std::uint64_t(realtime_ns());
        death.pid = dead.pid;
        death.finder = std::uint32_t(getpid());
        copy_text(death.program, sizeof death.program, dead.program);
        if (before.number) {
            death.replaced[0] = before.token;
            std::copy(std::begin(before.replaced), std::end(before.replaced) - 1, death.replaced + 1);
        }
    }
    death.members = std::min(death.members, most_members_of_death);
    for (const MemberRecord &member : dead.members) add(death, member);
    [[maybe_unused]] ssize_t written = pwrite(file, &death, sizeof death, off_t(place) * death_bytes);
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
        if (dead.empty()) return;
        File file(open_deaths(true));
        if (!file || !lock_soon(file.get())) return;
        for (const auto &[token, one] : dead) store(file.get(), token, one);
    } catch (...) {
    }
}

std::vector<DeathRecord> read_deaths() {
    std::vector<DeathRecord> found;
    File file(open_deaths(false));
    if (!file) return found;
    lock_soon(file.get());  // else a record may be half written: its numbers are checked
    for (std::uint32_t i = 0; i < most_deaths; ++i) {
        DeathRecord death;
        if (pread(file.get(), &death, sizeof death, off_t(i) * death_bytes) != ssize_t(sizeof death) || !death.number)
            continue;
        death.members = std::min(death.members, most_members_of_death);
        death.program[sizeof death.program - 1] = 0;
        for (std::uint32_t m = 0; m < death.members; ++m) {
            MemberRecord &member = death.member[m];
            member.beginning_size = std::min<std::uint32_t>(member.beginning_size, sizeof member.beginning);
            member.name[sizeof member.name - 1] = 0;
        }
        found.push_back(death);
    }
    std::sort(found.begin(), found.end(), [](const auto &one, const auto &other) { return one.number > other.number; });
    return found;
}

}  // namespace penstock::shm
