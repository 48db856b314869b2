// The bytes of a frame, little-endian, and the only native place that knows them (docs/formats.md shows them too).
//
//   0        2      3          4            12 = plain_header_size
//   +--------+------+----------+------------+
//   | u16    | u8   | u8       | u64        |   then, up to header_size, what version 0 readers skip:
//   | header | type | reserved | data size  |
//   | size   |      | 0        |            |
//   +--------+------+----------+------------+
//   12         20             28       36            40                44
//   +----------+--------------+--------+-------------+-----------------+------------+
//   | u64      | i64          | u64    | u32         | u32             | properties |
//   | ordinal  | timestamp_ns | drops  | vchan_id+1  | properties size | (encoded)  |
//   +----------+--------------+--------+-------------+-----------------+------------+
//
// A field that header_size leaves out reads as 0. header_size 0 and 1 cannot be (they do not hold themselves).
// Nothing here does I/O or allocates; any thread may call it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace penstock::tcp {

static_assert(std::endian::native == std::endian::little, "frames are written as the machine stores them");

constexpr std::size_t plain_header_size = 12;
constexpr std::size_t short_extension_size = 16;   // ordinal, timestamp
constexpr std::size_t full_extension_size = 32;    // ... drops, vchan, size of properties
constexpr std::size_t max_header_size = 65535;
constexpr std::uint32_t max_vchan_plus_one = INT32_MAX;  // an id is an int32
constexpr std::size_t max_properties_size = max_header_size - plain_header_size - full_extension_size;

enum class FrameType : std::uint8_t { payload = 0, handshake = 1 };

struct Header {
    std::uint16_t header_size = 0;
    std::uint8_t type = 0;
    std::uint8_t reserved = 0;
    std::uint64_t data_size = 0;
    std::uint64_t ordinal = 0;
    std::int64_t timestamp_ns = 0;
    std::uint64_t drops = 0;
    std::uint32_t vchan_plus_one = 0;
    std::uint32_t properties_size = 0;
};

namespace detail {
struct __attribute__((packed)) Wire {
    std::uint16_t header_size;
    std::uint8_t type;
    std::uint8_t reserved;
    std::uint64_t data_size;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::uint64_t drops;
    std::uint32_t vchan_plus_one;
    std::uint32_t properties_size;
};
static_assert(sizeof(Wire) == plain_header_size + full_extension_size);
static_assert(offsetof(Wire, data_size) == 4 && offsetof(Wire, ordinal) == 12 && offsetof(Wire, drops) == 28 &&
              offsetof(Wire, properties_size) == 40);
}  // namespace detail

enum class Scan { more, frame, bad_header, too_large };

// Looks at the frame that begins at `data`. `more`: not all of its header is there. `frame`: the header is known; its
// data may still be missing.
inline Scan scan_header(const std::uint8_t *data, std::size_t available, std::uint64_t max_data_size, bool extended,
                        Header &header) noexcept {
    if (available < 2) return Scan::more;
    std::uint16_t header_size;
    std::memcpy(&header_size, data, 2);
    if (header_size < 2) return Scan::bad_header;
    if (available < header_size) return Scan::more;
    detail::Wire wire{};
    std::size_t known = extended ? sizeof(wire) : plain_header_size;
    std::memcpy(&wire, data, header_size < known ? header_size : known);
    if (wire.data_size > max_data_size) return Scan::too_large;
    if (wire.vchan_plus_one > max_vchan_plus_one || wire.properties_size > max_header_size ||
        (wire.properties_size && sizeof(wire) + wire.properties_size > header_size))
        return Scan::bad_header;
    header.header_size = header_size;
    header.type = wire.type;
    header.reserved = wire.reserved;
    header.data_size = wire.data_size;
    header.ordinal = wire.ordinal;
    header.timestamp_ns = wire.timestamp_ns;
    header.drops = wire.drops;
    header.vchan_plus_one = wire.vchan_plus_one;
    header.properties_size = wire.properties_size;
    return Scan::frame;
}

// How long the header of these fields is; fields at the end that are 0 are left out.
inline std::size_t encoded_header_size(bool extended, std::uint64_t drops, std::uint32_t vchan_plus_one,
                                       std::uint32_t properties_size) noexcept {
    if (!extended) return plain_header_size;
    if (!(drops | vchan_plus_one | properties_size)) return plain_header_size + short_extension_size;
    return plain_header_size + full_extension_size + properties_size;
}

// Writes all of the header but the properties; `header.header_size` says how much of it there is.
inline std::size_t encode_header(const Header &header, std::uint8_t *out) noexcept {
    detail::Wire wire{header.header_size, header.type,  0,           header.data_size,      header.ordinal,
                      header.timestamp_ns, header.drops, header.vchan_plus_one, header.properties_size};
    std::size_t size = header.header_size < sizeof(wire) ? header.header_size : sizeof(wire);
    std::memcpy(out, &wire, size);
    return size;
}

}  // namespace penstock::tcp
