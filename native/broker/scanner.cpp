#include "broker/scanner.hpp"

#include <algorithm>
#include <cstring>

namespace penstock::broker {

namespace {

constexpr std::size_t max_topics = 65536;

// The next word of `rest`, which loses it and the blanks before it.
std::string_view word(std::string_view &rest) {
    std::size_t begin = 0;
    while (begin < rest.size() && rest[begin] == ' ') ++begin;
    std::size_t end = begin;
    while (end < rest.size() && rest[end] != ' ') ++end;
    std::string_view found = rest.substr(begin, end - begin);
    rest.remove_prefix(end);
    return found;
}

void strip_front(std::string_view &text) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
}

bool number(std::string_view text, std::uint64_t &value) {
    if (text.empty() || text.size() > 19) return false;
    value = 0;
    for (char c : text) {
        if (c < '0' || c > '9') return false;
        value = value * 10 + static_cast<std::uint64_t>(c - '0');
    }
    return true;
}

// A signed number of 64 bits, the least one excepted, which means none.
bool signed_number(std::string_view text, std::int64_t &value) {
    const bool negative = !text.empty() && text.front() == '-';
    std::uint64_t size;
    if (!number(text.substr(negative), size) || size > INT64_MAX) return false;
    value = negative ? -static_cast<std::int64_t>(size) : static_cast<std::int64_t>(size);
    return true;
}

std::string_view without_blanks(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    return text;
}

bool starts(std::string_view text, std::string_view verb) {
    return text.size() >= verb.size() && std::memcmp(text.data(), verb.data(), verb.size()) == 0 &&
           (text.size() == verb.size() || text[verb.size()] == ' ');
}

}  // namespace

bool good_properties(const std::uint8_t *data, std::size_t size, bool foreign) {
    const auto *at = reinterpret_cast<const char *>(data);
    const char *const end = at + size;
    for (bool key = true; at < end; key = !key) {
        if (foreign && key && *at == '$') return false;
        const auto *nul = static_cast<const char *>(std::memchr(at, 0, static_cast<std::size_t>(end - at)));
        if (!nul || (key && nul + 1 == end)) return false;
        at = nul + 1;
    }
    return true;
}

Event Scanner::fail(std::string_view reason) {
    failed_ = true;
    return finish(Event::fatal, reason);
}

std::uint32_t Scanner::find(std::string_view topic) {
    if (last_index_ != unknown_topic && topic == last_topic_) return last_index_;
    auto found = index_.find(topic);
    if (found == index_.end()) return unknown_topic;
    last_topic_.assign(topic);
    return last_index_ = found->second;
}

void Scanner::add(std::string_view topic, std::uint32_t index) {
    index_.insert_or_assign(std::string(topic), index);
    last_index_ = unknown_topic;
}

std::uint32_t Scanner::allow(std::string_view topic) {
    if (index_.size() >= max_topics) forget_topics();
    auto index = static_cast<std::uint32_t>(topics_.size());
    topics_.emplace_back(topic);
    add(topic, index);
    return index;
}

void Scanner::refuse(std::string_view topic) {
    if (index_.size() >= max_topics) forget_topics();
    add(topic, refused_topic);
}

void Scanner::forget_topics() {
    topics_.clear();
    ++generation_;
    index_.clear();
    last_index_ = unknown_topic;
}

bool Scanner::find_line(const std::uint8_t *at, const std::uint8_t *end, std::string_view &text,
                        std::size_t &consumed) {
    const auto *stop = static_cast<const std::uint8_t *>(std::memchr(at, '\n', static_cast<std::size_t>(end - at)));
    if (!stop) return false;
    consumed = static_cast<std::size_t>(stop - at) + 1;
    text = {reinterpret_cast<const char *>(at), consumed - 1};
    while (!text.empty() && (text.back() == ' ' || text.back() == '\r' || text.back() == '\t')) text.remove_suffix(1);
    return true;
}

// <length> or, where messages have properties, <length>+<properties length>.
bool Scanner::lengths_of(std::string_view text, Header &header) const {
    const std::size_t plus = grammar_ == Grammar::raw ? std::string_view::npos : text.find('+');
    if (plus == std::string_view::npos) return number(text, header.length);
    return number(text.substr(0, plus), header.length) && number(text.substr(plus + 1), header.properties);
}

