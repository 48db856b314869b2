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
#include "journal/frontier.hpp"

namespace penstock::journal {
namespace {

constexpr std::size_t open_segments = 64;
constexpr const char *frontier_damaged = "the frontier file is damaged; opening the journal for writing makes it anew";
constexpr off_t max_summary_bytes = off_t{1} << 30;
constexpr std::uint64_t most_entries = std::uint64_t{1} << 40;  // of an index: so many times their size is no overflow
constexpr off_t longest_hole = off_t{1} << 30;  // longer than any batch: what follows was not written by us

template <typename Header>
Header copy(const std::uint8_t *at) {
    Header header;
    std::memcpy(&header, at, sizeof header);
    return header;
}

#ifdef O_PATH
constexpr int held_flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
#else
constexpr int held_flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
#endif

// Only regular files: a link may lead anywhere, and opening a FIFO would wait for its other end.
int open_regular(int directory, const std::string &name) {
    int file = openat(directory, name.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file < 0) {
        if (errno == ELOOP || errno == ENXIO) errno = EINVAL;
        return -1;
    }
    struct stat status;
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode)) return file;
    ::close(file);
    errno = EINVAL;
    return -1;
}

// Where the data of a sparse file ends: before the first hole that no batch can span.
std::uint64_t data_end([[maybe_unused]] int file, off_t size) {
#ifdef SEEK_DATA
    for (off_t hole = 0; hole >= 0 && hole < size;) {
        off_t data = lseek(file, hole, SEEK_DATA);
        if (data < 0 || data - hole > longest_hole) return static_cast<std::uint64_t>(hole);
        hole = lseek(file, data, SEEK_HOLE);
    }
#endif
    return static_cast<std::uint64_t>(size);
}

bool read_file(int directory, const std::string &name, std::uint8_t *target, std::size_t bytes) {
    int file = open_regular(directory, name);
    if (file < 0) return false;
    ssize_t got = pread(file, target, bytes, 0);
    ::close(file);
    return got == static_cast<ssize_t>(bytes);
}

bool read_file(int directory, const std::string &name, std::vector<std::uint8_t> &target) {
    struct stat status;
    if (fstatat(directory, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0 || status.st_size > max_summary_bytes) return false;
    target.resize(static_cast<std::size_t>(status.st_size));
    return read_file(directory, name, target.data(), target.size());
}

// The seal of a segment (its first 4096 bytes at `head`): only with a seal are its caches on disk. End 0: there is
// none, or it is damaged.
Seal seal_of(const std::uint8_t *head) {
    auto seal = copy<Seal>(head + seal_offset);
    bool good = seal.end && seal.checksum == seal_check(copy<SegmentHeader>(head).nonce, seal);
    return good ? seal : Seal{};
}

}  // namespace

std::shared_ptr<Mapping> Mapping::open(int directory, const std::string &name, std::uint64_t at_least) {
    return map(open_regular(directory, name), at_least);
}

std::shared_ptr<Mapping> Mapping::longer(std::uint64_t at_least) const {
    return map(fcntl(file_, F_DUPFD_CLOEXEC, 0), at_least);
}

