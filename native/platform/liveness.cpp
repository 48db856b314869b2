#include "platform/liveness.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "platform/shared_directory.hpp"

namespace penstock {

std::atomic<std::uint32_t> fork_generation_now{1};

namespace {

// One file of this process; a second one only when the directory was changed or emptied meanwhile.
struct Mark {
    std::uint64_t token;
    int file;
    std::string path;
};

struct State {
    std::recursive_mutex fork_mutex;
    std::mutex mutex;
    std::vector<Mark> marks;
    int owner = 0;  // pid that made them
    bool shared = false;
};

State &state() {
    static State *made = [] {
        auto *fresh = new State;  // never destroyed: finalisers may come later
        pthread_atfork([] { state().fork_mutex.lock(); state().mutex.lock(); },
                       [] { state().mutex.unlock(); state().fork_mutex.unlock(); },
                       [] {
                           fork_generation_now.fetch_add(1);
                           // The file is the parent's; closing our copy does not touch the parent's lock.
                           for (Mark &mark : state().marks) close(mark.file);
                           state().marks.clear();
                           state().mutex.unlock();
                           // A recursive mutex knows its owner by thread id, which is another one in the child.
                           new (&state().fork_mutex) std::recursive_mutex;
                       });
        std::atexit(process_end);
        return fresh;
    }();
    return *made;
}

std::string file_name(std::uint64_t token) { return process_file_name("alive", token); }

[[noreturn]] void fail(const std::string &what) { throw std::system_error(errno, std::generic_category(), what); }

// The file is locked before it gets its name, so that others never see it unlocked while its owner is alive.
void make(State &s) {
    std::uint32_t random = 0;
    if (getrandom(&random, sizeof random, 0) != sizeof random) fail("getrandom");
    std::uint64_t token = std::uint64_t(getpid()) << 32 | random;  // the pid is for the reader, the random bits make it unique
    int directory = shared_directory();
    std::string name = file_name(token), early = name + ".new";
    int file = openat(directory, early.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) fail("cannot make " + early + " in the shared directory");
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    if (fcntl(file, F_SETLK, &lock) != 0 || renameat(directory, early.c_str(), directory, name.c_str()) != 0) {
        int error = errno;
        unlinkat(directory, early.c_str(), 0);
        close(file);
        errno = error;
        fail("cannot lock " + early);
    }
    if (s.shared) fchmod(file, 0644);
    s.marks.push_back({token, file, shared_directory_path() + "/" + name});
    s.owner = getpid();
}

// Never opens a file of this process again: closing any descriptor of it would release the lock.
bool is_own(std::uint64_t token) {
    std::lock_guard lock(state().mutex);
    for (Mark &mark : state().marks)
        if (token == mark.token) return true;
    return false;
}

// The process that holds the file's lock, as this PID namespace numbers it: 0 where it has no number here, or where it
// cannot be told; none where nobody holds it.
std::optional<int> holder(int directory, const char *name) {
    int file = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        if (errno == EACCES) return 0;  // another user's file, which cannot be checked: assume that it is alive
        return std::nullopt;
    }
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    bool told = fcntl(file, F_GETLK, &lock) == 0;
    close(file);
    if (told && lock.l_type == F_UNLCK) return std::nullopt;
    return told && lock.l_pid > 0 ? int(lock.l_pid) : 0;
}

}  // namespace

std::uint64_t process_token() {
    NoFork guard;  // before the mutex, as a fork takes them
    State &s = state();
    std::lock_guard lock(s.mutex);
    std::string directory = shared_directory_path() + "/";
    for (Mark &mark : s.marks)  // the mark must be where others look for it
        if (mark.path == directory + file_name(mark.token) && access(mark.path.c_str(), F_OK) == 0) return mark.token;
    make(s);
    return s.marks.back().token;
}

void process_token_share() {
    process_token();
    State &s = state();
    std::lock_guard lock(s.mutex);
    s.shared = true;
    for (Mark &mark : s.marks) fchmod(mark.file, 0644);
}

void process_end() noexcept {
    State &s = state();
    std::lock_guard lock(s.mutex);
    if (s.owner != getpid()) return;
    for (Mark &mark : s.marks) unlink(mark.path.c_str());
}

std::optional<int> process_holder(std::uint64_t token) {
    if (token == 0) return std::nullopt;
    if (is_own(token)) return getpid();
    return holder(shared_directory(), file_name(token).c_str());
}

bool process_alive(std::uint64_t token) { return process_holder(token).has_value(); }

std::string process_file_name(const char *kind, std::uint64_t token) {
    char text[64];
    std::snprintf(text, sizeof text, "%s.%u.%08x", kind, unsigned(token >> 32), unsigned(token));
    return text;
}

namespace {

std::vector<std::string> command_line() {
    std::vector<std::string> words;
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    if (file < 0) return words;
    char text[4096];
    ssize_t size = read(file, text, sizeof text);
    close(file);
    for (ssize_t at = 0; at < size; at += ssize_t(words.back().size()) + 1)
        words.emplace_back(text + at, strnlen(text + at, std::size_t(size - at)));
    return words;
}

std::string last_part(const std::string &path) { return path.substr(path.rfind('/') + 1); }

std::string find_program() {
    std::vector<std::string> words = command_line();
    if (words.empty()) return "";
    std::string program = last_part(words[0]);
    if (program.compare(0, 6, "python") != 0) return program;
    for (std::size_t i = 1; i < words.size() && words[i] != "-c"; ++i) {
        if (words[i] == "-X" || words[i] == "-W") ++i;  // they take a word
        else if (words[i] == "-m") return i + 1 < words.size() ? words[i + 1] : program;
        else if (words[i].empty() || words[i][0] != '-') return last_part(words[i]);
    }
    return program;
}

}  // namespace

const std::string &process_program() {
    static const std::string *found = new std::string(find_program());  // never destroyed: finalisers may come later
    return *found;
}

int process_sweep(void (*before)(const std::string &page)) {
    int directory = shared_directory(), count = 0;
    DIR *listing = opendir(shared_directory_path().c_str());
    if (!listing) return 0;
    while (dirent *entry = readdir(listing)) {
        // A page of counters lives as long as the process whose token it has in its name.
        unsigned pid, random;
        bool page = std::sscanf(entry->d_name, "counters.%u.%8x.", &pid, &random) == 2;
        if (!page && std::sscanf(entry->d_name, "alive.%u.%8x", &pid, &random) != 2) continue;
        std::uint64_t token = std::uint64_t(pid) << 32 | random;
        bool early = std::strstr(entry->d_name, ".new") != nullptr;
        if (early) {  // the file may be between creation and lock: only an old one is surely dead
            struct stat status {};
            if (fstatat(directory, entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
                time(nullptr) - status.st_mtime < 60)
                continue;
        }
        bool dead = early && !page ? !is_own(token) && !holder(directory, entry->d_name) : !process_alive(token);
        if (dead && page && before) before(shared_directory_path() + "/" + entry->d_name);
        if (dead && unlinkat(directory, entry->d_name, 0) == 0) ++count;
    }
    closedir(listing);
    return count;
}

NoFork::NoFork() { state().fork_mutex.lock(); }
NoFork::~NoFork() { state().fork_mutex.unlock(); }

}  // namespace penstock
