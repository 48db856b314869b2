// CRC-32C of a payload.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock::shm {

std::uint32_t checksum_of(const std::uint8_t *data, std::size_t size) noexcept;

}  // namespace penstock::shm
