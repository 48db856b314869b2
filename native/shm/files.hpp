// Files of shared memory: completed before they get a name, locked while members join and leave, mapped.
//
// Rules: any thread. Everything is opened relative to the shared directory, without following links.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>

#include "platform/liveness.hpp"
#include "shm/error.hpp"

namespace penstock::shm {

// Who may use a channel's files.
struct Access {
    mode_t mode = 0600;
    bool has_group = false;
    gid_t group = 0;
    bool shared = false;  // mode or group was given: files of other users are then accepted
};

class Mapping {
   public:
    Mapping() = default;
    Mapping(int file, std::uint64_t size, bool writable);
    Mapping(Mapping &&other) noexcept;
    Mapping &operator=(Mapping &&other) noexcept;
    ~Mapping();
    std::uint8_t *data() const { return data_; }
    std::uint64_t size() const { return size_; }
    explicit operator bool() const { return data_ != nullptr; }

   private:
    std::uint8_t *data_ = nullptr;
    std::uint64_t size_ = 0;
};

class File {
   public:
    File() = default;
    explicit File(int descriptor) : descriptor_(descriptor) {}
    File(File &&other) noexcept : descriptor_(other.descriptor_) { other.descriptor_ = -1; }
    File &operator=(File &&other) noexcept;
    ~File();
    int get() const { return descriptor_; }
    explicit operator bool() const { return descriptor_ >= 0; }

   private:
    int descriptor_ = -1;
};

// "/camera/front" as a file name; throws Fault::invalid for a name that cannot be one.
std::string encode_name(const std::string &name);
// The beginning of a name that is too long to be told, not cut inside a UTF-8 character.
std::string name_beginning(const std::string &name);
std::string decode_name(const std::string &file_name);

// An existing file, or an empty File when there is none. Refuses what is not a regular file of ours.
File open_file(const std::string &name, const Access &access, bool writable);

// A new file of `size` zeroed bytes whose space is claimed now, unless it is to be claimed piece by piece; `fill` writes
// into it before it gets its name. Empty when the name is taken.
File make_file(const std::string &name, std::uint64_t size, const Access &access,
               const std::function<void(std::uint8_t *)> &fill, bool claims = true);

// Claims the space of a part of the file; an error where there is none.
void claim_space(const File &file, const std::string &name, std::uint64_t at, std::uint64_t size);
// Whether the directory has room for so many bytes now; claims nothing.
bool has_space(std::uint64_t size);
// Throws where it has not.
void check_space(const std::string &name, std::uint64_t size);

std::uint64_t file_size(const File &file);
bool has_name(const File &file);
void remove_file(const std::string &name) noexcept;

// The exclusive lock on a control file. No fork can happen in this process while it is held.
class FileLock {
   public:
    // Waits up to ten seconds; throws Fault::timeout naming `what`. With wait=false held() may be false.
    FileLock(const File &file, const std::string &what, bool wait = true);
    ~FileLock();
    bool held() const { return held_; }
    FileLock(const FileLock &) = delete;
    FileLock &operator=(const FileLock &) = delete;

   private:
    NoFork no_fork_;
    int descriptor_;
    bool held_ = false;
};

[[noreturn]] void fail_system(int error, const std::string &what);
std::uint64_t random_word();
std::int64_t realtime_ns();
std::int64_t monotonic_ns();

}  // namespace penstock::shm
