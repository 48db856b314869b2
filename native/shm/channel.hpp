// The algorithm: lock-free publishing and reading in memory that the caller provides. No system call and no allocation
// per message, so that native tests can run it in plain memory with many threads.
//
// Rules
//   - Every operation that decides something is sequentially consistent; there is no stand-alone fence.
//   - Whatever is read from shared memory may be invalid (a hostile writer): indexes are checked, loops are bounded.
//   - Writer and Reader are the private side of one member and are used by one thread at a time.
//   - A member that dies after any step leaves words that recover_publisher and recover_subscriber repair; both may
//     be repeated, and run under the channel's file lock.
#pragma once

#include <bit>
#include <cstring>
#include <vector>

#include "shm/layout.hpp"
#include "shm/step.hpp"

namespace penstock::shm {

// A publisher's private side.
struct Writer {
    std::uint32_t index = 0;
    bool reliable = false;
    std::int32_t vchan = -1;
    std::uint64_t floor = 0;  // every reliable subscriber has seen all sequences below it
    std::uint64_t lowered = 0;  // the value of Header::lowered when floor was computed
    std::uint64_t ordinal = 0;  // ordinal of the last published message
};

// A subscriber's private side.
struct Reader {
    struct Pin {
        std::uint64_t sequence = 0;
        std::uint32_t count = 0;  // handles in this process that share the one reference
    };
    std::uint32_t index = 0;
    std::int32_t vchan = -1;
    std::uint64_t cursor = 1;
    std::uint32_t held = 0;
    std::uint32_t most_held = 1;  // slots it may always hold
    std::uint32_t extra = 0;      // further slots that it has claimed
    bool may_exceed = false;      // it may claim more while slots are free
    std::uint64_t lost = 0;  // sequences that were overwritten before it read them, since the cursor was first set
    std::vector<Pin> pins;   // by slot
};

enum class Taken { yes, unread, held, none };
enum class Found { message, nothing, limit, damaged };

struct Channel {
    Header *header = nullptr;
    Word *reader_sleepers = nullptr, *publisher_sleepers = nullptr, *active = nullptr, *reliable = nullptr,
         *exceeding = nullptr;
    Member *publishers = nullptr, *subscribers = nullptr;
    std::uint32_t publisher_capacity = 0, subscriber_capacity = 0;
    Tables *tables = nullptr;
    Slot *slots = nullptr;
    Word *more_holders = nullptr, *ring = nullptr, *hints = nullptr, *hint_summary = nullptr;
    std::uint8_t *metadata = nullptr;
    std::uint32_t slot_count = 0, metadata_stride = 0;
    std::uint64_t ring_size = 0;
    unsigned ring_bits = 0;
    Vchan *vchans = nullptr;

    std::uint32_t publisher_words() const { return publisher_capacity / 64; }
    std::uint32_t subscriber_words() const { return subscriber_capacity / 64; }

    void attach_control(void *memory, std::uint32_t publishers_most, std::uint32_t subscribers_most) {
        auto *base = static_cast<std::uint8_t *>(memory);
        ControlPlaces at(publishers_most, subscribers_most);
        header = reinterpret_cast<Header *>(base);
        reader_sleepers = reinterpret_cast<Word *>(base + at.reader_sleepers);
        publisher_sleepers = reinterpret_cast<Word *>(base + at.publisher_sleepers);
        active = reinterpret_cast<Word *>(base + at.active);
        reliable = reinterpret_cast<Word *>(base + at.reliable);
        exceeding = reinterpret_cast<Word *>(base + at.exceeding);
        publishers = reinterpret_cast<Member *>(base + at.publishers);
        subscribers = reinterpret_cast<Member *>(base + at.subscribers);
        publisher_capacity = publishers_most;
        subscriber_capacity = subscribers_most;
    }

    void attach_tables(void *memory, std::uint32_t count, std::uint32_t stride) {
        auto *base = static_cast<std::uint8_t *>(memory);
        TablePlaces at(count, subscriber_words(), stride);
        tables = reinterpret_cast<Tables *>(base);
        slots = reinterpret_cast<Slot *>(base + at.slots);
        more_holders = reinterpret_cast<Word *>(base + at.more_holders);
        ring = reinterpret_cast<Word *>(base + at.ring);
        hints = reinterpret_cast<Word *>(base + at.hints);
        hint_summary = reinterpret_cast<Word *>(base + at.hint_summary);
        metadata = base + at.metadata;
        slot_count = count;
        metadata_stride = stride;
        ring_size = ring_size_for(count);
        ring_bits = unsigned(std::countr_zero(ring_size));
    }

