// How a member joins a channel: what exists must be valid and agree with its options; then it gets a place. All of it
// under the file lock.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "platform/shared_directory.hpp"
#include "shm/membership.hpp"

namespace penstock::shm {

void Membership::check_header() const {
    const Header &header = *channel.header;
    std::string path = shared_directory_path() + "/" + encoded_ + ".channel";
    if (header.magic != control_magic)
        throw Error(Fault::corruption, describe() + ": " + path + " is no channel of Penstock; remove it");
    if (header.version != layout_version)
        throw Error(Fault::refused, describe() + ": " + path + " has layout " + std::to_string(header.version) +
                                        ", this is " + std::to_string(layout_version));
    std::uint32_t p = header.publisher_capacity, s = header.subscriber_capacity;
    bool sane = p && s && p % 64 == 0 && s % 64 == 0 && p <= max_members && s <= max_members &&
                control_.size() == ControlPlaces(p, s).total &&
                read_text(header.name, sizeof header.name) == channel_name() && header.segments.load() <= max_segments &&
                header.slots.load() <= max_slots && header.metadata_size.load() <= max_metadata_bytes;
    if (!sane) throw Error(Fault::corruption, describe() + ": the control block in " + path + " is damaged; remove it");
}

// One name is one channel: an ordinary one, or a virtual one on one multiplexer.
void Membership::check_name() const {
    const std::string used = options.mux.empty() ? "" : channel_in_use(encode_name(options.name));
    if (!used.empty()) throw Error(Fault::refused, describe() + ": '" + options.name + "' is " + used + " already");
    for (const std::string &name : {options.name, options.mux}) {
        std::string mux = name.empty() ? "" : multiplexer_of(encode_name(name), nonce_);
        if (!mux.empty())
            throw Error(Fault::refused, describe() + ": '" + name + "' is a virtual channel on '" + mux + "' already");
    }
}

std::string Membership::virtual_name(const std::string &name) const {
    return encode_name(name) + file_name("virtual").substr(encoded_.size());
}

// Under the file lock: ids that no member uses any more may be used for other names.
void Membership::give_back_vchans() const {
    if (!channel.vchans) return;
    std::vector<bool> in_use(max_vchans);
    auto note = [&](const Member *members, std::uint32_t capacity) {
        for (std::uint32_t i = 0; i < capacity; ++i)
            if (members[i].taken.load() && members[i].vchan >= 0 && members[i].vchan < std::int32_t(max_vchans))
                in_use[std::size_t(members[i].vchan)] = true;
    };
    note(channel.publishers, channel.publisher_capacity);
    note(channel.subscribers, channel.subscriber_capacity);
    for (std::uint32_t id = 0; id < max_vchans; ++id) {
        Vchan &vchan = channel.vchans[id];
        if (in_use[id] || !vchan.used.load()) continue;
        vchan.given_back.store(channel.tables ? channel.tail() : 1);
        try {
            remove_file(virtual_name(read_text(vchan.name, sizeof vchan.name)));
        } catch (const Error &) {  // a damaged name belongs to no file
        }
        vchan.used.store(0);
    }
}

void Membership::check_agreement() {
    Header &header = *channel.header;
    bool is_virtual = !options.mux.empty();
    std::uint32_t flags = header.flags.load();
    bool ready = header.ready.load();
    if (is_virtual && !(flags & channel_mux)) {
        if (ready || count_members(true))
            throw Error(Fault::refused, describe() + ": '" + options.mux + "' is an ordinary channel, not a multiplexer");
        header.flags.fetch_or(channel_mux);
    }
    if (!is_virtual && (flags & channel_mux) && is_publisher)
        throw Error(Fault::refused, describe() + " is a multiplexer: publish on a virtual channel of it (mux='" +
                                        options.name + "')");
    if (!is_virtual) check_name();
    if (!is_virtual) agree_on_type(header.type, sizeof header.type, ready);
    auto refuse = [&](const char *option, std::uint64_t given, std::uint64_t there) {
        throw Error(Fault::refused, describe() + ": " + option + "=" + std::to_string(given) + " but the channel has " +
                                        std::to_string(there));
    };
    // Its files would have one mode, and those of the channel that are there already another one.
    if (is_publisher && options.access.shared && options.access.mode != header.mode) {
        char text[64];
        std::snprintf(text, sizeof text, ": mode=0o%o but the channel has 0o%o", unsigned(options.access.mode),
                      unsigned(header.mode));
        throw Error(Fault::refused, describe() + text + ": whoever opens it first decides; give all of them the same");
    }
    if (ready && is_publisher) {
        std::uint64_t kept = header.history.load(), slots = header.slots.load() - std::min<std::uint64_t>(kept, header.slots.load());
        if (options.slots && options.slots != slots) refuse("slots", options.slots, slots);
        if (options.history_slots && options.history_slots != kept) refuse("slots for the history", options.history_slots, kept);
        if (is_virtual && options.slot_size && options.slot_size != header.segment[0].slot_size.load())
            refuse("slot_size", options.slot_size, header.segment[0].slot_size.load());
        if (options.metadata_size != not_given && options.metadata_size != header.metadata_size.load())
            refuse("metadata_size", options.metadata_size, header.metadata_size.load());
        if (options.fixed_size && !(flags & channel_fixed_size))
            throw Error(Fault::refused, describe() + ": fixed_size=True, but the slots of the channel grow");
        if (options.local != bool(flags & channel_local)) refuse("local", options.local, !options.local);
    }
    auto limit = [&](std::atomic<std::uint32_t> &place, std::uint32_t given, std::uint32_t capacity, bool publishers) {
        if (!given) return;
        const char *option = publishers ? "max_publishers" : "max_subscribers";
        const std::uint32_t there = count_members(publishers), own = publishers == is_publisher;
        if (!place.load() && there + own > given)
            throw Error(Fault::refused, describe() + ": " + option + "=" + std::to_string(given) + ", but the channel has " +
                                            std::to_string(there) + " already: " + pids_of(publishers));
        if (!place.load()) place.store(std::min(given, capacity));
        if (place.load() != given) refuse(option, given, place.load());
    };
    limit(header.max_publishers, options.max_publishers, channel.publisher_capacity, true);
    limit(header.max_subscribers, options.max_subscribers, channel.subscriber_capacity, false);
}

void Membership::agree_on_type(char *type, std::size_t room, bool has_publisher) {
    if (options.type.empty()) return;
    std::string there = read_text(type, room);
    if (there.empty() && (is_publisher || !has_publisher)) copy_text(type, room, options.type);
    else if (there != options.type)
        throw Error(Fault::refused, describe() + " carries type '" + there + "', not '" + options.type + "'");
}

std::string Membership::type() const {
    if (vchan >= 0 && channel.vchans) return read_text(channel.vchans[vchan].type, sizeof channel.vchans[vchan].type);
    return read_text(channel.header->type, sizeof channel.header->type);
}

std::string Membership::schema_name(std::int32_t id) const {
    return file_name("schema") + (id >= 0 ? "." + std::to_string(id) : "");
}

std::pair<std::string, std::string> Membership::agree_on_schema(const std::string &name, const std::string &text,
                                                                const std::string *replaced) {
    FileLock lock(control_file_, describe());
    bool is_virtual = vchan >= 0 && channel.vchans;
    char *type = is_virtual ? channel.vchans[vchan].type : channel.header->type;
    std::size_t room = sizeof channel.header->type;
    bool has_publisher = is_virtual ? channel.vchans[vchan].published.load() : channel.header->ready.load();
    std::string there = read_text(type, room), file = schema_name(is_virtual ? vchan : -1), known;
    if (File schema = open_file(file, options.access, false)) {
        std::uint64_t size = std::min(file_size(schema), max_schema_bytes);
        if (size) {
            Mapping memory(schema.get(), size, false);
            known.assign(reinterpret_cast<const char *>(memory.data()), size);
        }
    }
    bool first = there.empty() && (is_publisher || !has_publisher);
    if (name.empty() || !(first || (replaced && known == *replaced) || (there == name && known.empty()))) return {there, known};
    remove_file(file);  // the text is stored before the name: whoever sees the name finds the text
    make_file(file, text.size(), options.access, [&](std::uint8_t *memory) { std::memcpy(memory, text.data(), text.size()); });
    PENSTOCK_STEP("schema.after_text");
    copy_text(type, room, name);
    return {name, text};
}

std::string Membership::durable(const std::string &directory) {
    FileLock lock(control_file_, describe());
    const std::string name = file_name("durable");
    if (!directory.empty()) {
        remove_file(name);
        make_file(name, directory.size(), options.access,
                  [&](std::uint8_t *memory) { std::memcpy(memory, directory.data(), directory.size()); });
        return directory;
    }
    return kept_on_disk();
}

// Under the file lock.
std::string Membership::kept_on_disk() const {
    File file = open_file(file_name("durable"), options.access, false);
    const std::uint64_t size = file ? std::min(file_size(file), max_schema_bytes) : 0;
    if (!size) return "";
    Mapping memory(file.get(), size, false);
    return std::string(reinterpret_cast<const char *>(memory.data()), size);
}

void Membership::make_tables() {
    Header &header = *channel.header;
    std::uint32_t slots = (options.slots ? options.slots : default_slots) + options.history_slots;
    std::uint32_t metadata = options.metadata_size == not_given ? 0 : options.metadata_size;
    auto stride = std::uint32_t(round_up(metadata, 16));
    make_sure(slots - options.history_slots);
    TablePlaces at(slots, channel.subscriber_words(), stride);
    remove_file(file_name("tables"));  // left by a publisher that died before it set ready
    File file = make_file(file_name("tables"), at.total, options.access, [&](std::uint8_t *memory) {
        Channel fresh = channel;
        fresh.attach_tables(memory, slots, stride);
        fresh.format_tables();
    });
    PENSTOCK_STEP("join.after_tables");
    header.slots.store(slots);
    header.history.store(options.history_slots);
    header.history_messages.store(options.history_messages);
    header.history_ns.store(options.history_ns);
    header.history_bytes.store(options.history_bytes);
    header.before.store(options.before);
    header.metadata_size.store(metadata);
    header.flags.fetch_or((options.fixed_size ? channel_fixed_size : 0) | (options.local ? channel_local : 0));
    std::uint64_t slot_size = options.slot_size ? options.slot_size : default_slot_size;
    try {
        make_segment(0, round_up(std::max<std::uint64_t>(slot_size, 1), 64));
    } catch (...) {
        remove_file(file_name("tables"));
        throw;
    }
    header.segment[0].slot_size.store(round_up(std::max<std::uint64_t>(slot_size, 1), 64));
    header.segments.store(1);
    PENSTOCK_STEP("join.before_ready");
    header.ready.store(1);
    PENSTOCK_STEP("join.after_ready");
    attach_tables(true);
}

bool Membership::attach_tables(bool locked) {
    Header &header = *channel.header;
    if (!header.ready.load()) return false;
    std::uint32_t slots = header.slots.load(), metadata = header.metadata_size.load();
    auto damaged = [&](const std::string &what) {
        throw Error(Fault::corruption, describe() + ": " + what + " is damaged; remove the channel's files");
    };
    if (slots < 2 || slots > max_slots || metadata > max_metadata_bytes) damaged("its control block");
    auto stride = std::uint32_t(round_up(metadata, 16));
    File file = open_file(file_name("tables"), options.access, true);
    if (!file || file_size(file) != TablePlaces(slots, channel.subscriber_words(), stride).total) damaged("its table of slots");
    Mapping memory(file.get(), file_size(file), true);
    auto *tables = reinterpret_cast<Tables *>(memory.data());
    if (tables->magic != tables_magic || tables->slots != slots || tables->metadata_stride != stride ||
        tables->subscriber_words != channel.subscriber_words() || tables->ring_size != ring_size_for(slots))
        damaged("its table of slots");
    tables_memory_ = std::move(memory);
    channel.attach_tables(tables_memory_.data(), slots, stride);
    if (header.vchans_ready.load()) attach_vchans();
    if (joined_ && !is_publisher && options.most_held == 0) {
        if (locked) {
            settle_most_held();
        } else {
            FileLock lock(control_file_, describe());
            settle_most_held();
        }
        self().most_held = most_held;
    }
    return true;
}

void Membership::attach_vchans() {
    if (channel.vchans) return;
    File file = open_file(file_name("vchans"), options.access, true);
    if (!file || file_size(file) != sizeof(Vchan) * max_vchans)
        throw Error(Fault::corruption, describe() + ": its table of virtual channels is damaged");
    vchans_memory_ = Mapping(file.get(), sizeof(Vchan) * max_vchans, true);
    channel.vchans = reinterpret_cast<Vchan *>(vchans_memory_.data());
}

void Membership::choose_vchan() {
    Header &header = *channel.header;
    if (header.vchans_ready.load()) attach_vchans();
    if (options.mux.empty()) return;
    if (!channel.vchans) {
        remove_file(file_name("vchans"));
        make_file(file_name("vchans"), sizeof(Vchan) * max_vchans, options.access, nullptr);
        PENSTOCK_STEP("join.after_vchans");
        header.vchans_ready.store(1);
        attach_vchans();
    }
    // The id that the name has, or had and nobody has used since; else a new one, else the one that was returned first.
    std::int32_t by_name = -1, fresh = -1, oldest = -1;
    for (std::int32_t id = 0; id < std::int32_t(max_vchans); ++id) {
        const Vchan &there = channel.vchans[id];
        std::string name = read_text(there.name, sizeof there.name);
        if (name == options.name) by_name = id;
        if (there.used.load()) continue;
        if (name.empty() && fresh < 0) fresh = id;
        if (!name.empty() && (oldest < 0 || there.given_back.load() < channel.vchans[oldest].given_back.load()))
            oldest = id;
    }
    std::int32_t wanted = options.vchan_id;
    bool in_use = by_name >= 0 && channel.vchans[by_name].used.load();
    if (in_use && wanted >= 0 && wanted != by_name)
        throw Error(Fault::refused, describe() + " has vchan_id " + std::to_string(by_name) + ", not " +
                                        std::to_string(wanted) +
                                        ": who joins first without vchan_id is given one; give the same vchan_id on both sides");
    if (!in_use && wanted >= 0 && wanted != by_name) {
        if (channel.vchans[wanted].used.load())
            throw Error(Fault::refused, describe() + ": vchan_id " + std::to_string(wanted) + " belongs to '" +
                                            read_text(channel.vchans[wanted].name, sizeof channel.vchans[wanted].name) + "'");
        by_name = -1;
    }
    vchan = by_name >= 0 ? by_name : wanted >= 0 ? wanted : fresh >= 0 ? fresh : oldest;
    if (vchan < 0)
        throw Error(Fault::capacity, describe() + ": all " + std::to_string(max_vchans) + " virtual channels are used");
    Vchan &mine = channel.vchans[vchan];
    if (!in_use) {
        mine.published.store(0);
        copy_text(mine.type, sizeof mine.type, "");
        remove_file(schema_name(vchan));
    }
    agree_on_type(mine.type, sizeof mine.type, mine.published.load());
    if (!in_use) {
        if (by_name < 0) {  // its ordinals begin again, and earlier messages of this id are not its own
            if (channel.tables) channel.help();
            mine.tail.store(0);
            mine.since.store(channel.tables ? channel.tail() : 1);
            copy_text(mine.name, sizeof mine.name, options.name);
        }
        mine.used.store(1);
        PENSTOCK_STEP("join.after_vchan");
        make_file(virtual_name(options.name), 0, options.access, nullptr);
        PENSTOCK_STEP("join.after_virtual_name");
        try {
            check_name();  // checked after ours was stored: of two that join at once, one sees the other
        } catch (...) {
            give_back_vchans();
            throw;
        }
    }
    if (is_publisher) mine.published.store(1);
}

// A member is refused if the slots that all members may always hold, and those that subscribers have claimed, leave
// none for the next message.
void Membership::settle_most_held() {
    most_held = std::max(1u, options.most_held);
    if (!channel.tables) return;
    std::uint64_t others = held_by_others(), slots = channel.to_hold();
    if (options.most_held == 0 && !is_publisher && slots > default_sure + 1 && !(joined_ && others + default_sure >= slots))
        most_held = default_sure;
    channel.header->sure.store(others + most_held);  // stored first: a reader that claims more at this moment sees it
    if (channel.claimed() < slots) return;
    std::string text = describe() + " has " + std::to_string(slots) + " slots, of which " + std::to_string(most_held) +
                       " more cannot be kept for " + (is_publisher ? "a publisher: " : "a subscriber: ") + who_holds_what() +
                       ", and one is kept for the next message; use more slots, a smaller max_active_messages or max_reserved";
    channel.header->sure.store(others);
    throw Error(Fault::capacity, text);
}

// The publisher that creates the slots may find earlier subscribers: each gets as many slots as if it had joined later.
void Membership::make_sure(std::uint32_t slots) {
    const std::uint32_t each = slots > default_sure + 1 ? default_sure : 1;
    std::uint64_t waiting = 0;
    for (std::uint32_t i = 0; i < channel.subscriber_capacity; ++i) {
        Member &member = channel.subscribers[i];
        if (!member.taken.load() || !(member.flags & member_default_sure)) continue;
        member.most_held = each;
        ++waiting;
    }
    std::uint64_t needed = held_by_others() + std::max(1u, options.most_held) + 1;
    if (needed <= slots) return;
    if (needed > default_sure + 1) needed += waiting * (default_sure - each);
    throw Error(Fault::capacity, describe() + ": " + std::to_string(slots) + " slots are too few for those who have joined: " +
                                     who_holds_what() + ", and one is kept for the next message; " +
                                     std::to_string(needed) + " slots would do");
}

// The sequence at which the history begins for a member that joins when `end` is the next one.
std::uint64_t Membership::first_of_history(std::uint64_t end) const {
    const Header &header = *channel.header;
    const std::uint64_t most = header.history_messages.load(), most_bytes = header.history_bytes.load(), age = header.history_ns.load();
    const std::int64_t since = age ? realtime_ns() - std::int64_t(age) : INT64_MIN;
    std::uint64_t first = end, count = 0, bytes = 0;
    for (std::uint64_t n = end, low = channel.first_in_ring(); n-- > low && count < most;) {
        std::uint64_t entry = channel.entry_at(n).load();
        std::uint32_t s = Channel::slot_in(entry);
        if (Channel::lap_in(entry) != channel.lap_of(n) || s >= channel.slot_count) break;
        const Slot &slot = channel.slots[s];
        const std::uint64_t size = slot.size.load();
        const std::int64_t time = slot.timestamp_ns.load();
        const bool activation = slot.flags.load() & message_activation;
        std::uint64_t state = slot.state.load();
        if (state != live(n) && !(kind_of(state) == slot_claiming && sequence_of(state) == n)) break;
        if (activation) continue;
        if (time < since || (count && bytes + size > most_bytes)) break;
        bytes += size;
        ++count;
        first = n;
    }
    return first;
}

void Membership::take_place() {
    Header &header = *channel.header;
    Member *members = is_publisher ? channel.publishers : channel.subscribers;
    std::uint32_t capacity = is_publisher ? channel.publisher_capacity : channel.subscriber_capacity;
    std::uint32_t limit = (is_publisher ? header.max_publishers : header.max_subscribers).load();
    const char *option = is_publisher ? "max_publishers" : "max_subscribers";
    if (limit == 0 || limit > capacity) limit = capacity;
    if (count_members(is_publisher) >= limit) {
        const std::string kept = is_publisher ? kept_on_disk() : "";
        if (!kept.empty())
            throw Error(Fault::capacity, describe() + " has a durable publisher, which keeps it in '" + kept +
                                             "' and is its only one: " + pids_of(true) + "; publish with that one, or end it");
        std::string remedy;
        if (limit < max_members)
            remedy = std::string("; the handle that makes the channel chooses ") + option + ", at most " + std::to_string(max_members);
        throw Error(Fault::capacity, describe() + " already has " + std::to_string(limit) + " " +
                                         (is_publisher ? "publishers" : "subscribers") + ", which is its " + option + ": " +
                                         pids_of(is_publisher) + remedy);
    }
    for (index = 0; index < capacity && members[index].taken.load(); ++index) {
    }
    if (index >= capacity) throw Error(Fault::capacity, describe() + ": no place left");
    if (is_publisher) channel.recover_publisher(index);  // a place that a dead publisher left before it was marked
    else channel.recover_subscriber(index);
    Member &me = members[index];
    me.process.store(process_token());
    me.pid = std::uint32_t(getpid());
    copy_text(me.program, sizeof me.program, process_program());
    me.most_held = most_held;
    me.vchan = vchan;
    me.flags = (options.reliable ? member_reliable : 0) | (options.local ? member_local : 0) |
               (!is_publisher && options.most_held == 0 ? member_default_sure : 0) |
               (is_publisher && options.retirement ? member_retirement : 0);
    me.joined_ns = std::uint64_t(realtime_ns());
    me.count.store(0);
    me.bytes.store(0);
    me.dropped.store(0);
    me.cursor.store(1);
    me.wanted_cursor.store(0);
    PENSTOCK_STEP("join.before_taken");
    taken_ = header.takings.fetch_add(1) + 1;
    me.taken.store(taken_);
    PENSTOCK_STEP("join.after_taken");
    bells.belong_to(channel, file_name("wake"), is_publisher, index, taken_, options.access);
    if (is_publisher) return;
    std::uint64_t bit = 1ull << (index % 64);
    const bool takes_past = options.history && channel.tables && vchan < 0 && header.history_messages.load();
    if (channel.tables) {
        channel.help();
        // A reliable subscriber that reads the history announces this first: what no publisher has taken by then stays.
        me.cursor.store(takes_past && options.reliable ? channel.first_in_ring() : channel.tail());
    }
    if (options.reliable) channel.reliable[index / 64].fetch_or(bit);
    channel.active[index / 64].fetch_or(bit);
    PENSTOCK_STEP("join.after_active");
    if (takes_past && options.reliable) header.lowered.fetch_add(1);
    if (channel.tables) {
        do {
            joined_tail = start = channel.tail();
            if (vchan >= 0) start_ordinal = channel.vchans[vchan].tail.load();
        } while (channel.tail() != start);
        if (takes_past) {
            start = first_of_history(start);
        } else if (options.history && !options.reliable) {
            std::uint64_t n = channel.first_in_ring();
            if (vchan >= 0) n = std::max(n, channel.vchans[vchan].since.load());
            for (; n < start; ++n) {
                std::uint64_t entry = channel.entry_at(n).load();
                std::uint32_t s = Channel::slot_in(entry);
                if (Channel::lap_in(entry) == channel.lap_of(n) && s < channel.slot_count &&
                    channel.slots[s].state.load() == live(n))
                    break;
            }
            start = n;
        }
        me.cursor.store(start);
    }
    wake_publishers();
}

}  // namespace penstock::shm
