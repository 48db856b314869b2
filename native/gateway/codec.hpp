// The byte form of a gateway message, in pure C++. All numbers are big-endian.
//
//    0      1      2              6              10
//   +------+------+--------------+--------------+----------------------------+--------------+---------+
//   | A1   | 60   | total size   | properties n | n x (key NUL value NUL)    | content size | content |
//   +------+------+--------------+--------------+----------------------------+--------------+---------+
//     1 byte each    u32, all of     u32            UTF-8, no key twice          u32
//                    the message
//
// Nothing but the content may follow the content size, so a buffer is one message or none. Decoding never reads out
// of the buffer, allocates only for messages of many properties, and gives pointers into the buffer.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::gateway {

constexpr std::uint8_t magic_first = 0xA1;
constexpr std::uint8_t magic_second = 0x60;
constexpr std::size_t header_size = 10;   // magic, total size, count
constexpr std::size_t smallest_size = 14;  // and the content's size
constexpr std::size_t largest_size = 0x7fffffff;  // Azure IoT Edge v1 keeps sizes in signed 32-bit numbers
static_assert(smallest_size == header_size + sizeof(std::uint32_t));

struct Parts {
    const std::uint8_t *properties = nullptr;  // key NUL value NUL ...
    std::uint32_t properties_size = 0;
    std::uint32_t property_count = 0;
    const std::uint8_t *content = nullptr;
    std::uint32_t content_size = 0;
};

// Fills `parts` with pointers into the buffer. Null when it is a whole message, else what is wrong with it.
const char *decode(const std::uint8_t *data, std::size_t size, Parts &parts);

// Null when these bytes are pairs of NUL-ended UTF-8 texts with no key twice, and then their count.
const char *check_properties(const std::uint8_t *data, std::size_t size, std::uint32_t &count);

// Bytes that `encode` writes; more than largest_size cannot be encoded.
inline std::size_t encoded_size(std::size_t properties_size, std::size_t content_size) {
    return smallest_size + properties_size + content_size;
}
void encode(const Parts &parts, std::uint8_t *out);

// A frame, for modules in other processes: the source's number (u64, big-endian), then the byte form.
constexpr std::size_t source_size = 8;
inline std::uint64_t load_source(const std::uint8_t *at) {
    std::uint64_t source = 0;
    for (std::size_t i = 0; i < source_size; ++i) source = source << 8 | at[i];
    return source;
}
inline void store_source(std::uint8_t *at, std::uint64_t source) {
    for (std::size_t i = source_size; i-- > 0; source >>= 8) at[i] = static_cast<std::uint8_t>(source);
}

bool valid_utf8(const std::uint8_t *data, std::size_t size);

}  // namespace penstock::gateway
