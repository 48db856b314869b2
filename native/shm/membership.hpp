// One member of one channel: joins, leaves, finds dead members, maps what it needs, wakes sleepers.
//
// Rules
//   - A membership is used by one thread at a time.
//   - After a fork the child's copy is dead: belongs_here() is false and nothing is written through it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "platform/liveness.hpp"
#include "shm/bells.hpp"
#include "shm/channel.hpp"
#include "shm/files.hpp"

namespace penstock::shm {

inline constexpr std::uint32_t default_slots = 64;
inline constexpr std::uint32_t min_slots = 3;
inline constexpr std::uint64_t default_slot_size = 4096;
inline constexpr std::uint32_t default_capacity = 64;
// messages that a subscriber may always hold, however many members there are
inline constexpr std::uint32_t default_sure = 2;
inline constexpr std::uint32_t not_given = 0xffffffff;

struct Options {
    std::string name;
    std::string mux;
    std::int32_t vchan_id = -1;
    bool reliable = false;
    std::uint32_t slots = 0;      // 0: what the channel has, or the default
    std::uint64_t slot_size = 0;  // 0: likewise
    std::uint32_t most_held = 0;  // reserved or active messages; 0: default_sure, and more while slots are free
    std::string type;
    std::uint32_t metadata_size = not_given;
    bool fixed_size = false;
    bool local = false;
    bool retirement = false;  // a publisher: track published messages, to report those that all subscribers have released
    std::uint32_t max_publishers = 0, max_subscribers = 0;  // 0: the capacity
    bool history = true;  // a subscriber starts with the channel's history; without one, an unreliable one with what is in the slots
    // A publisher: the history for later members, and its slots. 0 messages: as the channel has it, or none.
    std::uint64_t history_messages = 0, history_ns = 0, history_bytes = 0;
    std::uint32_t history_slots = 0;
    std::uint64_t before = 0;  // a publisher that creates the channel: the ordinal before its first message
    Access access;
};

class Membership {
   public:
    Membership(bool is_publisher, const Options &options);
    ~Membership();
    Membership(const Membership &) = delete;
    Membership &operator=(const Membership &) = delete;

    Channel channel;
    const Options options;
    const bool is_publisher;
    std::uint32_t index = 0;
    std::int32_t vchan = -1;
    std::uint32_t most_held = 1;
    std::uint64_t start = 1;         // a subscriber's first sequence
    std::uint64_t start_ordinal = 0; // last ordinal of its virtual channel when it joined
    std::uint64_t joined_tail = 1;   // messages before it were lost before joining

    bool belongs_here() const { return generation_ == fork_generation(); }
    bool joined() const { return joined_; }
    // The type of the channel, or of the virtual channel; empty if none was set.
    std::string type() const;
    // The type of the channel, or of the virtual channel, and its schema. If none was set before (or the schema is
    // still `replaced`), they are set to `name` and `text`; an empty name only reads them.
    std::pair<std::string, std::string> agree_on_schema(const std::string &name, const std::string &text,
                                                        const std::string *replaced);
    // The directory where the publisher keeps the messages on disk; a `directory` that is not empty sets it.
    std::string durable(const std::string &directory);
    Member &self() const { return is_publisher ? channel.publishers[index] : channel.subscribers[index]; }

    // Maps the tables once a publisher has created them; false while there are none.
    bool ensure_tables() { return channel.tables || attach_tables(false); }
    // The bytes of slot s in the segment; null if that segment does not exist (any more).
    std::uint8_t *payload(std::uint32_t segment, std::uint32_t s) {
        if (segment < segments_.size() && segments_[segment].memory) [[likely]]
            return segments_[segment].memory.data() + std::uint64_t(s) * segments_[segment].slot_size;
        return map_segment(segment) ? payload(segment, s) : nullptr;
    }
    std::uint64_t segment_size(std::uint32_t segment) const { return segments_[segment].slot_size; }
    std::uint32_t newest_segment() const;
    // Claims the memory of slot s in a segment that it moves to; throws where there is none.
    void claim_slot(std::uint32_t segment, std::uint32_t s);
    std::uint64_t slot_size() { return segment_size_of(newest_segment()); }

    // Makes slots of at least `size` bytes; throws where the channel is of fixed size or there is no room.
    void grow(std::uint64_t size);
    static std::uint64_t grown_size(std::uint64_t now, std::uint64_t wanted);
    // Removes sizes that no slot refers to any more.
    void free_segments();

    // Recovers what dead members left; true if there were any. Does nothing while another member is doing it.
    bool recover();
    // The same for the channel with that file name, by one who is no member of it.
    static bool recover_without_joining(const std::string &encoded);
    // `somebody_looks`: messages or arrays still refer to its memory, which then stays mapped.
    void leave(bool somebody_looks = false) noexcept;
    void unmap() noexcept;
    // Closed while messages are held: no reliable publisher waits for it any more, but its slots stay held.
    void linger() noexcept;

