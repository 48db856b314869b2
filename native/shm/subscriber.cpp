#include "shm/subscriber.hpp"

#include <algorithm>

namespace penstock::shm {

Subscriber::Subscriber(const Options &options, bool with_activation, bool with_verify, bool refuse)
    : member(false, options),
      counters(counters_take("shm", "subscriber", options.name)),
      pass_activation(with_activation),
      verify(with_verify),
      refuse_damaged(refuse) {
    reader.index = member.index;
    reader.vchan = member.vchan;
    reader.cursor = expected_ = member.start;
    last_ordinal_ = member.start_ordinal;
    if (reader.vchan < 0) note_counted(std::max(expected_, member.joined_tail));
    else note_counted(last_ordinal_ + 1);
    prepare();
}

Subscriber::~Subscriber() {
    close(true);
    counters_give(counters);
}

bool Subscriber::prepare() {
    if (!member.belongs_here() || !member.joined() || !member.ensure_tables()) return false;
    const Channel &channel = member.channel;
    reader.pins.assign(channel.slot_count, {});
    reader.most_held = member.most_held;
    reader.may_exceed = member.options.most_held == 0;
    metadata_size_ = std::min<std::uint32_t>(channel.header->metadata_size.load(), channel.metadata_stride);
    // 0: whatever the others leave free, which the monitor computes
    counters->capacity.set(reader.may_exceed ? 0 : reader.most_held);
    return ready_ = true;
}

void Subscriber::drop(std::uint64_t count, DropReason reason) {
    // Dropped messages were published: count them as matched even if this reader, at its limit, delivers nothing.
    counters->matched.set(std::max(counters->matched.get(), counters->delivered.get() + counters->lost() + count));
    counters->drop(reason, count);
    Word &dropped = member.self().dropped;
    dropped.store(dropped.load(std::memory_order_relaxed) + count, std::memory_order_relaxed);
}

// So that the monitor, which reads it from another process, counts no loss twice.
void Subscriber::note_counted(std::uint64_t next) {
    member.self().uncounted().store(next, std::memory_order_release);
}

// Everything below `upto` that was not delivered is lost; messages before joining were never ours.
void Subscriber::account(std::uint64_t upto, DropReason reason) {
    std::uint64_t from = std::max(expected_, member.joined_tail);
    if (upto > from) drop(upto - from, reason);
    if (upto > expected_) expected_ = upto;
}

bool Subscriber::fill(View &view, std::uint32_t s, std::uint64_t sequence) {
    const Slot &slot = member.channel.slots[s];
    std::uint32_t segment = slot.segment.load(std::memory_order_relaxed);
    const std::uint8_t *data = member.payload(segment, s);
    std::uint64_t size = slot.size.load(std::memory_order_relaxed);
    if (!data || size > member.segment_size(segment)) [[unlikely]]
        refuse_message(sequence, s, "says it has " + std::to_string(size) + " bytes in segment " + std::to_string(segment) +
                                        ", which cannot be");
    view.data = data;
    view.size = size;
    view.ordinal = slot.ordinal.load(std::memory_order_relaxed);
    view.timestamp_ns = slot.timestamp_ns.load(std::memory_order_relaxed);
    view.sequence = sequence;
    view.slot = s;
    view.vchan = slot.vchan.load(std::memory_order_relaxed);
    if (view.vchan >= std::int32_t(max_vchans)) view.vchan = -1;  // others add to it, or take it as a place in a table
    view.flags = slot.flags.load(std::memory_order_relaxed);
    view.metadata = metadata_size_ ? member.channel.metadata + std::uint64_t(s) * member.channel.metadata_stride : nullptr;
    view.metadata_size = metadata_size_;
    view.checked = verify && (view.flags & message_checksummed);
    view.intact = true;
    if (view.checked) [[unlikely]]
        view.intact = checksum_of(data, size, view.metadata, metadata_size_) == slot.checksum.load(std::memory_order_relaxed);
    return true;
}

// A bad message costs only itself: it is counted, its slot is released, and the cursor is past it.
void Subscriber::refuse_message(std::uint64_t sequence, std::uint32_t s, const std::string &why) {
    release(s);
    counters->errors.add();
    throw Error(Fault::corruption, member.describe() + ": message " + std::to_string(sequence) + " in slot " +
                                       std::to_string(s) + " " + why);
}

bool Subscriber::deliver(View &view, std::uint32_t s) {
    std::uint64_t sequence = reader.cursor - 1;
    if (reader.vchan < 0) {
        if (sequence != expected_) [[unlikely]] account(sequence);
        expected_ = sequence + 1;
    }
    try {
        fill(view, s, sequence);
    } catch (...) {
        if (reader.vchan < 0) drop(1, DropReason::error);  // otherwise the gap in the ordinals counts it
        throw;
    }
    if (reader.vchan >= 0) {
        std::uint64_t from = std::max(last_ordinal_, member.start_ordinal);
        if (view.ordinal > from + 1) drop(view.ordinal - from - 1, DropReason::overflow);
        last_ordinal_ = std::max(last_ordinal_, view.ordinal);
        note_counted(last_ordinal_ + 1);
    }
    bool before_joining = reader.vchan < 0 ? sequence < member.joined_tail : view.ordinal <= member.start_ordinal;
    if (before_joining) [[unlikely]] ++history_;
    if ((view.flags & message_activation) && !pass_activation) [[unlikely]] {
        drop(1, DropReason::filtered);
        release(s);
        return false;
    }
    if (!view.intact) [[unlikely]] {
        if (!refuse_damaged) {
            counters->errors.add();
        } else {
            drop(1, DropReason::error);
            refuse_message(view.ordinal, s, "has a checksum that does not match its " + std::to_string(view.size) + " bytes");
        }
    }
    std::uint64_t seen = reader.vchan < 0 ? expected_ : last_ordinal_;
    std::uint64_t first = reader.vchan < 0 ? member.joined_tail : member.start_ordinal;
    counters->matched.set(history_ + (seen > first ? seen - first : 0));
    if (waited_ || counters->delivered.get() % measured_every == 0) [[unlikely]] {
        waited_ = false;
        counters->measure(view.timestamp_ns);
    }
    counters->delivered.add();
    counters->bytes.add(view.size);
    Member &me = member.channel.subscribers[reader.index];
    me.count.store(me.count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    me.bytes.store(me.bytes.load(std::memory_order_relaxed) + view.size, std::memory_order_relaxed);
    return true;
}

Found Subscriber::read_newest(View &view) {
    if (!ready_ && !prepare()) return Found::nothing;
    Channel &channel = member.channel;
    channel.help();
    if (!channel.may_hold_more(reader)) return has_next() ? Found::limit : Found::nothing;
    std::uint64_t end = channel.tail();
    std::uint64_t low = std::max(reader.cursor, end > channel.ring_size ? end - channel.ring_size : 1);
    for (std::uint64_t n = end; n-- > low;) {
        std::uint64_t entry = channel.entry_at(n).load();
        std::uint32_t s = Channel::slot_in(entry);
        if (Channel::lap_in(entry) != channel.lap_of(n) || s >= channel.slot_count) continue;
        if (channel.is_foreign(reader, n, s) || !channel.pin(reader, n, s)) continue;
        if (reader.vchan < 0) account(n, DropReason::filtered);
        bool left_behind = reader.cursor < channel.first_in_ring();
        channel.move_cursor(reader, n + 1);
        if (left_behind) channel.rebuild_hints();  // release what was kept for it beyond the ring
        if (reader.vchan >= 0) {
            std::uint64_t ordinal = channel.slots[s].ordinal.load();
            if (ordinal > last_ordinal_ + 1) drop(ordinal - last_ordinal_ - 1, DropReason::filtered);
            last_ordinal_ = std::max(last_ordinal_, ordinal - 1);
        }
        if (deliver(view, s)) {
            tell_publishers();
            return Found::message;
        }
    }
    return read(view);
}

Found Subscriber::again(View &view, std::uint32_t s, std::uint64_t sequence) {
    if (!ready_ || s >= member.channel.slot_count) return Found::nothing;
    bool shared = reader.pins[s].count > 0;
    if (!shared && !member.channel.may_hold_more(reader))
        return member.channel.slots[s].state.load() == live(sequence) ? Found::limit : Found::nothing;
    if (!member.channel.pin(reader, sequence, s)) {
        member.channel.give_back_extra(reader);
        return Found::nothing;
    }
    fill(view, s, sequence);
    if (!view.intact && refuse_damaged)
        refuse_message(view.ordinal, s, "has a checksum that does not match its " + std::to_string(view.size) + " bytes");
    return Found::message;
}

Found Subscriber::find(View &view, std::int64_t timestamp_ns) {
    if (!ready_ && !prepare()) return Found::nothing;
    Channel &channel = member.channel;
    channel.help();
    std::uint64_t end = channel.tail(), low = channel.first_in_ring();
    if (reader.vchan >= 0) low = std::max(low, channel.vchans[reader.vchan].since.load());
    for (int tries = 0; tries < 4; ++tries) {
        std::uint64_t best = 0;
        std::uint32_t best_slot = 0;
        for (std::uint64_t n = end; n-- > low;) {
            std::uint64_t entry = channel.entry_at(n).load();
            std::uint32_t s = Channel::slot_in(entry);
            if (Channel::lap_in(entry) != channel.lap_of(n) || s >= channel.slot_count) continue;
            std::int64_t time = channel.slots[s].timestamp_ns.load();
            bool foreign = channel.is_foreign(reader, n, s);
            bool activation = channel.slots[s].flags.load() & message_activation;
            if (channel.slots[s].state.load() != live(n) || foreign || activation) continue;
            if (time < timestamp_ns) break;
            best = n;
            best_slot = s;
        }
        if (!best) return Found::nothing;
        Found found = again(view, best_slot, best);
        if (found != Found::nothing) return found;  // otherwise it was overwritten meanwhile
    }
    return Found::nothing;
}

void Subscriber::release_many(const std::uint64_t *slots, std::size_t count) noexcept {
    if (!member.belongs_here() || !member.joined()) return;
    bool freed = false;
    for (std::size_t i = 0; i < count; ++i) freed |= member.channel.unpin(reader, std::uint32_t(slots[i]));
    if (freed) released();
}

std::uint32_t Subscriber::prepare_batch(std::size_t most) {
    if (!ready_ && !prepare()) return 1;
    std::uint32_t half = std::max(1u, may_hold() / 2);
    auto wanted = std::uint32_t(std::min<std::size_t>(most, half));
    std::uint32_t sure = reader.most_held + reader.extra, room = sure > reader.held ? sure - reader.held : 0;
    // Another subscriber may be claiming the same slots: try again with fewer.
    if (reader.may_exceed)
        for (std::uint32_t more = wanted > room ? wanted - room : 0; more && !member.channel.claim(reader, more); more /= 2) {
        }
    return wanted;
}

Woken Subscriber::wait_release(std::int64_t deadline_ns) {
    Wait wait;
    wait.deadline_ns = deadline_ns;
    wait.closed = &closed;
    // No wake-up is sent for slots that another process releases.
    if (reader.may_exceed) wait.slice_ns = 10'000'000;
    waits_for_release_.store(true);
    Woken woken = sleep_until(member, wait, [&] { return !waits_for_release_.load(); });
    return woken == Woken::look && reader.may_exceed ? Woken::ready : woken;
}

void Subscriber::wake_for_release() noexcept {
    waits_for_release_.store(false);
    member.bells.wake_self();
}

Woken Subscriber::wait(std::int64_t deadline_ns, std::int64_t spin_until_ns, int extra, int patience) {
    if (!has_next()) {
        member.wake_publishers();  // publishers that wait for this reader can go on: it has nothing left to read
        waited_ = true;
    }
    Wait wait;
    wait.deadline_ns = deadline_ns;
    wait.spin_until_ns = spin_until_ns;
    wait.patience = patience;
    wait.extra = extra;
    wait.closed = &closed;
    return sleep_until(member, wait, [&] { return has_next(); });
}

bool Subscriber::arm() {
    waited_ = true;
    member.wake_publishers();
    member.arm_descriptor();
    return !has_next();
}

void Subscriber::arm_release() {
    waits_for_release_.store(true);
    member.arm_descriptor();
}

void Subscriber::wake() { member.bells.wake_self(); }

void Subscriber::refuse_damage() const {
    throw Error(Fault::corruption, member.describe() + ": its ring of messages is damaged; open the channel anew");
}

void Subscriber::finish() noexcept {
    if (reader.held) {
        member.wake_publishers();
        return;
    }
    member.leave();
}

void Subscriber::close(bool at_once) noexcept {
    closed.store(true);
    if (!member.joined()) return;
    if (!at_once && reader.held && member.belongs_here()) {
        retiring_ = true;
        member.linger();
        return;
    }
    member.leave(reader.held > 0);
}

// Counts what was overwritten before it was read as lost now, not when the reader gets there: everything before the
// first message that still exists. `newest` is the last ordinal of the virtual channel.
void Subscriber::count_overwritten(std::uint64_t newest, bool alone) {
    Channel &channel = member.channel;
    std::uint64_t first = channel.first_in_ring(), n = std::max(reader.cursor, first);
    if (reader.cursor < first) {
        std::uint32_t s = 0;
        n = channel.next_kept(reader, reader.cursor, first, s);
        if (n < first) newest = channel.slots[s].ordinal.load() - 1;
        if (n < first && channel.slots[s].state.load() != live(n)) return;  // read meanwhile: the next call counts it
    }
    for (std::uint64_t turns = 0; n >= first && turns <= 2 * channel.ring_size; ++turns, ++n) {
        std::uint64_t entry = channel.entry_at(n).load();
        std::uint32_t s = Channel::slot_in(entry);
        if (Channel::lap_in(entry) < channel.lap_of(n)) break;  // not published yet
        if (Channel::lap_in(entry) > channel.lap_of(n) || s >= channel.slot_count || channel.is_foreign(reader, n, s)) continue;
        std::uint64_t ordinal = channel.slots[s].ordinal.load(), state = channel.slots[s].state.load();
        bool coming = kind_of(state) == slot_owned && sequence_of(state) < n;
        bool going = kind_of(state) == slot_claiming && sequence_of(state) == n;
        if (state != live(n) && !coming && !going) continue;
        if (reader.vchan >= 0 && state != live(n)) return;  // its ordinal cannot be trusted: the next call counts it
        newest = ordinal - 1;
        break;
    }
    if (reader.vchan < 0) {
        account(n);
        note_counted(std::max(n, member.joined_tail));
        if (alone && n > reader.cursor) channel.move_cursor(reader, n);
        return;
    }
    std::uint64_t from = std::max(last_ordinal_, member.start_ordinal);
    if (newest > from) drop(newest - from, DropReason::overflow);
    last_ordinal_ = std::max(last_ordinal_, newest);
    note_counted(last_ordinal_ + 1);
}

void Subscriber::update_counters(bool alone) {
    if (!ready_ || !member.belongs_here() || !member.joined()) return;
    Channel &channel = member.channel;
    std::uint64_t end, published;
    do {
        end = channel.tail();
        published = reader.vchan < 0 ? end - member.joined_tail : channel.vchans[reader.vchan].tail.load() - member.start_ordinal;
    } while (channel.tail() != end);
    count_overwritten(published + member.start_ordinal, alone);
    std::uint64_t known = counters->delivered.get() + counters->lost();
    counters->matched.set(std::max(known, published + history_));
    counters->depth.set(reader.held);
    counters->lag.set(end > reader.cursor ? end - reader.cursor : 0);
}

template <typename Condition>
bool Subscriber::any_publisher(Condition holds) const {
    const Channel &channel = member.channel;
    for (std::uint32_t i = 0; i < channel.publisher_capacity; ++i) {
        const Member &writer = channel.publishers[i];
        bool is_read = reader.vchan < 0 || reader.vchan == writer.vchan;
        if (writer.taken.load() && is_read && holds(writer)) return true;
    }
    return false;
}

bool Subscriber::retirement() const {
    return any_publisher([](const Member &writer) { return (writer.flags & member_retirement) != 0; });
}

bool Subscriber::typed() const {
    const Channel &channel = member.channel;
    return any_publisher([&](const Member &writer) {
        std::int32_t vchan = writer.vchan;
        bool is_virtual = channel.vchans && vchan >= 0 && vchan < std::int32_t(max_vchans);
        return (is_virtual ? channel.vchans[vchan].type[0] : channel.header->type[0]) != 0;
    });
}

std::string Subscriber::why_limit() const {
    return member.describe() + ": this subscriber holds " + std::to_string(reader.held) + " messages and may hold no more (" +
           member.who_holds_what() + "); release some (message.release(), or let them go)" +
           (reader.may_exceed ? ", or use more slots" : " or open it with a larger max_active_messages");
}

}  // namespace penstock::shm
