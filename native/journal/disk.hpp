// The interface between the writer and the disk: the operations of a commit. Tests put a simulated disk here that
// loses, reorders and tears writes and fails syncs. Functions give 0 or an errno; the GIL is not held when they are
// called.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::journal {

struct Disk {
    // Writes all of it at `offset`: `bytes` from `data`, then `zeros` zero bytes.
    virtual int write(int file, const std::uint8_t *data, std::size_t bytes, std::size_t zeros, std::uint64_t offset) = 0;
    virtual int sync(int file) = 0;
    virtual ~Disk() = default;
};

struct SystemDisk final : Disk {
    int write(int file, const std::uint8_t *data, std::size_t bytes, std::size_t zeros, std::uint64_t offset) override;
    int sync(int file) override;
};

}  // namespace penstock::journal
