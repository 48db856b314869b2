// penstock._core.journal: its functions; the writer and the reader have files of their own.
#include "bindings.hpp"

#include <algorithm>
#include <memory>
#include <vector>

#include "gil.hpp"
#include "journal/checksum.hpp"
#include "journal/compose.hpp"
#include "journal/python.hpp"
#include "journal/reader.hpp"
#include "journal/scan.hpp"

namespace nb = nanobind;

namespace penstock {
namespace {

using namespace journal;

// Memory of a draft until its function has stored a copy of it.
struct HeapDraft final : DraftOwner {
    HeapDraft(std::size_t size, nb::object function) : memory(new std::uint8_t[size ? size : 1]()), function(std::move(function)) {}
    PyObject *publish(PyObject *, std::uint64_t, std::int64_t size) override {
        PyObject *view = PyMemoryView_FromMemory(reinterpret_cast<char *>(memory.get()), size, PyBUF_READ);
        PyObject *result = view ? PyObject_CallOneArg(function.ptr(), view) : nullptr;
        Py_XDECREF(view);
        if (result) let_go(0);
        return result;
    }
    void cancel(std::uint64_t) noexcept override { let_go(0); }
    void hold(std::uint64_t) noexcept override { ++users; }
    bool closed(const Draft *draft) const override { return keeper_closed(draft); }
    void let_go(std::uint64_t) noexcept override {
        if (--users == 0) delete this;
    }
    int users = 1;  // the draft until it is published, and arrays that outlive that
    std::unique_ptr<std::uint8_t[]> memory;
    nb::object function;
};

nb::object reserve(std::size_t size, nb::object function, nb::object keep) {
    auto *owner = new HeapDraft(size, std::move(function));
    PyObject *draft = draft_new(owner->memory.get(), static_cast<std::int64_t>(size), owner, 0, keep.ptr());
    if (!draft) {
        delete owner;
        throw nb::python_error();
    }
    return nb::steal(draft);
}

nb::dict scan(nb::handle buffer, std::uint64_t nonce, std::uint64_t first, std::uint64_t limit, std::uint64_t durable, bool gaps) {
    View view(buffer);
    Scan result;
    {
        GilReleased released;
        result = scan_segment(view.data(), view.size(), {nonce, first, limit, durable, gaps});
    }
    nb::dict answer;
    answer["index"] = nb::bytes(result.index.data(), result.index.size() * sizeof(IndexEntry));
    nb::list topics, states, damage;
    for (const auto &topic : result.topics)
        topics.append(nb::make_tuple(topic.id, nb::bytes(topic.name.data(), topic.name.size()), static_cast<int>(topic.flags),
                                     topic.next_ordinal, topic.last_stored_ns));
    for (const auto &state : result.states)
        states.append(nb::make_tuple(state.kind, static_cast<int>(state.flags), nb::bytes(view.data() + state.offset, state.bytes)));
    for (const auto &bad : result.damage)
        damage.append(nb::make_tuple(bad.offset, bad.bytes, bad.first_position, bad.next_position, bad.text));
    answer["topics"] = topics;
    answer["states"] = states;
    answer["damage"] = damage;
    answer["end"] = result.end;
    answer["next_position"] = result.next_position;
    answer["batches"] = result.batches;
    answer["state_records"] = result.state_records;
    answer["least_time_ns"] = result.least_time_ns;
    answer["greatest_time_ns"] = result.greatest_time_ns;
    answer["least_stored_ns"] = result.least_stored_ns;
    answer["greatest_stored_ns"] = result.greatest_stored_ns;
    answer["tail_bytes"] = result.tail_bytes;
    answer["open_group"] = result.open_group;
    return answer;
}

nb::tuple compose(nb::handle source, nb::handle index, std::uint64_t nonce, std::uint64_t first, nb::handle head,
                  std::uint32_t head_records, std::uint32_t head_flags) {
    View bytes(source), entries(index), records(head);
    Composed result;
    {
        GilReleased released;
        result = compose_segment(bytes.data(), bytes.size(), reinterpret_cast<const IndexEntry *>(entries.data()),
                                 entries.size() / sizeof(IndexEntry), nonce, first, records.data(), records.size(),
                                 head_records, head_flags);
    }
    return nb::make_tuple(nb::bytes(result.log.data(), result.log.size()),
                          nb::bytes(result.index.data(), result.index.size() * sizeof(IndexEntry)));
}

nb::list keys_of(nb::handle source, nb::handle index) {
    View bytes(source), entries(index);
    nb::list result;
    for (const std::string &key : record_keys(bytes.data(), bytes.size(), reinterpret_cast<const IndexEntry *>(entries.data()),
                                              entries.size() / sizeof(IndexEntry)))
        result.append(nb::bytes(key.data(), key.size()));
    return result;
}

nb::bytes sums_of(nb::handle data, std::uint64_t end) {
    View view(data);
    std::vector<std::uint32_t> sums;
    {
        GilReleased released;
        sums = block_sums(view.data(), std::min<std::uint64_t>(end, view.size()));
    }
    return nb::bytes(sums.data(), sums.size() * 4);
}

nb::bytes summary_of(nb::handle index, std::uint64_t nonce) {
    View view(index);
    std::vector<TopicSummary> rows;
    {
        GilReleased released;
        rows = summarise(reinterpret_cast<const IndexEntry *>(view.data()), view.size() / sizeof(IndexEntry), nonce);
    }
    return nb::bytes(rows.data(), rows.size() * sizeof(TopicSummary));
}

// How many entries at the beginning of an index are believed by their own checksum. A file that was cut ends in a part of
// one, which is none.
std::size_t believed_of(nb::handle index, std::uint64_t nonce) {
    View view(index);
    auto *entries = reinterpret_cast<const IndexEntry *>(view.data());
    const std::size_t count = view.size() / sizeof(IndexEntry);
    GilReleased released;
    const std::uint32_t seed = nonce_seed(nonce);
    std::size_t good = 0;
    while (good < count && entry_believed(seed, entries[good])) ++good;
    return good;
}

template <std::uint32_t (*function)(std::uint32_t, const void *, std::size_t)>
std::uint32_t checksum(nb::handle data, std::uint32_t value) {
    View view(data);
    GilReleased released;
    return function(value, view.data(), view.size());
}

}  // namespace

void bind_journal(nb::module_ &module) {
    nb::register_exception_translator(raise_refused);
    module.def("crc32c", checksum<crc32c>, nb::arg("data"), nb::arg("value") = 0);
    module.def("crc32c_table", checksum<crc32c_table>, nb::arg("data"), nb::arg("value") = 0);
    module.def("crc32", checksum<journal::crc32>, nb::arg("data"), nb::arg("value") = 0);
    module.def("topic_matches", topic_matches, nb::arg("pattern"), nb::arg("name"));
    module.def("reserve", reserve, nb::arg("size"), nb::arg("function"), nb::arg("keep"));
    module.def("compose", compose, nb::arg("source"), nb::arg("index"), nb::arg("nonce"), nb::arg("first"), nb::arg("head"),
               nb::arg("head_records"), nb::arg("head_flags"));
    module.def("record_keys", keys_of, nb::arg("source"), nb::arg("index"));
    module.def("block_sums", sums_of, nb::arg("data"), nb::arg("end"));
    module.def("summarise", summary_of, nb::arg("index"), nb::arg("nonce"));
    module.def("believed", believed_of, nb::arg("index"), nb::arg("nonce"));
    module.def("scan", scan, nb::arg("data"), nb::arg("nonce"), nb::arg("first"), nb::arg("limit"), nb::arg("durable"),
               nb::arg("gaps") = false);
    journal::bind_writer(module);
    journal::bind_reader(module);
    journal::bind_queue_state(module);
}

}  // namespace penstock
