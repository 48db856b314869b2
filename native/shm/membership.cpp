#include "shm/membership.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>

#include "platform/shared_directory.hpp"
#include "shm/deaths.hpp"

namespace penstock::shm {

namespace {

std::uint32_t capacity_for(std::uint32_t most) {
    return std::uint32_t(round_up(std::max(most, default_capacity), 64));
}

// The options with which a process opens a channel, also one of another user, to inspect or clean it without joining.
Options visiting(const std::string &encoded) {
    Options options;
    options.name = decode_name(encoded);
    options.access.shared = true;
    return options;
}

// Once per process: removes what earlier crashes left, in any channel.
void sweep_once() {
    static std::atomic<std::uint32_t> swept{0};
    std::uint32_t now = fork_generation();
    if (swept.exchange(now) != now) clean_channels();
}

}  // namespace

Membership::Membership(bool publisher, const Options &given) : options(given), is_publisher(publisher) {
    if (given.slots && (given.slots < min_slots || given.slots > max_slots))
        throw Error(Fault::invalid, describe() + ": slots=" + std::to_string(given.slots) + " must be between " +
                                        std::to_string(min_slots) + " and " + std::to_string(max_slots) +
                                        ": one for a publisher, one for a subscriber, one for the next message");
    if (given.slot_size > max_slot_bytes)
        throw Error(Fault::invalid, describe() + ": slot_size=" + std::to_string(given.slot_size) +
                                        " must be at most " + std::to_string(max_slot_bytes) + " bytes");
    if (given.type.size() > max_type_bytes)
        throw Error(Fault::invalid, describe() + ": the type's name is longer than " + std::to_string(max_type_bytes) +
                                        " bytes");
    if (given.type.find('\0') != std::string::npos)
        throw Error(Fault::invalid, describe() + ": the type's name contains a null character");
    if (given.metadata_size != not_given && given.metadata_size > max_metadata_bytes)
        throw Error(Fault::invalid, describe() + ": metadata_size=" + std::to_string(given.metadata_size) +
                                        " must be at most " + std::to_string(max_metadata_bytes));
    if (given.max_publishers > max_members || given.max_subscribers > max_members)
        throw Error(Fault::invalid, describe() + ": max_publishers and max_subscribers are at most " +
                                        std::to_string(max_members));
    if (given.vchan_id >= std::int32_t(max_vchans))
        throw Error(Fault::invalid, describe() + ": vchan_id=" + std::to_string(given.vchan_id) +
                                        " must be below MAX_VCHAN_ID, " + std::to_string(max_vchans));
    if (!given.mux.empty()) {
        encode_name(given.name);
        if (given.name.size() > max_vchan_name_bytes)
            throw Error(Fault::invalid, "virtual channel name '" + name_beginning(given.name) + "...' is longer than " +
                                            std::to_string(max_vchan_name_bytes) + " bytes");
        if (given.mux == given.name)
            throw Error(Fault::invalid, describe() + " cannot be its own multiplexer");
    }
    encoded_ = encode_name(channel_name());
    sweep_once();
    if (given.access.shared) process_token_share();
    generation_ = fork_generation();
    for (int attempt = 0; attempt < 1000; ++attempt)
        if (try_join()) return;
    throw Error(Fault::state, describe() + " keeps vanishing while it is joined");
}

Membership::Membership(const std::string &encoded)
    : options(visiting(encoded)), is_publisher(false), encoded_(encoded), generation_(fork_generation()) {}

Membership::~Membership() { leave(); }

std::string Membership::describe() const {
    if (options.mux.empty()) return "channel '" + options.name + "'";
    return "virtual channel '" + options.name + "' on '" + options.mux + "'";
}

std::string Membership::file_name(const char *kind) const {
    char text[32];
    std::snprintf(text, sizeof text, ".%s.%016llx", kind, static_cast<unsigned long long>(nonce_));
    return encoded_ + text;
}

std::string Membership::bell_name(bool publisher, std::uint32_t member) const {
    const Member &owner = (publisher ? channel.publishers : channel.subscribers)[member];
    return Bells::name_of(file_name("wake"), publisher, member, owner.taken.load());
}

// ---------------------------------------------------------------------------------------------- joining

// A control block without members, as before the first one joins. The new nonce gives its other files new names: the
// old ones may still be mapped by the processes that made them.
void Membership::begin_life(std::uint8_t *memory, std::uint64_t size) {
    auto *header = reinterpret_cast<Header *>(memory);
    std::memset(memory + offsetof(Header, type), 0, size - offsetof(Header, type));
    header->made_ns = std::uint64_t(realtime_ns());
    header->nonce = random_word();
}

// Under the file lock. True if all earlier members are gone: then this channel ends, and a new one of this name begins.
bool Membership::end_life() {
    const Header &header = *channel.header;
    bool begun = header.takings.load() || header.ready.load() || header.vchans_ready.load() || header.flags.load();
    if (!begun || anyone_left()) return false;
    remove_files();
    // Another user's file, in a directory where each user may remove only its own files: use it again.
    if (has_name(control_file_)) begin_life(control_.data(), control_.size());
    return true;
}

// Under the file lock.
void Membership::attach_control(File file) {
    std::uint64_t size = file_size(file);
    control_file_ = std::move(file);
    if (size < sizeof(Header))
        throw Error(Fault::corruption, describe() + ": " + shared_directory_path() + "/" + encoded_ + ".channel holds " +
                                           std::to_string(size) + " bytes and is no channel; remove it");
    control_ = Mapping(control_file_.get(), size, true);
    channel = Channel();
    channel.header = reinterpret_cast<Header *>(control_.data());
    check_header();
    // From here on only these copies are used, whatever happens to the header.
    channel.attach_control(control_.data(), channel.header->publisher_capacity, channel.header->subscriber_capacity);
    nonce_ = channel.header->nonce;
    segments_.clear();
    vchans_memory_ = Mapping();
    tables_memory_ = Mapping();
}

bool Membership::try_join() {
    std::string name = encoded_ + ".channel";
    File file = open_file(name, options.access, true);
    if (!file) {
        std::uint32_t publisher_capacity = capacity_for(options.max_publishers);
        std::uint32_t subscriber_capacity = capacity_for(options.max_subscribers);
        ControlPlaces at(publisher_capacity, subscriber_capacity);
        file = make_file(name, at.total, options.access, [&](std::uint8_t *memory) {
            auto *header = reinterpret_cast<Header *>(memory);
            header->version = layout_version;
            header->publisher_capacity = publisher_capacity;
            header->subscriber_capacity = subscriber_capacity;
            header->mode = options.access.mode;
            copy_text(header->name, sizeof header->name, channel_name());
            begin_life(memory, at.total);
            header->magic = control_magic;
        });
        if (!file) return false;
    }
    FileLock lock(file, describe());
    if (!has_name(file)) return false;
    attach_control(std::move(file));
    PENSTOCK_STEP("join.after_lock");
    if (end_life()) return false;  // all have left, but could not remove it
    if (channel.header->ready.load()) attach_tables(true);
    recover_locked();
    if (end_life()) return false;  // all have died
    try {
        check_agreement();
        if (is_publisher && !channel.header->ready.load()) make_tables();
        choose_vchan();
        settle_most_held();
        take_place();
    } catch (...) {
        if (!anyone_left()) remove_files();
        throw;
    }
    joined_ = true;
    count_sure();
    return true;
}

std::uint32_t Membership::count_members(bool publishers) const {
    std::uint32_t count = 0;
    const Member *members = publishers ? channel.publishers : channel.subscribers;
    for (std::uint32_t i = 0; i < (publishers ? channel.publisher_capacity : channel.subscriber_capacity); ++i)
        if (members[i].taken.load()) ++count;
    return count;
}

std::uint64_t Membership::held_by_others() const {
    std::uint64_t sum = 0;
    for (std::uint32_t i = 0; i < channel.publisher_capacity; ++i)
        if (channel.publishers[i].taken.load() && !(joined_ && is_publisher && i == index))
            sum += channel.publishers[i].most_held;
    for (std::uint32_t i = 0; i < channel.subscriber_capacity; ++i)
        if (channel.subscribers[i].taken.load() && !(joined_ && !is_publisher && i == index))
            sum += channel.subscribers[i].most_held;
    return sum;
}

// Repeated under the file lock whenever a member has joined or left.
void Membership::count_sure() const { channel.header->sure.store(held_by_others() + (joined_ ? self().most_held : 0)); }

std::string Membership::who_holds_what() const {
    std::string text;
    std::uint32_t unnamed = 0;
    auto add = [&](const char *kind, const Member &member, std::uint32_t i, const std::string &what) {
        if (!member.taken.load()) return;
        if (text.size() > 800) {
            ++unnamed;
            return;
        }
        text += (text.empty() ? "" : ", ") + std::string(kind) + " " + std::to_string(i) + " (pid " +
                std::to_string(member.pid) + ") " + what;
    };
    for (std::uint32_t i = 0; i < channel.publisher_capacity; ++i)
        add("publisher", channel.publishers[i], i, "may reserve " + std::to_string(channel.publishers[i].most_held));
    for (std::uint32_t i = 0; i < channel.subscriber_capacity; ++i) {
        if (!channel.subscribers[i].taken.load()) continue;
        std::uint32_t held = 0;
        for (std::uint32_t s = 0; channel.tables && s < channel.slot_count; ++s)
            held += channel.holder_word(s, i / 64).load() >> (i % 64) & 1;
        add("subscriber", channel.subscribers[i], i,
            "holds " + std::to_string(held) + " and is guaranteed " + std::to_string(channel.subscribers[i].most_held));
    }
    if (unnamed) text += " and " + std::to_string(unnamed) + " more";
    return text.empty() ? "nobody is there" : text;
}

std::string Membership::pids_of(bool publishers) const {
    const Member *members = publishers ? channel.publishers : channel.subscribers;
    const std::uint32_t capacity = publishers ? channel.publisher_capacity : channel.subscriber_capacity;
    std::map<std::uint32_t, std::uint32_t> counts;
    for (std::uint32_t i = 0; i < capacity; ++i)
        if (members[i].taken.load()) ++counts[members[i].pid];
    std::string text;
    std::uint32_t named = 0;
    for (auto [pid, count] : counts) {
        if (++named > 16) return text + " and others";
        text += (text.empty() ? "" : ", ") + std::to_string(count) + " of pid " + std::to_string(pid);
    }
    return text;
}

// ---------------------------------------------------------------------------------------------- leaving

bool Membership::recover() {
    if (!belongs_here() || !joined_) return false;
    FileLock lock(control_file_, describe(), false);
    return lock.held() && recover_locked();
}

// Sleeping members are not woken: they look again by themselves (look_again_ns).
bool Membership::recover_without_joining(const std::string &encoded) {
    Membership visitor(encoded);
    File file = open_file(encoded + ".channel", visitor.options.access, true);
    if (!file) return false;
    FileLock lock(file, visitor.describe(), false);
    if (!lock.held() || !has_name(file)) return false;
    visitor.attach_control(std::move(file));
    return visitor.recover_locked();
}

bool Membership::recover_locked() {
    std::map<std::uint64_t, bool> known;
    bool noted = false;
    auto is_dead = [&](Member &member) {
        if (!member.taken.load()) return false;
        std::uint64_t token = member.process.load();
        auto found = known.find(token);
        if (found == known.end()) found = known.emplace(token, process_alive(token)).first;
        // records all of them before the first is recovered
        if (!found->second && !noted) note_deaths(encoded_, channel);
        noted = noted || !found->second;
        return !found->second;
    };
    bool any = false;
    if (!channel.tables && channel.header->ready.load()) attach_tables(true);
    for (std::uint32_t i = 0; i < channel.publisher_capacity; ++i)
        if (is_dead(channel.publishers[i])) {
            channel.recover_publisher(i);
            remove_file(bell_name(true, i));
            channel.publishers[i].taken.store(0);
            any = true;
        }
    for (std::uint32_t i = 0; i < channel.subscriber_capacity; ++i)
        if (is_dead(channel.subscribers[i])) {
            channel.recover_subscriber(i);
            remove_file(bell_name(false, i));
            PENSTOCK_STEP("recover.before_taken");
            channel.subscribers[i].taken.store(0);
            any = true;
        }
    if (any) {
        count_sure();
        if (!channel.vchans && channel.header->vchans_ready.load()) attach_vchans();
        give_back_vchans();
    }
    if (any && joined_) {
        wake_publishers();
        wake_readers(-1);  // a publisher may have died between publishing and waking
    }
    return any;
}

bool Membership::anyone_left() const { return count_members(true) + count_members(false) > 0; }

void Membership::remove_files() const noexcept {
    try {
        remove_file(encoded_ + ".channel");  // the name first: a member that joins now creates a new channel
        PENSTOCK_STEP("remove.after_name");
        for (std::uint32_t k = 0; k < max_segments; ++k) remove_file(file_name("payload") + "." + std::to_string(k));
        remove_file(file_name("tables"));
        remove_file(file_name("durable"));
        remove_file(file_name("vchans"));
        remove_file(schema_name(-1));
        for (std::int32_t id = 0; channel.vchans && id < std::int32_t(max_vchans); ++id)
            if (channel.vchans[id].type[0]) remove_file(schema_name(id));
    } catch (...) {  // out of memory for a name: the next sweep removes it
    }
}

void Membership::linger() noexcept {
    if (!joined_ || !belongs_here() || is_publisher) return;
    std::uint64_t bit = 1ull << (index % 64);
    channel.active[index / 64].fetch_and(~bit);
    channel.reliable[index / 64].fetch_and(~bit);
    self().flags |= member_closing;
    wake_publishers();
}

void Membership::close_files() noexcept {
    bells.close();
    for (SegmentMap &segment : segments_) segment.file = File();
    control_file_ = File();
}

void Membership::unmap() noexcept {
    segments_.clear();
    for (Mapping *memory : {&tables_memory_, &vchans_memory_, &control_}) *memory = Mapping();
    channel = Channel();
}

void Membership::leave(bool somebody_looks) noexcept {
    if (!joined_) return;
    joined_ = false;
    if (!belongs_here()) return close_files();
    try {
        FileLock lock(control_file_, describe());
        Member &me = self();
        if (me.taken.load() == taken_ && me.process.load() == process_token()) {
            if (is_publisher) channel.recover_publisher(index);
            else channel.recover_subscriber(index);
            PENSTOCK_STEP("leave.before_taken");
            remove_file(bell_name(is_publisher, index));
            me.taken.store(0);
            PENSTOCK_STEP("leave.after_taken");
        }
        recover_locked();
        count_sure();
        give_back_vchans();
        if (!anyone_left()) {
            if (has_name(control_file_)) remove_files();
        } else {
            wake_publishers();
            wake_readers(-1);
        }
    } catch (const std::exception &) {  // the next member finds us dead and recovers it
    }
    close_files();
    if (!somebody_looks) unmap();
}

// ---------------------------------------------------------------------------------------------- waking

void Membership::arm_descriptor() {
    bells.watched();
    constexpr std::uint64_t both = asleep | asleep_on_descriptor;
    if ((self().sleep.load() & both) == both && !bells.is_readable()) return;
    bells.drain();
    bells.set_tick();
    arm(true);
}

void Membership::wake_readers_now(std::int32_t message_vchan) {
    channel.wake_readers(message_vchan, [&](std::uint32_t member, bool on_descriptor) {
        bells.ring(false, member, on_descriptor);
    });
}
void Membership::wake_publishers_now(std::uint64_t cursor) {
    channel.wake_publishers(cursor, [&](std::uint32_t member, bool on_descriptor) {
        bells.ring(true, member, on_descriptor);
    });
}

}  // namespace penstock::shm