std::shared_ptr<Mapping> Mapping::map(int file, std::uint64_t at_least) {
    auto mapping = std::make_shared<Mapping>();
    mapping->file_ = file;
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
    if (fstat(file_, &status) != 0) return 0;
    return status.st_size <= longest_hole ? static_cast<std::uint64_t>(status.st_size) : data_end(file_, status.st_size);
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

TopicFilter::TopicFilter(std::vector<std::string> patterns) {
    for (std::string &pattern : patterns) {
        if (pattern.find_first_of("*>") == pattern.npos) names_.insert(std::move(pattern));
        else patterns_.push_back(std::move(pattern));
    }
}

bool TopicFilter::matches(std::string_view name) const {
    if (names_.contains(std::string(name))) return true;
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
    reader->held_ = ::open(directory.c_str(), held_flags);
    if (reader->held_ >= 0) reader->frontier_ = Mapping::open(reader->held_, "frontier", frontier_bytes);
    if (!reader->frontier_) {
        problem = {Problem::system, "cannot open the journal's frontier file", directory + "/frontier", errno};
        return nullptr;
    }
    FrontierHead head{};
    if (reader->frontier_->file_bytes() >= frontier_bytes) std::memcpy(&head, reader->frontier_->data(), sizeof head);
    const bool ours = std::memcmp(head.magic, "PENSTKFR", 8) == 0;
    if (ours && head.version != format_version) {
        problem = {Problem::version, "is of version " + std::to_string(head.version), directory, 0};
        return nullptr;
    }
    std::memcpy(reader->uuid_, head.uuid, sizeof head.uuid);
    if (!ours) problem = {Problem::damage, frontier_damaged, directory + "/frontier", 0};
    else reader->frontier(problem);
    return problem.kind == Problem::none ? std::move(reader) : nullptr;
}

// Both copies may be changing at the moment they are read, but never for as long as a second.
FrontierWords Reader::frontier(Problem &problem) const {
    for (int attempt = 0; attempt < 2000; ++attempt) {
        if (frontier_->file_bytes() < frontier_bytes) break;
        if (auto copy = read_frontier(frontier_->data())) return {copy->frontier, copy->segment, copy->end, copy->generation};
        if (attempt > 100) usleep(500);
    }
    problem = {Problem::damage, frontier_damaged, directory_ + "/frontier", 0};
    return {};
}

Reader::~Reader() {
    if (held_ >= 0) ::close(held_);
}

std::string Reader::name_of(std::uint64_t first, std::uint32_t revision, const char *suffix) {
    char name[64];
    std::snprintf(name, sizeof name, "%020llu-%04u.%s", static_cast<unsigned long long>(first), revision, suffix);
    return name;
}

std::string Reader::path_of(std::uint64_t first, std::uint32_t revision, const char *suffix) const {
    return directory_ + "/" + name_of(first, revision, suffix);
}

// The frontier is read before the list of files, and is kept until the next refresh: a newer one may refer to a segment
// that is not in the list, which would look like damage.
bool Reader::refresh(Problem &problem) {
    FrontierWords now = frontier(problem);
    if (problem.kind != Problem::none) return false;
    // no descriptor is left: try later
    if ((now.generation != generation_ || now.segment != listed_segment_) && !list()) return true;
    seen_ = now;
    generation_ = now.generation;
    listed_segment_ = now.segment;
    return true;
}

// Whether a segment that cannot be opened was removed or rewritten meanwhile; the list is up to date then.
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
    int listed = openat(held_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *directory = listed < 0 ? nullptr : fdopendir(listed);
    if (!directory) {
        if (listed >= 0) ::close(listed);
        return false;
    }
    while (dirent *entry = readdir(directory)) {
        unsigned long long first;
        unsigned revision;
        int length = 0;
        if (std::strlen(entry->d_name) != 29 || std::sscanf(entry->d_name, "%20llu-%4u.log%n", &first, &revision, &length) != 2 || length != 29 ||
            first >> 62)
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

std::uint64_t Reader::first(Problem &problem) {
    refresh(problem);
    return segments_.empty() ? 1 : segments_.begin()->first;
}

std::vector<Reader::SegmentPlace> Reader::places(Problem &problem) {
    refresh(problem);
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
    segment.log = Mapping::open(held_, name_of(first, segment.revision, "log"), active ? segment_bytes_ + (std::uint64_t{1} << 26) : 0);
    if (!segment.log) {
        problem = {Problem::system, "cannot open a segment", path, errno};
        return false;
    }
    if (segment.log->file_bytes() < segment_header_bytes) {
        segment.log.reset();
        problem = {Problem::damage, "the segment is shorter than its header", path, 0};
        return false;
    }
    auto header = copy<SegmentHeader>(segment.log->data());
    const char *wrong = nullptr;
    if (header.checksum != crc32c(0, &header, offsetof(SegmentHeader, checksum))) wrong = "the segment's header is damaged";
    else if (header.version != format_version) wrong = "the segment is of another version";
    else if (std::memcmp(header.uuid, uuid_, sizeof header.uuid) != 0 || header.first_position != first)
        wrong = "the segment belongs elsewhere";
    if (wrong) {
        segment.log.reset();
        problem = {Problem::damage, wrong, path, 0};
        return false;
    }
    segment.flags = header.flags;
    segment.nonce = header.nonce;
    segment.seed = nonce_seed(header.nonce);
    segment.seal = seal_of(segment.log->data());
    segment.checked = false;
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
    segment.rebuilt.reset();
    const bool gaps = segment.flags & segment_gaps;
    // the number of entries is not known
    if (gaps && !segment.seal.end) return rebuild(first, next, segment, view, problem);
    const std::uint64_t count = gaps ? segment.seal.messages : end - first;
    // more than a segment can hold: the seal or the frontier is damaged
    if (count > most_entries) return rebuild(first, next, segment, view, problem);
    const std::uint64_t expected = count * sizeof(IndexEntry);
    if (!segment.index || segment.index->bytes() < expected) {
        segment.index = Mapping::open(held_, name_of(first, segment.revision, "index"), active ? expected * 2 + (1 << 24) : 0);
        segment.checked = false;
    }
    if (!segment.index || std::min(segment.index->file_bytes(), segment.index->bytes()) < expected)
        return rebuild(first, next, segment, view, problem);
    view.entries = reinterpret_cast<const IndexEntry *>(segment.index->data());
    view.count = count;
    return !gaps || segment.checked || believe_all(first, next, view, problem);
}

// With gaps an entry is found by its position, and a wrong position would hide others: check all of them once.
bool Reader::believe_all(std::uint64_t first, std::uint64_t next, View &view, Problem &problem) {
    std::uint64_t before = 0;
    for (const IndexEntry *entry = view.entries; entry < view.entries + view.count; ++entry) {
        if (!entry_believed(view.segment->seed, *entry) || entry->position <= before)
            return rebuild(first, next, *view.segment, view, problem);
        before = entry->position;
    }
    view.segment->checked = true;
    return true;
}

// A copy of the log.
bool Reader::read_log(std::uint64_t first, Segment &segment, std::vector<std::uint8_t> &bytes, Problem &problem) {
    bytes.resize(segment.log->file_bytes());
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
    bytes.resize(done);
    return true;
}

bool Reader::rebuild(std::uint64_t first, std::uint64_t next, Segment &segment, View &view, Problem &problem) {
    std::vector<std::uint8_t> bytes;
    if (!read_log(first, segment, bytes, problem)) return false;
    std::uint64_t durable = seen_.frontier;
    segment.rebuilt = std::make_unique<Scan>(scan_segment(
        bytes.data(), bytes.size(),
        {segment.nonce, first, std::min(next, durable), std::min(next, durable), (segment.flags & segment_gaps) != 0}));
    auto &index = segment.rebuilt->index;
    while (!index.empty() && index.back().position >= std::min(next, durable)) index.pop_back();
    view.entries = index.data();
    view.count = index.size();
    return true;
}

bool Reader::entry_good(const View &view, const IndexEntry &entry, std::uint64_t file_bytes) const {
    if (entry.offset < segment_header_bytes || entry.offset % 8 || entry.offset > file_bytes ||
        file_bytes - entry.offset < sizeof(RecordHeader))
        return false;
    const std::uint8_t *at = view.segment->log->data() + entry.offset;
    auto record = copy<RecordHeader>(at);
    return record.checksum == entry.checksum && record.kind == kind_message && record.topic == entry.topic &&
           record.data_bytes == entry.length && extra_bytes(record) == entry.extra_bytes &&
           record.ordinal == entry.ordinal && record.timestamp_ns == entry.timestamp_ns && record_fits(record, file_bytes - entry.offset) &&
           crc32c(record_seed(view.segment->nonce, entry.position), at + 4, record.bytes - 4) == record.checksum;
}

// Whether a message between these positions is damaged, as far as a scan of the log knows.
bool Reader::damage_in(const View &view, std::uint64_t from, std::uint64_t to) const {
    if (!view.segment->rebuilt) return false;
    const auto &damage = view.segment->rebuilt->damage;  // in the order of positions
    auto bad = std::partition_point(damage.begin(), damage.end(), [&](const ScanDamage &one) { return one.next_position <= from; });
    for (; bad != damage.end() && bad->first_position < to; ++bad)
        if (bad->first_position < bad->next_position) return true;
    return false;
}

ReadResult Reader::read(const Pass &pass) {
    ReadResult result;
    if (!refresh(result.problem)) return result;
    const std::uint64_t most = pass.most, frontier_now = std::min(seen_.frontier, pass.stop);
    std::uint64_t start = pass.start;
    TopicFilter *const filter = pass.filter;
    auto skip = [&] {  // retention has removed it meanwhile
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
            if (!gone(at->first, at->second.revision, result.problem)) {
                result.problem.first = start;
                result.problem.next = end;
                return result;
            }
            skip();
            result.next = start;
            continue;
        }
        std::uint64_t file_bytes = view.segment->log->file_bytes();
        if (file_bytes > view.segment->log->bytes()) {  // the file has grown beyond its mapping
            auto longer = view.segment->log->longer(file_bytes + (std::uint64_t{1} << 26));
            if (!longer) {
                result.problem = {Problem::system, "cannot map a segment", path_of(at->first, at->second.revision, "log"), errno};
                return result;
            }
            view.segment->log = std::move(longer);
        }
        auto below = [](const IndexEntry &entry, std::uint64_t position) { return entry.position < position; };
        const bool direct = !view.segment->rebuilt && !(view.segment->flags & segment_gaps);
        const IndexEntry *entry = direct ? view.entries + (start - at->first)
                                         : std::lower_bound(view.entries, view.entries + view.count, start, below);
        auto last = [&] {  // only entries of the range are examined
            return std::lower_bound(view.entries, view.entries + view.count, frontier_now, below);
        };
        const IndexEntry *stop = direct ? view.entries + std::min(view.count, end - at->first) : last();
        std::uint64_t expected = start, bytes = 0;
        bool gaps = view.segment->flags & segment_gaps;
        // Beyond the end of a sealed segment, a segment is missing: that is damage, not a hole.
        std::uint64_t stop_at = gaps && view.segment->seal.end ? std::min(end, view.segment->seal.next_position) : end;
        bool missing = start >= stop_at;
        while (entry < stop && result.found.size() < most) {
            bool in_order = believed(view, *entry) && (entry->position == expected || (entry->position > expected && (gaps || view.segment->rebuilt)));
            if (in_order && entry->position > expected && (!gaps || damage_in(view, expected, entry->position)))
                break;  // damaged in between: reported below
            if (in_order && filter) {
                if (!filter->known(entry->topic) && !learn(*filter, entry->topic, result.problem)) return result;
                if (!filter->verdict(entry->topic)) {
                    expected = entry->position + 1;
                    ++entry;
                    continue;
                }
            }
            if (!in_order || !numbered(entry->topic) || (pass.records && !entry_good(view, *entry, file_bytes))) {
                if (in_order && view.segment->checked) {  // the index is correct, so the log is damaged
                    expected = entry->position;
                    break;
                }
                if (!view.segment->rebuilt) {  // the index may be stale: rebuild it from the log
                    if (!rebuild(at->first, next, *view.segment, view, result.problem)) return result;
                    stop = last();
                    entry = std::lower_bound(view.entries, stop, expected, below);
                    continue;
                }
                break;
            }
            const std::uint64_t size = entry->length + (pass.extras ? std::uint64_t{entry->extra_bytes} : 0);
            if (!result.found.empty() && bytes + size > pass.most_bytes) break;
            bytes += size;
            result.found.push_back({entry->position, view.segment->log->data() + entry->offset, entry->topic});
            if (pass.entries) result.entries.push_back(*entry);
            expected = entry->position + 1;
            ++entry;
        }
        result.mapping = view.segment->log;
        bool stopped_early = result.found.size() >= most || (entry < stop && !result.found.empty());
        const bool lost = gaps ? entry == stop && damage_in(view, expected, stop_at) : expected < end;
        // neither everything was read nor enough found: damage
        if (!stopped_early && (missing || entry < stop || lost)) {
            if (result.found.empty()) {
                std::uint64_t until = entry < stop ? entry->position : end;
                if (until == expected) until = expected + 1;
                std::string place = path_of(at->first, at->second.revision, "log");
                std::uint64_t offset = entry < stop ? entry->offset : view.segment->rebuilt ? view.segment->rebuilt->end : 0;
                for (const auto &damage : view.segment->rebuilt ? view.segment->rebuilt->damage : std::vector<ScanDamage>{})
                    if (damage.first_position <= expected && expected < damage.next_position) offset = damage.offset;
                result.problem = {Problem::damage,
                                  "positions " + std::to_string(expected) + " to " + std::to_string(until - 1) + " are damaged",
                                  place + ":" + std::to_string(offset), 0, expected, until};
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

std::vector<Hole> Reader::holes(Problem &problem) {
    std::vector<Hole> found;
    if (!refresh(problem)) return found;
    if (!segments_.empty() && segments_.begin()->first > 1) found.push_back({1, segments_.begin()->first - 1, Hole::retention});
    for (auto at = segments_.begin(); at != segments_.end() && at->first < seen_.frontier; ++at) {
        const std::size_t before = found.size();
        if (holes_of(at->first, next_of(at), at->second, found, problem)) continue;
        if (problem.kind == Problem::damage) {  // nothing in it can be read
            problem = {};
            found.resize(before);
            found.push_back({at->first, std::min(next_of(at), seen_.frontier) - 1, Hole::lost});
            continue;
        }
        if (!gone(at->first, at->second.revision, problem)) break;
        return holes(problem);
    }
    return found;
}

bool Reader::holes_of(std::uint64_t first, std::uint64_t next, Segment &segment, std::vector<Hole> &found, Problem &problem) {
    View view;
    const std::uint64_t end = std::min(next, seen_.frontier);
    if (!open_log(first, next == ~std::uint64_t{0}, segment, problem)) return false;
    const bool gaps = segment.flags & segment_gaps;
    // its seal says that it is complete
    if (!gaps && segment.seal.end && segment.seal.messages == end - first) return true;
    if (!open_segment(first, next, segment, view, problem)) return false;
    for (std::uint64_t i = 0; !gaps && !segment.rebuilt && i < view.count; ++i)
        if (!entry_believed(segment.seed, view.entries[i]) || view.entries[i].position != first + i)
            if (!rebuild(first, next, segment, view, problem)) return false;
    std::uint64_t expected = first;
    auto until = [&](std::uint64_t position) {
        if (position > expected) found.push_back({expected, position - 1, segment.flags & segment_compacted ? Hole::compaction : Hole::lost});
        expected = position + 1;
    };
    for (std::uint64_t i = 0; i < view.count; ++i) until(view.entries[i].position);
    until(end);
    return true;
}

template <typename Passes>
std::uint64_t Reader::find(Passes passes, std::function<bool(std::uint64_t, const Segment &)> may_hold, Problem &problem) {
    if (!refresh(problem)) return 0;
    std::uint64_t frontier_now = seen_.frontier;
    for (auto at = segments_.begin(); at != segments_.end() && at->first < frontier_now; ++at) {
        if (!may_hold(at->first, at->second)) continue;
        View view;
        if (!open_segment(at->first, next_of(at), at->second, view, problem))
            return gone(at->first, at->second.revision, problem) ? find(passes, may_hold, problem) : 0;
        for (std::uint64_t i = 0; i < view.count; ++i) {
            if (!believed(view, view.entries[i])) {
                if (!rebuild(at->first, next_of(at), at->second, view, problem)) return 0;
                i = ~std::uint64_t{0};  // start again from the beginning
                continue;
            }
            if (passes(view.entries[i])) return view.entries[i].position;
        }
    }
    return 0;
}

std::uint64_t Reader::find_time(std::int64_t stored_ns, std::uint32_t topic, Problem &problem) {
    auto passes = [&](const IndexEntry &entry) { return entry.stored_ns >= stored_ns && (!topic || entry.topic == topic); };
    // A sealed segment knows its range, so most segments are skipped.
    auto may_hold = [&](std::uint64_t first, const Segment &segment) {
        std::uint8_t head[segment_header_bytes];
        if (!read_file(held_, name_of(first, segment.revision, "log"), head, sizeof head)) return true;
        Seal seal = seal_of(head);
        return !seal.end || seal.greatest_stored_ns >= stored_ns;
    };
    return find(passes, may_hold, problem);
}

std::uint64_t Reader::find_ordinal(std::uint32_t topic, std::uint64_t ordinal, Problem &problem) {
    auto passes = [&](const IndexEntry &entry) { return entry.topic == topic && entry.ordinal >= ordinal; };
    // The summary of most sealed segments shows that they have neither this ordinal of the topic nor a greater one.
    auto may_hold = [&](std::uint64_t first, const Segment &segment) {
        std::uint8_t head[segment_header_bytes];
        std::vector<std::uint8_t> summary;
        if (!read_file(held_, name_of(first, segment.revision, "log"), head, sizeof head) || !seal_of(head).end ||
            !read_file(held_, name_of(first, segment.revision, "topics"), summary))
            return true;
        std::uint64_t messages = 0;
        const std::uint32_t seed = nonce_seed(copy<SegmentHeader>(head).nonce);
        bool here = false;
        for (std::size_t i = 0; i + sizeof(TopicSummary) <= summary.size(); i += sizeof(TopicSummary)) {
            auto row = copy<TopicSummary>(summary.data() + i);
            if (row.checksum != summary_check(seed, row)) return true;
            messages += row.messages;
            if (row.topic == topic) here = row.greatest_ordinal >= ordinal;
        }
        return here || messages != seal_of(head).messages;  // a summary with a wrong total is ignored
    };
    return find(passes, may_hold, problem);
}

// Reads names from the newest segment: its snapshot has all that were known before it. Called while another segment is
// being read, so it uses the current list (a new one might drop that segment) and does not touch the indexes.
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
        bool good = header.magic == batch_magic && header.nonce == segment.nonce && header.bytes >= sizeof header &&
                    header.bytes <= end - walked_to_ && header.head_checksum == batch_head_check(header);
        if (good && header.flags & (batch_topics | batch_snapshot)) good = walk_batch(segment, header);
        if (!good && known_end) {  // it is durable, so it is damaged: another segment may have the names
            search_names(problem);
            walked_to_ = end;
        }
        if (!good) return;  // or it is not complete yet: try again later
        walked_to_ += header.bytes;
    }
}

// False: a record of the batch is damaged.
bool Reader::walk_batch(const Segment &segment, const BatchHeader &header) {
    const std::uint8_t *batch = segment.log->data() + walked_to_;
    std::uint64_t at = sizeof header, position = header.first_position;
    for (std::uint32_t i = 0; i < header.records; ++i) {
        if (header.bytes - at < sizeof(RecordHeader)) return false;
        auto record = copy<RecordHeader>(batch + at);
        if (!record_fits(record, header.bytes - at)) return false;
        if (record.kind == kind_topic || header.flags & batch_snapshot) {
            if (crc32c(record_seed(segment.nonce, position), batch + at + 4, record.bytes - 4) != record.checksum) return false;
            if (record.kind == kind_topic &&
                !take_name(record.topic, reinterpret_cast<const char *>(batch + at + sizeof record), record.data_bytes))
                return false;
        }
        if (record.kind == kind_message) ++position;
        at += record.bytes;
    }
    return at == header.bytes;
}

// False: a number that no writer gives.
bool Reader::take_name(std::uint32_t topic, const char *name, std::uint32_t bytes) {
    if (!topic_number_fits(topic, named_)) return false;
    if (topics_.size() <= topic) topics_.resize(topic + 1);
    if (!bytes) return true;
    if (topics_[topic].empty()) ++named_;
    topics_[topic].assign(name, bytes);
    return true;
}

// Whether a message may have this topic. Most numbers are so small that no name need be known for it.
bool Reader::numbered(std::uint32_t topic) {
    if (topic_number_fits(topic, 0)) return true;
    Problem ignored;  // concerns only the names
    if (!topic_number_fits(topic, named_)) walk_topics(ignored);
    return topic_number_fits(topic, named_);
}

// Reads the names of all segments, record by record. Slow, and only done if the newest segment does not have them.
void Reader::search_names(Problem &problem) {
    if (searched_ == generation_) return;
    searched_ = generation_;
    std::vector<std::uint32_t> met;
    for (auto at = segments_.rbegin(); at != segments_.rend() && at->first <= seen_.frontier; ++at) {
        Problem ignored;  // reported when its messages are read
        std::vector<std::uint8_t> bytes;
        Segment segment;  // a separate object: the one in the list may be in use
        segment.revision = at->second.revision;
        if (!open_log(at->first, at == segments_.rbegin(), segment, ignored) || !read_log(at->first, segment, bytes, problem))
            continue;
        std::uint64_t end = at == segments_.rbegin() ? seen_.frontier : std::prev(at)->first;
        end = std::min(end, seen_.frontier);
        Scan scan = scan_segment(bytes.data(), bytes.size(),
                                 {segment.nonce, at->first, end, end, (segment.flags & segment_gaps) != 0});
        for (const ScanTopic &topic : scan.topics) {
            take_name(topic.id, topic.name.data(), static_cast<std::uint32_t>(topic.name.size()));
            met.push_back(topic.id);
        }
    }
    nameless_ = std::any_of(met.begin(), met.end(), [&](std::uint32_t id) { return id < topics_.size() && topics_[id].empty(); });
}

// Whether the filter accepts a topic. If its name is not known there is no answer: its messages must not be skipped
// silently.
bool Reader::learn(TopicFilter &filter, std::uint32_t topic, Problem &problem) {
    auto known = [&] { return topic < topics_.size() && !topics_[topic].empty(); };
    if (!known()) walk_topics(problem);
    if (!known() && problem.kind == Problem::none) search_names(problem);
    if (problem.kind != Problem::none) return false;
    if (!known()) {
        problem = {Problem::damage, "the name of topic number " + std::to_string(topic) + " is damaged", directory_, 0};
        return false;
    }
    filter.learn(topic, topics_[topic]);
    return true;
}

std::uint32_t Reader::topic_id(std::string_view name, Problem &problem) {
    for (int attempt = 0; attempt < 2; ++attempt) {
        for (std::size_t id = 1; id < topics_.size(); ++id)
            if (topics_[id] == name) return static_cast<std::uint32_t>(id);
        topics(problem);
    }
    if (nameless_ && problem.kind == Problem::none)
        problem = {Problem::damage, "the name of a topic is damaged: it may be " + std::string(name), directory_, 0};
    return 0;
}

const std::vector<std::string> &Reader::topics(Problem &problem) {
    if (refresh(problem)) walk_topics(problem);
    return topics_;
}

}  // namespace penstock::journal
