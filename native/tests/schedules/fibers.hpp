// Fibers of one thread under a scheduler that tries schedules systematically.
//
// Every atomic operation is a step. A run is deterministic: the fiber that runs goes on until it sleeps or ends, then the
// next one that can goes on; a run differs from that by a few deviations (at step k another fiber goes on, or the one
// that runs dies). All runs with at most so many deviations are tried: delay-bounded search.
//
// With `late_stores` memory is as lazy as a weakly ordered machine may make it: a relaxed or release store is seen by the
// others only when its fiber's next sequentially consistent store or change is, or when the fiber sleeps, ends or dies.
#pragma once

#include <ucontext.h>

#include <atomic>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace schedules {

inline constexpr int most_fibers = 8;
inline constexpr int dies = -1;
inline constexpr std::uint32_t most_steps = 20'000;  // a run that takes longer goes round in circles

struct Deviation {
    std::uint32_t step;
    int choice;  // a fiber, or `dies`
};

// What could have been chosen at a step.
struct Choices {
    std::uint8_t enabled;  // one bit a fiber
    std::int8_t current;
    bool may_die;
};

class Scheduler {
   public:
    std::vector<Deviation> deviations;
    std::vector<Choices> trace;
    std::function<void(int)> on_death;
    bool failed = false;
    bool late_stores = false;

    Scheduler() {
        for (Fiber &fiber : fibers_) fiber.stack.reset(new char[stack_bytes]);
    }

    void begin() {
        trace.clear();
        next_deviation_ = 0;
        count_ = 0;
        failed = false;
        why_ = "";
    }
    int add(std::function<void()> program, bool mortal) {
        int index = count_++;
        start(index, std::move(program), mortal);
        return index;
    }
    // Another life for a fiber that died.
    void start(int index, std::function<void()> program, bool mortal) {
        Fiber &fiber = fibers_[index];
        fiber.program = std::move(program);
        fiber.mortal = mortal;
        fiber.asleep = fiber.over = false;
        fiber.late.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Scheduler::enter), 0);
    }
    // Runs all fibers to their end; false when something was found.
    bool run() {
        active_ = this;
        current_ = 0;
        while (!failed && !all_over()) {
            if (!can_run(current_) && !choose_next()) break;
            swapcontext(&main_, &fibers_[current_].context);
            if (killed_) {
                killed_ = false;
                on_death(current_);
            }
        }
        active_ = nullptr;
        return !failed;
    }

    // A step of the running fiber is about to happen.
    static void step() {
        if (active_) active_->at_step();
    }
    // The running fiber sleeps until wake(index).
    static void sleep() {
        Scheduler *self = active_;
        show_late();
        self->fibers_[self->current_].asleep = true;
        self->give_way();
    }
    // The running fiber waits for what another one does (a lock).
    static void yield_to(int other) {
        Scheduler *self = active_;
        if (!self->can_run(other)) return self->fail("waits for who does not run");
        int me = self->current_;
        self->current_ = other;
        swapcontext(&self->fibers_[me].context, &self->main_);
    }
    // What the running fiber has stored and others do not see yet; null where stores are seen at once.
    using Late = std::pair<void *, std::function<void()>>;
    static std::vector<Late> *late() {
        return active_ && active_->late_stores ? &active_->fibers_[active_->current_].late : nullptr;
    }
    static void show_late() {
        if (std::vector<Late> *stores = late()) {
            for (Late &store : *stores) store.second();
            stores->clear();
        }
    }
    bool is_asleep(int index) const { return fibers_[index].asleep; }
    void wake(int index) { fibers_[index].asleep = false; }
    int current() const { return current_; }
    static Scheduler *active() { return active_; }

    void fail(const char *why) {
        if (!failed) why_ = why;
        failed = true;
        if (active_) give_way();  // never comes back: the run is over
    }
    const char *why() const { return why_; }

   private:
    static constexpr std::size_t stack_bytes = 64 * 1024;
    struct Fiber {
        ucontext_t context;
        std::unique_ptr<char[]> stack;
        std::function<void()> program;
        bool asleep = false, over = true, mortal = false;
        std::vector<Late> late;
    };

    static void enter() {
        Scheduler *self = active_;
        self->fibers_[self->current_].program();
        show_late();
        self->fibers_[self->current_].over = true;
        self->give_way();
    }
    bool can_run(int index) const { return !fibers_[index].over && !fibers_[index].asleep; }
    bool all_over() const {
        for (int i = 0; i < count_; ++i)
            if (!fibers_[i].over) return false;
        return true;
    }
    bool choose_next() {
        for (int i = 1; i <= count_; ++i)
            if (int other = (current_ + i) % count_; can_run(other)) return current_ = other, true;
        why_ = "everybody sleeps";
        failed = true;
        return false;
    }
    void give_way() { swapcontext(&fibers_[current_].context, &main_); }

    void at_step() {
        for (;;) {
            auto now = std::uint32_t(trace.size());
            if (now >= most_steps) return fail("goes round in circles");
            std::uint8_t enabled = 0;
            for (int i = 0; i < count_; ++i)
                if (can_run(i)) enabled |= std::uint8_t(1u << i);
            trace.push_back({enabled, std::int8_t(current_), fibers_[current_].mortal});
            if (next_deviation_ >= deviations.size() || deviations[next_deviation_].step != now) return;
            int choice = deviations[next_deviation_++].choice;
            if (choice == dies) {
                show_late();
                fibers_[current_].over = killed_ = true;
                give_way();  // never comes back in this life
            }
            int me = current_;
            current_ = choice;
            swapcontext(&fibers_[me].context, &main_);
            return;
        }
    }

    static inline Scheduler *active_ = nullptr;
    Fiber fibers_[most_fibers];
    ucontext_t main_;
    int count_ = 0, current_ = 0;
    std::size_t next_deviation_ = 0;
    bool killed_ = false;
    const char *why_ = "";
};

