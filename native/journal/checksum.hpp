// CRC32C (Castagnoli; in hardware where the processor has it) for batches and records, and CRC-32 as zlib computes it
// for the block sums that readers without native code check. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::journal {

// Continues from an earlier result; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t bytes);
std::uint32_t crc32c_table(std::uint32_t crc, const void *data, std::size_t bytes);  // what runs without hardware
std::uint32_t crc32(std::uint32_t crc, const void *data, std::size_t bytes);

// The start of a record's checksum: of the segment's nonce and the record's position.
inline std::uint32_t record_seed(std::uint64_t nonce, std::uint64_t position) {
    const std::uint64_t words[2] = {nonce, position};
    return crc32c(0, words, sizeof words);
}

}  // namespace penstock::journal
