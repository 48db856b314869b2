#include "broker/python.hpp"

#include <charconv>
#include <cstring>
#include <memory>
#include <string_view>

#include "broker/scanner.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

// Memory for a draft of a publisher that copies: publishing calls a function with what was written.
struct HeapDraft final : DraftOwner {
    HeapDraft(PyObject *function, std::size_t size) : function(Py_NewRef(function)), data(new std::uint8_t[size ? size : 1]()) {}
    PyObject *publish(PyObject *, std::uint64_t, std::int64_t size) override {
        PyObject *bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char *>(data.get()), size);
        if (!bytes) return nullptr;
        PyObject *result = PyObject_CallOneArg(function, bytes);
        Py_DECREF(bytes);
        if (result) let_go(0);
        return result;
    }
    void cancel(std::uint64_t) noexcept override { let_go(0); }
    void hold(std::uint64_t) noexcept override { ++users; }
    bool closed(const Draft *draft) const override { return keeper_closed(draft); }
    void let_go(std::uint64_t) noexcept override {
        if (--users) return;
        Py_DECREF(function);
        delete this;
    }
    int users = 1;  // the draft until it is published, and arrays that outlive that
    PyObject *function;
    std::unique_ptr<std::uint8_t[]> data;
};

nb::object reserve(nb::object function, std::int64_t size, nb::object keep) {
    if (size < 0) {
        raise_error("InvalidArgument", "size %zd must be 0 or more bytes", static_cast<Py_ssize_t>(size));
        throw nb::python_error();
    }
    auto *owner = new HeapDraft(function.ptr(), static_cast<std::size_t>(size));
    PyObject *draft = draft_new(owner->data.get(), size, owner, 0, keep.ptr());
    if (!draft) {
        owner->let_go(0);
        throw nb::python_error();
    }
    return nb::steal(draft);
}

// A buffer of one item of publish_lines, released at the end, and its encoded properties.
struct Item {
    const char *data;
    Py_ssize_t size;
    std::string_view properties{};
};

struct Views {
    std::vector<Py_buffer> held;
    ~Views() {
        for (Py_buffer &view : held) PyBuffer_Release(&view);
    }
};

