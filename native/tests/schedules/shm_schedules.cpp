// native/shm/channel.hpp itself, not a model of it, under every schedule of a few participants with at most so many
// deviations from running one after the other: preemptions and deaths. What the dead left is recovered while the others
// go on, and recovery may die too.
//
// Checked in every run: bytes are whole and stay so while held; sequences and each publisher's numbers come in order; a
// reliable subscriber misses nothing; nobody sleeps for ever (there are no time-outs here: a lost wake-up is found);
// in the end no slot is held or lost. All of it twice: with sequential consistency, and with relaxed and release stores that
// others see as late as they may; shm_stress.cpp under ThreadSanitizer is for the rest.
//
// Beside an unreliable publisher, also one that goes round the ring, a reliable subscriber misses nothing of the reliable one. Subscribers that hold more than they
// are sure of leave a slot for each publisher and one more.
//
//   shm_schedules [DEVIATIONS [SECONDS]]     all configurations; each stops after SECONDS and says so
#include "fibers.hpp"

#define PENSTOCK_SHM_ATOMIC schedules::Stepped
#include "shm/channel.hpp"

#include <chrono>
#include <cstring>
#include <string>

using namespace penstock::shm;
using schedules::Deviation;
using schedules::dies;
using schedules::Scheduler;
using schedules::Stepped;

namespace {

struct Configuration {
    const char *name;
    int publishers, subscribers;
    std::uint32_t slots;
    int messages;  // of each publisher
    bool reliable, mortal, is_virtual;
    bool mixed = false;    // publisher 1 is unreliable beside a reliable one, and publishes so many messages:
    int unreliable_messages = 0;
    bool exceeds = false;  // subscribers are sure of one slot and claim more
};

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) return scheduler.fail(#condition);                              \
    } while (0)

constexpr int most_members = 2;

class World {
   public:
    Scheduler scheduler;
    Configuration how;

    explicit World(const Configuration &configuration) : how(configuration) {
        control_bytes_ = ControlPlaces(64, 64).total;
        tables_bytes_ = TablePlaces(how.slots, 1, 0).total;
        control_ = static_cast<std::uint8_t *>(std::aligned_alloc(128, round_up(control_bytes_, 128)));
        tables_ = static_cast<std::uint8_t *>(std::aligned_alloc(128, round_up(tables_bytes_, 128)));
        payload_ = std::make_unique<Payload[]>(how.slots);
        vchans_ = std::make_unique<Vchan[]>(most_members);
        scheduler.on_death = [this](int fiber) { bury(fiber); };
    }
    World(const World &) = delete;
    ~World() {
        std::free(control_);
        std::free(tables_);
    }

    // One run with the scheduler's deviations; false when something was found.
    bool run() {
        set_up();
        if (!scheduler.run()) return false;
        check_rest();
        return !scheduler.failed;
    }

   private:
    struct Payload {
        Stepped<std::uint64_t> first, second;
    };
    struct Member {
        bool is_publisher = false;
        std::uint32_t index = 0;
        Writer writer;
        Reader reader;
        int sent = 0;
        bool bell = false, finished = false, has_died = false;
    };

    void set_up() {
        std::memset(control_, 0, control_bytes_);
        std::memset(tables_, 0, tables_bytes_);
        for (int v = 0; v < most_members; ++v) vchans_[v].tail.poke(0);
        channel_ = Channel();
        channel_.attach_control(control_, 64, 64);
        channel_.attach_tables(tables_, how.slots, 0);
        channel_.format_tables();
        if (how.is_virtual) channel_.vchans = vchans_.get();
        channel_.header->sure.poke(std::uint64_t(how.publishers + how.subscribers));
        scheduler.begin();
        lock_owner_ = -1;
        publishing_ = how.publishers;
        count_ = 0;
        for (int i = 0; i < how.subscribers; ++i) {
            Member &member = fresh(false, std::uint32_t(i));
            join(member);
            int fiber = scheduler.add([this, &member] { subscribe(member); }, how.mortal);
            members_of_[fiber] = &member;
        }
        for (int i = 0; i < how.publishers; ++i) {
            Member &member = fresh(true, std::uint32_t(i));
            int fiber = scheduler.add([this, &member] { publish(member); }, how.mortal);
            members_of_[fiber] = &member;
        }
    }

    Member &fresh(bool is_publisher, std::uint32_t index) {
        Member &member = members_[count_++];
        member.is_publisher = is_publisher;
        member.index = index;
        member.sent = 0;
        member.bell = member.finished = member.has_died = false;
        return member;
    }

    // ------------------------------------------------------------------------------------------ participants