    // What a new tables file must hold beyond zeros.
    void format_tables() {
        tables->slots = slot_count;
        tables->subscriber_words = subscriber_words();
        tables->ring_size = ring_size;
        tables->metadata_stride = metadata_stride;
        tables->tail.store(1);
        tables->oldest.store(1);
        for (std::uint32_t s = 0; s < slot_count; ++s) slots[s].vchan.store(-1);
        rebuild_hints();
        tables->magic = tables_magic;
    }

    // ------------------------------------------------------------------------------------------ ring

    Word &entry_at(std::uint64_t sequence) const { return ring[sequence & (ring_size - 1)]; }
    std::uint64_t entry_of(std::uint64_t sequence, std::uint32_t slot) const {
        return (((sequence >> ring_bits) + 1) << 20) | slot;
    }
    std::uint64_t lap_of(std::uint64_t sequence) const { return (sequence >> ring_bits) + 1; }
    static std::uint64_t lap_in(std::uint64_t entry) { return entry >> 20; }
    static std::uint32_t slot_in(std::uint64_t entry) { return std::uint32_t(entry) & (max_slots - 1); }

    std::uint64_t tail() const { return tables->tail.load() & sequence_mask; }

    // The first sequence that the ring still names. Of the messages before it that are still in their slots, reliable
    // subscribers find those of reliable publishers (next_kept), and nobody the others.
    std::uint64_t first_in_ring() const {
        std::uint64_t end = tail();
        return end > ring_size ? end - ring_size : 1;
    }
    std::uint64_t oldest() const {
        std::uint64_t mark = tables->oldest.load() & sequence_mask, first = first_in_ring();
        return mark > first ? mark : first;
    }

    // Completes what was installed at the tail. Any member may do this, any number of times.
    void help() {
        for (std::uint64_t turns = 0; turns < 2 * ring_size; ++turns) {
            std::uint64_t t = tail();
            std::uint64_t entry = entry_at(t).load();
            if (lap_in(entry) != lap_of(t)) return;
            std::uint32_t s = slot_in(entry);
            if (s >= slot_count) return;
            Slot &slot = slots[s];
            std::uint64_t state = slot.state.load();
            // An earlier sequence means that it is not done yet; t or a later one that another member did it.
            if (kind_of(state) == slot_owned && sequence_of(state) < t) {
                PENSTOCK_STEP("help.before_live");
                slot.state.compare_exchange_strong(state, live(t));
                PENSTOCK_STEP("help.after_live");
            }
            std::int64_t time = slot.timestamp_ns.load();
            std::int32_t vchan = slot.vchan.load();
            std::uint64_t ordinal = slot.ordinal.load();
            if (slot.state.load() == live(t)) {  // still this message, so what was read belongs to it
                std::int64_t last = tables->last_timestamp_ns.load();
                while (last < time && !tables->last_timestamp_ns.compare_exchange_weak(last, time)) {
                }
                if (vchans && vchan >= 0 && std::uint32_t(vchan) < max_vchans) {
                    std::uint64_t before = ordinal - 1;
                    vchans[vchan].tail.compare_exchange_strong(before, ordinal);
                }
                PENSTOCK_STEP("help.before_tail");
            }
            tables->tail.compare_exchange_strong(t, t + 1);
            PENSTOCK_STEP("help.after_tail");
        }
    }

    // ------------------------------------------------------------------------------------------ holders

    Word &holder_word(std::uint32_t s, std::uint32_t word) const {
        return word == 0 ? slots[s].holders : more_holders[std::uint64_t(s) * (subscriber_words() - 1) + word - 1];
    }
    bool is_held(std::uint32_t s) const {
        if (slots[s].holders.load()) return true;
        for (std::uint32_t word = 1; word < subscriber_words(); ++word)
            if (holder_word(s, word).load()) return true;
        return false;
    }

    // ------------------------------------------------------------------------------------------ who may hold how many

