#include "shm/publisher.hpp"

#include <algorithm>
#include <utility>

namespace penstock::shm {

// How long a publisher waits before it checks for dead members.
static constexpr std::int64_t patience_ns = 50'000'000;

Publisher::Publisher(const Options &options, bool with_checksums)
    : member(true, options),
      counters(counters_take("shm", "publisher", options.name)),
      checksums(with_checksums),
      retirement(options.retirement) {
    writer.index = member.index;
    writer.reliable = options.reliable;
    writer.vchan = member.vchan;
    metadata_size_ = std::min<std::uint32_t>(member.channel.header->metadata_size.load(), member.channel.metadata_stride);
    if (options.mux.empty() && options.slot_size > slot_size() &&
        !(member.channel.header->flags.load() & channel_fixed_size))
        grow(options.slot_size);
    if (retirement) untold_.resize(member.channel.slot_count);
    counters->capacity.set(member.channel.slot_count);
}

Publisher::~Publisher() {
    close(true);
    counters_give(counters);
}

void Publisher::use_segment(std::uint32_t segment) {
    base_ = member.payload(segment, 0);
    if (!base_) throw Error(Fault::corruption, member.describe() + ": its payload " + std::to_string(segment) + " is gone");
    segment_ = segment;
    segment_size_ = member.segment_size(segment);
    counters->memory_bytes.set(segment_size_ * member.channel.slot_count);
}

bool Publisher::stays(Place &place, std::uint64_t size) {
    std::uint32_t segment = member.channel.slots[place.slot].segment.load();
    std::uint8_t *data = segment < max_segments ? member.payload(segment, place.slot) : nullptr;
    if (!data || size > member.segment_size(segment) || member.channel.header->segment[segment].gone.load()) return false;
    place.data = data;
    return true;
}

void Publisher::move_slot(const Place &place) {
    Slot &slot = member.channel.slots[place.slot];
    try {
        member.claim_slot(segment_, place.slot);
    } catch (...) {
        cancel(place.slot);
        throw;
    }
    slot.segment.store(segment_);
    // Now and then, and once every slot may have moved, check whether older sizes can be removed.
    std::uint32_t count = member.channel.slot_count;
    if (++moved_since_ % ((count + 7) / 8) == 0 || moved_since_ >= count) member.free_segments();
    if (moved_since_ >= count) moved_since_ = 0;
}

// The newest size is never released, so the control block is damaged.
void Publisher::lose_segment(const Place &place) {
    cancel(place.slot);
    throw Error(Fault::corruption, member.describe() + ": its control block says that its payload is gone");
}

void Publisher::refuse_reserve() const {
    throw Error(Fault::capacity, member.describe() + ": this publisher has " + std::to_string(reserved) +
                                     " messages reserved and max_reserved is " + std::to_string(member.most_held) +
                                     "; publish or cancel one, or open it with a larger max_reserved");
}

void Publisher::cancel(std::uint32_t slot, bool was_stranded) {
    if (was_stranded) --stranded;
    if (!member.belongs_here() || !member.joined()) return;
    member.channel.cancel(writer, slot);
    if (reserved) --reserved;
    if (retiring_ && !reserved) return member.leave(looked_at > 0);
    member.wake_publishers();
}

bool Publisher::could_reserve() {
    Place place;
    if (full()) return true;  // reserve() says why not
    if (member.channel.acquire(writer, place.slot) != Taken::yes) return false;
    member.channel.cancel(writer, place.slot);
    return true;
}

bool Publisher::look_for_dead() {
    std::int64_t now = monotonic_ns();
    if (now - looked_ns_ < patience_ns) return false;
    looked_ns_ = now;
    return member.recover();
}

Woken Publisher::wait(std::int64_t deadline_ns, std::int64_t spin_until_ns, int extra) {
    Wait wait;
    wait.deadline_ns = deadline_ns;
    wait.spin_until_ns = spin_until_ns;
    wait.slice_ns = patience_ns;
    wait.extra = extra;
    wait.closed = &closed;
    // Do not wake up for one slot of many: a wake-up costs far more than a message. A reader that has nothing left to
        // read wakes us anyway, and each slice of the wait ends with a check.
    const Channel &channel = member.channel;
    bool unread = writer.reliable && channel.any_subscriber() && channel.slot_count >= 32;
    member.self().wanted_cursor.store(unread ? channel.reliable_floor() + channel.slot_count / 8 : 0);
    return sleep_until(member, wait, [&] {
        if (could_reserve()) return true;
        return look_for_dead() && could_reserve();  // the member that we wait for may be dead
    });
}

std::uint32_t Publisher::subscribers() const {
    const Channel &channel = member.channel;
    std::uint32_t count = 0;
    for (std::uint32_t word = 0; word < channel.subscriber_words(); ++word)
        for (std::uint64_t bits = channel.active[word].load(); bits; bits &= bits - 1) {
            std::int32_t vchan = channel.subscribers[word * 64 + unsigned(std::countr_zero(bits))].vchan;
            if (vchan < 0 || writer.vchan < 0 || vchan == writer.vchan) ++count;
        }
    return count;
}

std::uint64_t Publisher::unread() const {
    const Channel &channel = member.channel;
    std::uint64_t tail = channel.tail(), least = tail;
    for (std::uint32_t word = 0; word < channel.subscriber_words(); ++word)
        for (std::uint64_t bits = channel.active[word].load(); bits; bits &= bits - 1)
            least = std::min(least, channel.subscribers[word * 64 + unsigned(std::countr_zero(bits))].cursor.load());
    return tail - least;
}

std::uint32_t Publisher::publishers() const {
    std::uint32_t count = 0;
    for (std::uint32_t i = 0; i < member.channel.publisher_capacity; ++i)
        if (member.channel.publishers[i].taken.load()) ++count;
    return count;
}

Woken Publisher::wait_subscribers(std::uint32_t count, std::int64_t deadline_ns) {
    if (deadline_ns == 0) {
        if (subscribers() >= count) look_for_dead();
        return subscribers() >= count ? Woken::ready : Woken::timeout;
    }
    Wait wait;
    wait.deadline_ns = deadline_ns;
    wait.slice_ns = patience_ns;
    wait.closed = &closed;
    member.self().wanted_cursor.store(0);
    std::int64_t looked_ns = 0;
    return sleep_until(member, wait, [&] {
        if (subscribers() < count) return false;
        // Dead members do not count.
        if (std::int64_t now = monotonic_ns(); now - looked_ns > patience_ns) looked_ns = now, member.recover();
        return subscribers() >= count;
    });
}

bool Publisher::is_retired(std::uint64_t sequence, std::uint32_t slot) const {
    const Channel &channel = member.channel;
    std::uint64_t state = channel.slots[slot].state.load();
    bool claimed = kind_of(state) == slot_claiming && sequence_of(state) == sequence;  // a subscriber may still get it
    if (state != live(sequence) && !claimed) return true;  // taken again
    for (std::uint32_t word = 0; word < channel.subscriber_words(); ++word)
        for (std::uint64_t bits = channel.active[word].load(); bits; bits &= bits - 1) {
            const Member &reader = channel.subscribers[word * 64 + unsigned(std::countr_zero(bits))];
            bool wants = reader.vchan < 0 || writer.vchan < 0 || reader.vchan == writer.vchan;
            if (wants && reader.cursor.load() <= sequence) return false;
        }
    return !channel.is_held(slot);
}

bool Publisher::any_retired() const {
    for (std::uint32_t slot = 0; slot < untold_.size(); ++slot)
        if (count_retired(slot)) return true;
    return false;
}

std::uint64_t Publisher::count_retired() const {
    std::uint64_t count = 0;
    for (std::uint32_t slot = 0; slot < untold_.size(); ++slot) count += count_retired(slot);
    return count;
}

std::vector<std::uint32_t> Publisher::retired(std::size_t most) {
    std::vector<std::pair<std::uint32_t, std::uint64_t>> found;  // a slot, and how many of its messages were released by all and not reported yet
    for (std::uint32_t slot = 0; slot < untold_.size(); ++slot)
        if (std::uint64_t count = count_retired(slot)) found.emplace_back(slot, count);
    std::sort(found.begin(), found.end(),
              [&](auto &one, auto &other) { return untold_[one.first].oldest < untold_[other.first].oldest; });
    std::vector<std::uint32_t> slots;
    for (auto &[slot, released] : found) {
        std::uint64_t count = std::min<std::uint64_t>(released, most - slots.size());
        slots.insert(slots.end(), count, slot);
        untold_[slot].tell(count);
    }
    return slots;
}

Woken Publisher::wait_retired(std::int64_t deadline_ns) {
    Wait wait;
    wait.deadline_ns = deadline_ns;
    wait.slice_ns = patience_ns;
    wait.closed = &closed;
    member.self().wanted_cursor.store(0);
    return sleep_until(member, wait, [&] { return any_retired(); });
}

bool Publisher::arm_if(bool nothing) {
    member.bells.watched();
    if (!nothing) return false;
    member.self().wanted_cursor.store(0);
    member.arm_descriptor();
    return true;
}

void Publisher::wake() { member.bells.wake_self(); }

void Publisher::close(bool at_once) noexcept {
    closed.store(true);
    if (!at_once && reserved && member.belongs_here() && member.joined()) retiring_ = true;
    else member.leave(reserved || looked_at);
}

std::string Publisher::why_full() const {
    if (writer.reliable && !member.channel.any_subscriber())
        return member.describe() + " is reliable and has no subscriber yet";
    const Channel &channel = member.channel;
    std::uint64_t end = channel.tail(), floor = channel.reliable_floor();
    if (writer.reliable && floor < end) {
        std::string text;
        for (std::uint32_t word = 0; word < channel.subscriber_words(); ++word)
            for (std::uint64_t bits = channel.reliable[word].load(); bits && text.size() < 800; bits &= bits - 1) {
                std::uint32_t i = word * 64 + unsigned(std::countr_zero(bits));
                std::uint64_t cursor = channel.subscribers[i].cursor.load();
                if (cursor >= end) continue;
                text += (text.empty() ? "" : ", ") + std::string("subscriber ") + std::to_string(i) + " (pid " +
                        std::to_string(channel.subscribers[i].pid) + ") " + std::to_string(end - cursor);
            }
        if (!text.empty())
            return member.describe() + " is full: messages wait to be read by reliable subscribers: " + text + " of " +
                   std::to_string(channel.slot_count) + " slots";
    }
    return member.describe() + ": no slot is free; " + member.who_holds_what() +
           (writer.reliable ? "" : "; what reliable subscribers have not read of reliable publishers is not overwritten");
}

}  // namespace penstock::shm