    void publish(Member &me) {
        me.writer = Writer();
        me.writer.index = me.index;
        me.writer.reliable = how.reliable && !(how.mixed && me.index == 1);
        me.writer.vchan = how.is_virtual ? std::int32_t(me.index) : -1;
        bool gives_up = how.reliable && !me.writer.reliable;
        while (me.sent < (gives_up ? how.unreliable_messages : how.messages)) {
            std::uint32_t s;
            Taken taken = channel_.acquire(me.writer, s);
            if (taken == Taken::unread && gives_up) {
                ++me.sent;
                continue;
            }
            if (taken != Taken::yes) {
                if (sleep_unless(me, channel_.publisher_sleepers, channel_.publishers[me.index],
                                 [&] { return channel_.acquire(me.writer, s) == Taken::yes; }))
                    continue;
            }
            std::uint64_t number = std::uint64_t(me.index) << 32 | std::uint64_t(++me.sent);
            payload_[s].first.store(number, std::memory_order_relaxed);  // as a copy of bytes is
            payload_[s].second.store(number, std::memory_order_relaxed);
            if (me.sent == 2 && me.index == 0) {
                channel_.cancel(me.writer, s);
                wake_publishers(~0ull);
                continue;
            }
            channel_.slots[s].flags.store(me.writer.reliable ? message_reliable : 0, std::memory_order_release);
            CHECK(channel_.commit(me.writer, s, 1) != 0);
            wake_readers(me.writer.vchan);
        }
        finish(me);
    }

    // No more comes from that publisher.
    void finish(Member &publisher) {
        if (!publisher.finished) --publishing_;
        publisher.finished = true;
        wake_readers(-1);
    }

    void subscribe(Member &me) {
        std::uint64_t last_sequence = me.reader.cursor - 1, last_number[most_members] = {};
        std::uint32_t held[4];
        const int most = how.exceeds ? 4 : 2;
        int count = 0;
        for (;;) {
            bool over = publishing_ == 0;
            std::uint32_t s;
            Found found = channel_.next(me.reader, s);
            CHECK(found != Found::damaged);
            if (found == Found::message) {
                std::uint64_t sequence = me.reader.pins[s].sequence, number = payload_[s].first.load();
                CHECK(payload_[s].second.load() == number);
                CHECK(sequence > last_sequence);
                if (how.reliable && me.reader.vchan < 0 && !how.mixed) CHECK(sequence == last_sequence + 1);
                if (how.exceeds) CHECK(held_by_all() + std::uint32_t(how.publishers) < how.slots);
                last_sequence = sequence;
                std::uint64_t publisher = number >> 32;
                CHECK(publisher < most_members && number > last_number[publisher]);
                if (how.mixed && publisher == 0 && (last_number[0] || !me.has_died))  // its second one is cancelled
                    CHECK(number == (last_number[0] == 1 ? 3 : last_number[0] + 1));
                last_number[publisher] = number;
                if (me.reader.vchan >= 0) CHECK(publisher == std::uint64_t(me.reader.vchan));
                held[count++] = s;
                wake_publishers(me.reader.cursor);
            } else if (found == Found::nothing && over) {
                break;
            }
            if (count && (found != Found::message || count == most)) {
                std::uint64_t number = payload_[held[0]].first.load();
                CHECK(number == payload_[held[0]].second.load() && number != 0);
                std::uint64_t state = channel_.slots[held[0]].state.peek();  // live, or claimed in vain
                CHECK(kind_of(state) >= slot_claiming && sequence_of(state) == me.reader.pins[held[0]].sequence);
                channel_.unpin(me.reader, held[0]);
                held[0] = held[--count];
                wake_publishers(me.reader.cursor);
            } else if (found == Found::nothing) {
                wake_publishers(~0ull);
                sleep_unless(me, channel_.reader_sleepers, channel_.subscribers[me.index],
                             [&] { return channel_.has_next(me.reader) || publishing_ == 0; });
            }
        }
        if (how.reliable && !how.mixed) CHECK(me.reader.lost == 0);
        if (how.mixed && !me.has_died && !first_publisher().has_died)
            CHECK(last_number[0] == std::uint64_t(how.messages == 2 ? 1 : how.messages));
        me.reader.held = 0;
        recover(me);  // what leaving is
    }

    const Member &first_publisher() const { return members_[how.subscribers]; }
    std::uint32_t held_by_all() const {
        std::uint32_t sum = 0;
        for (int i = 0; i < count_; ++i)
            if (!members_[i].is_publisher) sum += members_[i].reader.held;
        return sum;
    }

