#include "journal/queue_state.hpp"

#include <algorithm>
#include <cstring>

namespace penstock::journal {

void Runs::add(std::int64_t first, std::int64_t last) {
    last = std::min(last, INT64_MAX - 1);  // a file may contain anything
    if (first > last) return;
    auto at = runs_.upper_bound(first);
    if (at != runs_.begin()) {
        auto before = std::prev(at);
        if (before->second >= first - 1) {
            first = before->first;
            last = std::max(last, before->second);
            at = runs_.erase(before);
        }
    }
    while (at != runs_.end() && at->first <= last + 1) {
        last = std::max(last, at->second);
        at = runs_.erase(at);
    }
    runs_.emplace(first, last);
}

bool Runs::holds(std::int64_t position) const {
    auto at = runs_.upper_bound(position);
    return at != runs_.begin() && std::prev(at)->second >= position;
}

void Runs::remove(std::int64_t position) {
    auto at = runs_.upper_bound(position);
    if (at == runs_.begin() || (--at)->second < position) return;
    const auto [first, last] = *at;
    runs_.erase(at);
    if (first < position) runs_.emplace(first, position - 1);
    if (position < last) runs_.emplace(position + 1, last);
}

std::int64_t Runs::skip(std::int64_t position) const {
    auto at = runs_.upper_bound(position);
    if (at == runs_.begin() || std::prev(at)->second < position) return position;
    return std::prev(at)->second + 1;
}

void Runs::drop_below(std::int64_t position) {
    while (!runs_.empty() && runs_.begin()->second < position) runs_.erase(runs_.begin());
}

std::size_t QueueState::find(std::int64_t position) const {
    return static_cast<std::size_t>(
        std::lower_bound(entries_.begin(), entries_.end(), position,
                         [](const Entry &entry, std::int64_t wanted) { return entry.position < wanted; }) -
        entries_.begin());
}

QueueState::Entry *QueueState::live(std::int64_t position) {
    const std::size_t at = find(position);
    if (at == entries_.size() || entries_[at].position != position) return nullptr;
    return entries_[at].place == static_cast<std::uint8_t>(Place::done) ? nullptr : &entries_[at];
}

void QueueState::add(const Entry &entry) {
    entries_.push_back(entry);
    ++live_;
    cursor_ = entry.position + 1;
    settle_floor();
}

bool QueueState::deliver(std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns,
                         std::uint32_t &deliveries, std::int64_t now_ns, std::uint32_t most) {
    if (position < cursor_) return false;
    if (done_before_.holds(position)) {
        pass(position);
        return false;
    }
    Entry entry{position, deadline_ns, consumer, 1, 0, 0, static_cast<std::uint8_t>(Place::in_flight)};
    if (position < delivered_before_) {
        entry.uncounted = counts_before_.contains(position);
        const std::uint32_t before = this->deliveries(position);
        auto put_off = due_before_.find(position);
        const bool waits = put_off != due_before_.end() && put_off->second > now_ns;
        if (waits || (most && before >= most)) {
            const std::int64_t due_ns = waits ? put_off->second : now_ns;
            waiting_.emplace(due_ns, position);
            add({position, due_ns, 0, before, entry.uncounted, waits, static_cast<std::uint8_t>(Place::waiting)});
            return false;
        }
        entry.deliveries = before + 1;
    }
    note_deadline(deadline_ns, position);
    ++held_[consumer];
    add(entry);
    note_deliveries(entry);
    deliveries = entry.deliveries;
    return true;
}

bool QueueState::hold(std::int64_t position, std::int64_t due_ns) {
    if (position < cursor_) return false;
    if (done_before_.holds(position)) {
        pass(position);
        return false;
    }
    add({position, due_ns, 0, 0, 0, 0, static_cast<std::uint8_t>(Place::waiting)});
    waiting_.emplace(due_ns, position);
    return true;
}

void QueueState::pass(std::int64_t position) {
    look_from(position + 1);
    changed_ = true;
}

void QueueState::leave_place(Entry &entry) {
    if (entry.place == static_cast<std::uint8_t>(Place::waiting)) {
        waiting_.erase({entry.time_ns, entry.position});
    } else if (entry.place == static_cast<std::uint8_t>(Place::in_flight)) {
        auto found = held_.find(entry.consumer);
        if (--found->second == 0) held_.erase(found);
    }
}

void QueueState::finish(Entry &entry) {
    leave_place(entry);
    entry.place = static_cast<std::uint8_t>(Place::done);
    --live_;
    counts_.erase(entry.position);
    waits_.erase(entry.position);
}

std::size_t QueueState::acknowledge(std::uint32_t consumer, std::int64_t first, std::int64_t last, bool exact) {
    std::size_t count = 0, at = find(first);
    std::int64_t run = -1;
    const auto close = [&](std::int64_t end) {
        if (run >= 0) acked_.emplace_back(run, end);
        run = -1;
    };
    std::int64_t previous = 0;
    for (; at < entries_.size() && entries_[at].position <= last; ++at) {
        Entry &entry = entries_[at];
        const bool done = entry.place == static_cast<std::uint8_t>(Place::done);
        const bool meant = exact || entry.deliveries <= 1 || entry.position == first || entry.position == last;
        if (!done && meant && (consumer == 0 || entry.consumer == consumer)) {
            finish(entry);
            ++count;
            if (run < 0) run = entry.position;
            previous = entry.position;
        } else if (!done) {
            close(previous);
        }
    }
    close(previous);
    if (count) {
        changed_ = true;
        settle_floor();
        tidy();
    }
    return count;
}

// Neighbours (with only done positions between them) are merged into one run.
std::size_t QueueState::acknowledge_each(const std::vector<std::int64_t> &positions) {
    std::size_t count = 0, at = 0, previous = 0;
    std::int64_t first = 0, last = -1;
    for (const std::int64_t position : positions) {
        ++at;
        if (at >= entries_.size() || entries_[at].position != position) at = find(position);
        if (at == entries_.size() || entries_[at].position != position || is_done(entries_[at])) continue;
        finish(entries_[at]);
        bool neighbour = count && at > previous;
        for (std::size_t i = previous + 1; neighbour && i < at; ++i) neighbour = is_done(entries_[i]);
        if (count && !neighbour) acked_.emplace_back(first, last);
        if (!neighbour) first = position;
        last = position;
        previous = at;
        ++count;
    }
    if (!count) return 0;
    acked_.emplace_back(first, last);
    changed_ = true;
    settle_floor();
    tidy();
    return count;
}

void QueueState::wait(Entry &entry, std::int64_t due_ns) {
    leave_place(entry);
    entry.lasting = 0;
    entry.place = static_cast<std::uint8_t>(Place::waiting);
    entry.time_ns = due_ns;
    entry.consumer = 0;
    waiting_.emplace(due_ns, entry.position);
}

void QueueState::put_back(std::int64_t position, std::uint32_t deliveries, std::int64_t due_ns) {
    if (live(position) || position >= cursor_) return;
    const std::size_t at = find(position);
    const Entry entry{position, due_ns, 0, deliveries, 0, 0, static_cast<std::uint8_t>(Place::waiting)};
    if (at < entries_.size() && entries_[at].position == position) entries_[at] = entry;
    else entries_.insert(entries_.begin() + static_cast<std::ptrdiff_t>(at), entry);
    ++live_;
    waiting_.emplace(due_ns, position);
    floor_ = std::min(floor_, position);
    changed_ = true;
}

bool QueueState::finish_ahead(std::int64_t position) {
    if (!open(position)) return false;
    done_before_.add(position, position);
    acked_.emplace_back(position, position);
    changed_ = true;
    settle_floor();
    return true;
}

void QueueState::reopen(std::int64_t position) {
    if (position < cursor_) {  // the cursor has passed it meanwhile
        put_back(position, 0, 0);
        return;
    }
    done_before_.remove(position);
    std::erase(acked_, Run{position, position});
    changed_ = true;
}

bool QueueState::postpone(std::int64_t position, std::int64_t due_ns) {
    Entry *entry = live(position);
    if (!entry || entry->place != static_cast<std::uint8_t>(Place::waiting)) return false;
    wait(*entry, due_ns);
    return true;
}

QueueState::Entry *QueueState::in_flight_at(std::int64_t position) {
    Entry *entry = live(position);
    return entry && entry->place == static_cast<std::uint8_t>(Place::in_flight) ? entry : nullptr;
}

bool QueueState::return_message(std::uint32_t consumer, std::int64_t position, std::int64_t due_ns, bool lasting) {
    Entry *entry = in_flight_at(position);
    if (!entry || (consumer != 0 && entry->consumer != consumer)) return false;
    wait(*entry, due_ns);
    if (lasting) {
        entry->lasting = 1;
        waits_[position] = due_ns;
        changed_ = true;
    }
    return true;
}

void QueueState::uncount(Entry &entry) {
    if (entry.deliveries > 0) entry.deliveries = entry.deliveries - 1;
    entry.uncounted = 1;
    note_deliveries(entry);
}

bool QueueState::take_back(std::int64_t position, std::int64_t now_ns) {
    Entry *entry = in_flight_at(position);
    if (!entry) return false;
    uncount(*entry);
    wait(*entry, now_ns);
    return true;
}

bool QueueState::extend(std::int64_t position, std::int64_t deadline_ns) {
    Entry *entry = in_flight_at(position);
    if (!entry) return false;
    entry->time_ns = deadline_ns;
    note_deadline(deadline_ns, position);
    return true;
}

void QueueState::heard(std::uint32_t consumer, std::int64_t first, std::int64_t last, std::int64_t deadline_ns) {
    Heard &heard = heard_[consumer];
    for (std::size_t at = find(heard.reached + 1); at < entries_.size() && entries_[at].position < first; ++at) {
        Entry &entry = entries_[at];
        if (entry.place != static_cast<std::uint8_t>(Place::in_flight) || entry.consumer != consumer) continue;
        entry.time_ns = deadline_ns;
        note_deadline(deadline_ns, entry.position);
    }
    heard.reached = std::max(heard.reached, std::min(last, cursor_ - 1));
    heard.deadline_ns = deadline_ns;
}

std::size_t QueueState::drop_consumer(std::uint32_t consumer, std::int64_t now_ns, bool delivered) {
    heard_.erase(consumer);
    std::size_t count = 0;
    for (Entry &entry : entries_) {
        if (entry.place != static_cast<std::uint8_t>(Place::in_flight) || entry.consumer != consumer) continue;
        if (!delivered) uncount(entry);
        wait(entry, now_ns);
        ++count;
    }
    return count;
}

// Deadlines arrive in time order, except after a time-out was shortened or the clock was set back: those are kept
// apart,
    // otherwise they would wait for the earlier ones. Entries without a deadline are in neither list.
void QueueState::note_deadline(std::int64_t deadline_ns, std::int64_t position) {
    if (deadline_ns == INT64_MAX) return;
    if (deadlines_.empty() || deadlines_.back().first <= deadline_ns) deadlines_.emplace_back(deadline_ns, position);
    else early_deadlines_.emplace(deadline_ns, position);
}

bool QueueState::expire_one(std::int64_t deadline_ns, std::int64_t position, std::int64_t now_ns) {
    Entry *entry = in_flight_at(position);
    if (!entry || entry->time_ns != deadline_ns) return false;
    const auto heard = heard_.find(entry->consumer);
    if (heard != heard_.end() && position > heard->second.reached && heard->second.deadline_ns > now_ns) {
        entry->time_ns = heard->second.deadline_ns;
        note_deadline(entry->time_ns, position);
        return false;
    }
    wait(*entry, now_ns);
    return true;
}

void QueueState::clamp(std::int64_t latest_ns) {
    const bool late = (!deadlines_.empty() && deadlines_.back().first > latest_ns) ||
                      (!early_deadlines_.empty() && early_deadlines_.rbegin()->first > latest_ns);
    if (!late) return;
    deadlines_.clear();
    early_deadlines_.clear();
    for (Entry &entry : entries_) {
        if (entry.place != static_cast<std::uint8_t>(Place::in_flight) || entry.time_ns == INT64_MAX) continue;
        entry.time_ns = std::min(entry.time_ns, latest_ns);
        note_deadline(entry.time_ns, entry.position);
    }
}

std::size_t QueueState::expire(std::int64_t now_ns, std::int64_t latest_ns) {
    std::size_t count = 0;
    if (latest_ns != INT64_MAX) clamp(latest_ns);
    while (!deadlines_.empty() && deadlines_.front().first <= now_ns) {
        const auto [deadline, position] = deadlines_.front();
        deadlines_.pop_front();
        count += expire_one(deadline, position, now_ns);
    }
    while (!early_deadlines_.empty() && early_deadlines_.begin()->first <= now_ns) {
        const auto [deadline, position] = *early_deadlines_.begin();
        early_deadlines_.erase(early_deadlines_.begin());
        count += expire_one(deadline, position, now_ns);
    }
    return count;
}

std::vector<Waiting> QueueState::due(std::int64_t now_ns, std::size_t most) const {
    std::vector<Waiting> found;
    for (const auto &[due, position] : waiting_) {
        if (due > now_ns || found.size() >= most) break;
        const Entry &entry = entries_[find(position)];
        found.push_back({position, entry.deliveries});
    }
    return found;
}

std::vector<Waiting> QueueState::waiting_from(std::int64_t position, std::size_t most) const {
    std::vector<Waiting> found;
    for (std::size_t at = find(position); at < entries_.size() && found.size() < most; ++at)
        if (entries_[at].place == static_cast<std::uint8_t>(Place::waiting))
            found.push_back({entries_[at].position, entries_[at].deliveries});
    return found;
}

bool QueueState::redeliver(std::int64_t position, std::uint32_t consumer, std::int64_t deadline_ns,
                           std::uint32_t &deliveries) {
    Entry *entry = live(position);
    if (!entry || entry->place != static_cast<std::uint8_t>(Place::waiting)) return false;
    leave_place(*entry);
    ++held_[consumer];
    entry->place = static_cast<std::uint8_t>(Place::in_flight);
    entry->consumer = consumer;
    entry->time_ns = deadline_ns;
    entry->deliveries = entry->deliveries + 1;
    note_deadline(deadline_ns, position);
    note_deliveries(*entry);
    deliveries = entry->deliveries;
    return true;
}

std::int64_t QueueState::next_time_ns() const {
    std::int64_t next = INT64_MAX;
    if (!deadlines_.empty()) next = deadlines_.front().first;
    if (!early_deadlines_.empty()) next = std::min(next, early_deadlines_.begin()->first);
    if (!waiting_.empty()) next = std::min(next, waiting_.begin()->first);
    return next;
}

void QueueState::settle_floor() {
    while (!entries_.empty() && entries_.front().place == static_cast<std::uint8_t>(Place::done)) entries_.pop_front();
    floor_ = entries_.empty() ? cursor_ : entries_.front().position;
    if (!done_before_.empty()) {
        done_before_.drop_below(cursor_);
        if (entries_.empty()) floor_ = cursor_ = done_before_.skip(cursor_);
    }
    if (cursor_ > delivered_before_) {
        counts_before_.clear();
        due_before_.clear();
    }
    while (!deadlines_.empty() && deadlines_.front().second < floor_) deadlines_.pop_front();
    while (!early_deadlines_.empty() && early_deadlines_.begin()->second < floor_)
        early_deadlines_.erase(early_deadlines_.begin());
}

// Entries that are done must not pile up behind one that is not.
void QueueState::tidy() {
    if (entries_.size() < 1024 || entries_.size() < 2 * live_) return;
    std::erase_if(entries_, [](const Entry &entry) { return entry.place == static_cast<std::uint8_t>(Place::done); });
    std::erase_if(deadlines_, [this](const auto &item) { return live(item.second) == nullptr; });
    std::erase_if(early_deadlines_, [this](const auto &item) { return live(item.second) == nullptr; });
}

void QueueState::reset(std::int64_t start) {
    ++epoch_;
    floor_ = cursor_ = start;
    entries_.clear();
    live_ = 0;
    held_.clear();
    heard_.clear();
    waiting_.clear();
    deadlines_.clear();
    early_deadlines_.clear();
    done_before_.clear();
    counts_before_.clear();
    due_before_.clear();
    delivered_before_ = 0;
    acked_.clear();
    counts_.clear();
    waits_.clear();
    changed_ = was_reset_ = true;
}

std::uint32_t QueueState::deliveries(std::int64_t position) const {
    const std::size_t at = find(position);
    if (at < entries_.size() && entries_[at].position == position && !is_done(entries_[at])) return entries_[at].deliveries;
    if (position < cursor_ || position >= delivered_before_) return 0;
    auto found = counts_before_.find(position);
    return found == counts_before_.end() ? 1 : found->second;
}

std::vector<Run> QueueState::runs() const {
    std::vector<Run> runs;
    std::int64_t from = floor_;
    for (const Entry &entry : entries_) {
        if (is_done(entry)) continue;
        if (entry.position > from) runs.emplace_back(from, entry.position - 1);
        from = entry.position + 1;
    }
    if (cursor_ > from) runs.emplace_back(from, cursor_ - 1);
    for (const auto &[first, last] : done_before_.all())
        if (last >= cursor_) runs.emplace_back(std::max(first, cursor_), last);
    return runs;
}

// Records: u8 kind (1 delta, 2 whole), 3 bytes zero, u32 waits, u64 epoch, i64 floor, i64 delivered (positions below it
// were delivered once at least), u32 runs, u32 counts, then runs (i64 first, i64 last), then counts (i64 position,
// i64 n), then waits (i64 position, i64 due).
namespace {

constexpr char kind_delta = 1, kind_whole = 2;
constexpr std::size_t head_bytes = 8 + 8 + 8 + 8 + 8;

void put(std::string &out, std::int64_t value) { out.append(reinterpret_cast<const char *>(&value), 8); }

void put_pairs(std::string &out, const auto &pairs) {
    for (const auto &[first, second] : pairs) {
        put(out, first);
        put(out, second);
    }
}

void put_head(std::string &out, char kind, std::uint64_t epoch, std::int64_t floor, std::int64_t delivered,
              std::size_t runs, std::size_t counts, std::size_t waits) {
    const auto late = static_cast<std::uint32_t>(waits);
    out.append(1, kind).append(3, 0).append(reinterpret_cast<const char *>(&late), 4);
    put(out, static_cast<std::int64_t>(epoch));
    put(out, floor);
    put(out, delivered);
    const std::uint32_t sizes[2] = {static_cast<std::uint32_t>(runs), static_cast<std::uint32_t>(counts)};
    out.append(reinterpret_cast<const char *>(sizes), 8);
}

}  // namespace

std::string QueueState::delta() {
    std::string out;
    std::erase_if(acked_, [this](const Run &run) { return run.second < floor_; });  // the floor covers it
    put_head(out, was_reset_ ? kind_whole : kind_delta, epoch_, floor_, std::max(cursor_, delivered_before_), acked_.size(),
             counts_.size(), waits_.size());
    put_pairs(out, acked_);
    put_pairs(out, counts_);
    put_pairs(out, waits_);
    acked_.clear();
    counts_.clear();
    waits_.clear();
    changed_ = was_reset_ = false;
    return out;
}

std::string QueueState::snapshot() const {
    const std::vector<Run> done = runs();
    std::vector<std::pair<std::int64_t, std::uint32_t>> counts;
    std::vector<std::pair<std::int64_t, std::int64_t>> waits;
    for (const Entry &entry : entries_) {
        if (is_done(entry)) continue;
        if (tells_deliveries(entry)) counts.emplace_back(entry.position, entry.deliveries);
        if (entry.lasting) waits.emplace_back(entry.position, entry.time_ns);
    }
    for (const auto &[position, count] : counts_before_)
        if (position >= cursor_) counts.emplace_back(position, count);
    for (const auto &[position, due_ns] : due_before_)
        if (position >= cursor_) waits.emplace_back(position, due_ns);
    std::string out;
    put_head(out, kind_whole, epoch_, floor_, std::max(cursor_, delivered_before_), done.size(), counts.size(),
             waits.size());
    put_pairs(out, done);
    put_pairs(out, counts);
    put_pairs(out, waits);
    return out;
}

std::string QueueState::done_record(std::int64_t position) const {
    std::string out;
    put_head(out, was_reset_ ? kind_whole : kind_delta, epoch_, floor_, std::max(cursor_, delivered_before_), 1, 0, 0);
    put(out, position);
    put(out, position);
    return out;
}

bool QueueState::apply(std::string_view record) {
    if (record.size() < head_bytes || (record[0] != kind_delta && record[0] != kind_whole)) return false;
    std::int64_t numbers[3];
    std::uint32_t sizes[2], waits;
    std::memcpy(&waits, record.data() + 4, sizeof waits);
    std::memcpy(numbers, record.data() + 8, sizeof numbers);
    std::memcpy(sizes, record.data() + 32, sizeof sizes);
    const std::size_t runs = sizes[0], counts = runs + sizes[1];
    if (record.size() != head_bytes + 16 * (counts + waits)) return false;
    const auto epoch = static_cast<std::uint64_t>(numbers[0]);
    if (epoch < epoch_) return true;
    if (epoch > epoch_) {
        const std::int64_t start = numbers[1];
        reset(start);
        epoch_ = epoch;
    }
    floor_ = std::max(floor_, numbers[1]);
    delivered_before_ = std::max(delivered_before_, numbers[2]);
    const char *at = record.data() + head_bytes;
    for (std::size_t i = 0; i < counts + waits; ++i, at += 16) {
        std::int64_t pair[2];
        std::memcpy(pair, at, sizeof pair);
        if (i < runs) done_before_.add(pair[0], pair[1]);
        else if (i < counts) note_count_before(pair[0], pair[1]);  // the last value counts
        else due_before_[pair[0]] = pair[1];
    }
    return true;
}

void QueueState::note_count_before(std::int64_t position, std::int64_t count) {
    counts_before_[position] = static_cast<std::uint32_t>(std::clamp<std::int64_t>(count, 0, most_deliveries));
}

void QueueState::apply_note(int kind, std::int64_t first, std::int64_t second) {
    enum { done = 1, tries, cursor, waiting, seek = 6 };
    if (kind == done) done_before_.add(first, second);
    if (kind == waiting) due_before_[first] = second;
    if (kind == cursor) delivered_before_ = std::max(delivered_before_, first);
    if (kind == seek) reset(first);
    if (kind != tries) return;
    note_count_before(first, second);
    delivered_before_ = std::max(delivered_before_, std::min(first, INT64_MAX - 1) + 1);
}

void QueueState::recovered() {
    done_before_.drop_below(floor_);
    cursor_ = floor_ = done_before_.skip(floor_);
    changed_ = was_reset_ = false;
    acked_.clear();
    counts_.clear();
    waits_.clear();
    std::erase_if(counts_before_, [this](const auto &item) { return is_done_before(item.first); });
    std::erase_if(due_before_, [this](const auto &item) { return is_done_before(item.first); });
}

}  // namespace penstock::journal
