// Many publishers and subscribers of one channel as threads over plain memory, with deaths at random steps. Payloads
// are ordinary memory, so that ThreadSanitizer sees any access that the algorithm does not order.
//
// Checked: bytes are whole; a subscriber sees sequences and each publisher's numbers in order; reliable subscribers
// lose nothing; what was published by the dead counts; no slot is lost in the end.
#define PENSTOCK_STEPS 1
#include "shm/channel.hpp"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <thread>
#include <vector>

using namespace penstock::shm;

#define CHECK(condition)                                                            \
    do {                                                                            \
        if (!(condition)) {                                                         \
            std::fprintf(stderr, "line %d: %s (seed %u)\n", __LINE__, #condition, seed); \
            std::abort();                                                           \
        }                                                                           \
    } while (0)

namespace {

unsigned seed;
struct Died {};
thread_local std::minstd_rand *chance = nullptr;
thread_local unsigned death_odds = 0;  // one in so many steps

void maybe_die(const char *) {
    if (death_odds && (*chance)() % death_odds == 0) throw Died();
    if ((*chance)() % 64 == 0) std::this_thread::yield();
}

struct Payload {
    std::uint64_t publisher, number, inverse, filler[5];
};

struct World {
    std::uint32_t slots;
    std::unique_ptr<std::uint8_t, void (*)(void *)> control, tables;
    std::vector<Payload> payloads;
    Channel channel;
    std::mutex file_lock;
    std::atomic<std::uint64_t> published{0}, delivered{0}, deaths{0};
    std::atomic<bool> over{false};

    explicit World(std::uint32_t count)
        : slots(count),
          control(static_cast<std::uint8_t *>(std::aligned_alloc(128, round_up(ControlPlaces(64, 64).total, 128))), std::free),
          tables(static_cast<std::uint8_t *>(std::aligned_alloc(128, round_up(TablePlaces(count, 1, 0).total, 128))), std::free),
          payloads(count) {
        std::memset(control.get(), 0, ControlPlaces(64, 64).total);
        std::memset(tables.get(), 0, TablePlaces(count, 1, 0).total);
        channel.attach_control(control.get(), 64, 64);
        channel.attach_tables(tables.get(), count, 0);
        channel.format_tables();
    }

    void join(Reader &reader, std::uint32_t index, bool reliable) {
        std::lock_guard lock(file_lock);
        channel.recover_subscriber(index);
        reader = Reader();
        reader.index = index;
        reader.most_held = 2;
        reader.pins.assign(slots, {});
        Member &me = channel.subscribers[index];
        me.vchan = -1;
        me.cursor.store(channel.tail());
        if (reliable) channel.reliable[0].fetch_or(1ull << index);
        channel.active[0].fetch_or(1ull << index);
        reader.cursor = channel.tail();
        me.cursor.store(reader.cursor);
    }
};

void publish(World &world, std::uint32_t index, bool reliable, unsigned odds, std::uint64_t count) {
    std::minstd_rand generator(seed + 1000 + index);
    chance = &generator;
    std::uint64_t number = 0;
    while (number < count) {
        Writer writer;
        writer.index = index;
        writer.reliable = reliable;
        death_odds = odds;
        std::uint64_t tail_before = 0;
        try {
            while (number < count) {
                std::uint32_t s;
                if (world.channel.acquire(writer, s) != Taken::yes) {
                    std::this_thread::yield();
                    continue;
                }
                ++number;
                world.payloads[s] = Payload{index, number, ~number, {number, number, number, number, number}};
                if (generator() % 16 == 0) {
                    world.channel.cancel(writer, s);
                    continue;
                }
                tail_before = world.channel.tail();
                CHECK(world.channel.commit(writer, s, 1) != 0);
                world.published.fetch_add(1);
            }
        } catch (const Died &) {
            death_odds = 0;
            (void)tail_before;
            world.deaths.fetch_add(1);
            std::lock_guard lock(world.file_lock);
            world.channel.recover_publisher(index);
        }
    }
    death_odds = 0;
}

void subscribe(World &world, std::uint32_t index, bool reliable, unsigned odds) {
    std::minstd_rand generator(seed + 2000 + index);
    chance = &generator;
    Reader reader;
    for (bool again = true; again;) {
        death_odds = 0;
        world.join(reader, index, reliable);
        std::vector<std::uint64_t> last(64, 0);
        std::vector<std::uint32_t> held;
        std::uint64_t last_sequence = reader.cursor - 1;
        death_odds = odds;
        try {
            again = false;
            for (;;) {
                std::uint32_t s;
                bool over = world.over.load();
                Found found = world.channel.next(reader, s);
                CHECK(found != Found::damaged);
                if (found == Found::message) {
                    Payload got = world.payloads[s];
                    CHECK(got.inverse == ~got.number && got.filler[4] == got.number);
                    std::uint64_t sequence = reader.pins[s].sequence;
                    CHECK(sequence > last_sequence);
                    if (reliable) CHECK(sequence == last_sequence + 1);
                    last_sequence = sequence;
                    CHECK(got.number > last[got.publisher]);
                    last[got.publisher] = got.number;
                    CHECK(world.channel.slots[s].ordinal.load() == sequence);
                    world.delivered.fetch_add(1);
                    held.push_back(s);
                } else if (over && found == Found::nothing) {
                    break;
                }
                if (!held.empty() && (found == Found::limit || generator() % 2)) {
                    std::size_t pick = generator() % held.size();  // released out of order
                    CHECK(world.payloads[held[pick]].inverse == ~world.payloads[held[pick]].number);
                    std::uint32_t given = held[pick];
                    held.erase(held.begin() + std::ptrdiff_t(pick));
                    world.channel.unpin(reader, given);
                } else if (found == Found::nothing) {
                    std::this_thread::yield();
                }
            }
            for (std::uint32_t s : held) world.channel.unpin(reader, s);
            if (reliable) CHECK(reader.lost == 0);
        } catch (const Died &) {
            again = true;
            world.deaths.fetch_add(1);
        }
    }
    death_odds = 0;
    std::lock_guard lock(world.file_lock);
    world.channel.recover_subscriber(index);
}

// Everything is at rest: each slot must be free or live, held by nobody, and all of them must be to be had.
void check_rest(World &world) {
    Channel &channel = world.channel;
    for (std::uint32_t s = 0; s < world.slots; ++s) {
        SlotKind kind = kind_of(channel.slots[s].state.load());
        CHECK(kind == slot_free || kind == slot_live);
        CHECK(!channel.is_held(s));
    }
    Writer writer;
    writer.index = 63;
    channel.rebuild_hints();
    for (std::uint32_t i = 0; i < world.slots; ++i) {
        std::uint32_t s;
        CHECK(channel.acquire(writer, s) == Taken::yes);
    }
}

void round(unsigned publishers, unsigned subscribers, std::uint32_t slots, bool reliable, unsigned odds, std::uint64_t count) {
    World world(slots);
    std::vector<std::thread> readers, writers;
    for (unsigned i = 0; i < subscribers; ++i)
        readers.emplace_back(subscribe, std::ref(world), i, reliable && i % 2 == 0, i % 2 ? odds : 0);
    // Reliable publishers wait for a subscriber; all of them are there before anything is published.
    while (std::popcount(world.channel.active[0].load()) < int(subscribers)) std::this_thread::yield();
    for (unsigned i = 0; i < publishers; ++i) writers.emplace_back(publish, std::ref(world), i, reliable, odds, count);
    for (auto &thread : writers) thread.join();
    world.over.store(true);
    for (auto &thread : readers) thread.join();
    CHECK(world.channel.tail() - 1 >= world.published.load());
    check_rest(world);
    std::printf("%u+%u, %u slots, %s, deaths 1 in %u: %llu published, %llu read, %llu deaths\n", publishers, subscribers,
                slots, reliable ? "reliable" : "unreliable", odds, (unsigned long long)world.published.load(),
                (unsigned long long)world.delivered.load(), (unsigned long long)world.deaths.load());
}

}  // namespace

int main(int count, char **arguments) {
    seed = count > 1 ? unsigned(std::atoi(arguments[1])) : std::random_device()();
    std::uint64_t messages = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 3000;
    std::printf("seed %u\n", seed);
    step_hook = maybe_die;
    std::minstd_rand generator(seed);
    chance = &generator;
    for (unsigned odds : {0u, 300u}) {
        round(1, 2, 6, true, odds, messages);
        round(2, 1, 4, true, odds, messages);
        round(4, 4, 16, true, odds, messages);
        round(1, 2, 6, false, odds, messages);
        round(4, 4, 16, false, odds, messages);
        round(3, 8, 300, false, odds, messages);
    }
    std::puts("shm stress: ok");
    return 0;
}
