#include "shm/bells.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>

#include "platform/futex.hpp"
#include "platform/shared_directory.hpp"

namespace penstock::shm {

std::string Bells::name_of(const std::string &prefix, bool publisher, std::uint32_t member, std::uint64_t taken) {
    return prefix + (publisher ? ".p" : ".s") + std::to_string(member) + "." + std::to_string(taken);
}

void Bells::belong_to(const Channel &channel, std::string prefix, bool is_publisher, std::uint32_t index,
                      std::uint64_t taken, const Access &access) {
    publishers_ = channel.publishers;
    subscribers_ = channel.subscribers;
    self_ = &(is_publisher ? publishers_ : subscribers_)[index];
    prefix_ = std::move(prefix);
    own_name_ = name_of(prefix_, is_publisher, index, taken);
    access_ = access;
}

int Bells::own() {
    if (own_) return own_.get();
    int directory = shared_directory();
    if (mkfifoat(directory, own_name_.c_str(), 0600) != 0 && errno != EEXIST) fail_system(errno, "cannot make " + own_name_);
    int descriptor = openat(directory, own_name_.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW);
    if (descriptor < 0) fail_system(errno, "cannot open " + own_name_);
    File made(descriptor);
    struct stat status {};
    if (fstat(descriptor, &status) != 0 || !S_ISFIFO(status.st_mode))
        throw Error(Fault::corruption, own_name_ + " is not a FIFO");
    if (access_.has_group && fchown(descriptor, uid_t(-1), access_.group) != 0)
        fail_system(errno, "cannot give " + own_name_ + " to its group");
    fchmod(descriptor, access_.mode);
    own_ = std::move(made);
    return descriptor;
}

int Bells::watched() {
    if (watched_) return watched_.get();
    own();
    File tick(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)), both(epoll_create1(EPOLL_CLOEXEC));
    epoll_event wanted{EPOLLIN, {}};
    if (!tick || !both ||
        epoll_ctl(both.get(), EPOLL_CTL_ADD, own_.get(), &wanted) != 0 ||
        epoll_ctl(both.get(), EPOLL_CTL_ADD, tick.get(), &wanted) != 0)
        fail_system(errno, "cannot make a descriptor to wait for");
    tick_ = std::move(tick);
    watched_ = std::move(both);
    return watched_.get();
}

void Bells::drain() noexcept {
    char bytes[64];
    while (own_ && read(own_.get(), bytes, sizeof bytes) == ssize_t(sizeof bytes)) {
    }
}

bool Bells::is_readable() noexcept {
    epoll_event found;
    return watched_ && epoll_wait(watched_.get(), &found, 1, 0) > 0;
}

void Bells::set_tick() noexcept {
    constexpr itimerspec once{{0, 0}, {look_again_ns / 1'000'000'000, look_again_ns % 1'000'000'000}};
    timerfd_settime(tick_.get(), 0, &once, nullptr);  // replaces an old tick
}

void Bells::wake_self() noexcept {
    if (own_) (void)!write(own_.get(), "", 1);  // if the FIFO is full it is readable anyway
    if (std::uint64_t sleep = self_->sleep.load(); (sleep & asleep) && !(sleep & asleep_on_descriptor))
        futex_clear_and_wake(self_->sleep);
}

void Bells::ring(bool publisher, std::uint32_t member, bool by_descriptor) noexcept {
    Member &sleeper = (publisher ? publishers_ : subscribers_)[member];
    if (!by_descriptor) return futex_clear_and_wake(sleeper.sleep);
    try {
        auto &bells = publisher ? publisher_bells_ : reader_bells_;
        if (bells.size() <= member) bells.resize(member + 1);
        Bell &bell = bells[member];
        std::uint64_t taken = sleeper.taken.load();
        if (bell.taken != taken || !bell.file) {
            std::string name = name_of(prefix_, publisher, member, taken);
            bell.file = File(openat(shared_directory(), name.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOFOLLOW));
            struct stat status {};
            if (bell.file && (fstat(bell.file.get(), &status) != 0 || !S_ISFIFO(status.st_mode))) bell.file = File();
            bell.taken = taken;
        }
        if (bell.file && write(bell.file.get(), "", 1) < 0) return;  // if the FIFO is full it is readable anyway
    } catch (...) {  // no memory for the list of bells: the sleeper checks again by itself
    }
}

void Bells::close() noexcept {
    for (File *file : {&own_, &tick_, &watched_}) *file = File();
    reader_bells_.clear();
    publisher_bells_.clear();
}

}  // namespace penstock::shm
