// The byte form of gateway messages: what is decoded is encoded to the same bytes; all else is refused inside of its buffer.
// sources: gateway/codec.cpp
#include "driver.hpp"

#include "gateway/codec.hpp"

using namespace penstock::gateway;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    std::vector<std::uint8_t> bytes(data, data + size);
    Parts parts;
    if (!decode(bytes.data(), bytes.size(), parts)) {
        std::vector<std::uint8_t> again(encoded_size(parts.properties_size, parts.content_size));
        encode(parts, again.data());
        CHECK(again == bytes);
        std::uint32_t count = 0;
        CHECK(!check_properties(parts.properties, parts.properties_size, count) && count == parts.property_count);
    }
    std::uint32_t count = 0;
    check_properties(bytes.data(), bytes.size(), count);
    valid_utf8(bytes.data(), bytes.size());
    return 0;
}