    // Slots that members may hold; the others keep the history. As long as few are held, the newest messages stay in
    // their slots, because a publisher takes the oldest slot that nobody holds.
    std::uint64_t to_hold() const {
        std::uint64_t kept = header->history.load(std::memory_order_relaxed);
        return kept < slot_count ? slot_count - kept : slot_count;
    }

    // Slots that all members may always hold, and those that subscribers have claimed. Below to_hold(), a publisher
    // finds a slot.
    std::uint64_t claimed() const {
        std::uint64_t sum = header->sure.load();
        for (std::uint32_t word = 0; word < subscriber_words(); ++word)
            for (std::uint64_t bits = exceeding[word].load(); bits; bits &= bits - 1)
                sum += subscribers[word * 64 + unsigned(std::countr_zero(bits))].extra.load();
        return sum;
    }
    std::uint32_t unclaimed() const {
        std::uint64_t sum = claimed();
        return sum + 1 < to_hold() ? std::uint32_t(to_hold() - 1 - sum) : 0;
    }

    // Claims so many more slots for the reader, or none. Two readers that claim the same slots see each other, so never
    // both get them.
    bool claim(Reader &reader, std::uint32_t more) {
        Word &mine = subscribers[reader.index].extra;
        std::uint64_t bit = 1ull << (reader.index % 64);
        if (!(exceeding[reader.index / 64].load(std::memory_order_relaxed) & bit)) exceeding[reader.index / 64].fetch_or(bit);
        PENSTOCK_STEP("claim.before_extra");
        mine.store(reader.extra + more);
        PENSTOCK_STEP("claim.after_extra");
        bool fits = claimed() < to_hold();
        if (fits) reader.extra += more;
        else mine.store(reader.extra);
        return fits;
    }

    // Returns slots that were claimed and are not held.
    void give_back_extra(Reader &reader) {
        std::uint32_t needed = reader.held > reader.most_held ? reader.held - reader.most_held : 0;
        if (needed >= reader.extra) return;
        reader.extra = needed;
        subscribers[reader.index].extra.store(needed, std::memory_order_release);
    }

    // Whether the reader may hold one more slot.
    bool may_hold_more(Reader &reader) {
        return reader.held < reader.most_held + reader.extra || (reader.may_exceed && claim(reader, 1));
    }

    // ------------------------------------------------------------------------------------------ hints of free slots

    void hint_free(std::uint32_t s) {
        hints[s / 64].fetch_or(1ull << (s % 64));
        hint_summary[s / 4096].fetch_or(1ull << (s / 64 % 64));
    }

    // Takes a slot that may be free out of the hints; slot_count if there is none.
    std::uint32_t next_hint() {
        for (std::uint32_t top = 0; top < (slot_count + 4095) / 4096; ++top) {
            for (std::uint64_t words = hint_summary[top].load(); words; words &= words - 1) {
                std::uint32_t word = top * 64 + std::uint32_t(std::countr_zero(words));
                std::uint64_t bits = hints[word].load();
                if (!bits) {
                    hint_summary[top].fetch_and(~(1ull << (word % 64)));
                    if (!hints[word].load()) continue;
                    hint_summary[top].fetch_or(1ull << (word % 64));
                    bits = hints[word].load();
                }
                while (bits) {
                    std::uint64_t bit = bits & -bits;
                    if (hints[word].fetch_and(~bit) & bit) {
                        std::uint32_t s = word * 64 + std::uint32_t(std::countr_zero(bit));
                        if (s < slot_count) return s;
                    }
                    bits &= ~bit;
                }
            }
        }
        return slot_count;
    }

    void rebuild_hints() {
        std::uint64_t first = oldest();
        for (std::uint32_t s = 0; s < slot_count; ++s) {
            std::uint64_t state = slots[s].state.load();
            if (kind_of(state) == slot_free || (kind_of(state) == slot_live && sequence_of(state) < first)) hint_free(s);
        }
    }

    // The publisher skips a held slot: whoever releases it sets the hint, unless it was released just now.
    void pass_by(std::uint32_t s) {
        slots[s].skipped.fetch_or(1);
        if (!is_held(s)) hint_free(s);
    }

