// CRC-32C of a payload and its metadata.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

std::uint32_t checksum_of(const std::uint8_t *data, std::size_t size, const std::uint8_t *metadata,
                          std::size_t metadata_size) noexcept;

}  // namespace penstock
