// What the fuzz targets share: CHECK, an input that is taken apart piece by piece, and a directory of their own in memory.
// A target is NAME.cpp with LLVMFuzzerTestOneInput; a line "// sources: a.cpp" names what it links from native/.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (0)

namespace penstock::fuzz {

// What is missing at the end reads as zeros.
class Input {
   public:
    Input(const std::uint8_t *data, std::size_t size) : at_(data), left_(size) {}
    std::size_t left() const { return left_; }
    template <typename Number>
    Number number() {
        Number value{};
        const std::size_t bytes = std::min(left_, sizeof value);
        if (bytes) std::memcpy(&value, at_, bytes);
        skip(bytes);
        return value;
    }
    std::vector<std::uint8_t> bytes(std::size_t most) {
        most = std::min(most, left_);
        std::vector<std::uint8_t> taken(at_, at_ + most);
        skip(most);
        return taken;
    }
    std::vector<std::uint8_t> rest() { return bytes(left_); }

   private:
    void skip(std::size_t bytes) {
        at_ += bytes;
        left_ -= bytes;
    }
    const std::uint8_t *at_;
    std::size_t left_;
};

// Removed when the process ends well; what a find leaves behind is removed by `make fuzz`, which says where it is (FUZZ_PLACE).
inline const std::string &place() {
    static const std::string made = [] {
        const char *given = std::getenv("FUZZ_PLACE");
        std::string path = (given ? std::string(given) : std::string("/dev/shm")) + "/penstock-fuzz-XXXXXX";
        CHECK(mkdtemp(path.data()));
        setenv("PENSTOCK_SHM_DIR", (path + "/shm").c_str(), 1);
        setenv("XDG_STATE_HOME", (path + "/state").c_str(), 1);
        CHECK(mkdir((path + "/shm").c_str(), 0700) == 0);
        static std::string kept;
        kept = path;
        std::atexit([] {
            std::error_code ignored;
            std::filesystem::remove_all(kept, ignored);
        });
        return path;
    }();
    return made;
}

inline void write_file(const std::string &path, const void *data, std::size_t size) {
    int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file >= 0);
    CHECK(write(file, data, size) == static_cast<ssize_t>(size));
    close(file);
}

}  // namespace penstock::fuzz