// An atomic whose every operation is a step. Loads are sequentially consistent; stores too, unless they may be late.
template <typename T>
class Stepped {
   public:
    Stepped() = default;
    Stepped(const Stepped &) = delete;
    T load(std::memory_order = std::memory_order_seq_cst) const { return Scheduler::step(), seen(); }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) {
        Scheduler::step();
        std::vector<Scheduler::Late> *late = Scheduler::late();
        if (late && order != std::memory_order_seq_cst) return late->emplace_back(this, Store{this, value}), void();
        Scheduler::show_late();
        value_ = value;
    }
    T fetch_or(T bits) { return change([&](T v) { return v | bits; }); }
    T fetch_and(T bits) { return change([&](T v) { return v & bits; }); }
    T fetch_add(T more) { return change([&](T v) { return v + more; }); }
    bool compare_exchange_strong(T &expected, T wanted) {
        Scheduler::step();
        if (T now = seen(); now != expected) return expected = now, false;  // a change that fails shows nothing
        Scheduler::show_late();
        return value_ = wanted, true;
    }
    bool compare_exchange_weak(T &expected, T wanted) { return compare_exchange_strong(expected, wanted); }
    // Without a step: for checks, and for what the kernel does at once.
    T peek() const { return value_; }
    void poke(T value) { value_ = value; }

   private:
    struct Store {
        Stepped *place;
        T value;
        void operator()() const { place->value_ = value; }
    };
    // As the running fiber sees it: its own stores at once.
    T seen() const {
        if (const std::vector<Scheduler::Late> *late = Scheduler::late())
            for (auto store = late->rbegin(); store != late->rend(); ++store)
                if (store->first == this) return store->second.template target<Store>()->value;
        return value_;
    }
    template <typename Function>
    T change(Function &&function) {
        Scheduler::step();
        Scheduler::show_late();
        T before = value_;
        value_ = function(before);
        return before;
    }
    T value_;
};

}  // namespace schedules