bool Scanner::too_large(const Header &header) const {
    if (header.alone && grammar_ == Grammar::hello)
        return header.length > std::min<std::uint64_t>(max_message_bytes_ + range_overhead_bytes, 0xffffffff);
    const std::uint32_t most = grammar_ == Grammar::deliveries ? max_message_bytes_ : max_properties_bytes;
    return header.length > max_message_bytes_ || header.properties > most;
}

Scanner::Kind Scanner::publish_header(std::string_view text, Header &header) {
    text.remove_prefix(3);
    header.topic = word(text);
    if (!lengths_of(word(text), header)) return Kind::bad;
    strip_front(text);
    constexpr std::string_view time = "time_ns=";
    header.timed = text.substr(0, time.size()) == time;
    if (header.timed && !signed_number(word(text).substr(time.size()), header.range.timestamp_ns)) {
        bad_ = "bad time";
        return Kind::bad;
    }
    strip_front(text);
    header.shared = text;
    return Kind::data;
}

Scanner::Kind Scanner::raw_publish_header(std::string_view text, Header &header) {
    text = without_blanks(text.substr(3));
    if (!text.empty() && text.front() == '+') text.remove_prefix(1);
    std::size_t digits = 0;
    while (digits < text.size() && text[digits] >= '0' && text[digits] <= '9') ++digits;
    return number(text.substr(0, digits), header.length) ? Kind::data : Kind::bad;
}

Scanner::Kind Scanner::stage_header(std::string_view text, Header &header) {
    text.remove_prefix(5);
    header.shared = word(text);
    header.topic = word(text);
    if (!lengths_of(word(text), header)) return Kind::bad;
    return word(text).empty() ? Kind::data : Kind::bad;
}

Scanner::Kind Scanner::load_header(std::string_view text, Header &header) {
    text.remove_prefix(4);
    header.shared = word(text);
    header.alone = true;
    return number(word(text), header.length) && word(text).empty() ? Kind::data : Kind::bad;
}

Scanner::Kind Scanner::delivery_header(std::string_view text, Header &header) {
    text.remove_prefix(3);
    header.shared = word(text);
    header.topic = word(text);
    std::uint64_t position, deliveries;
    if (!number(word(text), position) || !number(word(text), header.range.ordinal)) return Kind::bad;
    if (!signed_number(word(text), header.range.timestamp_ns)) return Kind::bad;
    if (!number(word(text), deliveries) || deliveries > 0xffffffff || !lengths_of(word(text), header)) return Kind::bad;
    header.range.position = static_cast<std::int64_t>(position);
    header.range.deliveries = static_cast<std::uint32_t>(deliveries);
    return Kind::data;
}

Scanner::Kind Scanner::header_of(std::string_view text, Header &header) {
    if (grammar_ == Grammar::deliveries) {
        if (starts(text, "MSG")) return delivery_header(text, header);
        if (!starts(text, "DATA")) return Kind::line;
        text.remove_prefix(4);
        header.alone = true;
        return number(word(text), header.length) ? Kind::data : Kind::bad;
    }
    if (grammar_ == Grammar::raw) return text.substr(0, 3) == "PUB" ? raw_publish_header(text, header) : Kind::line;
    if (starts(text, "PUB")) return publish_header(text, header);
    if (starts(text, "STAGE")) return stage_header(text, header);
    if (starts(text, "LOAD")) return load_header(text, header);
    return Kind::line;
}

// Whether one more publish belongs to the current run; run_ is "VERB shared".
bool Scanner::same_run(std::string_view verb, const Header &header) const {
    const std::string_view run = run_, shared = header.shared;
    return header.timed == timed_ && run.size() == verb.size() + 1 + shared.size() && run.substr(0, verb.size()) == verb &&
           run.substr(verb.size() + 1) == shared;
}

