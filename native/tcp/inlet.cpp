#include "tcp/inlet.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

#include "platform/signals.hpp"

namespace penstock::tcp {

namespace {
constexpr std::size_t big_frame_bytes = 64 * 1024;
constexpr std::size_t header_look_bytes = 4096;
constexpr std::size_t first_growth_bytes = 16 * 1024 * 1024;
constexpr std::uint32_t fills_between_polls = 16;
constexpr std::size_t streams_that_keep_chunks = 8;
constexpr std::size_t max_counted_vchans = 65536;
constexpr std::int64_t turn_wait_ns = 50'000'000;
constexpr long receive_wait_ms = 8;  // the longest wait in recv, where a new session or a close cannot wake the reader

std::int64_t now_ns(clockid_t clock) noexcept {
    timespec time;
    ::clock_gettime(clock, &time);
    return static_cast<std::int64_t>(time.tv_sec) * 1'000'000'000 + time.tv_nsec;
}
}  // namespace

std::int64_t monotonic_ns() noexcept { return now_ns(CLOCK_MONOTONIC); }
std::int64_t realtime_ns() noexcept { return now_ns(CLOCK_REALTIME); }

Inlet::Inlet(std::uint64_t max_message_size, std::size_t held_limit_bytes, const std::string &name)
    : max_message_size_(max_message_size), budget_(new Budget(held_limit_bytes)) {
    epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_ < 0 || wake_ < 0) {
        int error = errno;
        if (epoll_ >= 0) ::close(epoll_);
        if (wake_ >= 0) ::close(wake_);
        budget_->drop();
        throw std::system_error(error, std::generic_category(), "epoll or eventfd for a tcp subscriber");
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event);
    counters_ = counters_take("tcp", "subscriber", name);
    chunk_users(1);
}

Inlet::~Inlet() {
    if (forked()) return;
    close();
    ::close(epoll_);
    ::close(wake_);
    budget_->drop();
    counters_give(counters_);
}

void Inlet::knock() {
    knocks_.fetch_add(1, std::memory_order_acq_rel);
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(wake_, &one, sizeof one);
    turn_.lock();
    // The event stays readable until the reader has seen it; a poll of the descriptor may then find nothing once.
    knocks_.fetch_sub(1, std::memory_order_acq_rel);
}

