// Reader: messages of a journal as views of its mapped files, up to the durable frontier, never further.
//
// Rules
//   - One thread at a time (the bindings hold a lock); any number of readers in any number of processes, no locks.
//   - Files are opened in the directory that was opened, wherever it is moved and whatever takes its place.
//   - The size of a file is asked for before its mapping is touched, so that a truncated file is an error, not a fault.
//   - An index entry is trusted if its checksum is right, so is a topic summary; a record if its own and its entry's are.
//     Anything else is rebuilt in memory from the log, or reported; nothing is skipped because of an unchecked word.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "journal/checksum.hpp"
#include "journal/format.hpp"
#include "journal/scan.hpp"

namespace penstock::journal {

// A file mapped for reading; messages hold it by shared_ptr. The mapping may be longer than the file is now.
class Mapping {
   public:
    // Null with errno set; EINVAL: no regular file, or a link.
    static std::shared_ptr<Mapping> open(int directory, const std::string &name, std::uint64_t at_least);
    // The same file, which has grown beyond this mapping; by its descriptor, for another one may have its name by now.
    std::shared_ptr<Mapping> longer(std::uint64_t at_least) const;
    ~Mapping();
    std::uint64_t file_bytes() const;  // now
    const std::uint8_t *data() const { return data_; }
    std::uint64_t bytes() const { return bytes_; }
    int file() const { return file_; }

   private:
    static std::shared_ptr<Mapping> map(int file, std::uint64_t at_least);
    int file_ = -1;
    const std::uint8_t *data_ = nullptr;
    std::uint64_t bytes_ = 0;
};

struct FrontierWords {
    std::uint64_t frontier = 1, segment = 0, end = 0, generation = 0;
};

// Names and patterns: `*` is one part between dots, `>` at the end one or more.
class TopicFilter {
   public:
    explicit TopicFilter(std::vector<std::string> patterns);
    bool matches(std::string_view name) const;
    bool known(std::uint32_t id) const { return id < verdicts_.size() && verdicts_[id]; }
    bool verdict(std::uint32_t id) const { return verdicts_[id] == 2; }
    void learn(std::uint32_t id, std::string_view name);
    void forget() { verdicts_.clear(); }

   private:
    std::unordered_set<std::string> names_;  // those without wildcards: thousands of them cost no more than one
    std::vector<std::string> patterns_;      // the others
    std::vector<std::uint8_t> verdicts_;  // by topic id: 0 unknown, 1 no, 2 yes
};
bool topic_matches(std::string_view pattern, std::string_view name);

struct Problem {
    enum Kind : std::uint8_t { none, damage, system, version } kind = none;
    std::string text, place;
    int error = 0;
    std::uint64_t first = 0, next = 0;  // of damage that a reader can pass: the first damaged position, and the one after it
};

struct Found {
    std::uint64_t position;
    const std::uint8_t *record;
    std::uint32_t topic;
};

// What of a range is read.
struct Pass {
    std::uint64_t start, most, most_bytes;
    TopicFilter *filter = nullptr;
    std::uint64_t stop = ~std::uint64_t{0};  // the position to end before
    bool records = true;   // false: the index alone, whose entries have checksums of their own
    bool entries = false;  // copies of the entries are wanted too
    bool extras = false;   // most_bytes counts what stands beside the data too
};

// Positions that cannot be read, both ends included.
struct Hole {
    std::uint64_t first, last;
    enum Reason : std::uint8_t { retention, compaction, lost } reason;
};

struct ReadResult {
    std::vector<Found> found;
    std::vector<IndexEntry> entries;  // of what was found, where asked for
    std::shared_ptr<Mapping> mapping;
    std::uint64_t next = 0;  // where to go on
    std::uint64_t skipped = 0;  // positions from the start on that are not kept any more
    Problem problem;         // only when nothing was found
};

class Reader {
   public:
    Reader() = default;
    Reader(const Reader &) = delete;
    Reader &operator=(const Reader &) = delete;
    ~Reader();
    // Null with a problem filled in when the directory cannot be read.
    static std::unique_ptr<Reader> open(const std::string &directory, std::uint64_t segment_bytes, Problem &problem);

