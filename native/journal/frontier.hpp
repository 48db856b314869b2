// The durable frontier's words, read from the mapped file or a copy of it. Pure, any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "journal/format.hpp"

namespace penstock::journal {

// The newest copy whose checksum is right and whose words can be true together; none: both are damaged, or a writer was
// changing them at that moment (read again).
std::optional<FrontierCopy> read_frontier(const std::uint8_t *file);

// Whether the words can be true together: so many messages fit into so many bytes.
bool plausible(const FrontierCopy &copy);

}  // namespace penstock::journal