    // The ring no longer refers to the slot's message. A reader that wants it finds it by next_kept, and sets the hint
    // when it releases it; if no reader does, or one has just released it, the hint is set here.
    void keep(std::uint32_t s) {
        slots[s].skipped.fetch_or(1);
        std::uint64_t state = slots[s].state.load();
        bool wanted = kind_of(state) == slot_live && (slots[s].flags.load() & message_reliable) &&
                      is_wanted(sequence_of(state), slots[s].vchan.load());
        if (!wanted && !is_held(s)) hint_free(s);
    }

    // ------------------------------------------------------------------------------------------ publishing

    // The sequence below which every reliable subscriber has seen everything.
    std::uint64_t reliable_floor() const {
        std::uint64_t floor = tail();
        for (std::uint32_t word = 0; word < subscriber_words(); ++word)
            for (std::uint64_t bits = reliable[word].load(); bits; bits &= bits - 1) {
                std::uint64_t cursor = subscribers[word * 64 + unsigned(std::countr_zero(bits))].cursor.load();
                if (cursor < floor) floor = cursor;
            }
        return floor;
    }

    bool any_subscriber() const {
        for (std::uint32_t word = 0; word < subscriber_words(); ++word)
            if (active[word].load()) return true;
        return false;
    }

    // Whether a reliable subscriber of that virtual channel has not seen message n yet.
    bool is_wanted(std::uint64_t sequence, std::int32_t vchan) const {
        for (std::uint32_t word = 0; word < subscriber_words(); ++word)
            for (std::uint64_t bits = reliable[word].load(); bits; bits &= bits - 1) {
                const Member &member = subscribers[word * 64 + unsigned(std::countr_zero(bits))];
                if (member.cursor.load() <= sequence && (member.vchan < 0 || member.vchan == vchan)) return true;
            }
        return false;
    }

    // An unreliable publisher skips messages of reliable publishers that reliable subscribers still want, and nothing
    // else.
    bool may_overwrite(Writer &writer, std::uint64_t sequence, std::uint32_t s) {
        bool unreliable = !(slots[s].flags.load() & message_reliable);
        if (!writer.reliable && unreliable) return true;
        std::uint64_t lowered = header->lowered.load();
        if (sequence < writer.floor && lowered == writer.lowered) return true;
        writer.lowered = lowered;
        writer.floor = reliable_floor();
        if (sequence < writer.floor || (unreliable && sequence < first_in_ring())) return true;
        return vchans && !is_wanted(sequence, slots[s].vchan.load());
    }

    // One try at one slot.
    Taken take(Writer &writer, std::uint32_t s) {
        Slot &slot = slots[s];
        std::uint64_t state = slot.state.load();
        std::uint64_t sequence = sequence_of(state);
        std::uint64_t owned = state_of(slot_owned, writer.index, sequence);
        if (kind_of(state) == slot_free) {
            PENSTOCK_STEP("take.before_owned");
            if (!slot.state.compare_exchange_strong(state, owned)) return Taken::none;
        } else {
            if (kind_of(state) != slot_live || sequence >= tail()) return Taken::none;
            if (!may_overwrite(writer, sequence, s)) return Taken::unread;
            if (is_held(s)) return Taken::held;
            std::uint64_t claiming = state_of(slot_claiming, writer.index, sequence);
            PENSTOCK_STEP("take.before_claiming");
            if (!slot.state.compare_exchange_strong(state, claiming)) return Taken::held;
            PENSTOCK_STEP("take.after_claiming");
            if (is_held(s)) {
                slot.state.compare_exchange_strong(claiming, live(sequence));
                PENSTOCK_STEP("take.after_restore");
                return Taken::held;
            }
            PENSTOCK_STEP("take.before_claimed");
            if (!slot.state.compare_exchange_strong(claiming, owned)) return Taken::held;  // a reader put it back
        }
        // Ours now: a reader that sets its bit at this moment has seen the old state, and will check again.
        if (slot.skipped.load(std::memory_order_relaxed)) slot.skipped.store(0, std::memory_order_relaxed);
        PENSTOCK_STEP("take.after_owned");
        return Taken::yes;
    }

