// The durable frontier's words, read from the mapped file or a copy of it. Pure, any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "journal/format.hpp"

namespace penstock::journal {

// The newest copy with a correct checksum and consistent words; none: both are damaged, or a writer was changing them
// at that moment (read again).
std::optional<FrontierCopy> read_frontier(const std::uint8_t *file);

// Whether the words are consistent: that many messages fit into that many bytes.
bool plausible(const FrontierCopy &copy);

}  // namespace penstock::journal
