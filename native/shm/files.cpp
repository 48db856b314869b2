#include "shm/files.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <system_error>

#include "platform/liveness.hpp"
#include "platform/shared_directory.hpp"
#include "shm/layout.hpp"
#include "shm/step.hpp"

namespace penstock::shm {

void fail_system(int error, const std::string &what) {
    throw Error(Fault::system, what + ": " + std::generic_category().message(error), error);
}

std::uint64_t random_word() {
    std::uint64_t word = 0;
    while (word == 0)
        if (getrandom(&word, sizeof word, 0) != sizeof word) fail_system(errno, "getrandom");
    return word;
}

static std::int64_t clock_ns(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return std::int64_t(now.tv_sec) * 1000000000 + now.tv_nsec;
}
std::int64_t realtime_ns() { return clock_ns(CLOCK_REALTIME); }
std::int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

Mapping::Mapping(int file, std::uint64_t size, bool writable) {
    void *memory = mmap(nullptr, size, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) fail_system(errno, "cannot map " + std::to_string(size) + " bytes of shared memory");
    data_ = static_cast<std::uint8_t *>(memory);
    size_ = size;
}
Mapping::Mapping(Mapping &&other) noexcept : data_(other.data_), size_(other.size_) { other.data_ = nullptr; }
Mapping &Mapping::operator=(Mapping &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}
Mapping::~Mapping() {
    if (data_) munmap(data_, size_);
}

File &File::operator=(File &&other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
}
File::~File() {
    if (descriptor_ >= 0) close(descriptor_);
}

std::string name_beginning(const std::string &name) {
    std::size_t size = std::min<std::size_t>(name.size(), 40);
    for (int back = 0; back < 3 && size && size < name.size() && (name[size] & 0xC0) == 0x80; ++back) --size;
    return name.substr(0, size);
}

std::string encode_name(const std::string &name) {
    if (name.size() < 2 || name[0] != '/')
        throw Error(Fault::invalid, "channel name '" + name + "' must begin with '/' and name something, as in /camera");
    if (name.size() > max_name_bytes)
        throw Error(Fault::invalid, "channel name '" + name_beginning(name) + "...' has " + std::to_string(name.size()) +
                                        " bytes; at most " + std::to_string(max_name_bytes) + " are possible");
    std::string encoded;
    for (unsigned char letter : name) {
        if (letter < 0x20 || letter == 0x7f)
            throw Error(Fault::invalid, "channel name '" + name.substr(0, name.find(char(letter))) +
                                            "...' holds a control character; use letters, digits, '/', '_', '-'");
        char text[4];
        if (std::isalnum(letter) || letter == '_' || letter == '-') {
            encoded += char(letter);
        } else {
            std::snprintf(text, sizeof text, "%%%02X", letter);
            encoded += text;
        }
    }
    if (encoded.size() > 200)
        throw Error(Fault::invalid, "channel name '" + name_beginning(name) +
                                        "...' is too long once its odd characters are encoded; use a shorter one");
    return encoded;
}

std::string decode_name(const std::string &file_name) {
    std::string name;
    for (std::size_t i = 0; i < file_name.size(); ++i) {
        unsigned value;
        if (file_name[i] == '%' && std::sscanf(file_name.substr(i + 1, 2).c_str(), "%2x", &value) == 1) {
            name += char(value);
            i += 2;
        } else {
            name += file_name[i];
        }
    }
    return name;
}

File open_file(const std::string &name, const Access &access, bool writable) {
    std::string path = shared_directory_path() + "/" + name;
    int descriptor = openat(shared_directory(), name.c_str(),
                            (writable ? O_RDWR : O_RDONLY) | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (descriptor < 0) {
        if (errno == ENOENT) return File();
        if (errno == ELOOP)
            throw Error(Fault::refused, path + " is a symbolic link, not a channel of ours; remove it");
        if (errno == EACCES || errno == EPERM)
            throw Error(Fault::refused, path + " belongs to another user, who did not share it (mode= or group=)");
        fail_system(errno, "cannot open " + path);
    }
    File file(descriptor);
    struct stat status {};
    if (fstat(descriptor, &status) != 0) fail_system(errno, path);
    if (!S_ISREG(status.st_mode)) throw Error(Fault::corruption, path + " is not a regular file; remove it");
    if (status.st_uid != geteuid() && !access.shared)
        throw Error(Fault::refused, path + " belongs to user " + std::to_string(status.st_uid) +
                                        "; give mode= or group= to use channels of other users");
    return file;
}

static void refuse_space(int error, const std::string &name, std::uint64_t size) {
    throw Error(Fault::system,
                "no room for " + std::to_string(size) + " bytes of " + shared_directory_path() + "/" + name + ": " +
                    std::generic_category().message(error) + "; use fewer or smaller slots, or free some",
                error);
}

void claim_space(const File &file, const std::string &name, std::uint64_t at, std::uint64_t size) {
    if (int error = size ? posix_fallocate(file.get(), off_t(at), off_t(size)) : 0) refuse_space(error, name, size);
}

bool has_space(std::uint64_t size) {
    struct statvfs status {};
    if (fstatvfs(shared_directory(), &status) != 0 || status.f_blocks == 0) return true;  // it has no bound of its own
    return std::uint64_t(status.f_bavail) >= (size + status.f_frsize - 1) / status.f_frsize;
}

void check_space(const std::string &name, std::uint64_t size) {
    if (!has_space(size)) refuse_space(ENOSPC, name, size);
}

File make_file(const std::string &name, std::uint64_t size, const Access &access,
               const std::function<void(std::uint8_t *)> &fill, bool claims) {
    int directory = shared_directory();
    auto fail = [&](int error, const std::string &before, const std::string &after = "") {
        fail_system(error, before + shared_directory_path() + "/" + name + after);
    };
    int descriptor = openat(directory, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (descriptor < 0) fail(errno, "cannot make ");
    File file(descriptor);
    PENSTOCK_STEP("make.after_open");
    if (claims) claim_space(file, name, 0, size);
    else if (ftruncate(descriptor, off_t(size)) != 0) fail(errno, "cannot set the size of ");
    if (access.has_group && fchown(descriptor, uid_t(-1), access.group) != 0)
        fail(errno, "cannot give ", " to group " + std::to_string(access.group));
    if (fchmod(descriptor, access.mode) != 0) fail(errno, "cannot set the mode of ");
    if (fill) {
        Mapping memory(descriptor, size, true);
        fill(memory.data());
    }
    PENSTOCK_STEP("make.before_link");
    std::string self = "/proc/self/fd/" + std::to_string(descriptor);
    if (linkat(AT_FDCWD, self.c_str(), directory, name.c_str(), AT_SYMLINK_FOLLOW) != 0) {
        if (errno == EEXIST) return File();
        fail(errno, "cannot make ");
    }
    PENSTOCK_STEP("make.after_link");
    return file;
}

std::uint64_t file_size(const File &file) {
    struct stat status {};
    return fstat(file.get(), &status) == 0 ? std::uint64_t(status.st_size) : 0;
}

bool has_name(const File &file) {
    struct stat status {};
    return fstat(file.get(), &status) == 0 && status.st_nlink > 0;
}

void remove_file(const std::string &name) noexcept {
    try {
        unlinkat(shared_directory(), name.c_str(), 0);
    } catch (...) {  // no directory: nothing to remove
    }
}

FileLock::FileLock(const File &file, const std::string &what, bool wait) : descriptor_(file.get()) {
    std::int64_t deadline = monotonic_ns() + 10'000'000'000;
    while (!(held_ = flock(descriptor_, LOCK_EX | LOCK_NB) == 0)) {
        if (!wait) return;
        if (monotonic_ns() > deadline)
            throw Error(Fault::timeout, what + ": another process has been joining or leaving for ten seconds");
        timespec pause{0, 200'000};
        nanosleep(&pause, nullptr);
    }
}

FileLock::~FileLock() {
    if (held_) flock(descriptor_, LOCK_UN);
}

}  // namespace penstock::shm