Item item_of(PyObject *object, Views &views) {
    if (PyBytes_CheckExact(object)) return {PyBytes_AS_STRING(object), PyBytes_GET_SIZE(object)};
    Py_buffer view;
    if (buffer_to_publish(object, &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    views.held.push_back(view);
    return {static_cast<const char *>(view.buf), view.len};
}

// With `own` the messages of a batch bring their properties along.
std::vector<Item> items_of(nb::handle items, Views &views, nb::object &keep, bool own) {
    std::vector<Item> found;
    if (batch_check(items.ptr())) {
        for (const Envelope &entry : entries_of(items))
            found.push_back({reinterpret_cast<const char *>(entry.data), static_cast<Py_ssize_t>(entry.size),
                             own ? foreign_properties(entry) : std::string_view{}});
        return found;
    }
    keep = nb::steal(PySequence_Fast(items.ptr(), "publish_many takes an iterable of bytes-like objects"));
    if (!keep.is_valid()) throw nb::python_error();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(keep.ptr());
    found.reserve(static_cast<std::size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) found.push_back(item_of(PySequence_Fast_GET_ITEM(keep.ptr(), i), views));
    return found;
}

// `properties` are those of all items (bytes), of each (a list of bytes), or None: the items' own where they have any.
void give_properties(std::vector<Item> &items, nb::handle properties) {
    if (PyBytes_Check(properties.ptr())) {
        const std::string_view all{PyBytes_AS_STRING(properties.ptr()),
                                   static_cast<std::size_t>(PyBytes_GET_SIZE(properties.ptr()))};
        for (Item &item : items) item.properties = all;
    } else if (PyList_Check(properties.ptr())) {
        if (static_cast<std::size_t>(PyList_GET_SIZE(properties.ptr())) != items.size()) {
            raise_error("InvalidArgument", "%zd messages have %zd properties", static_cast<Py_ssize_t>(items.size()),
                        PyList_GET_SIZE(properties.ptr()));
            throw nb::python_error();
        }
        for (std::size_t i = 0; i < items.size(); ++i) {
            PyObject *one = PyList_GET_ITEM(properties.ptr(), static_cast<Py_ssize_t>(i));
            if (!PyBytes_Check(one)) throw nb::type_error("encoded properties are bytes");
            items[i].properties = {PyBytes_AS_STRING(one), static_cast<std::size_t>(PyBytes_GET_SIZE(one))};
        }
    }
}

// The time of each item, from a buffer of signed 64-bit numbers; empty: none has one.
std::vector<std::int64_t> times_of(nb::handle times, std::size_t count) {
    if (times.is_none()) return {};
    Py_buffer view;
    if (PyObject_GetBuffer(times.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    std::vector<std::int64_t> found(static_cast<std::size_t>(view.len) / sizeof(std::int64_t));
    if (!found.empty()) std::memcpy(found.data(), view.buf, found.size() * sizeof(std::int64_t));
    PyBuffer_Release(&view);
    if (found.size() != count) {
        raise_error("InvalidArgument", "%zd messages have %zd times", static_cast<Py_ssize_t>(count),
                    static_cast<Py_ssize_t>(found.size()));
        throw nb::python_error();
    }
    return found;
}

constexpr std::string_view time_word = " time_ns=";

// "head length tail\ndata\n" of each item, one after the other; "length+properties" and both where there are properties,
// and a word between length and tail where it has a time.
nb::bytes publish_lines(nb::bytes head, nb::handle items, nb::bytes tail, std::size_t max_message_bytes,
                        nb::handle properties, nb::handle times) {
    Views views;
    nb::object keep;
    std::vector<Item> found = items_of(items, views, keep, properties.is_none());
    give_properties(found, properties);
    const std::vector<std::int64_t> when = times_of(times, found.size());
    const auto timed = [&when](std::size_t i) { return i < when.size() && when[i] != no_time; };
    std::size_t total = 0;
    char digits[24];
    for (std::size_t i = 0; i < when.size(); ++i)
        if (timed(i)) total += time_word.size() + static_cast<std::size_t>(std::to_chars(digits, digits + 24, when[i]).ptr - digits);
    for (const Item &item : found) {
        if (static_cast<std::size_t>(item.size) > max_message_bytes) {
            raise_error("InvalidArgument", "a message of %zd bytes is larger than the %zu bytes allowed", item.size,
                        max_message_bytes);
            throw nb::python_error();
        }
        auto length = static_cast<std::size_t>(std::to_chars(digits, digits + 24, item.size).ptr - digits);
        total += head.size() + 1 + length + tail.size() + 1 + static_cast<std::size_t>(item.size) + 1;
        if (item.properties.empty()) continue;
        if (item.properties.size() > Scanner::max_properties_bytes) {
            raise_error("InvalidArgument", "properties of %zu bytes are larger than the %u bytes allowed",
                        item.properties.size(), Scanner::max_properties_bytes);
            throw nb::python_error();
        }
        length = static_cast<std::size_t>(std::to_chars(digits, digits + 24, item.properties.size()).ptr - digits);
        total += 1 + length + item.properties.size();
    }
    nb::bytes result = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(total)));
    if (!result.is_valid()) throw nb::python_error();
    char *at = PyBytes_AS_STRING(result.ptr());
    std::size_t number = 0;
    for (const Item &item : found) {
        std::memcpy(at, head.c_str(), head.size());
        at += head.size();
        *at++ = ' ';
        at = std::to_chars(at, at + 24, item.size).ptr;
        if (!item.properties.empty()) {
            *at++ = '+';
            at = std::to_chars(at, at + 24, item.properties.size()).ptr;
        }
        if (timed(number)) {
            std::memcpy(at, time_word.data(), time_word.size());
            at = std::to_chars(at + time_word.size(), at + time_word.size() + 24, when[number]).ptr;
        }
        ++number;
        std::memcpy(at, tail.c_str(), tail.size());
        at += tail.size();
        *at++ = '\n';
        if (item.size) std::memcpy(at, item.data, static_cast<std::size_t>(item.size));
        at += item.size;
        if (!item.properties.empty()) std::memcpy(at, item.properties.data(), item.properties.size());
        at += item.properties.size();
        *at++ = '\n';
    }
    return result;
}

}  // namespace

void bind_publish(nb::module_ &module) {
    module.def("reserve", &reserve);
    module.def("publish_lines", &publish_lines, nb::arg("head"), nb::arg("items"), nb::arg("tail") = nb::bytes("", 0),
               nb::arg("max_message_bytes") = 0xffffffff, nb::arg("properties").none() = nb::bytes("", 0),
               nb::arg("times").none() = nb::none());
}

}  // namespace penstock::broker