    // What Membership does for who joins; under the file lock but for the first ones.
    void join(Member &me) {
        me.reader.index = me.index;
        me.reader.vchan = how.is_virtual && me.index == 0 ? 0 : -1;
        me.reader.held = 0;
        me.reader.lost = 0;
        me.reader.most_held = how.exceeds ? 1 : 2;
        me.reader.may_exceed = how.exceeds;
        me.reader.extra = 0;
        me.reader.pins.assign(how.slots, {});
        penstock::shm::Member &place = channel_.subscribers[me.index];
        place.vchan = me.reader.vchan;
        std::uint64_t bit = 1ull << me.index;
        channel_.help();
        place.cursor.store(channel_.tail());
        if (how.reliable) channel_.reliable[0].fetch_or(bit);
        channel_.active[0].fetch_or(bit);
        me.reader.cursor = channel_.tail();
        place.cursor.store(me.reader.cursor);
        wake_publishers(~0ull);
    }

    // ------------------------------------------------------------------------------------------ death

    void bury(int fiber) {
        if (lock_owner_ == fiber) lock_owner_ = -1;
        Member &dead = *members_of_[fiber];
        dead.has_died = true;
        if (!dead.is_publisher) dead.reader.held = 0;  // nobody reads there any more; its claim counts until it is recovered
        scheduler.start(fiber, [this, &dead] { inherit(dead); }, how.mortal);
    }

    // Whoever finds the dead recovers what it left; then a publisher's place stays empty and a subscriber comes again.
    void inherit(Member &dead) {
        recover(dead);
        if (dead.is_publisher) return finish(dead);
        take_lock();
        join(dead);
        lock_owner_ = -1;
        subscribe(dead);
    }

    void recover(Member &whose) {
        take_lock();
        if (whose.is_publisher) channel_.recover_publisher(whose.index);
        else channel_.recover_subscriber(whose.index);
        wake_publishers(~0ull);
        wake_readers(-1);
        lock_owner_ = -1;
    }

    void take_lock() {
        Scheduler::step();
        while (lock_owner_ >= 0) {  // the others go on; flock is polled
            Scheduler::yield_to(lock_owner_);
            Scheduler::step();
        }
        lock_owner_ = scheduler.current();
    }

    // ------------------------------------------------------------------------------------------ sleeping

    // Publishers sleep on their FIFO, subscribers on their mark. True when it slept.
    template <typename Ready>
    bool sleep_unless(Member &me, Word *sleepers, penstock::shm::Member &place, Ready &&ready) {
        std::uint64_t mark = Channel::arm(sleepers, place, me.index, me.is_publisher);
        if (ready()) {
            Channel::disarm(sleepers, place, me.index);
            return false;
        }
        Scheduler::step();
        if (me.is_publisher ? !me.bell : place.sleep.peek() == mark) Scheduler::sleep();
        me.bell = false;
        Channel::disarm(sleepers, place, me.index);
        return true;
    }
    void ring(bool is_publisher, std::uint32_t index, bool on_descriptor) {
        Scheduler::step();
        Member *sleeper = nullptr;
        int fiber = 0;
        for (int i = 0; i < count_; ++i)
            if (members_of_[i]->is_publisher == is_publisher && members_of_[i]->index == index)
                sleeper = members_of_[i], fiber = i;
        if (!sleeper) return;
        Word &sleep = (is_publisher ? channel_.publishers : channel_.subscribers)[index].sleep;
        if (on_descriptor) sleeper->bell = true;
        else sleep.poke(sleep.peek() & ~asleep);
        scheduler.wake(fiber);
    }
    void wake_readers(std::int32_t vchan) {
        channel_.wake_readers(vchan, [&](std::uint32_t index, bool on_descriptor) { ring(false, index, on_descriptor); });
    }
    void wake_publishers(std::uint64_t cursor) {
        channel_.wake_publishers(cursor, [&](std::uint32_t index, bool on_descriptor) { ring(true, index, on_descriptor); });
    }

    // ------------------------------------------------------------------------------------------ the end

    void check_rest() {
        for (std::uint32_t s = 0; s < how.slots; ++s) {
            SlotKind kind = kind_of(channel_.slots[s].state.peek());
            CHECK(kind == slot_free || kind == slot_live);
            CHECK(!channel_.is_held(s));
        }
        std::uint64_t end = channel_.tail();
        for (std::uint64_t n = end > channel_.ring_size ? end - channel_.ring_size : 1; n < end; ++n)
            CHECK(Channel::lap_in(channel_.entry_at(n).peek()) == channel_.lap_of(n));
        Writer writer;
        writer.index = 63;
        channel_.rebuild_hints();
        for (std::uint32_t i = 0; i < how.slots; ++i) {
            std::uint32_t s;
            CHECK(channel_.acquire(writer, s) == Taken::yes);
        }
    }

    std::uint8_t *control_, *tables_;
    std::uint64_t control_bytes_, tables_bytes_;
    std::unique_ptr<Payload[]> payload_;
    std::unique_ptr<Vchan[]> vchans_;
    Channel channel_;
    Member members_[schedules::most_fibers];
    Member *members_of_[schedules::most_fibers];
    int count_ = 0, lock_owner_ = -1, publishing_ = 0;
};