    // Refreshes now; each call below uses the state of the journal at its beginning.
    FrontierWords frontier(Problem &problem) const;
    const std::uint8_t *uuid() const { return uuid_; }
    std::uint64_t first(Problem &problem);  // least position kept
    // Messages from `start` on that pass the filter: of one segment, so that one mapping holds them.
    ReadResult read(const Pass &pass);
    std::vector<Hole> holes(Problem &problem);
    // The first position at or after: by time of storing (topic 0: any) or by ordinal in a topic. 0: none.
    std::uint64_t find_time(std::int64_t stored_ns, std::uint32_t topic, Problem &problem);
    std::uint64_t find_ordinal(std::uint32_t topic, std::uint64_t ordinal, Problem &problem);
    static std::string unknown_name(std::uint32_t id) { return "unknown#" + std::to_string(id); }
    std::uint32_t topic_id(std::string_view name, Problem &problem);
    const std::vector<std::string> &topics(Problem &problem);
    struct SegmentPlace {
        std::uint64_t first, next;
        std::uint32_t revision;
    };
    std::vector<SegmentPlace> places(Problem &problem);
    std::string path_of(std::uint64_t first, std::uint32_t revision, const char *suffix) const;

   private:
    struct Segment {
        std::uint32_t revision = 0;
        std::shared_ptr<Mapping> log, index;
        std::unique_ptr<Scan> rebuilt;  // where the index was no good
        std::uint64_t nonce = 0;
        std::uint32_t flags = 0, seed = 0;
        bool checked = false;  // every entry of the index was checked
        Seal seal{};           // end 0: not sealed, or damaged
        std::uint64_t used = 0;         // to close the least recently used one
    };
    struct View {  // what reading one segment needs
        Segment *segment = nullptr;
        const IndexEntry *entries = nullptr;
        std::uint64_t count = 0;
    };

    bool refresh(Problem &problem);
    bool list();
    std::map<std::uint64_t, Segment>::iterator segment_of(std::uint64_t position);
    std::uint64_t next_of(std::map<std::uint64_t, Segment>::iterator at) const;
    bool open_log(std::uint64_t first, bool active, Segment &segment, Problem &problem);
    bool open_segment(std::uint64_t first, std::uint64_t next, Segment &segment, View &view, Problem &problem);
    bool rebuild(std::uint64_t first, std::uint64_t next, Segment &segment, View &view, Problem &problem);
    bool believed(const View &view, const IndexEntry &entry) const {
        return view.segment->rebuilt || view.segment->checked || entry_believed(view.segment->seed, entry);
    }
    bool believe_all(std::uint64_t first, std::uint64_t next, View &view, Problem &problem);
    bool holes_of(std::uint64_t first, std::uint64_t next, Segment &segment, std::vector<Hole> &found, Problem &problem);
    bool damage_in(const View &view, std::uint64_t from, std::uint64_t to) const;
    bool entry_good(const View &view, const IndexEntry &entry, std::uint64_t file_bytes) const;
    template <typename Passes>
    std::uint64_t find(Passes passes, std::function<bool(std::uint64_t, const Segment &)> may_hold, Problem &problem);
    void close_unused(const Segment &keep);
    bool gone(std::uint64_t first, std::uint32_t revision, Problem &problem);
    void walk_topics(Problem &problem);
    bool walk_batch(const Segment &segment, const BatchHeader &header);
    bool take_name(std::uint32_t topic, const char *name, std::uint32_t bytes);
    bool numbered(std::uint32_t topic);
    void search_names(Problem &problem);
    bool read_log(std::uint64_t first, Segment &segment, std::vector<std::uint8_t> &bytes, Problem &problem);
    bool learn(TopicFilter &filter, std::uint32_t topic, Problem &problem);

    static std::string name_of(std::uint64_t first, std::uint32_t revision, const char *suffix);

    std::string directory_;
    int held_ = -1;  // the directory itself: what takes its place when it is moved is another journal
    std::uint64_t segment_bytes_ = 0;
    std::shared_ptr<Mapping> frontier_;
    std::map<std::uint64_t, Segment> segments_;  // by first position
    std::uint64_t generation_ = ~std::uint64_t{0}, listed_segment_ = ~std::uint64_t{0};
    FrontierWords seen_;  // as of the last refresh: segments_ has every position below its frontier
    std::uint64_t clock_ = 0;

    std::uint8_t uuid_[16] = {};
    std::vector<std::string> topics_;  // by id; empty: not known
    std::uint64_t named_ = 0;          // of them are known
    bool nameless_ = false;            // there is a topic whose name no segment has
    std::uint64_t searched_ = ~std::uint64_t{0};  // the generation in which all segments were last searched for names
    std::uint64_t walked_segment_ = 0, walked_to_ = 0;
    std::uint32_t walked_revision_ = 0;
};

// A descriptor that is readable after the frontier has moved.
class Watch {
   public:
    explicit Watch(const std::string &directory);
    ~Watch();
    int file() const { return both_; }  // readable by either; -1: no inotify instance was left
    bool wait(int timeout_ms) const;  // true: moved, closed or interrupted: look again
    void drain() const;
    void wake() const;  // ends a wait, from any thread, or the next one

   private:
    int inotify_ = -1, event_ = -1, both_ = -1;
};

}  // namespace penstock::journal