    // A slot for the writer: never used or released out of order first, then the oldest message.
    // unread: a reliable subscriber has not seen the oldest; held: nothing can be taken.
    Taken acquire(Writer &writer, std::uint32_t &taken_slot) {
        if (writer.reliable && !any_subscriber()) return Taken::unread;
        Taken worst = Taken::none;
        bool kept = false;
        for (std::uint32_t tries = 0; tries <= slot_count; ++tries) {
            std::uint32_t s = next_hint();
            if (s >= slot_count) break;
            PENSTOCK_STEP("acquire.after_hint");
            // A hint may be stale: a message that `oldest` has not passed is only taken in its turn.
            std::uint64_t state = slots[s].state.load();
            if (kind_of(state) == slot_live && sequence_of(state) >= oldest()) continue;
            Taken result = take(writer, s);
            if (result == Taken::yes) return taken_slot = s, result;
            if (result == Taken::held) pass_by(s);
            if (result == Taken::unread) {
                keep(s);
                kept = true;
                if (sequence_of(state) < first_in_ring()) continue;
                lower_oldest(sequence_of(state));
                worst = result;
            }
        }
        for (std::uint64_t end = tail(), n = oldest(); n < end; ++n) {
            std::uint64_t entry = entry_at(n).load();
            Taken result = Taken::none;
            std::uint32_t s = slot_in(entry);
            if (lap_in(entry) == lap_of(n) && s < slot_count && slots[s].state.load() == live(n)) {
                fetch_ahead(n);
                result = take(writer, s);
                if (result == Taken::unread) {
                    if (!vchans && writer.reliable) return result;
                    // the next one may belong to another virtual channel, or to an unreliable publisher
                    worst = result;
                    continue;
                }
            }
            if (worst != Taken::unread) raise_oldest(n + 1);
            PENSTOCK_STEP("acquire.after_oldest");
            if (result == Taken::yes) return taken_slot = s, result;
            if (result == Taken::held && worst != Taken::unread) pass_by(s);
        }
        return kept || worst == Taken::unread ? Taken::unread : Taken::held;
    }

    // Prefetch the slot that will be needed a few messages later: its line is in another core's cache.
    void fetch_ahead(std::uint64_t n) const {
        std::uint64_t entry = entry_at(n + 6).load(std::memory_order_relaxed);
        if (slot_in(entry) >= slot_count || lap_in(entry) != lap_of(n + 6)) return;
        fetch_for_writing(&slots[slot_in(entry)]);  // readers write into it too: their bit
    }

    // The compiler's own prefetch fetches for reading where it builds for any machine; the line would be asked for twice.
    static void fetch_for_writing(const void *line) {
#if defined(__x86_64__)
        asm volatile("prefetchw %0" ::"m"(*static_cast<const char *>(line)));
#else
        __builtin_prefetch(line, 1);
#endif
    }

    void raise_oldest(std::uint64_t to) {
        std::uint64_t now = tables->oldest.load();
        while (now < to && !tables->oldest.compare_exchange_weak(now, to)) {
        }
    }
    void lower_oldest(std::uint64_t to) {
        std::uint64_t now = tables->oldest.load();
        while (now > to && !tables->oldest.compare_exchange_weak(now, to)) {
        }
    }

    // Publishes an owned slot; returns its sequence, 0 if the ring is damaged. Stores into the slot have release order:
    // a member that sees them early (help() of another member reads them for the tail) sees what was stored before too.
    std::uint64_t commit(Writer &writer, std::uint32_t s, std::int64_t now_ns) {
        Slot &slot = slots[s];
        slot.vchan.store(writer.vchan, std::memory_order_release);
        std::uint64_t owned = slot.state.load();
        for (std::uint64_t turns = 0; turns < (1ull << 32); ++turns) {
            std::uint64_t t = tail();
            std::uint64_t entry = entry_at(t).load();
            if (lap_in(entry) >= lap_of(t)) {
                help();
                if (tail() == t) return 0;  // the ring is damaged
                continue;
            }
            // A message that was skipped for so long that this place of the ring still refers to it: not passed by
            // `oldest` yet.
            std::uint32_t old = slot_in(entry);
            bool passed_over = t > ring_size && t - ring_size >= tables->oldest.load() && old < slot_count &&
                               slots[old].state.load() == live(t - ring_size);
            std::int64_t last = tables->last_timestamp_ns.load();
            slot.timestamp_ns.store(now_ns > last ? now_ns : last, std::memory_order_release);
            bool is_virtual = vchans && writer.vchan >= 0;
            std::uint64_t ordinal = is_virtual ? vchans[writer.vchan].tail.load() + 1 : t + header->before.load(std::memory_order_relaxed);
            slot.ordinal.store(ordinal, std::memory_order_release);
            if (tail() != t) continue;
            PENSTOCK_STEP("commit.before_install");
            if (entry_at(t).compare_exchange_strong(entry, entry_of(t, s))) {
                PENSTOCK_STEP("commit.after_install");
                // Does the first part of help() at once, because a reader may be waiting for it.
                if (kind_of(owned) == slot_owned) slot.state.compare_exchange_strong(owned, live(t));
                PENSTOCK_STEP("commit.after_live");
                writer.ordinal = ordinal;
                help();
                if (passed_over) [[unlikely]] keep(old);
                PENSTOCK_STEP("commit.after_help");
                return t;
            }
        }
        return 0;
    }

