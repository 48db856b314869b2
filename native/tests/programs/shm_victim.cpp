// A participant that kills or stops itself at a named step. Compiled by tests/crash/test_shm_steps.py with
// PENSTOCK_STEPS.
//
//   shm_victim CHANNEL ACTION list              does ACTION and prints every step it goes through
//   shm_victim CHANNEL ACTION kill STEP NTH     dies by SIGKILL at the NTH time of STEP
//   shm_victim CHANNEL ACTION stop STEP NTH     stops itself there (SIGSTOP), to be woken or killed
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>

#include "shm/publisher.hpp"
#include "shm/step.hpp"
#include "shm/subscriber.hpp"

using namespace penstock::shm;

namespace {

std::string mode, wanted;
int nth = 1, seen = 0;
bool watching = false;

void at_step(const char *name) {
    if (!watching) return;
    if (mode == "list") {
        std::printf("%s\n", name);
        std::fflush(stdout);
    } else if (wanted == name && ++seen == nth) {
        kill(getpid(), mode == "stop" ? SIGSTOP : SIGKILL);
    }
}

Options options_for(const char *channel, bool reliable) {
    Options options;
    options.name = channel;
    options.reliable = reliable;
    return options;
}

void publish(Publisher &publisher, const char *text) {
    Publisher::Place place;
    while (publisher.reserve(place, std::strlen(text)) != Taken::yes) publisher.wait(-1, 0, -1);
    std::memcpy(place.data, text, std::strlen(text));
    publisher.publish(place, std::strlen(text), realtime_ns());
    publisher.wake_readers();
}

int act(const char *channel, const std::string &action) {
    if (action == "publish" || action == "publish_later" || action == "reliable_publish" || action == "leave_publisher" || action == "cancel" ||
        action == "grow") {
        Publisher publisher(options_for(channel, action == "reliable_publish"), false);
        if (action == "publish_later") {
            std::printf("ready\n");
            std::fflush(stdout);
            std::getchar();
        }
        watching = true;
        if (action == "cancel") {
            Publisher::Place place;
            publisher.reserve(place, 1);
            publisher.cancel(place.slot);
        } else if (action == "grow") {
            publisher.grow(publisher.slot_size() * 2);
            publish(publisher, "grown");
        } else if (action != "leave_publisher") {
            for (int i = 0; i < 3; ++i) publish(publisher, "victim");
        }
        watching = action == "leave_publisher";
    } else if (action == "join_publisher" || action == "join_virtual") {
        Options options = options_for(channel, false);
        if (action == "join_virtual") options.mux = options.name + "-mux";
        watching = true;
        Publisher publisher(options, false);
        watching = false;
    } else if (action == "join_subscriber" || action == "join_reliable") {
        watching = true;
        Subscriber subscriber(options_for(channel, action == "join_reliable"), false, false);
        watching = false;
    } else if (action == "read" || action == "read_and_hold" || action == "reliable_read" || action == "leave_subscriber" ||
               action == "sleep") {
        Options options = options_for(channel, action == "reliable_read");
        if (action == "read_and_hold") options.most_held = 0;  // beyond two it claims
        Subscriber subscriber(options, false, false);
        std::printf("ready\n");
        std::fflush(stdout);
        if (action != "sleep") std::getchar();  // the other side publishes first
        watching = true;
        if (action == "sleep") {
            subscriber.wait(monotonic_ns() + 200'000'000, 0, -1);
        } else if (action != "leave_subscriber") {
            View view;
            for (int i = 0; i < 4; ++i)
                if (subscriber.read(view) == Found::message && action != "read_and_hold") subscriber.release(view.slot);
        }
        watching = action == "leave_subscriber";
    } else {
        std::fprintf(stderr, "no action %s\n", action.c_str());
        return 2;
    }
    return 0;
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 4) return 2;
    mode = arguments[3];
    if (count > 5) {
        wanted = arguments[4];
        nth = std::atoi(arguments[5]);
    }
    step_hook = at_step;
    try {
        return act(arguments[1], arguments[2]);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 3;
    }
}
