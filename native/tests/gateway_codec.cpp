// The byte form of gateway messages: whole ones come back, cut and changed ones never read out of their buffer.
// sources: gateway/codec.cpp
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gateway/codec.hpp"

using namespace penstock::gateway;

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                       \
        }                                                                       \
    } while (0)

static std::vector<std::uint8_t> encoded(const std::string &properties, std::uint32_t count, const std::string &content) {
    Parts parts;
    parts.properties = reinterpret_cast<const std::uint8_t *>(properties.data());
    parts.properties_size = static_cast<std::uint32_t>(properties.size());
    parts.property_count = count;
    parts.content = reinterpret_cast<const std::uint8_t *>(content.data());
    parts.content_size = static_cast<std::uint32_t>(content.size());
    std::vector<std::uint8_t> out(encoded_size(properties.size(), content.size()));
    encode(parts, out.data());
    return out;
}

// In memory of exactly its size, so that the sanitizer sees the first byte read beyond it.
static const char *decode_exact(const std::uint8_t *data, std::size_t size, Parts &parts) {
    std::unique_ptr<std::uint8_t[]> copy(new std::uint8_t[size]);
    if (size) std::memcpy(copy.get(), data, size);
    return decode(copy.get(), size, parts);
}

static std::string random_properties(std::mt19937 &chance, std::uint32_t &count) {
    std::string properties;
    count = chance() % 40;
    for (std::uint32_t i = 0; i < count; ++i) {
        properties += "key" + std::to_string(i) + std::string(chance() % 5, 'k') + '\0';
        properties += std::string(chance() % 9, static_cast<char>('a' + chance() % 26)) + '\0';
    }
    return properties;
}

int main() {
    std::mt19937 chance(20261115);
    Parts parts;
    const std::vector<std::uint8_t> smallest = encoded("", 0, "");
    CHECK(smallest.size() == smallest_size && !decode(smallest.data(), smallest.size(), parts));
    for (int round = 0; round < 20000; ++round) {
        std::uint32_t count;
        const std::string properties = random_properties(chance, count);
        const std::string content(chance() % 300, static_cast<char>(chance()));
        std::vector<std::uint8_t> bytes = encoded(properties, count, content);
        CHECK(!decode(bytes.data(), bytes.size(), parts));
        CHECK(parts.property_count == count && parts.properties_size == properties.size());
        CHECK(parts.content_size == content.size() && std::memcmp(parts.content, content.data(), content.size()) == 0);
        std::uint32_t found;
        CHECK(!check_properties(parts.properties, parts.properties_size, found) && found == count);
        CHECK(decode_exact(bytes.data(), chance() % bytes.size(), parts));
        for (int change = 0; change < 4; ++change) {
            bytes[chance() % bytes.size()] ^= static_cast<std::uint8_t>(1 + chance() % 255);
            decode_exact(bytes.data(), bytes.size(), parts);  // any answer, but nothing read outside
        }
    }
    for (int round = 0; round < 200000; ++round) {
        std::uint8_t noise[64];
        for (std::uint8_t &byte : noise) byte = static_cast<std::uint8_t>(chance());
        valid_utf8(noise, chance() % sizeof noise);
        noise[0] = magic_first, noise[1] = magic_second, noise[2] = noise[3] = noise[4] = 0;
        noise[6] = noise[7] = noise[8] = 0;
        noise[5] = static_cast<std::uint8_t>(chance() % sizeof noise);
        decode_exact(noise, noise[5], parts);
    }
    std::uint8_t frame[source_size];
    store_source(frame, 0x0102030405060708);
    CHECK(frame[0] == 1 && frame[7] == 8 && load_source(frame) == 0x0102030405060708);
    std::puts("gateway_codec: well");
}
