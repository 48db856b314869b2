// The Python object of a publisher, for the files that give it its methods.
#pragma once

#include <condition_variable>
#include <mutex>

#include "shm/bindings_handle.hpp"
#include "shm/publisher.hpp"

namespace penstock::shm {

struct PublisherObject;

struct Lender final : DraftOwner {
    PublisherObject *publisher = nullptr;
    PyObject *publish(PyObject *draft, std::uint64_t token, std::int64_t size) override;
    void cancel(std::uint64_t token) noexcept override;
    std::uint64_t strand(std::uint64_t token) noexcept override;
    void hold(std::uint64_t token) noexcept override;
    void let_go(std::uint64_t token) noexcept override;
    bool closed(const Draft *) const override;
};

// Publishes of other threads that copy without the GIL, each with a slot reserved: who finds no slot left waits for one.
class Copies {
   public:
    void begin() {
        std::lock_guard lock(mutex_);
        ++running_;
    }
    void end() {
        {
            std::lock_guard lock(mutex_);
            --running_;
            ++ended_;
        }
        changed_.notify_all();
    }
    bool any() const { return running_ > 0; }
    std::uint64_t ended() const { return ended_; }
    // Until one has ended since `before`. Without the GIL.
    void wait(std::uint64_t before) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return ended_ != before || !running_; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t ended_ = 0;  // changes with the GIL and the mutex held
    unsigned running_ = 0;     // the same
};

struct PublisherObject : HandleObject<Publisher> {
    static constexpr const char *kind = "publisher";
    Lender lender;
    Copies *copies;
    std::int64_t timeout_ns;  // of publish and reserve; -1: for ever
};

inline PublisherObject *as_publisher(PyObject *self) { return reinterpret_cast<PublisherObject *>(self); }

// In bindings_publish.cpp
PyObject *publisher_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_publish_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_reserve(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_activate(PyObject *object, PyObject *);

}  // namespace penstock::shm
