// A signal at every step of every wait: who looks for signals before each sleep, as the callers of these waits do, sees it
// while the wait goes on, and not when it is over.
// sources: shm/membership.cpp shm/joining.cpp shm/payload.cpp shm/bells.cpp shm/publisher.cpp shm/subscriber.cpp shm/files.cpp platform/checksum.cpp shm/deaths.cpp platform/deaths.cpp shm/directory.cpp platform/liveness.cpp platform/shared_directory.cpp counters/counters.cpp
// flags: -DPENSTOCK_STEPS=1
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "shm/publisher.hpp"
#include "shm/subscriber.hpp"

using namespace penstock::shm;

namespace {

volatile sig_atomic_t arrived = 0;
int steps_left = -1;  // the signal comes when they are used up

void take_step(const char *) {
    if (steps_left >= 0 && steps_left-- == 0) raise(SIGUSR1);
}

// How many steps the wait has up to its first sleep; each of them was tried.
int try_every_step(const char *name, const std::function<Woken(std::int64_t deadline_ns)> &wait) {
    for (int step = 0; step < 1000; ++step) {
        arrived = 0;
        steps_left = step;
        std::int64_t begin = penstock::shm::monotonic_ns(), deadline = begin + 60'000'000'000;
        bool tried = false;
        for (int turns = 0; !arrived && turns < 3; ++turns) {  // two slices pass without a signal: the step is not reached
            Woken woken = wait(deadline);
            if (woken == Woken::timeout || woken == Woken::closed) {
                std::printf("%s, step %d: the wait was over before the signal was seen\n", name, step);
                std::exit(1);
            }
            tried = arrived;
        }
        if (!tried && !arrived) return step;
    }
    return 1000;
}

}  // namespace

int main() {
    std::string directory = "/tmp/penstock-signals-" + std::to_string(getpid());
    setenv("PENSTOCK_SHM_DIR", directory.c_str(), 1);
    struct sigaction action {};
    action.sa_handler = [](int) { arrived = 1; };
    sigaction(SIGUSR1, &action, nullptr);
    {
        Options options;
        options.name = "/signals";
        options.slots = 8;
        options.reliable = true;
        options.retirement = true;
        Publisher publisher(options, false);
        int pipes[2];
        if (pipe(pipes) != 0) return 1;
        auto report = [](const char *name, int steps) {
            std::printf("%s: a signal at each of %d steps\n", name, steps);
            if (steps == 0) std::exit(1);
        };
        step_hook = take_step;
        report("publisher", try_every_step("publisher", [&](std::int64_t deadline) { return publisher.wait(deadline, 0, -1); }));
        report("wait_subscribers", try_every_step("wait_subscribers", [&](std::int64_t deadline) {
            return publisher.wait_subscribers(5, deadline);
        }));
        report("wait_retired", try_every_step("wait_retired", [&](std::int64_t deadline) { return publisher.wait_retired(deadline); }));
        step_hook = nullptr;
        options.most_held = 1;
        Subscriber subscriber(options, false, false);
        step_hook = take_step;
        report("subscriber", try_every_step("subscriber", [&](std::int64_t deadline) { return subscriber.wait(deadline, 0, -1); }));
        report("with a descriptor", try_every_step("with a descriptor", [&](std::int64_t deadline) {
            return subscriber.wait(deadline, 0, pipes[0]);
        }));
        report("at the limit", try_every_step("at the limit", [&](std::int64_t deadline) { return subscriber.wait_release(deadline); }));
        step_hook = nullptr;
        // A spin has no steps: it ends its slice whatever comes.
        std::int64_t begin = monotonic_ns();
        if (subscriber.wait(begin + 60'000'000'000, begin + 50'000'000'000, -1) != Woken::look) return 1;
    }
    std::string remove = "rm -rf " + directory;
    if (std::system(remove.c_str()) != 0) return 1;
    std::puts("shm signals: ok");
    return 0;
}
