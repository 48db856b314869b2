#include "platform/deaths.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "platform/checksum.hpp"
#include "platform/liveness.hpp"

namespace penstock {

namespace {

constexpr off_t file_bytes = off_t(most_deaths) * death_bytes;

std::string deaths_path() {
    const char *state = secure_getenv("XDG_STATE_HOME"), *home = secure_getenv("HOME");
    std::string base = state && *state == '/' ? state : home && *home == '/' ? std::string(home) + "/.local/state" : "";
    return base.empty() ? "" : base + "/penstock/deaths";
}

void make_folders(const std::string &path) {
    for (std::size_t slash = path.find('/', 1); slash != std::string::npos; slash = path.find('/', slash + 1))
        mkdir(path.substr(0, slash).c_str(), 0700);
}

// A checksum does not protect against a forged file: no field may lead outside of the record.
void keep_within(DeathRecord &death) {
    death.members = std::min(death.members, most_members_of_death);
    death.program[sizeof death.program - 1] = death.finder_program[sizeof death.finder_program - 1] = 0;
    for (MemberRecord &member : death.member) {
        member.beginning_size = std::min<std::uint32_t>(member.beginning_size, sizeof member.beginning);
        member.room[sizeof member.room - 1] = member.kind[sizeof member.kind - 1] = member.name[sizeof member.name - 1] = 0;
    }
}

// The user's file of deaths, opened and locked; if that fails it has no descriptor, and `problem` says why.
class DeathsFile {
   public:
    explicit DeathsFile(bool write) : path(deaths_path()), problem(open_here(write)) {
        locked_ = problem.empty() && lock_soon();
    }
    ~DeathsFile() {
        if (descriptor_ >= 0) close(descriptor_);
    }
    DeathsFile(const DeathsFile &) = delete;
    DeathsFile &operator=(const DeathsFile &) = delete;

    bool locked() const { return locked_; }

    // Whether the record at that index is intact; a damaged or empty one gives number 0.
    bool read(std::uint32_t place, DeathRecord &record) const {
        ssize_t size = pread(descriptor_, &record, sizeof record, off_t(place) * death_bytes);
        if (size != ssize_t(sizeof record)) record = DeathRecord();
        if (size == 0) return true;  // the disk was full when the file was made
        bool whole = record.sum == sum_of(record) || is_empty(record);
        if (!whole) record = DeathRecord();
        keep_within(record);
        return whole;
    }

    void write(std::uint32_t place, DeathRecord &record) const {
        record.sum = sum_of(record);
        [[maybe_unused]] ssize_t written = pwrite(descriptor_, &record, sizeof record, off_t(place) * death_bytes);
    }

   private:
    NoFork no_fork_;  // a forked child would inherit the lock and keep it
    int descriptor_ = -1;
    bool locked_ = false;

   public:
    const std::string path, problem;

