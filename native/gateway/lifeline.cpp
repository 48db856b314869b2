#include "gateway/lifeline.hpp"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <thread>

namespace penstock::gateway {

namespace {

void watch(int descriptor, int grace_ms) {
    pollfd entry{descriptor, 0, 0};  // hang-up and error are always reported
    while (poll(&entry, 1, -1) < 0 && errno == EINTR) {
    }
    timespec left{grace_ms / 1000, grace_ms % 1000 * 1000000L};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
    _exit(1);
}

}  // namespace

bool exit_when_hung_up(int descriptor, int grace_ms) {
    try {
        std::thread(watch, descriptor, grace_ms).detach();
    } catch (const std::system_error &) {
        return false;
    }
    return true;
}

}  // namespace penstock::gateway
