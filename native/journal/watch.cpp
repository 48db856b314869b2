#include <cerrno>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "journal/reader.hpp"

namespace penstock::journal {

Watch::Watch(const std::string &directory) {
    inotify_ = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    event_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (inotify_ < 0 || inotify_add_watch(inotify_, (directory + "/frontier").c_str(), IN_MODIFY) < 0) {
        if (inotify_ >= 0) ::close(inotify_);
        inotify_ = -1;
        return;
    }
    both_ = epoll_create1(EPOLL_CLOEXEC);  // so that a thread that sleeps only on the descriptor notices a close
    for (int file : {inotify_, event_}) {
        epoll_event event{};
        event.events = EPOLLIN;
        if (both_ >= 0) epoll_ctl(both_, EPOLL_CTL_ADD, file, &event);
    }
}

Watch::~Watch() {
    if (inotify_ >= 0) ::close(inotify_);
    if (event_ >= 0) ::close(event_);
    if (both_ >= 0) ::close(both_);
}

bool Watch::wait(int timeout_ms) const {
    pollfd files[2] = {{inotify_, POLLIN, 0}, {event_, POLLIN, 0}};
    return poll(files, 2, timeout_ms) != 0;
}

void Watch::drain() const {
    char events[4096];
    while (read(inotify_, events, sizeof events) > 0) {
    }
    std::uint64_t count;
    (void)!read(event_, &count, sizeof count);
}

void Watch::wake() const {
    std::uint64_t one = 1;
    (void)!write(event_, &one, sizeof one);
}

}  // namespace penstock::journal