   private:
    // Why it could not be opened; empty: it is open.
    std::string open_here(bool write) {
        if (path.empty()) return "neither XDG_STATE_HOME nor HOME names a folder";
        if (write) make_folders(path);
        int flags = (write ? O_RDWR | O_CREAT : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
        descriptor_ = open(path.c_str(), flags, 0600);
        if (descriptor_ < 0) return errno == ELOOP ? "it is a symbolic link" : std::strerror(errno);
        struct stat status {};
        if (fstat(descriptor_, &status) != 0 || !S_ISREG(status.st_mode)) return "it is no file";
        if (status.st_uid != geteuid()) return "it belongs to somebody else";
        if (write && status.st_mode & 077) fchmod(descriptor_, 0600);  // it contains beginnings of messages
        // Allocate the whole file at once: a full disk then fails here, and not in the middle of a record.
        int error = write && status.st_size < file_bytes ? posix_fallocate(descriptor_, 0, file_bytes) : 0;
        return error == ENOSPC || error == EDQUOT || error == EFBIG ? std::strerror(error) : "";
    }

    // Nothing was ever written there.
    static bool is_empty(const DeathRecord &record) {
        auto *bytes = reinterpret_cast<const std::uint8_t *>(&record);
        return std::all_of(bytes, bytes + sizeof record, [](std::uint8_t byte) { return byte == 0; });
    }

    static std::uint32_t sum_of(const DeathRecord &record) {
        constexpr std::size_t at = offsetof(DeathRecord, sum), after = at + sizeof record.sum;
        auto *bytes = reinterpret_cast<const std::uint8_t *>(&record);
        return checksum_of(bytes, at, bytes + after, sizeof record - after);
    }

    bool lock_soon() const {
        for (int turns = 0; turns < 20; ++turns) {
            if (flock(descriptor_, LOCK_EX | LOCK_NB) == 0) return true;
            timespec pause{0, 1'000'000};
            nanosleep(&pause, nullptr);
        }
        return false;
    }
};

void copy_text(char *to, std::size_t room, const std::string &text) {
    std::memcpy(to, text.data(), std::min(text.size(), room - 1));  // the record is all zeros
}

bool same(const MemberRecord &one, const MemberRecord &other) {
    return one.opened_ns == other.opened_ns && one.vchan == other.vchan && std::strcmp(one.room, other.room) == 0 &&
           std::strcmp(one.kind, other.kind) == 0 && std::strcmp(one.name, other.name) == 0;
}

// Counts a member that there is no room for, once.
void leave_out(DeathRecord &death, const MemberRecord &member) {
    std::uint32_t mark = checksum_of(reinterpret_cast<const std::uint8_t *>(&member.opened_ns), sizeof member.opened_ns,
                                     reinterpret_cast<const std::uint8_t *>(member.room),
                                     sizeof member.room + sizeof member.kind + sizeof member.name);
    mark = (mark ^ std::uint32_t(member.vchan)) | 1u;  // never 0
    for (MemberRecord &kept : death.member)
        for (std::uint32_t &one : kept.left_out_marks) {
            if (one == mark) return;
            if (one) continue;
            one = mark;
            ++death.left_out;
            return;
        }
}

bool in_shm(const MemberRecord &member) { return std::strcmp(member.room, "shm") == 0; }

// The marks of that place stay: they are the death's.
void put(DeathRecord &death, std::uint32_t place, const MemberRecord &member) {
    MemberRecord &kept = death.member[place];
    std::uint32_t marks[] = {kept.left_out_marks[0], kept.left_out_marks[1]};
    kept = member;
    std::copy(std::begin(marks), std::end(marks), kept.left_out_marks);
}

void add(DeathRecord &death, const MemberRecord &member) {
    std::uint32_t outside = 0;
    for (std::uint32_t i = 0; i < death.members; ++i) {
        if (same(death.member[i], member)) {  // it was recorded by an earlier look, before the recovery
            put(death, i, member);
            return;
        }
        outside += !in_shm(death.member[i]);
    }
    bool room = death.members < most_members_of_death && (in_shm(member) || outside < most_members_outside_shm);
    if (room) put(death, death.members++, member);
    else leave_out(death, member);
}

DeathRecord new_record(std::uint64_t token, const Dead &dead, const DeathRecord &before) {
    DeathRecord death;
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    death.token = token;
    death.found_ns = std::uint64_t(now.tv_sec) * 1'000'000'000u + std::uint64_t(now.tv_nsec);
    death.pid = dead.pid;
    death.finder = std::uint32_t(getpid());
    copy_text(death.program, sizeof death.program, dead.program);
    copy_text(death.finder_program, sizeof death.finder_program, process_program());
    if (before.number) {
        death.replaced[0] = before.token;
        std::copy(std::begin(before.replaced), std::end(before.replaced) - 1, death.replaced + 1);
    }
    return death;
}

// The upper half of a token is the pid of its process: where a member says something else, its channel is damaged.
bool is_plausible(std::uint64_t token, const Dead &dead) { return dead.pid && token >> 32 == dead.pid; }

// Writes into the record of that process, or overwrites the oldest record.
void store(const DeathsFile &file, std::vector<DeathRecord> &records, std::uint64_t token, const Dead &dead) {
    std::uint64_t newest = 0;
    std::uint32_t place = 0;
    for (std::uint32_t i = 0; i < most_deaths; ++i) {
        const DeathRecord &found = records[i];
        newest = std::max(newest, found.number);
        if (found.number && found.token == token) {
            place = i;
            break;
        }
        if (std::find(std::begin(found.replaced), std::end(found.replaced), token) != std::end(found.replaced))
            return;  // it was recorded before and has been overwritten since
        if (found.number < records[place].number) place = i;
    }
    DeathRecord &death = records[place];
    if (!death.number || death.token != token) {
        death = new_record(token, dead, death);
        death.number = newest + 1;
    }
    for (const MemberRecord &member : dead.members) add(death, member);
    file.write(place, death);
}

}  // namespace

void write_deaths(const std::map<std::uint64_t, Dead> &dead) noexcept {
    try {
        if (std::none_of(dead.begin(), dead.end(), [](const auto &one) { return is_plausible(one.first, one.second); }))
            return;
        DeathsFile file(true);
        if (!file.locked()) return;
        std::vector<DeathRecord> records(most_deaths);
        for (std::uint32_t i = 0; i < most_deaths; ++i) file.read(i, records[i]);
        for (const auto &[token, one] : dead)
            if (is_plausible(token, one)) store(file, records, token, one);
    } catch (...) {
    }
}

Deaths read_deaths() {
    Deaths found;
    {
        DeathsFile file(true);  // opened for writing, to find out whether that is possible
        found.path = file.path;
        found.problem = file.problem;
        if (found.problem.empty() && !file.locked())
            found.problem = "another process has held its lock for more than 20 ms; deaths that are found meanwhile are not recorded";
    }
    DeathsFile file(false);
    for (std::uint32_t i = 0; file.problem.empty() && i < most_deaths; ++i) {
        DeathRecord death;
        // without the lock another process may just be writing it
        if (!file.read(i, death) && file.locked()) ++found.damaged;
        if (death.number) found.records.push_back(death);
    }
    std::sort(found.records.begin(), found.records.end(),
              [](const auto &one, const auto &other) { return one.number > other.number; });
    return found;
}

}  // namespace penstock
