#include "message/python.hpp"

namespace nb = nanobind;

namespace penstock {

namespace {

// Keeps Python objects whose memory a batch made here refers to.
struct ObjectOwner final : Owner {
    explicit ObjectOwner(PyObject *object) : object(Py_NewRef(object)) {}
    void release(std::uint64_t) noexcept override { give_back(); }
    void release_many(const std::uint64_t *, std::size_t) noexcept override { give_back(); }
    void give_back() noexcept {
        Py_DECREF(object);
        delete this;
    }
    PyObject *object;
};

}  // namespace

nb::object text_of(std::string_view text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

const std::vector<Envelope> &entries_of(nb::handle batch) {
    if (!batch_check(batch.ptr())) throw nb::type_error("a Batch is needed");
    const std::vector<Envelope> *entries = batch_entries(batch.ptr());
    if (!entries) throw nb::python_error();
    return *entries;
}

nb::object batch_over(std::vector<Envelope> &&entries, PyObject *keep, PyObject *channels) {
    auto *owner = new ObjectOwner(keep);
    PyObject *made = batch_new(std::move(entries), owner, channels);
    if (!made) {
        owner->give_back();
        throw nb::python_error();
    }
    return nb::steal(made);
}

}  // namespace penstock