struct Search {
    World &world;
    std::chrono::steady_clock::time_point deadline;
    std::uint64_t runs = 0, steps = 0, deaths = 0;
    bool complete = true;

    // Every schedule that begins with the scheduler's deviations and has up to `left` more. False: something was found.
    bool explore(int left) {
        if (!world.run()) return false;
        ++runs;
        std::vector<schedules::Choices> trace = world.scheduler.trace;
        steps += trace.size();
        if (left == 0) return true;
        std::vector<Deviation> &deviations = world.scheduler.deviations;
        std::uint32_t first = deviations.empty() ? 0 : deviations.back().step + 1;
        for (std::uint32_t step = first; step < trace.size(); ++step) {
            if (std::chrono::steady_clock::now() > deadline) return complete = false, true;
            for (int choice = dies; choice < schedules::most_fibers; ++choice) {
                bool possible = choice == dies ? trace[step].may_die
                                               : choice != trace[step].current && (trace[step].enabled >> choice & 1);
                if (!possible) continue;
                if (choice == dies) ++deaths;
                deviations.push_back({step, choice});
                bool sound = explore(left - 1);
                if (!sound) return false;
                deviations.pop_back();
            }
        }
        return true;
    }
};

bool check(const Configuration &how, bool late_stores, int deviations, double seconds) {
    World world(how);
    world.scheduler.late_stores = late_stores;
    auto now = std::chrono::steady_clock::now();
    Search search{world, now + std::chrono::milliseconds(std::int64_t(seconds * 1000))};
    bool sound = search.explore(deviations);
    double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - now).count();
    std::printf("%-52s %s, at most %d deviations: %s, %llu schedules, %llu steps, %.1f s\n", how.name,
                late_stores ? "late stores" : "stores at once", deviations,
                !sound ? "FAILED" : search.complete ? "all tried, sound" : "bounded by time, sound so far",
                (unsigned long long)search.runs, (unsigned long long)search.steps, took);
    if (!sound) {
        std::printf("  %s; deviations:", world.scheduler.why());
        for (const Deviation &deviation : world.scheduler.deviations) {
            if (deviation.choice == dies) std::printf(" step %u: dies;", deviation.step);
            else std::printf(" step %u: fiber %d goes on;", deviation.step, deviation.choice);
        }
        std::printf("\n");
    }
    std::fflush(stdout);
    return sound;
}

}  // namespace

int main(int count, char **arguments) {
    int deviations = count > 1 ? std::atoi(arguments[1]) : 2;
    double seconds = count > 2 ? std::atof(arguments[2]) : 20;
    const Configuration configurations[] = {
        {"1+1, 3 slots, reliable, deaths", 1, 1, 3, 3, true, true, false},
        {"1+2, 4 slots, reliable", 1, 2, 4, 4, true, false, false},
        {"1+2, 4 slots, reliable, deaths", 1, 2, 4, 3, true, true, false},
        {"1+2, 4 slots, unreliable, deaths", 1, 2, 4, 6, false, true, false},
        {"2+1, 4 slots, reliable, deaths", 2, 1, 4, 3, true, true, false},
        {"2+1, 4 slots, unreliable, deaths", 2, 1, 4, 4, false, true, false},
        {"2+2, 5 slots, reliable, deaths", 2, 2, 5, 3, true, true, false},
        {"2+2, 5 slots, unreliable, deaths", 2, 2, 5, 4, false, true, false},
        {"2+2, 5 slots, virtual, deaths", 2, 2, 5, 3, true, true, true},
        {"2+1, 4 slots, one unreliable, deaths", 2, 1, 4, 4, true, true, false, true, 4},
        {"2+2, 5 slots, one unreliable, deaths", 2, 2, 5, 3, true, true, false, true, 4},
        {"2+1, 4 slots, an unreliable one laps the ring, deaths", 2, 1, 4, 3, true, true, false, true, 70},
        {"2+2, 5 slots, an unreliable one laps the ring", 2, 2, 5, 2, true, false, false, true, 70},
        {"2+2, 5 slots, virtual, one unreliable", 2, 2, 5, 3, true, false, true, true, 4},
        {"1+2, 5 slots, claims, deaths", 1, 2, 5, 5, true, true, false, false, 0, true},
        {"1+2, 5 slots, claims, unreliable, deaths", 1, 2, 5, 5, false, true, false, false, 0, true},
    };
    bool sound = true;
    for (bool late_stores : {false, true})
        for (const Configuration &how : configurations) sound = check(how, late_stores, deviations, seconds) && sound;
    std::puts(sound ? "shm schedules: ok" : "shm schedules: FAILED");
    return sound ? 0 : 1;
}
