#include "journal/reader.hpp"

#include <cerrno>
#include <cstring>
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "journal/checksum.hpp"

namespace penstock::journal {
namespace {

constexpr std::size_t open_segments = 64;

std::uint64_t load(const std::uint64_t &word) {
    return std::atomic_ref<std::uint64_t>(const_cast<std::uint64_t &>(word)).load(std::memory_order_acquire);
}

template <typename Header>
Header copy(const std::uint8_t *at) {
    Header header;
    std::memcpy(&header, at, sizeof header);
    return header;
}

bool read_file(const std::string &path, std::uint8_t *target, std::size_t bytes) {
    int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    ssize_t got = pread(file, target, bytes, 0);
    ::close(file);
    return got == static_cast<ssize_t>(bytes);
}

bool read_file(const std::string &path, std::vector<std::uint8_t> &target) {
    struct stat status;
    if (stat(path.c_str(), &status) != 0) return false;
    target.resize(static_cast<std::size_t>(status.st_size));
    return read_file(path, target.data(), target.size());
}

// Whether a segment's header (its first 560 bytes) has a seal that counts: only then are its caches on disk.
bool sealed(const std::uint8_t *head) {
    std::uint32_t crc = crc32c(crc32c(0, head + 32, 8), head + 512, 44);
    return copy<std::uint64_t>(head + 512) != 0 && copy<std::uint32_t>(head + 556) == crc;
}

}  // namespace

std::shared_ptr<Mapping> Mapping::open(const std::string &path, std::uint64_t at_least) {
    auto mapping = std::make_shared<Mapping>();
    mapping->file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (mapping->file_ < 0) return nullptr;
    mapping->bytes_ = std::max(std::max(mapping->file_bytes(), at_least), std::uint64_t{4096});
    void *data = mmap(nullptr, mapping->bytes_, PROT_READ, MAP_SHARED, mapping->file_, 0);
    if (data == MAP_FAILED) return nullptr;
    mapping->data_ = static_cast<const std::uint8_t *>(data);
    return mapping;
}

Mapping::~Mapping() {
    if (data_) munmap(const_cast<std::uint8_t *>(data_), bytes_);
    if (file_ >= 0) ::close(file_);
}

std::uint64_t Mapping::file_bytes() const {
    struct stat status;
    return fstat(file_, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : 0;
}

bool topic_matches(std::string_view pattern, std::string_view name) {
    for (;;) {
        std::size_t dot = pattern.find('.'), name_dot = name.find('.');
        std::string_view part = pattern.substr(0, dot);
        if (part == ">" && dot == pattern.npos) return !name.empty();
        if (part != "*" && part != name.substr(0, name_dot)) return false;
        if (dot == pattern.npos || name_dot == name.npos) return dot == pattern.npos && name_dot == name.npos;
        pattern.remove_prefix(dot + 1);
        name.remove_prefix(name_dot + 1);
    }
}

bool TopicFilter::matches(std::string_view name) const {
    return std::any_of(patterns_.begin(), patterns_.end(), [&](const std::string &p) { return topic_matches(p, name); });
}

void TopicFilter::learn(std::uint32_t id, std::string_view name) {
    if (id >= verdicts_.size()) verdicts_.resize(id + 1);
    verdicts_[id] = matches(name) ? 2 : 1;
}

std::unique_ptr<Reader> Reader::open(const std::string &directory, std::uint64_t segment_bytes, Problem &problem) {
    auto reader = std::make_unique<Reader>();
    reader->directory_ = directory;
    reader->segment_bytes_ = segment_bytes;
    reader->frontier_ = Mapping::open(directory + "/frontier", frontier_bytes);
    if (!reader->frontier_) {
        problem = {Problem::system, "cannot open the journal's frontier file", directory + "/frontier", errno};
        return nullptr;
    }
    if (reader->frontier_->file_bytes() < frontier_bytes ||
        std::memcmp(reader->frontier_->data(), "PENSTKFR", 8) != 0) {
        problem = {Problem::damage, "the frontier file is damaged; opening the journal for writing makes it anew",
                   directory + "/frontier", 0};
        return nullptr;
    }
    return reader;
}

FrontierWords Reader::frontier() const {
    auto *file = reinterpret_cast<const FrontierFile *>(frontier_->data());
    for (int attempt = 0;; ++attempt) {
        std::uint64_t before = load(file->sequence);
        FrontierWords words{load(file->frontier), load(file->segment), load(file->end), load(file->generation)};
        std::uint64_t after = load(file->sequence);
        if (before == after && !(before & 1)) return words;
        if (attempt > 1000) return {words.frontier, words.segment, 0, words.generation};  // its writer died in between
    }
}

std::string Reader::path_of(std::uint64_t first, std::uint32_t revision, const char *suffix) const {
    char name[64];
    std::snprintf(name, sizeof name, "/%020llu-%04u.%s", static_cast<unsigned long long>(first), revision, suffix);
    return directory_ + name;
}

// The frontier is read before the names, and stays what it was until the next refresh: one that is newer may speak of a
// segment that is not in the list, and what is not in the list looks like damage.
void Reader::refresh() {
    FrontierWords now = frontier();
    if ((now.generation != generation_ || now.segment != listed_segment_) && !list()) return;  // no descriptor left: later
    seen_ = now;
    generation_ = now.generation;
    listed_segment_ = now.segment;
}

// Whether a segment that cannot be opened has gone or been written anew meanwhile; the list is up to date then.
bool Reader::gone(std::uint64_t first, std::uint32_t revision, Problem &problem) {
    if (problem.kind != Problem::system || problem.error != ENOENT) return false;
    if (!list()) return false;
    auto place = segments_.find(first);
    if (place != segments_.end() && place->second.revision == revision) return false;
    problem = {};
    return true;
}

bool Reader::list() {
    std::map<std::uint64_t, std::uint32_t> seen;
    DIR *directory = opendir(directory_.c_str());
    if (!directory) return false;
    while (dirent *entry = readdir(directory)) {
        unsigned long long first;
        unsigned revision;
        int length = 0;
        if (std::strlen(entry->d_name) != 29 || std::sscanf(entry->d_name, "%20llu-%4u.log%n", &first, &revision, &length) != 2 || length != 29)
            continue;
        auto [place, made] = seen.try_emplace(first, revision);
        if (!made) place->second = std::max<std::uint32_t>(place->second, revision);
    }
    closedir(directory);
    std::erase_if(segments_, [&](const auto &item) {
        auto place = seen.find(item.first);
        return place == seen.end() || place->second != item.second.revision;
    });
    for (auto [first, revision] : seen) segments_[first].revision = revision;
    return true;
}

std::uint64_t Reader::first() {
    refresh();
    return segments_.empty() ? 1 : segments_.begin()->first;
}

std::vector<Reader::SegmentPlace> Reader::places() {
    refresh();
    std::vector<SegmentPlace> result;
    std::uint64_t frontier_now = seen_.frontier;
    for (auto at = segments_.begin(); at != segments_.end() && at->first <= frontier_now; ++at)
        result.push_back({at->first, std::min(next_of(at), frontier_now), at->second.revision});
    return result;
}

std::map<std::uint64_t, Reader::Segment>::iterator Reader::segment_of(std::uint64_t position) {
    auto at = segments_.upper_bound(position);
    return at == segments_.begin() ? segments_.end() : std::prev(at);
}

std::uint64_t Reader::next_of(std::map<std::uint64_t, Segment>::iterator at) const {
    auto next = std::next(at);
    return next == segments_.end() ? ~std::uint64_t{0} : next->first;
}

void Reader::close_unused(const Segment &keep) {
    std::size_t open = 0;
    Segment *oldest = nullptr;
    for (auto &[first, segment] : segments_) {
        if (!segment.log) continue;
        ++open;
        if (&segment != &keep && (!oldest || segment.used < oldest->used)) oldest = &segment;
    }
    if (open <= open_segments || !oldest) return;
    oldest->log.reset();
    oldest->index.reset();
    oldest->rebuilt.reset();
}

bool Reader::open_log(std::uint64_t first, bool active, Segment &segment, Problem &problem) {
    segment.used = ++clock_;
    if (segment.log) return true;
    std::string path = path_of(first, segment.revision, "log");
    segment.log = Mapping::open(path, active ? segment_bytes_ + (std::uint64_t{1} << 26) : 0);
    if (!segment.log) {
        problem = {Problem::system, "cannot open a segment", path, errno};
        return false;
    }
    if (segment.log->file_bytes() < segment_header_bytes) {
        segment.log.reset();
        problem = {Problem::damage, "the segment is shorter than its header", path, 0};
        return false;
    }
    std::memcpy(&segment.flags, segment.log->data() + 12, 4);
    std::memcpy(&segment.nonce, segment.log->data() + 32, 8);
    segment.sealed_next = sealed(segment.log->data()) ? copy<std::uint64_t>(segment.log->data() + 520) : 0;
    std::uint32_t checksum;
    std::memcpy(&checksum, segment.log->data() + 60, 4);
    if (checksum != crc32c(0, segment.log->data(), 60)) {
        segment.log.reset();
        problem = {Problem::damage, "the segment's header is damaged", path, 0};
        return false;
    }
    close_unused(segment);
    return true;
}

bool Reader::open_segment(std::uint64_t first, std::uint64_t next, Segment &segment, View &view, Problem &problem) {
    bool active = next == ~std::uint64_t{0};
    if (!open_log(first, active, segment, problem)) return false;
    std::uint64_t end = std::min(next, seen_.frontier);
    view.segment = &segment;
    if (segment.rebuilt && (!active || segment.rebuilt->next_position >= end)) {
        view.entries = segment.rebuilt->index.data();
        view.count = segment.rebuilt->index.size();
        return true;
    }
    std::uint64_t expected = (end - first) * sizeof(IndexEntry);
    if (!segment.index || segment.index->bytes() < expected)
        segment.index = Mapping::open(path_of(first, segment.revision, "index"), active ? expected * 2 + (1 << 24) : 0);
    std::uint64_t there = segment.index ? segment.index->file_bytes() / sizeof(IndexEntry) : 0;
    if (!segment.index) return rebuild(first, next, segment, view, problem);
    view.entries = reinterpret_cast<const IndexEntry *>(segment.index->data());
    view.count = std::min(there, end - first);
    while (view.count && view.entries[view.count - 1].position == 0) {  // a cache that lost its end, or one with gaps
        if (!(segment.flags & 3)) return rebuild(first, next, segment, view, problem);
        --view.count;
    }
    if (!(segment.flags & 3) && view.count < end - first) return rebuild(first, next, segment, view, problem);
    return true;
}

bool Reader::rebuild(std::uint64_t first, std::uint64_t next, Segment &segment, View &view, Problem &problem) {
    std::vector<std::uint8_t> bytes(segment.log->file_bytes());
    std::uint64_t done = 0;
    while (done < bytes.size()) {
        ssize_t got = pread(segment.log->file(), bytes.data() + done, bytes.size() - done, static_cast<off_t>(done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            problem = {Problem::system, "cannot read a segment", path_of(first, segment.revision, "log"), errno};
            return false;
        }
        if (got == 0) break;
        done += static_cast<std::uint64_t>(got);
    }
    std::uint64_t durable = seen_.frontier;
    segment.rebuilt = std::make_unique<Scan>(scan_segment(
        bytes.data(), done, {segment.nonce, first, std::min(next, durable), std::min(next, durable), (segment.flags & 3) != 0}));
    auto &index = segment.rebuilt->index;
    while (!index.empty() && index.back().position >= std::min(next, durable)) index.pop_back();
    view.entries = index.data();
    view.count = index.size();
    return true;
}

bool Reader::entry_good(const View &view, const IndexEntry &entry, std::uint64_t file_bytes) const {
    if (entry.offset < segment_header_bytes || entry.offset % 8 || entry.offset + sizeof(RecordHeader) > file_bytes) return false;
    const std::uint8_t *at = view.segment->log->data() + entry.offset;
    auto record = copy<RecordHeader>(at);
    return record.checksum == entry.checksum && record.kind == kind_message && record.topic == entry.topic &&
           record.data_bytes == entry.length && record_fits(record, file_bytes - entry.offset) &&
           crc32c(record_seed(view.segment->nonce, entry.position), at + 4, record.bytes - 4) == record.checksum;
}

ReadResult Reader::read(std::uint64_t start, std::uint64_t most, std::uint64_t most_bytes, TopicFilter *filter) {
    ReadResult result;
    refresh();
    std::uint64_t frontier_now = seen_.frontier;
    auto skip = [&] {  // retention was quicker
        if (segments_.empty() || segments_.begin()->first <= start) return;
        result.skipped += segments_.begin()->first - start;
        start = segments_.begin()->first;
    };
    skip();
    result.next = start;
    while (result.found.empty() && start < frontier_now) {
        auto at = segment_of(start);
        if (at == segments_.end()) break;
        std::uint64_t next = next_of(at), end = std::min(next, frontier_now);
        View view;
        if (!open_segment(at->first, next, at->second, view, result.problem)) {
            if (!gone(at->first, at->second.revision, result.problem)) return result;
            skip();
            result.next = start;
            continue;
        }
        std::uint64_t file_bytes = view.segment->log->file_bytes();
        if (file_bytes > view.segment->log->bytes()) {  // it has outgrown its mapping
            view.segment->log = Mapping::open(path_of(at->first, view.segment->revision, "log"), file_bytes + (std::uint64_t{1} << 26));
            if (!view.segment->log) {
                result.problem = {Problem::system, "cannot map a segment", path_of(at->first, at->second.revision, "log"), errno};
                return result;
            }
        }
        auto below = [](const IndexEntry &entry, std::uint64_t position) { return entry.position < position; };
        const IndexEntry *entry = start - at->first < view.count && view.entries[start - at->first].position == start
                                      ? view.entries + (start - at->first)
                                      : std::lower_bound(view.entries, view.entries + view.count, start, below);
        const IndexEntry *stop = view.entries + view.count;
        std::uint64_t expected = start, bytes = 0;
        bool gaps = view.segment->flags & 3;
        // Past what a sealed segment says it has, a segment is missing: that is no hole.
        std::uint64_t stop_at = gaps && view.segment->sealed_next ? std::min(end, view.segment->sealed_next) : end;
        bool missing = start >= stop_at;
        for (; entry < stop && result.found.size() < most; ++entry) {
            bool in_order = entry->position == expected || (entry->position > expected && (gaps || view.segment->rebuilt));
            if (in_order && entry->position > expected && !gaps) break;  // damaged in between: told below
            if (in_order && filter) {
                if (!filter->known(entry->topic) && !learn(*filter, entry->topic, result.problem)) return result;
                if (!filter->verdict(entry->topic)) {
                    expected = entry->position + 1;
                    continue;
                }
            }
            if (!in_order || !entry_good(view, *entry, file_bytes)) {
                if (!view.segment->rebuilt) {  // the index may be stale: the log decides
                    if (!rebuild(at->first, next, *view.segment, view, result.problem)) return result;
                    stop = view.entries + view.count;
                    entry = std::lower_bound(view.entries, stop, expected, below) - 1;
                    continue;
                }
                break;
            }
            if (!result.found.empty() && bytes + entry->length > most_bytes) break;
            bytes += entry->length;
            result.found.push_back({entry->position, view.segment->log->data() + entry->offset, entry->topic});
            expected = entry->position + 1;
        }
        result.mapping = view.segment->log;
        bool stopped_early = result.found.size() >= most || (entry < stop && !result.found.empty());
        if (!stopped_early && (missing || entry < stop || (!gaps && expected < end))) {  // neither all read nor enough: damage
            if (result.found.empty()) {
                std::uint64_t until = entry < stop ? entry->position : end;
                if (until == expected) until = expected + 1;
                std::string place = path_of(at->first, at->second.revision, "log");
                std::uint64_t offset = entry < stop ? entry->offset : view.segment->rebuilt ? view.segment->rebuilt->end : 0;
                for (const auto &damage : view.segment->rebuilt ? view.segment->rebuilt->damage : std::vector<ScanDamage>{})
                    if (damage.first_position <= expected && expected < damage.next_position) offset = damage.offset;
                result.problem = {Problem::damage,
                                  "positions " + std::to_string(expected) + " to " + std::to_string(until - 1) + " are damaged",
                                  place + ":" + std::to_string(offset), 0};
                result.next = until;
                return result;
            }
            result.next = expected;
            return result;
        }
        result.next = stopped_early ? expected : std::max(expected, stop_at);
        start = result.next;
    }
    return result;
}

std::uint64_t Reader::find_time(std::int64_t timestamp_ns, std::uint32_t topic, Problem &problem) {
    refresh();
    std::uint64_t frontier_now = seen_.frontier;
    for (auto at = segments_.begin(); at != segments_.end() && at->first < frontier_now; ++at) {
        View view;
        if (!open_segment(at->first, next_of(at), at->second, view, problem))
            return gone(at->first, at->second.revision, problem) ? find_time(timestamp_ns, topic, problem) : 0;
        // A sealed segment says how far it goes: most are passed over.
        const std::uint8_t *head = view.segment->log->data();
        if (sealed(head) && copy<std::int64_t>(head + 544) < timestamp_ns) continue;
        for (std::uint64_t i = 0; i < view.count; ++i)
            if (view.entries[i].timestamp_ns >= timestamp_ns && (!topic || view.entries[i].topic == topic))
                return view.entries[i].position;
    }
    return 0;
}

// Whether a segment can have the ordinal or a greater one of the topic: most sealed ones say no by their summary.
bool Reader::may_hold(std::uint64_t first, std::uint32_t revision, std::uint32_t topic, std::uint64_t ordinal) const {
    std::uint8_t head[560];
    if (!read_file(path_of(first, revision, "log"), head, sizeof head) || !sealed(head)) return true;
    std::vector<std::uint8_t> summary;
    if (!read_file(path_of(first, revision, "topics"), summary)) return true;
    std::uint64_t messages = 0;
    bool here = false;
    for (std::size_t i = 0; i + 64 <= summary.size(); i += 64) {  // id, reserved, messages, positions, ordinals, times
        messages += copy<std::uint64_t>(summary.data() + i + 8);
        if (copy<std::uint32_t>(summary.data() + i) == topic) here = copy<std::uint64_t>(summary.data() + i + 40) >= ordinal;
    }
    return here || messages != copy<std::uint64_t>(head + 528);  // a summary that does not add up is not believed
}

std::uint64_t Reader::find_ordinal(std::uint32_t topic, std::uint64_t ordinal, Problem &problem) {
    refresh();
    std::uint64_t frontier_now = seen_.frontier;
    for (auto at = segments_.begin(); at != segments_.end() && at->first < frontier_now; ++at) {
        if (!may_hold(at->first, at->second.revision, topic, ordinal)) continue;
        View view;
        if (!open_segment(at->first, next_of(at), at->second, view, problem))
            return gone(at->first, at->second.revision, problem) ? find_ordinal(topic, ordinal, problem) : 0;
        for (std::uint64_t i = 0; i < view.count; ++i)
            if (view.entries[i].topic == topic && view.entries[i].ordinal >= ordinal) return view.entries[i].position;
    }
    return 0;
}

// Learns names from the newest segment: its snapshot has all that were known before it. Called while another segment is
// being read, so it goes by the list as it is (a fresh one might take that segment away) and leaves the indexes alone.
void Reader::walk_topics(Problem &problem) {
    auto at = segment_of(seen_.frontier);
    if (at == segments_.end()) return;
    const Segment &segment = at->second;
    if (!open_log(at->first, std::next(at) == segments_.end(), at->second, problem)) return;
    if (walked_segment_ != at->first || walked_revision_ != segment.revision || walked_to_ < segment_header_bytes) {
        walked_segment_ = at->first;
        walked_revision_ = segment.revision;
        walked_to_ = segment_header_bytes;
    }
    std::uint64_t end = std::min(segment.log->file_bytes(), segment.log->bytes());
    const bool known_end = seen_.segment == at->first && seen_.end;
    if (known_end) end = std::min(end, seen_.end);
    while (walked_to_ + sizeof(BatchHeader) <= end) {
        auto header = copy<BatchHeader>(segment.log->data() + walked_to_);
        if (header.magic != batch_magic || header.nonce != segment.nonce || header.bytes < sizeof header ||
            header.bytes > end - walked_to_)
            return;
        if (header.flags & (batch_topics | batch_snapshot) && !walk_batch(segment, header, known_end)) return;
        walked_to_ += header.bytes;
    }
}

// False: the batch is not all there yet, look again later. One that is durable is damaged instead: what it has is taken.
bool Reader::walk_batch(const Segment &segment, const BatchHeader &header, bool durable) {
    const std::uint8_t *batch = segment.log->data() + walked_to_;
    std::uint64_t at = sizeof header, position = header.first_position;
    for (std::uint32_t i = 0; i < header.records; ++i) {
        if (header.bytes - at < sizeof(RecordHeader)) return durable;
        auto record = copy<RecordHeader>(batch + at);
        if (!record_fits(record, header.bytes - at)) return durable;
        if (record.kind == kind_topic && record.topic < (1u << 24)) {
            if (crc32c(record_seed(segment.nonce, position), batch + at + 4, record.bytes - 4) != record.checksum) {
                if (!durable) return false;
            } else {
                if (topics_.size() <= record.topic) topics_.resize(record.topic + 1);
                topics_[record.topic].assign(reinterpret_cast<const char *>(batch + at + sizeof record), record.data_bytes);
            }
        }
        if (record.kind == kind_message) ++position;
        at += record.bytes;
    }
    return true;
}

// What the filter says of a topic. Where its name cannot be looked up now nothing is said: that is no reason to pass over
// its messages.
bool Reader::learn(TopicFilter &filter, std::uint32_t topic, Problem &problem) {
    if (topic >= topics_.size() || topics_[topic].empty()) walk_topics(problem);
    if (problem.kind != Problem::none) return false;
    const bool known = topic < topics_.size() && !topics_[topic].empty();
    filter.learn(topic, known ? topics_[topic] : unknown_name(topic));  // its record was damaged
    return true;
}

std::uint32_t Reader::topic_id(std::string_view name) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (std::size_t id = 1; id < topics_.size(); ++id)
            if (topics_[id] == name) return static_cast<std::uint32_t>(id);
        topics();
    }
    return 0;
}

const std::vector<std::string> &Reader::topics() {
    refresh();
    Problem problem;
    walk_topics(problem);
    return topics_;
}

}  // namespace penstock::journal
