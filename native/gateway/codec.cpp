#include "gateway/codec.hpp"

#include <cstring>
#include <string_view>
#include <unordered_set>

namespace penstock::gateway {

namespace {

constexpr std::uint32_t few_properties = 16;  // up to here comparing each with each is quicker than a set

std::uint32_t load32(const std::uint8_t *at) {
    return std::uint32_t{at[0]} << 24 | std::uint32_t{at[1]} << 16 | std::uint32_t{at[2]} << 8 | at[3];
}

void store32(std::uint8_t *at, std::uint32_t value) {
    at[0] = static_cast<std::uint8_t>(value >> 24);
    at[1] = static_cast<std::uint8_t>(value >> 16);
    at[2] = static_cast<std::uint8_t>(value >> 8);
    at[3] = static_cast<std::uint8_t>(value);
}

const std::uint8_t *find_nul(const std::uint8_t *at, const std::uint8_t *end) {
    return at == end ? nullptr : static_cast<const std::uint8_t *>(std::memchr(at, 0, static_cast<std::size_t>(end - at)));
}

std::string_view text(const std::uint8_t *from, const std::uint8_t *to) {
    return {reinterpret_cast<const char *>(from), static_cast<std::size_t>(to - from)};
}

// Sees each key once, with no allocation while there are few.
class Keys {
   public:
    bool add(std::string_view key) {
        if (count_ < few_properties) {
            for (std::uint32_t i = 0; i < count_; ++i)
                if (first_[i] == key) return false;
            first_[count_++] = key;
            return true;
        }
        if (rest_.empty()) rest_.insert(first_, first_ + few_properties);
        return rest_.insert(key).second;
    }

   private:
    std::string_view first_[few_properties];
    std::uint32_t count_ = 0;
    std::unordered_set<std::string_view> rest_;
};

// Walks one key and value from `at`; null when whole, else what is wrong.
const char *walk_pair(const std::uint8_t *&at, const std::uint8_t *end, Keys &keys) {
    const std::uint8_t *key_end = find_nul(at, end);
    if (!key_end) return "a property's key has no NUL";
    const std::uint8_t *value_end = find_nul(key_end + 1, end);
    if (!value_end) return "a property's value has no NUL";
    if (!valid_utf8(at, static_cast<std::size_t>(value_end - at))) return "a property is not UTF-8";
    if (!keys.add(text(at, key_end))) return "a property's key is there twice";
    at = value_end + 1;
    return nullptr;
}

// The length of the well-formed UTF-8 sequence that begins with a byte above 7F, or 0.
std::size_t sequence_length(const std::uint8_t *at, std::size_t left) {
    const std::uint8_t lead = at[0];
    std::size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
    if (lead < 0xC2 || lead > 0xF4 || left < length) return 0;
    for (std::size_t i = 1; i < length; ++i)
        if ((at[i] & 0xC0) != 0x80) return 0;
    // Overlong forms, surrogates and what lies beyond the last code point.
    if ((lead == 0xE0 && at[1] < 0xA0) || (lead == 0xED && at[1] > 0x9F) || (lead == 0xF0 && at[1] < 0x90) ||
        (lead == 0xF4 && at[1] > 0x8F))
        return 0;
    return length;
}

}  // namespace

bool valid_utf8(const std::uint8_t *data, std::size_t size) {
    std::size_t at = 0;
    while (at < size) {
        if (data[at] < 0x80) {
            ++at;
            continue;
        }
        const std::size_t length = sequence_length(data + at, size - at);
        if (length == 0) return false;
        at += length;
    }
    return true;
}

const char *check_properties(const std::uint8_t *data, std::size_t size, std::uint32_t &count) {
    const std::uint8_t *at = data, *end = data + size;
    Keys keys;
    for (count = 0; at != end; ++count)
        if (const char *wrong = walk_pair(at, end, keys)) return wrong;
    return nullptr;
}

const char *decode(const std::uint8_t *data, std::size_t size, Parts &parts) {
    if (size < smallest_size) return "shorter than the smallest message (14 bytes)";
    if (data[0] != magic_first || data[1] != magic_second) return "does not begin with A1 60";
    if (size > largest_size || load32(data + 2) != size) return "its total size is not the buffer's";
    const std::uint32_t count = load32(data + 6);
    if (count > (size - smallest_size) / 2) return "more properties than fit";
    const std::uint8_t *at = data + header_size, *end = data + size;
    Keys keys;
    for (std::uint32_t i = 0; i < count; ++i)
        if (const char *wrong = walk_pair(at, end, keys)) return wrong;
    if (end - at < 4) return "no room for the content's size";
    parts.properties = data + header_size;
    parts.properties_size = static_cast<std::uint32_t>(at - parts.properties);
    parts.property_count = count;
    parts.content_size = load32(at);
    parts.content = at + 4;
    if (parts.content_size != static_cast<std::size_t>(end - parts.content)) return "its content does not fill the rest";
    return nullptr;
}

void encode(const Parts &parts, std::uint8_t *out) {
    out[0] = magic_first;
    out[1] = magic_second;
    store32(out + 2, static_cast<std::uint32_t>(encoded_size(parts.properties_size, parts.content_size)));
    store32(out + 6, parts.property_count);
    std::uint8_t *at = out + header_size;
    if (parts.properties_size) std::memcpy(at, parts.properties, parts.properties_size);
    at += parts.properties_size;
    store32(at, parts.content_size);
    if (parts.content_size) std::memcpy(at + 4, parts.content, parts.content_size);
}

}  // namespace penstock::gateway