Event Scanner::take_line(std::string_view text, std::size_t consumed) {
    if (grammar_ == Grammar::raw && starts(text, "HELLO")) {
        grammar_ = Grammar::hello;
        max_line_bytes_ = std::max(max_line_bytes_, hello_line_bytes);  // COMMIT may name thousands of parts
        forget_topics();  // from here on each topic must be allowed
    }
    head_.assign(text);
    if (grammar_ == Grammar::raw && text.substr(0, 3) == "SUB") head_.assign("SUB ").append(without_blanks(text.substr(3)));
    inbox_.consume(consumed);
    after_data_ = false;
    return Event::line;
}

bool Scanner::skip_rest() {
    const std::size_t now = skip_ < inbox_.size() ? static_cast<std::size_t>(skip_) : inbox_.size();
    inbox_.consume(now);
    skip_ -= now;
    wanted_ = static_cast<std::size_t>(skip_ < Inbox::block_bytes ? skip_ : Inbox::block_bytes);
    return skip_ == 0;
}

Event Scanner::next(std::size_t most) {
    ranges_.clear();
    wanted_ = 0;
    if (failed_) return Event::fatal;
    if (skip_ && !skip_rest()) return Event::more;
    const std::uint8_t *const begin = inbox_.data();
    const std::uint8_t *const end = begin + inbox_.size();
    const std::uint8_t *at = begin;
    while (at < end && ranges_.size() < most) {
        const std::uint8_t *start = at;
        if (after_data_ && *start == '\n') {
            if (++start == end) {
                at = end;
                after_data_ = false;
                break;
            }
        }
        std::string_view text;
        std::size_t consumed;
        if (!find_line(start, end, text, consumed)) {
            if (static_cast<std::size_t>(end - start) > max_line_bytes_ && ranges_.empty()) return fail("line too long");
            break;
        }
        Header header;
        header.range.timestamp_ns = no_time;
        bad_ = "bad length";
        Kind kind = consumed > max_line_bytes_ ? Kind::bad : header_of(text, header);
        const std::size_t skipped = static_cast<std::size_t>(start - begin);
        if (kind != Kind::data) {
            if (!ranges_.empty()) break;
            if (kind == Kind::bad) return fail(consumed > max_line_bytes_ ? "line too long" : bad_);
            return take_line(text, skipped + consumed);
        }
        const std::string_view verb = grammar_ == Grammar::raw ? std::string_view("PUB") : text.substr(0, text.find(' '));
        if (!ranges_.empty() && (header.alone || !same_run(verb, header))) break;
        std::uint32_t topic = 0;
        if (!header.topic.empty() || (grammar_ == Grammar::hello && !header.alone)) {
            topic = find(header.topic);
            if (topic == unknown_topic) {
                if (!ranges_.empty()) break;
                if (grammar_ != Grammar::deliveries) return finish(Event::topic, header.topic);
                topic = allow(header.topic);
            }
        }
        if (topic == refused_topic || too_large(header)) {
            if (!ranges_.empty()) break;
            if (grammar_ != Grammar::hello || std::max(header.length, header.properties) > 0xffffffff)
                return fail("message too large");
            skip_ = header.length + header.properties;
            head_.assign(too_large(header) ? "too_large " : "denied ").append(text);
            inbox_.consume(skipped + consumed);
            after_data_ = true;
            skip_rest();
            return Event::refused;
        }
        const std::uint8_t *data = start + consumed;
        const std::uint64_t whole = header.length + header.properties;
        if (static_cast<std::uint64_t>(end - data) < whole) {
            wanted_ = whole - static_cast<std::size_t>(end - data);
            break;
        }
        if (header.properties && grammar_ == Grammar::hello && !good_properties(data + header.length, header.properties, true)) {
            if (!ranges_.empty()) break;
            return fail("bad properties");
        }
        if (ranges_.empty()) {
            run_.assign(verb).append(1, ' ').append(header.shared);
            timed_ = header.timed;
        }
        header.range.data = data;
        header.range.size = static_cast<std::uint32_t>(header.length);
        header.range.topic = topic;
        header.range.properties_size = static_cast<std::uint32_t>(header.properties);
        ranges_.push_back(header.range);
        at = data + whole;
        after_data_ = true;
        if (header.alone) break;
    }
    inbox_.consume(static_cast<std::size_t>(at - begin));
    if (ranges_.empty()) return Event::more;
    head_ = run_;
    if (timed_) head_.append(" time_ns");
    return Event::run;
}

}  // namespace penstock::broker
