// CRC32C (Castagnoli; in hardware where the processor has it) for all that the format checks, and CRC-32 as zlib computes
// it for the block sums that readers without native code check. Pure functions, any thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "journal/format.hpp"

namespace penstock::journal {

// Continues from an earlier result; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t bytes);
std::uint32_t crc32c_table(std::uint32_t crc, const void *data, std::size_t bytes);  // what runs without hardware
std::uint32_t crc32(std::uint32_t crc, const void *data, std::size_t bytes);
// What crc32c(value, ...) makes of `value` over so many zero bits of input: crc(A then B) is
// crc32c_shift(crc(A), bytes of B) ^ crc(B), so the CRC of any stretch follows from those of two beginnings.
std::uint32_t crc32c_shift(std::uint32_t crc, std::uint64_t bytes);

// The start of a record's checksum: of the segment's nonce and the record's position.
inline std::uint32_t record_seed(std::uint64_t nonce, std::uint64_t position) {
    const std::uint64_t words[2] = {nonce, position};
    return crc32c(0, words, sizeof words);
}

inline std::uint32_t nonce_seed(std::uint64_t nonce) { return crc32c(0, &nonce, sizeof nonce); }

// Of an index entry: of the segment's nonce (as its seed) and all before the checksum.
inline std::uint32_t entry_check(std::uint32_t seed, const IndexEntry &entry) {
    return crc32c(seed, &entry, offsetof(IndexEntry, entry_checksum));
}
inline bool entry_believed(std::uint32_t seed, const IndexEntry &entry) {
    return entry_check(seed, entry) == entry.entry_checksum;
}

inline std::uint32_t batch_head_check(const BatchHeader &header) {
    return crc32c(0, reinterpret_cast<const std::uint8_t *>(&header) + 8, offsetof(BatchHeader, head_checksum) - 8);
}

// Puts both checksums of a batch's header in; `words` are the checksums of its records in order.
inline void seal_header(BatchHeader &header, const std::uint32_t *words, std::size_t count) {
    header.head_checksum = batch_head_check(header);
    std::uint32_t crc = crc32c(0, reinterpret_cast<const std::uint8_t *>(&header) + 8, sizeof header - 8);
    header.checksum = crc32c(crc, words, count * 4);
}

inline std::uint32_t summary_check(std::uint32_t seed, const TopicSummary &summary) {
    auto *bytes = reinterpret_cast<const std::uint8_t *>(&summary);
    return crc32c(crc32c(seed, bytes, 4), bytes + 8, sizeof summary - 8);
}

inline std::uint32_t seal_check(std::uint64_t nonce, const Seal &seal) {
    return crc32c(nonce_seed(nonce), &seal, offsetof(Seal, checksum));
}

inline std::uint32_t frontier_check(const std::uint8_t *uuid, const FrontierCopy &copy) {
    return crc32c(crc32c(0, uuid, 16), &copy, offsetof(FrontierCopy, checksum));
}

}  // namespace penstock::journal
