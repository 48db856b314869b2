// penstock._core.tcp.
#include "../bindings.hpp"

#include "tcp/bindings.hpp"
#include "tcp/frame.hpp"

namespace penstock {

namespace {

using namespace penstock::tcp;

// For tests: the frames in `data` as (type, header_size, data_size), and the state at the end.
nb::tuple scan_frames(nb::handle data, std::uint64_t max_message_size, bool extended) {
    Bytes bytes(data.ptr());
    nb::list frames;
    std::uint64_t at = 0;
    const char *state = "end";
    while (at < bytes.size) {
        Header header;
        Scan result = scan_header(bytes.data + at, bytes.size - at, max_message_size, extended, header);
        if (result != Scan::frame) {
            state = result == Scan::more ? "more" : result == Scan::bad_header ? "bad_header" : "too_large";
            break;
        }
        std::uint64_t total = header.header_size + header.data_size;
        if (bytes.size - at < total) {
            state = "more";
            break;
        }
        frames.append(nb::make_tuple(header.type, header.header_size, header.data_size, header.ordinal));
        at += total;
    }
    return nb::make_tuple(frames, state);
}

}  // namespace

void bind_tcp(nb::module_ &module) {
    bind_inlet(module);
    bind_outlet(module);
    module.def("scan_frames", scan_frames, nb::arg("data"), nb::arg("max_message_size"), nb::arg("extended"));
    module.def("chunk_pool_bytes", [] { return chunk_pool_bytes(); });
}

}  // namespace penstock