    void cancel(Writer &writer, std::uint32_t s) {
        std::uint64_t state = slots[s].state.load();
        if (kind_of(state) != slot_owned || member_of(state) != writer.index) return;
        PENSTOCK_STEP("cancel.before_free");
        slots[s].state.store(state_of(slot_free, 0, sequence_of(state)));
        PENSTOCK_STEP("cancel.after_free");
        hint_free(s);
    }

    // ------------------------------------------------------------------------------------------ reading

    // How often a reader checks before it completes what a publisher has installed: doing it at the same time slows
    // both.
    static constexpr int publisher_turns = 16;

    // Tries to hold message n in slot s.
    bool pin(Reader &reader, std::uint64_t n, std::uint32_t s) {
        Reader::Pin &mine = reader.pins[s];
        if (mine.count) {  // this process holds the slot already, so it cannot have changed
            if (mine.sequence != n) return false;
            ++mine.count;
            return true;
        }
        Slot &slot = slots[s];
        std::uint64_t bit = 1ull << (reader.index % 64);
        Word &holders = holder_word(s, reader.index / 64);
        PENSTOCK_STEP("pin.before_bit");
        holders.fetch_or(bit);
        PENSTOCK_STEP("pin.after_bit");
        std::uint64_t state = slot.state.load();
        for (int turns = 0; turns < 64 && state != live(n); ++turns) {
            if (kind_of(state) == slot_claiming && sequence_of(state) == n) {
                if (slot.state.compare_exchange_strong(state, live(n))) state = live(n);
            } else if (kind_of(state) == slot_owned && sequence_of(state) < n) {
                // Installed and not completed: this will happen soon, unless its publisher has died.
                if (turns >= publisher_turns) help();
                state = slot.state.load();
            } else {
                break;
            }
        }
        if (state != live(n)) {
            unhold(s, holders, bit);
            return false;
        }
        PENSTOCK_STEP("pin.after_check");
        mine = {n, 1};
        ++reader.held;
        return true;
    }

    void unhold(std::uint32_t s, Word &holders, std::uint64_t bit) {
        PENSTOCK_STEP("unhold.before_bit");
        holders.fetch_and(~bit);
        PENSTOCK_STEP("unhold.after_bit");
        if (slots[s].skipped.load()) hint_free(s);
    }

    // True when the slot was given back (no other handle of this process shares the reference).
    bool unpin(Reader &reader, std::uint32_t s) {
        Reader::Pin &mine = reader.pins[s];
        if (mine.count == 0 || --mine.count) return false;
        --reader.held;
        unhold(s, holder_word(s, reader.index / 64), 1ull << (reader.index % 64));
        if (reader.extra) [[unlikely]] give_back_extra(reader);
        return true;
    }

    void move_cursor(Reader &reader, std::uint64_t to) {
        reader.cursor = to;
        PENSTOCK_STEP("read.before_cursor");
        subscribers[reader.index].cursor.store(to);
        PENSTOCK_STEP("read.after_cursor");
    }

    // Whether message n, in slot s as far as the ring says, is of another virtual channel.
    bool is_foreign(const Reader &reader, std::uint64_t n, std::uint32_t s) {
        if (reader.vchan < 0) return false;
        std::int32_t vchan = slots[s].vchan.load();
        std::uint64_t state = slots[s].state.load();
        bool whole = state == live(n) || (kind_of(state) == slot_claiming && sequence_of(state) == n);
        return whole && vchan != reader.vchan;
    }

