#include "tcp/loop.hpp"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "tcp/inlet.hpp"
#include "tcp/outlet.hpp"

namespace penstock::tcp {

namespace {
std::atomic<std::uint32_t> generation{1};
[[maybe_unused]] const int registered =
    ::pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
}  // namespace

std::uint32_t fork_generation() noexcept { return generation.load(std::memory_order_relaxed); }

Loop::Loop() : generation_(fork_generation()) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
        int error = errno;
        if (epoll_ >= 0) ::close(epoll_);
        if (wake_ >= 0) ::close(wake_);
        throw std::system_error(error, std::generic_category(), "epoll or eventfd for the tcp sender");
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = 0;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
}

Loop::~Loop() {
    if (thread_.joinable()) thread_.detach();  // it was stopped before, or is the parent process's thread
    ::close(epoll_);
    ::close(wake_);
}

void Loop::start() {
    if (started_ || stopping_) return;
    started_ = true;
    sigset_t all, before;  // signals are for Python's main thread
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Loop::stop() {
    if (generation_ != fork_generation()) return;
    {
        std::lock_guard lock(mutex_);
        if (stopping_) return;
        stopping_ = true;
    }
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(wake_, &one, sizeof one);
    if (thread_.joinable()) thread_.join();
}

void Loop::add(const std::shared_ptr<Outlet> &outlet, const std::shared_ptr<Peer> &peer) {
    std::lock_guard lock(mutex_);
    peers_[peer->id] = {outlet, peer};
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.u64 = peer->id;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, peer->fd, &event);
    start();
}

void Loop::remove(const Peer &peer) {
    std::lock_guard lock(mutex_);
    peers_.erase(peer.id);
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, peer.fd, nullptr);
}

void Loop::want_write(const Peer &peer, bool wanted) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    if (wanted) event.events |= EPOLLOUT;
    event.data.u64 = peer.id;
    ::epoll_ctl(epoll_, EPOLL_CTL_MOD, peer.fd, &event);
}

void Loop::arm(const std::shared_ptr<Outlet> &outlet) {
    {
        std::lock_guard lock(mutex_);
        start();
        armed_.push_back(outlet);
    }
    if (!asleep_.exchange(false)) return;
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(wake_, &one, sizeof one);
}

void Loop::run() {
    ::prctl(PR_SET_NAME, "penstock-tcp");
    ::prctl(PR_SET_TIMERSLACK, 1000);
    std::vector<std::weak_ptr<Outlet>> due;
    for (;;) {
        bool waiting;
        {
            std::lock_guard lock(mutex_);
            if (stopping_) return;
            waiting = !armed_.empty();
            if (!waiting) asleep_.store(true);
        }
        pollfd descriptor{epoll_, POLLIN, 0};
        timespec pause{0, gather_ns};
        ::ppoll(&descriptor, 1, waiting ? &pause : nullptr, nullptr);
        asleep_.store(false);
        epoll_event events[64];
        int count = ::epoll_wait(epoll_, events, 64, 0);
        for (int i = 0; i < count; ++i) {
            if (events[i].data.u64 == 0) {
                std::uint64_t value;
                [[maybe_unused]] auto n = ::read(wake_, &value, sizeof value);
                continue;
            }
            std::shared_ptr<Outlet> outlet;
            std::shared_ptr<Peer> peer;
            {
                std::lock_guard lock(mutex_);
                auto found = peers_.find(events[i].data.u64);
                if (found == peers_.end()) continue;
                outlet = found->second.first.lock();
                peer = found->second.second.lock();
            }
            if (!outlet || !peer) continue;
            if (events[i].events & EPOLLOUT) outlet->writable(peer);
            if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)) outlet->readable(peer);
        }
        due.clear();
        {
            std::lock_guard lock(mutex_);
            due.swap(armed_);
        }
        for (auto &weak : due) {
            auto outlet = weak.lock();
            if (outlet && outlet->flush_due()) arm(outlet);
        }
    }
}

}  // namespace penstock::tcp
