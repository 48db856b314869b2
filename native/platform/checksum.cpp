#include "platform/checksum.hpp"

#include <array>
#include <cstring>

namespace penstock {

namespace {

constexpr std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> made{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t value = i;
        for (int bit = 0; bit < 8; ++bit) value = value & 1 ? 0x82f63b78u ^ (value >> 1) : value >> 1;
        made[i] = value;
    }
    return made;
}();

std::uint32_t by_table(std::uint32_t sum, const std::uint8_t *data, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) sum = table[(sum ^ data[i]) & 0xff] ^ (sum >> 8);
    return sum;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) std::uint32_t by_instruction(std::uint32_t sum, const std::uint8_t *data,
                                                               std::size_t size) {
    std::uint64_t wide = sum;
    for (; size >= 8; size -= 8, data += 8) {
        std::uint64_t word;
        std::memcpy(&word, data, 8);
        wide = __builtin_ia32_crc32di(wide, word);
    }
    return by_table(std::uint32_t(wide), data, size);
}
#endif

}  // namespace

static std::uint32_t sum_on(std::uint32_t sum, const std::uint8_t *data, std::size_t size) noexcept {
#if defined(__x86_64__)
    static const bool has_instruction = __builtin_cpu_supports("sse4.2");
    if (has_instruction) return by_instruction(sum, data, size);
#endif
    return by_table(sum, data, size);
}

std::uint32_t checksum_of(const std::uint8_t *data, std::size_t size, const std::uint8_t *metadata,
                          std::size_t metadata_size) noexcept {
    return ~sum_on(sum_on(~0u, data, size), metadata, metadata_size);
}

}  // namespace penstock
