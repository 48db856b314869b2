#include "broker/python.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <cstring>

#include "broker/outbox.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

void release_object(void *hold) { Py_DECREF(static_cast<PyObject *>(hold)); }

class BoundOutbox {
   public:
    BoundOutbox() : outbox_(release_object) {}

    void text(nb::bytes bytes) { outbox_.text({bytes.c_str(), bytes.size()}); }

    void framed(nb::bytes queue, nb::handle batch, nb::handle deliveries) {
        std::vector<Delivery> rows = deliveries_of(batch, deliveries);
        outbox_.framed({queue.c_str(), queue.size()}, rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    void bare(nb::handle batch) {
        std::vector<Delivery> rows = deliveries_of(batch, nb::none());
        outbox_.bare(rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    // Data, properties, message id and key of each message, as fetch_index describes them.
    void payloads(nb::handle batch) {
        const std::vector<Envelope> &entries = entries_of(batch);
        std::vector<Delivery> rows;
        for (const Envelope &entry : entries) {
            rows.push_back({entry.data, static_cast<std::size_t>(entry.size), {}, 0, 0, 0, 0});
            if (const std::size_t details = entry.details_size())
                rows.push_back({entry.properties, details, {}, 0, 0, 0, 0});
        }
        outbox_.payloads(rows.data(), rows.size(), batch.inc_ref().ptr());
    }
    void lent(nb::bytes data) {
        outbox_.lent(reinterpret_cast<const std::uint8_t *>(data.c_str()), data.size(), data.inc_ref().ptr());
    }

    std::int64_t send(int descriptor) {
        std::int64_t sent;
        int error;
        {
            GilReleased unlocked;
            sent = outbox_.send(descriptor);
            error = errno;
        }
        outbox_.settle();
        if (sent < 0) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        return sent;
    }

    nb::bytes front(std::size_t most) {
        std::string_view piece = outbox_.front();
        return nb::bytes(piece.data(), piece.size() < most ? piece.size() : most);
    }
    void advance(std::size_t bytes) {
        if (bytes > outbox_.pending_bytes()) throw nb::value_error("more bytes than are pending");
        outbox_.advance(bytes);
        outbox_.settle();
    }
    void clear() { outbox_.clear(); }
    std::size_t pending() { return outbox_.pending_bytes(); }
    std::vector<std::pair<std::int64_t, std::int64_t>> take_sent(std::uint64_t end) { return outbox_.take_sent(end); }
    std::uint64_t sent() { return outbox_.sent_bytes(); }

   private:
    static std::vector<Delivery> deliveries_of(nb::handle batch, nb::handle counts) {
        const std::vector<Envelope> &entries = entries_of(batch);
        std::vector<std::string_view> topics = topics_of(batch_channels(batch.ptr()));
        std::vector<Delivery> rows;
        rows.reserve(entries.size());
        for (const Envelope &entry : entries) {
            std::string_view topic = topics.empty() ? std::string_view{"default"}
                                                    : topics[topics.size() == 1 ? 0 : entry.channel];
            // the broker has moved it here: deliver it under its original topic
            if (topic.starts_with('$') && entry.properties_size) {
                std::size_t size = 0;
                if (const char *original = property(entry, "$topic", size)) topic = {original, size};
            }
            rows.push_back({entry.data, static_cast<std::size_t>(entry.size), topic, entry.position, entry.ordinal,
                            entry.timestamp_ns, 1, entry.properties, entry.properties_size});
        }
        if (!counts.is_none()) fill_counts(counts, rows);
        return rows;
    }

    static void fill_counts(nb::handle counts, std::vector<Delivery> &rows) {
        Py_buffer view;
        if (PyObject_GetBuffer(counts.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const bool fits = static_cast<std::size_t>(view.len) == rows.size() * sizeof(std::uint32_t);
        for (std::size_t i = 0; fits && i < rows.size(); ++i)
            std::memcpy(&rows[i].deliveries, static_cast<const char *>(view.buf) + i * sizeof(std::uint32_t),
                        sizeof(std::uint32_t));
        PyBuffer_Release(&view);
        if (!fits) throw nb::value_error("counts must be one unsigned 32-bit number a message");
    }

    static std::string_view utf8(PyObject *text) {
        if (!PyUnicode_Check(text)) return "default";
        Py_ssize_t size = 0;
        const char *data = PyUnicode_AsUTF8AndSize(text, &size);
        if (!data) throw nb::python_error();
        return {data, static_cast<std::size_t>(size)};
    }

    static std::vector<std::string_view> topics_of(PyObject *channels) {
        std::vector<std::string_view> topics;
        if (!channels || channels == Py_None) return topics;
        if (PyUnicode_Check(channels)) return {utf8(channels)};
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(channels); ++i) topics.push_back(utf8(PyTuple_GET_ITEM(channels, i)));
        return topics;
    }

    Outbox outbox_;
};

}  // namespace

void bind_outbox(nb::module_ &module) {
    nb::class_<BoundOutbox>(module, "Outbox")
        .def(nb::init<>())
        .def("text", &BoundOutbox::text)
        .def("framed", &BoundOutbox::framed, nb::arg("queue"), nb::arg("batch"), nb::arg("deliveries").none() = nb::none())
        .def("bare", &BoundOutbox::bare)
        .def("payloads", &BoundOutbox::payloads)
        .def("lent", &BoundOutbox::lent)
        .def("send", &BoundOutbox::send)
        .def("front", &BoundOutbox::front, nb::arg("most") = 65536)
        .def("advance", &BoundOutbox::advance)
        .def("clear", &BoundOutbox::clear)
        .def("take_sent", &BoundOutbox::take_sent)
        .def_prop_ro("sent_bytes", &BoundOutbox::sent)
        .def_prop_ro("pending_bytes", &BoundOutbox::pending);
}

}  // namespace penstock::broker
