// Scanner: the broker's text protocol, from bytes to runs of messages and command lines. No I/O, no Python.
//
//   raw mode       PUB <length>\n<data>           SUB <queue>\n  BYE\n  SHUTDOWN\n  HELLO ...\n (switches)
//                  as ElephantMQ reads it: any blanks and tabs, or none, after the verb; a plus before the length and
//                  anything after it; a queue's name is the rest of the line
//   HELLO mode     PUB <topic> <lengths> [time_ns=<time>] [options]\n<data>     STAGE <transaction> <topic> <lengths>\n<data>
//                  LOAD <transaction> <length>\n<data>     any other verb: a line
//   deliveries     MSG <queue> <topic> <position> <ordinal> <timestamp_ns> <deliveries> <lengths>\n<data>
//                  DATA <length>\n<data>          any other verb: a line
//   <lengths> is <length> or <length>+<properties length>: encoded properties follow the data to the byte
//
// One '\n' after data is skipped; so are blanks and '\r' at the end of a line. A run is a sequence of publishes (or
// deliveries of one queue) with the same options: one step returns thousands of them as ranges of the inbox. A topic
// seen for the first time stops the scan, so that rights are checked once per topic and not once per message. Times are
// each message's own: a run has them for all or for none, and its head then ends with the bare word time_ns.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "broker/inbox.hpp"

namespace penstock::broker {

constexpr std::int64_t no_time = INT64_MIN;  // the journal's value for "use the time of storing"

struct Range {
    const std::uint8_t *data;
    std::uint32_t size;
    std::uint32_t topic;  // index into topics()
    std::int64_t timestamp_ns;  // of deliveries, and of publishes that tell it; else no_time
    // Deliveries only.
    std::uint64_t ordinal;
    std::int64_t position;
    std::uint32_t deliveries;
    // Right behind the data.
    std::uint32_t properties_size;
};

// Whether these are pairs of key NUL value NUL; with `foreign` none may be the broker's own, which begin with '$'.
bool good_properties(const std::uint8_t *data, std::size_t size, bool foreign);

enum class Event : std::uint8_t {
    more,     // wait for more bytes
    run,      // ranges(): publishes or deliveries; head() is what they share
    line,     // head() is the line without its end; data in ranges()[0] where the verb has data
    topic,    // head() is a topic not seen before: allow() or refuse() it, then go on
    refused,  // a publish to a refused topic, or one that is too large, was skipped; head() is its line
    fatal,    // head() is the reason; the connection is to be closed
};

enum class Grammar : std::uint8_t { raw, hello, deliveries };

class Scanner {
   public:
    Scanner(Grammar grammar, std::uint32_t max_message_bytes, std::uint32_t max_line_bytes = 4096)
        : grammar_(grammar), max_message_bytes_(max_message_bytes), max_line_bytes_(max_line_bytes) {
        if (grammar == Grammar::raw) allow("default");
    }

    static constexpr std::uint32_t max_properties_bytes = 65535;
    static constexpr std::uint32_t hello_line_bytes = 65536;  // of a line after HELLO
    static constexpr std::uint64_t range_overhead_bytes = 8 << 20;  // what LOAD may bring beside the data of the largest message

    Inbox &inbox() noexcept { return inbox_; }
    Event next(std::size_t most = 16384);

    const std::vector<Range> &ranges() const noexcept { return ranges_; }
    std::string_view head() const noexcept { return head_; }
    Grammar grammar() const noexcept { return grammar_; }
    // Bytes still missing of the current command, as far as known.
    std::size_t wanted() const noexcept { return wanted_; }

    std::uint32_t allow(std::string_view topic);
    void refuse(std::string_view topic);
    void forget_topics();
    const std::vector<std::string> &topics() const noexcept { return topics_; }
    std::uint64_t generation() const noexcept { return generation_; }  // changes when topics() begins anew

   private:
    static constexpr std::uint32_t unknown_topic = 0xffffffff, refused_topic = 0xfffffffe;

    struct Header {
        std::string_view shared;  // what a run has in common: STAGE's transaction, PUB's options, MSG's queue
        std::string_view topic;
        std::uint64_t length = 0;
        std::uint64_t properties = 0;  // their length
        bool alone = false;            // data of a verb that is in no run: DATA, LOAD
        bool timed = false;            // it has a time of its own
        Range range{};
    };
    enum class Kind : std::uint8_t { line, data, bad };

    Event finish(Event event, std::string_view head) {
        head_.assign(head);
        return event;
    }
    Event fail(std::string_view reason);
    bool skip_rest();
    bool find_line(const std::uint8_t *at, const std::uint8_t *end, std::string_view &text, std::size_t &consumed);
    Kind header_of(std::string_view text, Header &header);
    bool lengths_of(std::string_view text, Header &header) const;
    bool too_large(const Header &header) const;
    Kind publish_header(std::string_view text, Header &header);
    static Kind raw_publish_header(std::string_view text, Header &header);
    Kind stage_header(std::string_view text, Header &header);
    Kind load_header(std::string_view text, Header &header);
    Kind delivery_header(std::string_view text, Header &header);
    bool same_run(std::string_view verb, const Header &header) const;
    Event take_line(std::string_view text, std::size_t consumed);
    std::uint32_t find(std::string_view topic);
    void add(std::string_view topic, std::uint32_t index);

    Inbox inbox_;
    Grammar grammar_;
    std::uint32_t max_message_bytes_, max_line_bytes_;
    std::vector<Range> ranges_;
    std::string head_, run_;
    std::size_t wanted_ = 0;
    bool after_data_ = false, failed_ = false, timed_ = false;
    std::string_view bad_ = "bad length";  // what is wrong with the header that was looked at last
    std::uint64_t skip_ = 0;  // bytes of a refused message still to skip
    std::vector<std::string> topics_;
    std::uint64_t generation_ = 0;
    struct Hash {
        using is_transparent = void;
        std::size_t operator()(std::string_view text) const noexcept { return std::hash<std::string_view>{}(text); }
    };
    std::unordered_map<std::string, std::uint32_t, Hash, std::equal_to<>> index_;
    std::string last_topic_;
    std::uint32_t last_index_ = unknown_topic;
};

}  // namespace penstock::broker