    // The first message from sequence `from` on, before `to`, that the ring no longer refers to and that was kept in
    // its slot for a reliable subscriber; `to` if there is none.
    std::uint64_t next_kept(const Reader &reader, std::uint64_t from, std::uint64_t to, std::uint32_t &found_slot) const {
        if (!(reliable[reader.index / 64].load() >> (reader.index % 64) & 1)) return to;
        for (std::uint32_t s = 0; s < slot_count; ++s) {
            std::uint64_t state = slots[s].state.load(), n = sequence_of(state);
            if (kind_of(state) != slot_live || n < from || n >= to) continue;
            bool ours = (slots[s].flags.load() & message_reliable) && (reader.vchan < 0 || slots[s].vchan.load() == reader.vchan);
            if (!ours || slots[s].state.load() != state) continue;
            found_slot = s;
            to = n;
        }
        return to;
    }
    // Where a reader continues that has fallen a whole ring behind at n.
    std::uint64_t next_in_ring(std::uint64_t n) const {
        std::uint64_t end = tail();
        return end > ring_size && end - ring_size > n ? end - ring_size : n + 1;
    }

    // The next message, held and passed by the cursor.
    Found next(Reader &reader, std::uint32_t &found_slot) {
        std::uint64_t n = reader.cursor;
        Found result = Found::nothing;
        for (std::uint64_t turns = 0; turns <= 2 * ring_size; ++turns) {
            std::uint64_t entry = entry_at(n).load();
            if (lap_in(entry) < lap_of(n)) break;
            std::uint32_t s = slot_in(entry);
            if (lap_in(entry) > lap_of(n)) {  // a whole ring behind
                if (tail() <= n) return Found::damaged;
                std::uint64_t to = next_in_ring(n), kept = next_kept(reader, n, to, s);
                reader.lost += kept - n;
                n = kept;
                if (n == to) continue;
                turns += slot_count;
            } else if (s >= slot_count) {
                return Found::damaged;
            } else if (reader.vchan >= 0) {
                std::uint64_t state = slots[s].state.load();
                if (kind_of(state) == slot_owned && sequence_of(state) < n) help();
                if (is_foreign(reader, n, s)) {
                    ++n;
                    continue;
                }
            }
            if (!may_hold_more(reader)) [[unlikely]] {
                std::uint64_t state = slots[s].state.load();
                bool gone = state != live(n) && !(kind_of(state) == slot_claiming && sequence_of(state) == n) &&
                            !(kind_of(state) == slot_owned && sequence_of(state) < n);
                if (!gone) {
                    result = Found::limit;
                    break;
                }
            } else if (fetch_ahead(n); pin(reader, n, s)) {
                move_cursor(reader, n + 1);
                found_slot = s;
                return Found::message;
            }
            ++reader.lost;
            ++n;
        }
        if (n != reader.cursor) move_cursor(reader, n);
        if (reader.extra) [[unlikely]] give_back_extra(reader);
        return result;
    }

    // Whether next() would find something; costs one load if there is nothing. On a virtual channel, messages of other
    // channels are skipped on the way, and so are overwritten ones.
    bool has_next(Reader &reader) {
        std::uint64_t n = reader.cursor;
        bool found = false;
        for (std::uint64_t turns = 0; turns <= 2 * ring_size; ++turns) {
            std::uint64_t entry = entry_at(n).load();
            if (lap_in(entry) < lap_of(n)) break;
            std::uint32_t s = slot_in(entry);
            found = reader.vchan < 0 || s >= slot_count;
            if (found) break;
            if (lap_in(entry) > lap_of(n)) {  // a whole ring behind
                std::uint64_t to = next_in_ring(n);
                n = next_kept(reader, n, to, s);
                if ((found = n < to)) break;
                continue;
            }
            std::uint64_t state = slots[s].state.load();
            if (kind_of(state) == slot_owned && sequence_of(state) < n) {
                help();
                state = slots[s].state.load();
            }
            found = state == live(n) || (kind_of(state) == slot_claiming && sequence_of(state) == n) ||
                    (kind_of(state) == slot_owned && sequence_of(state) < n);
            if (found && !is_foreign(reader, n, s)) break;
            found = false;
            ++n;
        }
        if (n != reader.cursor) move_cursor(reader, n);
        return found;
    }

