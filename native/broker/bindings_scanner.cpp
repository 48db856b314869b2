#include "broker/python.hpp"

#include <nanobind/stl/string_view.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <new>

#include "broker/scanner.hpp"
#include "gil.hpp"

namespace nb = nanobind;

namespace penstock::broker {

namespace {

// Keeps the block that a batch's messages lie in.
struct BlockOwner final : Owner {
    explicit BlockOwner(Block *block) : block(block) { block->keep(); }
    void release(std::uint64_t) noexcept override { give_back(); }
    void release_many(const std::uint64_t *, std::size_t) noexcept override { give_back(); }  // once a batch
    void give_back() noexcept {
        block->drop();
        delete this;
    }
    Block *block;
};

class BoundScanner {
   public:
    BoundScanner(const char *grammar, std::uint32_t max_message_bytes, std::uint32_t max_line_bytes)
        : scanner_(std::strcmp(grammar, "raw") == 0     ? Grammar::raw
                   : std::strcmp(grammar, "hello") == 0 ? Grammar::hello
                                                        : Grammar::deliveries,
                   max_message_bytes, max_line_bytes) {}

    // Bytes received, 0 at the end of the stream, None when there are none now.
    nb::object receive(int descriptor) {
        wait_for_receive();
        std::size_t room = 0;
        std::uint8_t *place = scanner_.inbox().space(scanner_.wanted(), room);
        if (!place) throw std::bad_alloc();
        ssize_t got;
        int error;
        receiving_.lock();
        {
            GilReleased unlocked;
            do {
                got = ::recv(descriptor, place, room, MSG_DONTWAIT);
                error = errno;
            } while (got < 0 && error == EINTR);
            if (got > 0) scanner_.inbox().filled(static_cast<std::size_t>(got));
            receiving_.unlock();  // before the GIL is taken: the thread that has it may be waiting for this lock
        }
        if (got < 0) {
            scanner_.inbox().rest();
            if (error == EAGAIN || error == EWOULDBLOCK) return nb::none();
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
        if (got == 0) scanner_.inbox().rest();
        return nb::int_(static_cast<std::int64_t>(got));
    }

    void feed(nb::handle data) {
        wait_for_receive();
        Py_buffer view;
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
        const auto *at = static_cast<const std::uint8_t *>(view.buf);
        auto left = static_cast<std::size_t>(view.len);
        while (left) {
            std::size_t room = 0;
            std::uint8_t *place = scanner_.inbox().space(left, room);
            if (!place) break;
            const std::size_t now = room < left ? room : left;
            std::memcpy(place, at, now);
            scanner_.inbox().filled(now);
            at += now;
            left -= now;
        }
        PyBuffer_Release(&view);
        if (left) throw std::bad_alloc();
    }

    // Scanner events start with a newline, so no peer can send them as a verb.
    nb::object next(std::size_t most) {
        wait_for_receive();
        switch (scanner_.next(most)) {
            case Event::more:
                scanner_.inbox().rest();
                return nb::none();
            case Event::run: return event(scanner_.head(), batch());
            case Event::line: return event(scanner_.head(), nb::none());
            case Event::topic: return nb::make_tuple("\n?", text_of(scanner_.head()), nb::none());
            case Event::refused: return nb::make_tuple("\n!", text_of(scanner_.head()), nb::none());
            default: return nb::make_tuple("\n#", text_of(scanner_.head()), nb::none());
        }
    }

    // The connection is over: release its memory now, not when Python collects the connection.
    void clear() {
        wait_for_receive();
        scanner_.inbox().clear();
    }

    void allow(std::string_view topic) { scanner_.allow(topic); }
    void refuse(std::string_view topic) { scanner_.refuse(topic); }
    void forget_topics() { scanner_.forget_topics(); }
    std::size_t buffered() {
        wait_for_receive();
        return scanner_.inbox().size();
    }
    std::size_t held() { return scanner_.inbox().held_bytes(); }
    std::uint64_t moved() { return scanner_.inbox().moved_bytes(); }

   private:
    // Another thread's receive writes into the inbox without the GIL. It never blocks, so this wait is short.
    void wait_for_receive() { std::lock_guard over(receiving_); }

    static nb::object event(std::string_view head, nb::object batch) {
        const std::size_t blank = head.find(' ');
        std::string_view rest = blank == std::string_view::npos ? std::string_view{} : head.substr(blank + 1);
        return nb::make_tuple(text_of(head.substr(0, blank)), text_of(rest), batch);
    }

    // The number of a topic in the current batch, whose channels are only the topics of its messages: the cost of a
    // batch must not grow with all topics that its connection has ever named.
    std::uint32_t channel_of(std::uint32_t topic) {
        if (topic >= scanner_.topics().size()) return 0;  // data of a verb that has no topic
        if (places_.size() <= topic) places_.resize(topic + 1, unplaced);
        if (places_[topic] == unplaced) {
            places_[topic] = static_cast<std::uint32_t>(used_.size());
            used_.push_back(topic);
        }
        return places_[topic];
    }

    // The channels of the current batch; the same object as before if it has the same topics.
    void set_channels() {
        if (generation_ != scanner_.generation()) {
            generation_ = scanner_.generation();
            names_.clear();
            channels_.reset();
        }
        for (const std::uint32_t topic : used_) places_[topic] = unplaced;
        if (channels_.is_valid() && used_ == named_) return;
        channels_ = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(used_.empty() ? 1 : used_.size())));
        for (std::size_t i = 0; i < used_.size(); ++i) {
            if (names_.size() <= used_[i]) names_.resize(used_[i] + 1);
            nb::object &name = names_[used_[i]];
            if (!name.is_valid()) name = text_of(scanner_.topics()[used_[i]]);
            PyTuple_SET_ITEM(channels_.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(name.ptr()));
        }
        if (used_.empty()) PyTuple_SET_ITEM(channels_.ptr(), 0, Py_NewRef(Py_None));
        named_ = used_;
    }