void Inlet::lock() {
    // Let a waiting thread go first: with the mutex alone the reader could take the lock again before it.
    while (knocks_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
    turn_.lock();
}

bool Inlet::lock_for_a_moment(std::int64_t deadline_ns) {
    if (deadline_ns == 0) {
        knock();
        return true;
    }
    std::int64_t moment_ns = turn_wait_ns;
    if (deadline_ns > 0) moment_ns = std::clamp<std::int64_t>(deadline_ns - monotonic_ns(), 0, moment_ns);
    while (knocks_.load(std::memory_order_acquire) != 0) std::this_thread::yield();
    return turn_.try_lock_for(std::chrono::nanoseconds(moment_ns));
}

void Inlet::attach(std::uint64_t serial, std::uint32_t session, int fd, bool extended, bool fresh,
                   std::uint64_t next_ordinal, std::uint64_t past) {
    auto stream = std::make_unique<Stream>();
    stream->serial = serial;
    stream->fd = fd;
    stream->session = session;
    stream->extended = extended;
    stream->fresh = fresh || !extended;
    stream->next_ordinal = next_ordinal;
    stream->past = stream->fresh ? 0 : past;
    knock();
    if (!closed()) {
        auto &queue = sessions_[session];
        bool first = queue.empty();
        if (first) activate(std::move(stream));
        else queue.push_back(std::move(stream));
    }
    turn_.unlock();
}

std::uint64_t Inlet::last_ordinal(std::uint32_t session) {
    knock();
    auto found = counts_.find(session);
    std::uint64_t last = found == counts_.end() ? 0 : found->second.last_ordinal;
    turn_.unlock();
    return last;
}

void Inlet::activate(std::unique_ptr<Stream> stream) {
    Stream *raw = stream.get();
    raw->count = &counts_[raw->session];
    if (raw->fresh) {  // now, not when it was attached: until now the reader may have read the previous connection
        *raw->count = SessionCount{};
        raw->count->known = raw->next_ordinal != 0;
        raw->count->last_ordinal = raw->next_ordinal ? raw->next_ordinal - 1 : 0;
    }
    timeval wait{0, receive_wait_ms * 1000};
    int flags = ::fcntl(raw->fd, F_GETFL);
    raw->can_wait = flags >= 0 && ::setsockopt(raw->fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait) == 0 &&
                    ::fcntl(raw->fd, F_SETFL, flags & ~O_NONBLOCK) == 0;
    sessions_[raw->session].push_front(std::move(stream));
    epoll_event event{};
    event.events = EPOLLIN | EPOLLRDHUP;
    event.data.ptr = raw;
    ::epoll_ctl(epoll_, EPOLL_CTL_ADD, raw->fd, &event);
    ++streams_;
}

void Inlet::forget(Stream *stream) {
    if (stream->in_ready) ready_.erase(std::find(ready_.begin(), ready_.end(), stream));
    if (stream->chunk) chunk_drop(stream->chunk);
    stream->chunk = nullptr;
}

void Inlet::detach(std::uint32_t session) {
    knock();
    auto found = sessions_.find(session);
    if (found != sessions_.end()) {
        bool active = true;
        for (auto &stream : found->second) {
            if (active) {
                ::epoll_ctl(epoll_, EPOLL_CTL_DEL, stream->fd, nullptr);
                --streams_;
            }
            active = false;
            forget(stream.get());
        }
        sessions_.erase(found);
    }
    counts_.erase(session);
    turn_.unlock();
}

void Inlet::finish(bool ended) {
    knock();
    ended_ = ended;
    turn_.unlock();
    // Leave the descriptor readable, so that a poller reads again.
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(wake_, &one, sizeof one);
}

void Inlet::close() {
    if (closed_.exchange(true)) return;
    knock();
    for (auto &[session, queue] : sessions_) {
        if (!queue.empty()) ::epoll_ctl(epoll_, EPOLL_CTL_DEL, queue.front()->fd, nullptr);
        for (auto &stream : queue) forget(stream.get());
    }
    sessions_.clear();
    ready_.clear();
    if (has_kept_) chunk_drop(kept_.chunk);
    has_kept_ = false;
    turn_.unlock();
    counters_retire(counters_);
    chunk_users(-1);
    std::uint64_t one = 1;  // the descriptor stays readable, so that a poller notices the end
    [[maybe_unused]] auto n = ::write(wake_, &one, sizeof one);
}

std::uint64_t Inlet::come() const noexcept {
    std::uint64_t bytes = passed_;
    for (const auto &[session, queue] : sessions_) {
        int unread = 0;
        if (::ioctl(queue.front()->fd, FIONREAD, &unread) == 0 && unread > 0) bytes += static_cast<unsigned>(unread);
        bytes += queue.front()->end - queue.front()->begin;
    }
    return bytes;
}

Read Inlet::lose(Stream *stream, const char *reason, int error) {
    lost_ = Lost{stream->session, stream->serial, reason, error, stream->messages};
    ::epoll_ctl(epoll_, EPOLL_CTL_DEL, stream->fd, nullptr);
    --streams_;
    forget(stream);
    auto found = sessions_.find(stream->session);
    found->second.pop_front();
    if (found->second.empty()) sessions_.erase(found);
    else {
        auto next = std::move(found->second.front());
        found->second.pop_front();
        activate(std::move(next));
    }
    return Read::lost;
}

Read Inlet::scan(Stream &stream, Received &out, bool ends) {
    for (;;) {
        std::size_t available = stream.end - stream.begin;
        if (stream.skip) {
            std::size_t passed = std::min<std::uint64_t>(stream.skip, available);
            stream.begin += passed;
            passed_ += passed;
            stream.skip -= passed;
            available -= passed;
            if (stream.skip) return Read::nothing;
        }
        stream.want = 0;
        if (!available) return Read::nothing;
        const std::uint8_t *at = stream.chunk->data() + stream.begin;
        Header &header = out.header;
        switch (scan_header(at, available, max_message_size_, stream.extended, header)) {
            case Scan::more: {
                std::uint16_t size = plain_header_size;
                if (available >= 2) std::memcpy(&size, at, 2);
                stream.want = size;
                return Read::nothing;
            }
            case Scan::bad_header:
                return ends ? lose(&stream, "bad_header", 0) : Read::nothing;
            case Scan::too_large:
                return ends ? lose(&stream, "too_large", 0) : Read::nothing;
            case Scan::frame:
                break;
        }
        std::uint64_t total = header.header_size + header.data_size;
        if (header.type != static_cast<std::uint8_t>(FrameType::payload)) {
            stream.skip = total;
            continue;
        }
        if (stream.past) [[unlikely]] {
            --stream.past;
            if (came_before(*stream.count, header)) {
                stream.skip = total;
                continue;
            }
            if (available < total) ++stream.past;  // it will be examined again when it is complete
        }
        if (available < total) {
            stream.want = total;
            return Read::nothing;
        }
        stream.begin += total;
        passed_ += total;
        ++stream.messages;
        stream.after_big = total >= big_frame_bytes;
        out.data = at + header.header_size;
        out.properties = header.properties_size ? at + plain_header_size + full_extension_size : nullptr;
        out.chunk = stream.chunk;
        out.session = stream.session;
        out.serial = stream.serial;
        stream.chunk->references.fetch_add(1, std::memory_order_relaxed);
        if (stream.extended && header.ordinal) {
            note_gap(*stream.count, header);
        } else {
            header.ordinal = ++stream.count->plain_ordinal;
            header.timestamp_ns = stream.received_ns;
        }
        return Read::message;
    }
}

// Makes space behind stream.end for at least one byte, and for the whole frame if that is not excessive.
bool Inlet::make_room(Stream &stream) {
    if (stream.chunk && stream.begin == stream.end &&
        stream.chunk->references.load(std::memory_order_acquire) == 1)
        stream.begin = stream.end = 0;  // all its messages were released: reuse it while it is in the cache
    std::size_t held = stream.end - stream.begin;
    std::size_t want = std::max<std::uint64_t>(stream.want, held + 1);
    if (stream.chunk && want <= stream.chunk->capacity - stream.begin) return true;
    // Do not trust a large announced size: allocate at most twice what has been received, or 16 MiB.
    want = std::min(want, std::max(first_growth_bytes, held * 2));
    if (stream.chunk && want <= stream.chunk->capacity - stream.begin && stream.end < stream.chunk->capacity) return true;
    Chunk *chunk = chunk_take(std::max(want, small_chunk_size - 64), budget_);
    if (!chunk) return false;
    if (held) std::memcpy(chunk->data(), stream.chunk->data() + stream.begin, held);
    if (stream.chunk) chunk_drop(stream.chunk);
    stream.chunk = chunk;
    stream.begin = 0;
    stream.end = held;
    return true;
}

Read Inlet::fill(Stream &stream, bool wait) {
    if (!make_room(stream)) return Read::full;
    std::size_t room = stream.chunk->capacity - stream.end;
    std::size_t held = stream.end - stream.begin;
    if (stream.want >= big_frame_bytes) room = std::min<std::uint64_t>(room, stream.want - held);
    else if (stream.after_big && !stream.want) room = std::min(room, header_look_bytes);
    ssize_t n;
    do n = ::recv(stream.fd, stream.chunk->data() + stream.end, room, wait ? 0 : MSG_DONTWAIT);
    while (n < 0 && errno == EINTR && !wait);
    if (n < 0 && errno == EINTR) return Read::interrupted;
    if (n > 0) {
        stream.end += static_cast<std::size_t>(n);
        stream.drained = static_cast<std::size_t>(n) < room;
        stream.received_ns = std::max(stream.received_ns, realtime_ns());
        return Read::message;
    }
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        stream.drained = true;
        return Read::nothing;
    }
    return lose(&stream, n == 0 ? "closed" : "error", n == 0 ? 0 : errno);
}