    // ------------------------------------------------------------------------------------------ sleeping

    // Announces that the member is about to sleep; returns the mark, which changes when the member is woken.
    static std::uint64_t arm(Word *sleepers, Member &member, std::uint32_t index, bool on_descriptor) {
        std::uint64_t generation = (member.sleep.load() >> 2) + 1;
        std::uint64_t mark = generation << 2 | (on_descriptor ? asleep_on_descriptor : 0) | asleep;
        member.sleep.store(mark);
        PENSTOCK_STEP("arm.before_summary");
        sleepers[index / 64].fetch_or(1ull << (index % 64));
        PENSTOCK_STEP("arm.after_summary");
        return mark;
    }
    // Only the sleeper clears its summary bit.
    static void disarm(Word *sleepers, Member &member, std::uint32_t index) {
        member.sleep.fetch_and(~asleep);
        sleepers[index / 64].fetch_and(~(1ull << (index % 64)));
    }

    // Calls ring_bell(index, on_descriptor) for each sleeper of the virtual channel. The bell is rung before the mark
    // is cleared, so that a waker that dies in between causes one wake-up too many and never one too few.
    template <typename Bell>
    static void wake(Word *sleepers, std::uint32_t words, Member *members, std::int32_t vchan, std::uint64_t cursor,
                     Bell &&ring_bell) {
        for (std::uint32_t word = 0; word < words; ++word)
            for (std::uint64_t bits = sleepers[word].load(); bits; bits &= bits - 1) {
                std::uint32_t index = word * 64 + unsigned(std::countr_zero(bits));
                Member &member = members[index];
                std::uint64_t sleep = member.sleep.load();
                if (!(sleep & asleep) || (vchan >= 0 && member.vchan >= 0 && member.vchan != vchan)) continue;
                if (cursor < member.wanted_cursor.load()) continue;
                PENSTOCK_STEP("wake.before_bell");
                ring_bell(index, (sleep & asleep_on_descriptor) != 0);
                PENSTOCK_STEP("wake.after_bell");
                member.sleep.compare_exchange_strong(sleep, sleep & ~asleep);
            }
    }
    template <typename Bell>
    void wake_readers(std::int32_t vchan, Bell &&ring_bell) {
        wake(reader_sleepers, subscriber_words(), subscribers, vchan, ~0ull, ring_bell);
    }
    // `cursor`: how far the waking reader has read; all ones: something else has changed.
    template <typename Bell>
    void wake_publishers(std::uint64_t cursor, Bell &&ring_bell) {
        wake(publisher_sleepers, publisher_words(), publishers, -1, cursor, ring_bell);
    }

    // ------------------------------------------------------------------------------------------ recovery

    // Repairs what a dead publisher left. What it had installed in the ring counts as published.
    void recover_publisher(std::uint32_t index) {
        if (tables) {
            help();
            for (std::uint32_t s = 0; s < slot_count; ++s) {
                std::uint64_t state = slots[s].state.load();
                if (member_of(state) != index) continue;
                if (kind_of(state) == slot_claiming)
                    slots[s].state.compare_exchange_strong(state, live(sequence_of(state)));
                else if (kind_of(state) == slot_owned)
                    slots[s].state.compare_exchange_strong(state, state_of(slot_free, 0, sequence_of(state)));
                PENSTOCK_STEP("recover.after_slot");
            }
            rebuild_hints();
        }
        publisher_sleepers[index / 64].fetch_and(~(1ull << (index % 64)));
        publishers[index].sleep.fetch_and(~asleep);
    }

    // Repairs what a dead subscriber left; also used for one that leaves.
    void recover_subscriber(std::uint32_t index) {
        std::uint64_t bit = 1ull << (index % 64);
        active[index / 64].fetch_and(~bit);
        reliable[index / 64].fetch_and(~bit);
        PENSTOCK_STEP("recover.after_active");
        subscribers[index].extra.store(0);
        exceeding[index / 64].fetch_and(~bit);
        if (tables) {
            for (std::uint32_t s = 0; s < slot_count; ++s) holder_word(s, index / 64).fetch_and(~bit);
            rebuild_hints();
        }
        reader_sleepers[index / 64].fetch_and(~bit);
        subscribers[index].sleep.fetch_and(~asleep);
    }
};

}  // namespace penstock::shm
