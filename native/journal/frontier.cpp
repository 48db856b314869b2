#include "journal/frontier.hpp"

#include <atomic>
#include <cstring>

#include "journal/checksum.hpp"

namespace penstock::journal {

bool plausible(const FrontierCopy &copy) {
    if (copy.frontier == 0 || copy.segment > copy.frontier || copy.first > copy.frontier) return false;
    if (copy.frontier >= std::uint64_t{1} << 62 || copy.end >= std::uint64_t{1} << 56) return false;
    if (copy.segment == 0 || copy.end == 0) return copy.segment == 0 && copy.end == 0;  // new, not moved yet
    return copy.end >= segment_header_bytes && copy.frontier - copy.segment <= (copy.end - segment_header_bytes) / sizeof(RecordHeader);
}

std::optional<FrontierCopy> read_frontier(const std::uint8_t *file) {
    std::optional<FrontierCopy> best;
    for (std::uint64_t at : {frontier_first_copy, frontier_second_copy}) {
        std::uint64_t words[sizeof(FrontierCopy) / 8] = {};
        auto *source = reinterpret_cast<std::uint64_t *>(const_cast<std::uint8_t *>(file + at));
        for (std::size_t i = 0; i < sizeof words / 8; ++i)
            words[i] = std::atomic_ref<std::uint64_t>(source[i]).load(std::memory_order_acquire);
        FrontierCopy copy;
        std::memcpy(&copy, words, sizeof copy);
        if (frontier_check(file + offsetof(FrontierHead, uuid), copy) != copy.checksum || !plausible(copy)) continue;
        if (!best || copy.sequence > best->sequence) best = copy;
    }
    return best;
}

}  // namespace penstock::journal
