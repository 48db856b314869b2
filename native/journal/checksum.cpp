#include "journal/checksum.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace penstock::journal {
namespace {

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables(std::uint32_t polynomial) {
    Tables tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t crc = byte;
        for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ polynomial : crc >> 1;
        tables[0][byte] = crc;
    }
    for (std::size_t k = 1; k < 8; ++k)
        for (std::size_t byte = 0; byte < 256; ++byte)
            tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
    return tables;
}

constexpr Tables castagnoli = make_tables(0x82f63b78);
constexpr Tables ethernet = make_tables(0xedb88320);

std::uint32_t sliced(const Tables &tables, std::uint32_t crc, const void *data, std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        word ^= crc;
        crc = tables[7][word & 255] ^ tables[6][word >> 8 & 255] ^ tables[5][word >> 16 & 255] ^
              tables[4][word >> 24 & 255] ^ tables[3][word >> 32 & 255] ^ tables[2][word >> 40 & 255] ^
              tables[1][word >> 48 & 255] ^ tables[0][word >> 56];
    }
    for (; bytes; ++at, --bytes) crc = crc >> 8 ^ tables[0][(crc ^ *at) & 255];
    return ~crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data, std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    std::uint64_t state = static_cast<std::uint32_t>(~crc);
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        state = _mm_crc32_u64(state, word);
    }
    auto narrow = static_cast<std::uint32_t>(state);
    for (; bytes; ++at, --bytes) narrow = _mm_crc32_u8(narrow, *at);
    return ~narrow;
}
bool has_hardware() { return __builtin_cpu_supports("sse4.2"); }
#elif defined(__aarch64__)
__attribute__((target("arch=armv8-a+crc"))) std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data,
                                                                          std::size_t bytes) {
    auto *at = static_cast<const std::uint8_t *>(data);
    crc = ~crc;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        std::uint64_t word;
        std::memcpy(&word, at, 8);
        crc = __builtin_aarch64_crc32cx(crc, word);
    }
    for (; bytes; ++at, --bytes) crc = __builtin_aarch64_crc32cb(crc, *at);
    return ~crc;
}
bool has_hardware() { return getauxval(AT_HWCAP) & (1 << 7); }  // HWCAP_CRC32
#else
std::uint32_t crc32c_hardware(std::uint32_t crc, const void *data, std::size_t bytes) {
    return crc32c_table(crc, data, bytes);
}
bool has_hardware() { return false; }
#endif

const bool hardware = has_hardware();

}  // namespace

std::uint32_t crc32c_table(std::uint32_t crc, const void *data, std::size_t bytes) {
    return sliced(castagnoli, crc, data, bytes);
}

std::uint32_t crc32c(std::uint32_t crc, const void *data, std::size_t bytes) {
    return hardware ? crc32c_hardware(crc, data, bytes) : crc32c_table(crc, data, bytes);
}

std::uint32_t crc32(std::uint32_t crc, const void *data, std::size_t bytes) { return sliced(ethernet, crc, data, bytes); }

}  // namespace penstock::journal