    Bells bells;
    void wake_readers(std::int32_t message_vchan) {
        for (std::uint32_t word = 0; word < channel.subscriber_words(); ++word)
            if (channel.reader_sleepers[word].load()) return wake_readers_now(message_vchan);
    }
    void wake_publishers(std::uint64_t cursor = ~0ull) {
        for (std::uint32_t word = 0; word < channel.publisher_words(); ++word)
            if (channel.publisher_sleepers[word].load()) return wake_publishers_now(cursor);
    }
    Word *sleepers() const { return is_publisher ? channel.publisher_sleepers : channel.reader_sleepers; }
    std::uint64_t arm(bool on_descriptor) { return Channel::arm(sleepers(), self(), index, on_descriptor); }
    void disarm() { Channel::disarm(sleepers(), self(), index); }
    // For pollers of the descriptor: from now on it becomes readable when the member is woken.
    void arm_descriptor();

    // "publisher 0 (pid 17) may reserve 1, subscriber 0 (pid 18) holds 5 and is guaranteed 2, ..." for errors
    std::string who_holds_what() const;
    // "3 of pid 17, 1 of pid 18" for errors
    std::string pids_of(bool publishers) const;
    std::string describe() const;

   private:
    struct SegmentMap {
        Mapping memory;
        File file;
        std::uint64_t slot_size = 0;
    };

    explicit Membership(const std::string &encoded);  // of no channel yet
    void attach_control(File file);
    bool try_join();
    static void begin_life(std::uint8_t *memory, std::uint64_t size);
    bool end_life();
    void check_header() const;
    void check_agreement();
    void agree_on_type(char *type, std::size_t room, bool has_publisher);
    std::string schema_name(std::int32_t id) const;
    void make_tables();
    bool attach_tables(bool locked);
    void attach_vchans();
    void choose_vchan();
    void check_name() const;
    std::string virtual_name(const std::string &name) const;
    std::string kept_on_disk() const;
    void give_back_vchans() const;
    void take_place();
    std::uint64_t first_of_history(std::uint64_t end) const;
    void settle_most_held();
    void make_sure(std::uint32_t slots);
    void count_sure() const;
    std::uint32_t count_members(bool publishers) const;
    std::uint64_t held_by_others() const;
    bool recover_locked();
    bool anyone_left() const;
    void remove_files() const noexcept;
    void make_segment(std::uint32_t segment, std::uint64_t size);
    bool map_segment(std::uint32_t segment);
    void keep_segment(std::uint32_t segment, std::uint64_t slot_size, std::uint64_t bytes, File file);
    std::uint64_t segment_size_of(std::uint32_t segment) const;
    std::string file_name(const char *kind) const;
    std::string bell_name(bool publisher, std::uint32_t member) const;
    void close_files() noexcept;
    void wake_readers_now(std::int32_t message_vchan);
    void wake_publishers_now(std::uint64_t cursor);
    std::string channel_name() const { return options.mux.empty() ? options.name : options.mux; }

    std::string encoded_;
    File control_file_;
    Mapping control_, tables_memory_, vchans_memory_;
    std::vector<SegmentMap> segments_;
    std::uint64_t nonce_ = 0;
    std::uint64_t taken_ = 0;
    std::uint32_t generation_ = 0;
    bool joined_ = false;
};

// A channel as others see it.
struct MemberView {
    bool is_publisher = false, reliable = false, alive = false, asleep = false;
    bool here = false;          // it is alive, and pid is its number here
    std::uint64_t process = 0;  // the token of its process
    std::uint32_t index = 0, pid = 0, most_held = 0;
    std::int32_t vchan = -1;
    std::uint64_t count = 0, bytes = 0, dropped = 0, joined_ns = 0, cursor = 0;
    std::uint32_t held = 0;              // slots that it keeps from being reused
    std::int64_t oldest_held_ns = 0;     // when the oldest message among them was published
    std::uint64_t waiting = 0;           // messages that it can still read
    std::uint64_t overwritten = 0;       // those that it can read no more and has not counted as lost itself
};
struct ChannelView {
    std::string name, type, problem;
    std::string durable;  // the directory where its publisher keeps the messages, or empty
    std::uint32_t slots = 0, metadata_size = 0, flags = 0, mode = 0, owner = 0;
    std::uint64_t slot_size = 0, memory_bytes = 0, messages = 0, made_ns = 0;
    std::uint32_t free_slots = 0, owned_slots = 0, live_slots = 0, held_slots = 0;
    std::int64_t last_ns = 0;  // when the last message was published
    std::vector<MemberView> members;
    std::vector<std::pair<std::int32_t, std::string>> vchans, vchan_types;  // by id; those with a type
};
std::vector<ChannelView> list_channels();
// What describes the type of a channel, every version, a line each; empty if nobody has said it, or there is no channel.
std::string described_type(const std::string &name);
// What the channel with that file name is, "an ordinary channel" or "a multiplexer"; empty if it has no live member.
std::string channel_in_use(const std::string &encoded);
// The multiplexer of that virtual channel, if it is in use and not the one with that nonce; else empty.
std::string multiplexer_of(const std::string &encoded, std::uint64_t own_nonce);

// Records every dead member of every channel (deaths.hpp); recovers nothing.
void look_for_deaths();

// Removes what dead processes left: channels without a live member, stray files, liveness files; and, in the channels
// of others, what their dead members held.
struct Cleaned {
    std::vector<std::string> removed, recovered;  // names of channels
};
Cleaned clean_channels();

}  // namespace penstock::shm
