#include "journal/disk.hpp"

#include <cerrno>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>

namespace penstock::journal {
namespace {
const std::uint8_t zero_bytes[1 << 16] = {};
}

int SystemDisk::write(int file, const std::uint8_t *data, std::size_t bytes, std::size_t zeros, std::uint64_t offset) {
    while (bytes + zeros) {
        iovec parts[17];
        int count = 0;
        if (bytes) parts[count++] = {const_cast<std::uint8_t *>(data), bytes};
        for (std::size_t left = zeros; left && count < 17;) {
            std::size_t piece = std::min(left, sizeof zero_bytes);
            parts[count++] = {const_cast<std::uint8_t *>(zero_bytes), piece};
            left -= piece;
        }
        ssize_t written = pwritev(file, parts, count, static_cast<off_t>(offset));
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) return errno;
        if (written == 0) return EIO;
        auto done = static_cast<std::size_t>(written);
        std::size_t of_data = std::min(done, bytes);
        data += of_data;
        bytes -= of_data;
        zeros -= done - of_data;
        offset += done;
    }
    return 0;
}

// Not repeated on EINTR or any other error: after a failed sync the kernel may have dropped what it could not write.
// A file without a name could be synced, but nobody would ever read it: its directory was removed.
int SystemDisk::sync(int file) {
    if (fdatasync(file) != 0) return errno;
    struct stat status {};
    return fstat(file, &status) == 0 && status.st_nlink == 0 ? ENOENT : 0;
}

}  // namespace penstock::journal
