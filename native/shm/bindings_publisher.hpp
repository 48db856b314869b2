// The Python object of a publisher, for the files that give it its methods.
#pragma once

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

struct PublisherObject : HandleObject<Publisher> {
    static constexpr const char *kind = "publisher";
    Lender lender;
    std::int64_t timeout_ns;  // of publish and reserve; -1: for ever
};

inline PublisherObject *as_publisher(PyObject *self) { return reinterpret_cast<PublisherObject *>(self); }

// In bindings_publish.cpp
PyObject *publisher_publish(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_publish_many(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_reserve(PyObject *object, PyObject *const *arguments, Py_ssize_t count, PyObject *names);
PyObject *publisher_activate(PyObject *object, PyObject *);

}  // namespace penstock::shm