    nb::object batch() {
        std::vector<Envelope> entries;
        entries.reserve(scanner_.ranges().size());
        used_.clear();
        for (const Range &range : scanner_.ranges()) {
            Envelope &entry = entries.emplace_back();
            entry.data = range.data;
            entry.size = range.size;
            entry.channel = channel_of(range.topic);
            entry.ordinal = range.ordinal;
            entry.timestamp_ns = range.timestamp_ns;
            entry.position = scanner_.grammar() == Grammar::deliveries ? range.position : -1;
            entry.properties = range.properties_size ? range.data + range.size : nullptr;
            entry.properties_size = range.properties_size;
            entry.token = range.deliveries;  // the owner needs none
        }
        set_channels();
        auto *owner = new BlockOwner(scanner_.inbox().block());
        PyObject *made = batch_new(std::move(entries), owner, channels_.ptr());
        if (!made) {
            owner->give_back();
            throw nb::python_error();
        }
        return nb::steal(made);
    }

    Scanner scanner_;
    std::mutex receiving_;
    static constexpr std::uint32_t unplaced = 0xffffffff;
    std::vector<std::uint32_t> used_, named_, places_;  // topics of the batch under way, of channels_; their numbers in it
    std::vector<nb::object> names_;                     // of the scanner's topics, as far as they were needed
    nb::object channels_;
    std::uint64_t generation_ = 0;
};

}  // namespace

void bind_scanner(nb::module_ &module) {
    nb::class_<BoundScanner>(module, "Scanner")
        .def(nb::init<const char *, std::uint32_t, std::uint32_t>(), nb::arg("grammar"), nb::arg("max_message_bytes"),
             nb::arg("max_line_bytes") = 4096)
        .def("receive", &BoundScanner::receive)
        .def("feed", &BoundScanner::feed)
        .def("next", &BoundScanner::next, nb::arg("most") = 16384)
        .def("clear", &BoundScanner::clear)
        .def("allow", &BoundScanner::allow)
        .def("refuse", &BoundScanner::refuse)
        .def("forget_topics", &BoundScanner::forget_topics)
        .def_prop_ro("buffered_bytes", &BoundScanner::buffered)
        .def_prop_ro("held_bytes", &BoundScanner::held)
        .def_prop_ro("moved_bytes", &BoundScanner::moved);
}

}  // namespace penstock::broker