Read Inlet::take(Received &out) {
    if (has_kept_) {
        out = kept_;
        has_kept_ = false;
        return Read::message;
    }
    if (ready_.empty()) return Read::nothing;
    Stream &stream = *ready_.front();
    if (stream.end - stream.begin < 2 || stream.skip) return Read::nothing;
    return scan(stream, out);
}

bool Inlet::take_message(Received &out, std::uint32_t session) {
    if (ready_.empty() || ready_.front()->session != session) return false;
    Stream &stream = *ready_.front();
    if (stream.end - stream.begin < 2 || stream.skip) return false;
    // A frame that ends the connection, be it behind others that are skipped, is left to the next read, which can report it.
    return scan(stream, out, false) == Read::message;
}

Read Inlet::fetch(std::int64_t deadline_ns, Received &out) {
    std::uint32_t fruitless = 0;
    for (;;) {
        if (closed()) return Read::closed;
        if (deadline_ns != 0 && knocks_.load(std::memory_order_acquire) != 0) return Read::knocked;
        if (ready_.empty()) {
            if (ended_ && sessions_.empty()) return Read::ended;
            Stream *sole = sole_stream(deadline_ns);
            Read waited = sole ? wait_in_receive(*sole) : poll(deadline_ns);
            if (waited != Read::message) return waited;
            continue;
        }
        Stream &stream = *ready_.front();
        Read scanned = scan(stream, out);
        if (scanned != Read::nothing) return scanned;
        if (!stream.drained) {
            Read filled = fill(stream);
            if (filled == Read::lost || filled == Read::full) return filled;
            if (filled == Read::message && streams_ > 1) {  // round robin: serve every stream
                ready_.pop_front();
                ready_.push_back(&stream);
                if (++fills_ % fills_between_polls == 0) poll(0);
            }
            if (deadline_ns >= 0 && ++fruitless > fills_between_polls && monotonic_ns() >= deadline_ns)
                return Read::nothing;  // bytes arrive, but they do not complete a message
            continue;
        }
        ready_.pop_front();
        stream.in_ready = false;
        if (streams_ > streams_that_keep_chunks && stream.begin == stream.end && stream.chunk) {
            chunk_drop(stream.chunk);
            stream.chunk = nullptr;
            stream.begin = stream.end = 0;
        }
    }
}

