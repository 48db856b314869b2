// Loop: one native thread that does for many publishers what no caller is there to do: it sends what a full socket
// could not take, sends gathered frames whose publisher has fallen silent, and notices peers that have gone.
//
// Rules: every function may be called by any thread, with or without the GIL; the thread itself never takes the GIL.
// A publisher's own mutex may be held when calling; the loop holds none of its own when it calls a publisher.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace penstock::tcp {

class Outlet;
struct Peer;

// Changes in a forked child: what its parent's threads served is of no use there.
std::uint32_t fork_generation() noexcept;

class Loop : public std::enable_shared_from_this<Loop> {
   public:
    Loop();
    ~Loop();
    Loop(const Loop &) = delete;
    Loop &operator=(const Loop &) = delete;

    void add(const std::shared_ptr<Outlet> &outlet, const std::shared_ptr<Peer> &peer);
    void remove(const Peer &peer);
    void want_write(const Peer &peer, bool wanted);
    // The outlet has gathered frames: flush it in about 100 us unless its caller has.
    void arm(const std::shared_ptr<Outlet> &outlet);
    void stop();

   private:
    void run();
    void start();

    int epoll_ = -1, wake_ = -1;
    std::mutex mutex_;
    std::unordered_map<std::uint64_t, std::pair<std::weak_ptr<Outlet>, std::weak_ptr<Peer>>> peers_;
    std::vector<std::weak_ptr<Outlet>> armed_;
    std::uint32_t generation_ = 0;
    bool stopping_ = false;
    bool started_ = false;
    std::atomic<bool> asleep_{false};
    std::thread thread_;
};

}  // namespace penstock::tcp
