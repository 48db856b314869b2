// A member's payload: files of slots, one for each size that the channel has had.
#include <fcntl.h>

#include <algorithm>

#include "shm/membership.hpp"

namespace penstock::shm {

std::uint32_t Membership::newest_segment() const {
    std::uint32_t count = channel.header->segments.load();
    return count == 0 || count > max_segments ? 0 : count - 1;
}

std::uint64_t Membership::segment_size_of(std::uint32_t segment) const {
    return segment < segments_.size() && segments_[segment].memory
               ? segments_[segment].slot_size
               : channel.header->segment[segment].slot_size.load();
}

void Membership::make_segment(std::uint32_t segment, std::uint64_t size) {
    std::string name = file_name("payload") + "." + std::to_string(segment);
    std::uint64_t slots = channel.header->slots.load(), bytes = round_up(size * slots, 4096);
    // The first size is claimed whole, so that an open channel never lacks memory for it; a larger one slot by slot.
    bool claims = segment == 0;
    File file = make_file(name, bytes, options.access, nullptr, claims);
    if (!file) {  // left by a publisher that died before the size was counted
        remove_file(name);
        file = make_file(name, bytes, options.access, nullptr, claims);
    }
    if (!file) throw Error(Fault::state, describe() + ": " + name + " is there already");
    keep_segment(segment, size, size * slots, std::move(file));
}

void Membership::keep_segment(std::uint32_t segment, std::uint64_t slot_size, std::uint64_t bytes, File file) {
    if (segments_.size() <= segment) segments_.resize(segment + 1);
    segments_[segment].memory = Mapping(file.get(), bytes, is_publisher);
    segments_[segment].slot_size = slot_size;
    if (is_publisher) segments_[segment].file = std::move(file);
}

void Membership::claim_slot(std::uint32_t segment, std::uint32_t s) {
    std::uint64_t size = segments_[segment].slot_size;
    claim_space(segments_[segment].file, file_name("payload") + "." + std::to_string(segment), s * size, size);
}

bool Membership::map_segment(std::uint32_t segment) {
    if (segment >= max_segments || segment >= channel.header->segments.load()) return false;
    std::uint64_t size = channel.header->segment[segment].slot_size.load();
    if (size == 0 || size > max_slot_bytes) return false;
    File file = open_file(file_name("payload") + "." + std::to_string(segment), options.access, is_publisher);
    if (!file || file_size(file) < size * channel.slot_count) return false;
    keep_segment(segment, size, size * channel.slot_count, std::move(file));
    return true;
}

std::uint64_t Membership::grown_size(std::uint64_t now, std::uint64_t wanted) {
    std::uint64_t size = std::max<std::uint64_t>(now, 64);
    while (size < wanted) size = size < 4096 ? size * 2 : size < 65536 ? size + size / 2 : size + size / 4;
    return round_up(size, 64);
}

void Membership::grow(std::uint64_t size) {
    if (size > max_slot_bytes)
        throw Error(Fault::invalid, describe() + ": " + std::to_string(size) + " bytes are more than a slot can have");
    if (channel.header->flags.load() & channel_fixed_size)
        throw Error(Fault::invalid, describe() + " has slots of a fixed size of " + std::to_string(slot_size()) +
                                        " bytes; " + std::to_string(size) + " do not fit");
    FileLock lock(control_file_, describe());
    std::uint32_t newest = newest_segment();
    std::uint64_t now = segment_size_of(newest);
    if (now >= size) return;
    if (newest + 1 >= max_segments)
        throw Error(Fault::capacity, describe() + " has grown " + std::to_string(max_segments) +
                                         " times; open it with a larger slot_size");
    std::uint64_t larger = newest + 8 >= max_segments ? round_up(size * 4, 64) : grown_size(now, size);
    // Check that at least one slot fits: a size without room would become the newest one, which larger messages use.
    check_space(file_name("payload") + "." + std::to_string(newest + 1), larger);
    make_segment(newest + 1, larger);
    PENSTOCK_STEP("grow.after_segment");
    channel.header->segment[newest + 1].slot_size.store(larger);
    PENSTOCK_STEP("grow.before_count");
    channel.header->segments.store(newest + 2);
    PENSTOCK_STEP("grow.after_count");
}

void Membership::free_segments() {
    FileLock lock(control_file_, describe(), false);
    if (!lock.held()) return;
    for (std::uint32_t k = 0; k < newest_segment(); ++k) {
        if (channel.header->segment[k].gone.load()) {
            if (k < segments_.size()) segments_[k] = SegmentMap();
            continue;
        }
        channel.header->segment[k].gone.store(1);
        bool referred = false;
        std::uint64_t free = 0;
        for (std::uint32_t s = 0; s < channel.slot_count && !referred; ++s) {
            if (channel.slots[s].segment.load() != k) continue;
            referred = kind_of(channel.slots[s].state.load()) != slot_free;
            ++free;
        }
        // A free slot of this size must move to the newest one when it is used. Where there is no room for that, it keeps
        // what it has: small messages still fit.
        referred = referred || (free && !has_space(free * segment_size_of(newest_segment())));
        if (referred) {
            channel.header->segment[k].gone.store(0);
            continue;
        }
        if (!map_segment(k)) continue;
        // Other processes may have it mapped: the file keeps its length, only its pages are freed.
        fallocate(segments_[k].file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                  off_t(round_up(segments_[k].slot_size * channel.slot_count, 4096)));
        remove_file(file_name("payload") + "." + std::to_string(k));
        segments_[k] = SegmentMap();
    }
}

}  // namespace penstock::shm