// The one stream there is, if a reader may wait in its receive.
Stream *Inlet::sole_stream(std::int64_t deadline_ns) {
    if (streams_ != 1 || deadline_ns == 0) return nullptr;
    Stream *stream = sessions_.begin()->second.front().get();
    if (!stream->can_wait || !stream->brisk) return nullptr;
    if (deadline_ns > 0 && deadline_ns - monotonic_ns() < 2 * receive_wait_ms * 1'000'000) return nullptr;
    return stream;
}

// Waits in recv itself, one system call fewer than polling first. A knock cannot end this wait, so it is short and only
// used while messages arrive quickly; a quiet stream is waited for in poll.
Read Inlet::wait_in_receive(Stream &stream) {
    Read filled = fill(stream, true);
    if (filled == Read::nothing) {
        stream.brisk = false;
        return Read::message;  // no message yet: see first whether another thread wants the turn, then wait in epoll
    }
    if (filled != Read::message) return filled;
    stream.in_ready = true;
    ready_.push_back(&stream);
    polled_ = true;
    return Read::message;
}

// Asks which sockets have something. message: at least one has; they stand in ready_.
Read Inlet::poll(std::int64_t deadline_ns) {
    epoll_event events[64];
    int milliseconds = -1;
    if (deadline_ns >= 0) {
        std::int64_t left = deadline_ns == 0 ? 0 : deadline_ns - monotonic_ns();
        milliseconds = left <= 0 ? 0 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 1 << 30));
    }
    const bool in_part = (milliseconds < 0 || milliseconds > signal_slice_ms) && is_main_thread();
    int count = ::epoll_wait(epoll_, events, 64, in_part ? signal_slice_ms : milliseconds);
    if (count < 0) return errno == EINTR ? Read::interrupted : Read::closed;
    if (count == 0 && in_part) return Read::interrupted;  // perhaps: the caller checks
    bool any = false;
    for (int i = 0; i < count; ++i) {
        auto *stream = static_cast<Stream *>(events[i].data.ptr);
        if (!stream) {
            std::uint64_t value;
            if (!closed()) {
                [[maybe_unused]] auto n = ::read(wake_, &value, sizeof value);
            }
            continue;
        }
        any = true;
        stream->brisk = true;
        stream->drained = false;
        if (stream->in_ready) continue;
        stream->in_ready = true;
        ready_.push_back(stream);
    }
    polled_ |= any;
    if (any) return Read::message;
    if (closed()) return Read::closed;
    if (deadline_ns != 0 && knocks_.load(std::memory_order_acquire) != 0) return Read::knocked;
    return count == 0 ? Read::nothing : Read::message;  // woken for an attach: look again
}

bool Inlet::came_before(const SessionCount &count, const Header &header) {
    if (!header.vchan_plus_one) return count.known && header.ordinal <= count.last_ordinal;
    auto found = count.last.find(header.vchan_plus_one);
    return found != count.last.end() && header.ordinal <= found->second;
}

void Inlet::note_gap(SessionCount &count, const Header &header) {
    count.credit += header.drops;
    std::uint64_t *last = &count.last_ordinal;
    if (header.vchan_plus_one) {
        auto found = count.last.find(header.vchan_plus_one);
        if (found == count.last.end()) {
            if (count.last.size() < max_counted_vchans) count.last.emplace(header.vchan_plus_one, header.ordinal);
            return;
        }
        last = &found->second;
    } else if (!count.known) {
        count.known = true;
        count.last_ordinal = header.ordinal;
        return;
    }
    if (header.ordinal > *last + 1) {
        std::uint64_t missing = header.ordinal - *last - 1;
        std::uint64_t told = std::min(missing, count.credit);
        count.credit -= told;
        counters_->matched.add(missing);
        if (told) counters_->drop(DropReason::overflow, told);
        if (missing > told) counters_->drop(DropReason::gap, missing - told);
    }
    *last = header.ordinal;
}

void Inlet::count(const Received &received, bool delivered) {
    counters_->matched.add(1);
    if (!delivered) return counters_->drop(DropReason::overflow);
    if (polled_ || counters_->delivered.get() % measured_every == 0) [[unlikely]] {
        polled_ = false;
        counters_->measure(received.header.timestamp_ns);
    }
    counters_->note_read();
    counters_->delivered.add(1);
    counters_->bytes.add(received.header.data_size);
}

}  // namespace penstock::tcp
