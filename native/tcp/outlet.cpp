#include "tcp/outlet.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

#include "tcp/inlet.hpp"

namespace penstock::tcp {

namespace {
constexpr std::size_t pooled_payload_bytes = 184;
constexpr std::uint32_t pooled_frames = 8192;
constexpr std::size_t max_parts = 64;
constexpr std::size_t held_bytes_per_outbox = 1024 * 1024;
constexpr int direct_wait_ms = 2;
std::atomic<std::uint64_t> next_peer_id{1};

void wake(int descriptor) {
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(descriptor, &one, sizeof one);
}

void unwake(int descriptor) {
    std::uint64_t value;
    [[maybe_unused]] auto n = ::read(descriptor, &value, sizeof value);
}

int milliseconds_left(std::int64_t deadline_ns) {
    if (deadline_ns < 0) return -1;
    std::int64_t left = deadline_ns - monotonic_ns();
    return left <= 0 ? 0 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 1 << 30));
}
}  // namespace

Peer::~Peer() {
    if (fd >= 0) ::close(fd);
}

Outlet::Outlet(std::shared_ptr<Loop> loop, OverflowChoice overflow, std::uint64_t queue_messages,
               std::uint64_t queue_bytes, std::int64_t block_timeout_ns, const std::string &name)
    : loop_(std::move(loop)),
      overflow_(overflow),
      queue_messages_(queue_messages),
      queue_bytes_(queue_bytes),
      block_timeout_ns_(block_timeout_ns) {
    gone_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (gone_event_ < 0 || wake_ < 0) {
        int error = errno;
        if (gone_event_ >= 0) ::close(gone_event_);
        if (wake_ >= 0) ::close(wake_);
        throw std::system_error(error, std::generic_category(), "eventfd for a tcp publisher");
    }
    generation_ = fork_generation();
    counters_ = counters_take("tcp", "publisher", name);
    counters_->capacity.set(queue_messages);
}

Outlet::~Outlet() {
    if (forked()) return;  // the parent's threads, locks and sockets are not ours to end
    close();
    while (free_frames_) {
        Frame *frame = free_frames_;
        free_frames_ = frame->next;
        std::free(frame);
    }
    ::close(gone_event_);
    ::close(wake_);
    counters_give(counters_);
}

// ---- frames

Frame *Outlet::frame_new(std::uint64_t size, std::uint32_t properties_size) {
    Frame *frame;
    bool pooled = size + properties_size <= pooled_payload_bytes;
    std::uint64_t capacity = pooled ? pooled_payload_bytes : size + properties_size;
    if (pooled && free_frames_) {
        frame = free_frames_;
        free_frames_ = frame->next;
        --free_count_;
    } else {
        frame = static_cast<Frame *>(std::malloc(sizeof(Frame) + capacity));
        if (!frame) throw std::bad_alloc();
    }
    frame->references = 1;
    frame->pooled = pooled;
    frame->size = size;
    frame->capacity = size;
    frame->properties_size = properties_size;
    frame_bytes_ += size + properties_size;
    return frame;
}

void Outlet::frame_drop(Frame *frame) noexcept {
    if (--frame->references) return;
    frame_bytes_ -= frame->capacity + frame->properties_size;
    if (frame->pooled && free_count_ < pooled_frames) {
        frame->next = free_frames_;
        free_frames_ = frame;
        ++free_count_;
    } else {
        std::free(frame);
    }
}

void Outlet::fill(Frame *frame, const Outgoing &message) {
    frame->ordinal = message.ordinal;
    frame->timestamp_ns = message.timestamp_ns;
    frame->drops = message.drops;
    frame->vchan_plus_one = message.vchan_plus_one;
    if (message.size && message.data) std::memcpy(frame->payload(), message.data, message.size);
    if (message.properties_size) std::memcpy(frame->properties(), message.properties, message.properties_size);
}

Frame *Outlet::frame_of(const Outgoing &message) {
    Frame *frame = frame_new(message.size, message.properties_size);
    fill(frame, message);
    return frame;
}

Frame *Outlet::reserve(std::uint64_t size) {
    Lock lock(mutex_);
    return frame_new(size, 0);
}

void Outlet::drop_frame(Frame *frame) {
    Lock lock(mutex_);
    frame_drop(frame);
}

// ---- peers

std::uint64_t Outlet::add(int fd, bool extended, const std::string &answer, std::size_t ordinal_offset) {
    auto peer = std::make_shared<Peer>();
    peer->id = next_peer_id.fetch_add(1);
    peer->fd = fd;
    peer->extended = extended;
    Lock lock(mutex_);
    if (closed()) return 0;  // and the socket closes with the peer
    peer->staging.assign(answer.begin(), answer.end());
    std::uint64_t next_ordinal = last_ordinal_ + 1;
    if (ordinal_offset && ordinal_offset + sizeof next_ordinal <= answer.size())
        std::memcpy(peer->staging.data() + ordinal_offset, &next_ordinal, sizeof next_ordinal);
    if (!answer.empty()) peer->parts.push_back({nullptr, 0, answer.size()});
    peers_.push_back(peer);
    counters_->peers.set(peers_.size());
    loop_->add(shared_from_this(), peer);
    send_peer(lock, peer);
    return peer->id;
}

bool Outlet::remove(std::uint64_t id) {
    Lock lock(mutex_);
    for (auto &peer : peers_) {
        if (peer->id != id) continue;
        PeerPtr kept = peer;
        lose(kept, 0);
        return true;
    }
    return false;
}

// A peer that acknowledges nothing though something was sent is behind a cut cable. One that reads nothing but is there
// still acknowledges the probes of its closed window: it is only slow.
std::size_t Outlet::drop_silent(std::uint32_t timeout_ms) {
    Lock lock(mutex_);
    std::vector<PeerPtr> silent;
    for (const auto &peer : peers_) {
        tcp_info info{};
        socklen_t size = sizeof info;
        if (::getsockopt(peer->fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
        bool waiting = info.tcpi_unacked > 0 || info.tcpi_probes > 0 || info.tcpi_backoff > 0;
        if (waiting && info.tcpi_last_ack_recv > timeout_ms && info.tcpi_last_data_sent > 0) silent.push_back(peer);
    }
    for (const auto &peer : silent) lose(peer, ETIMEDOUT);
    return silent.size();
}

void Outlet::clear(Peer &peer) {
    std::uint64_t lost = peer.depth();
    for (Frame *frame : peer.queue) frame_drop(frame);
    for (Frame *frame : peer.held) frame_drop(frame);
    peer.queue.clear();
    peer.held.clear();
    peer.parts.clear();
    peer.staging.clear();
    peer.queued_bytes = peer.outbox_bytes = peer.outbox_messages = 0;
    peer.dropped_closed += lost;
    if (lost) counters_->drop(DropReason::closed, lost);
}

// The peer leaves the list at once; its memory is freed here, or by its sender when that comes back.
void Outlet::lose(const PeerPtr &peer, int error) {
    if (peer->gone) return;
    peer->gone = true;
    loop_->remove(*peer);
    std::uint64_t lost = peer->depth();
    if (!peer->sending) clear(*peer);
    ::shutdown(peer->fd, SHUT_RDWR);
    PeerPtr kept = peer;  // `peer` may be the entry that is erased
    peers_.erase(std::find(peers_.begin(), peers_.end(), kept));
    counters_->peers.set(peers_.size());
    gone_.push_back({kept->id, error, lost});
    wake(gone_event_);
    sent_.notify_all();
}

std::size_t Outlet::peer_count() {
    Lock lock(mutex_);
    return peers_.size();
}

std::vector<PeerCount> Outlet::peer_counts() {
    Lock lock(mutex_);
    std::vector<PeerCount> counts;
    for (const auto &peer : peers_)
        counts.push_back({peer->id, peer->extended, peer->matched, peer->delivered, peer->dropped_overflow,
                          peer->dropped_closed, peer->depth(), peer->bytes()});
    return counts;
}

std::vector<Gone> Outlet::take_gone() {
    Lock lock(mutex_);
    unwake(gone_event_);
    return std::exchange(gone_, {});
}

std::uint64_t Outlet::last_ordinal() {
    Lock lock(mutex_);
    return last_ordinal_;
}

std::uint64_t Outlet::memory_bytes() {
    Lock lock(mutex_);
    std::uint64_t bytes = frame_bytes_;
    for (const auto &peer : peers_) bytes += peer->staging.capacity();
    return bytes;
}

// ---- queues

bool Outlet::full(const Peer &peer, std::uint64_t size) const noexcept {
    std::uint64_t depth = peer.depth();
    return depth >= queue_messages_ || (depth && peer.bytes() + size > queue_bytes_);
}

bool Outlet::any_full(std::uint64_t size) const noexcept {
    for (const auto &peer : peers_)
        if (full(*peer, size)) return true;
    return false;
}

Outgoing Outlet::stamped(const Outgoing &message, std::int64_t now) {
    Outgoing out = message;
    if (!out.ordinal) out.ordinal = last_ordinal_ + 1;
    if (!out.timestamp_ns) out.timestamp_ns = std::max(now, last_timestamp_ns_);
    last_ordinal_ = out.ordinal;
    last_timestamp_ns_ = out.timestamp_ns;
    return out;
}

void Outlet::enqueue(Peer &peer, Frame *frame) {
    ++peer.matched;
    counters_->matched.add(1);
    if (overflow_ != OverflowChoice::block && full(peer, frame->size)) {
        if (overflow_ == OverflowChoice::drop_newest) {
            ++peer.dropped_overflow;
            ++peer.drops_to_tell;
            counters_->drop(DropReason::overflow);
            return;
        }
        while (!peer.queue.empty() && full(peer, frame->size)) {
            Frame *oldest = peer.queue.front();
            peer.queue.pop_front();
            peer.queued_bytes -= oldest->size;
            frame_drop(oldest);
            ++peer.dropped_overflow;
            ++peer.drops_to_tell;
            counters_->drop(DropReason::overflow);
        }
    }
    peer.queue.push_back(frame);
    peer.queued_bytes += frame->size;
    ++frame->references;
}

// Notes that frames wait to be gathered; true when they are to be sent now.
bool Outlet::note_unsent(std::uint64_t size, std::int64_t now, bool more) {
    bool idle = !more && (now - last_publish_ns_ >= idle_gap_ns || now < last_publish_ns_);
    last_publish_ns_ = now;
    if (!unsent_bytes_) first_unsent_ns_ = now;
    unsent_bytes_ += size + plain_header_size;
    if (idle || unsent_bytes_ >= gather_bytes || (!more && now - first_unsent_ns_ >= gather_ns)) return true;
    if (!armed_ && !more) {
        armed_ = true;
        loop_->arm(shared_from_this());
    }
    return false;
}

Quick Outlet::quick(const Outgoing &message, std::uint64_t &ordinal, bool more) {
    std::int64_t now = realtime_ns();
    Lock lock(mutex_);
    if (closed()) return Quick::closed;
    if (peers_.empty()) {
        ordinal = stamped(message, now).ordinal;
        counters_->last_ns.set(static_cast<std::uint64_t>(now));
        return Quick::done;
    }
    if (message.size >= direct_bytes || (overflow_ == OverflowChoice::block && any_full(message.size)))
        return Quick::slow;
    Outgoing out = stamped(message, now);
    ordinal = out.ordinal;
    counters_->last_ns.set(static_cast<std::uint64_t>(now));
    Frame *frame = frame_of(out);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    frame_drop(frame);
    return note_unsent(out.size, now, more) ? Quick::flush : Quick::done;
}

Sent Outlet::publish(const Outgoing &message, std::uint64_t &ordinal, std::int64_t deadline_ns) {
    Lock lock(mutex_);
    if (Sent waited = wait_for_room(lock, message.size, deadline_ns); waited != Sent::done) return waited;
    std::int64_t now = realtime_ns();
    Outgoing out = stamped(message, now);
    ordinal = out.ordinal;
    counters_->last_ns.set(static_cast<std::uint64_t>(now));
    if (out.size >= direct_bytes) {
        send_direct(lock, out);
        last_publish_ns_ = realtime_ns();
        return Sent::done;
    }
    Frame *frame = frame_of(out);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    frame_drop(frame);
    if (note_unsent(out.size, now, false)) send_all(lock);
    return Sent::done;
}

Sent Outlet::publish_frame(Frame *frame, std::uint64_t size, std::uint64_t &ordinal, std::int64_t deadline_ns) {
    Lock lock(mutex_);
    if (Sent waited = wait_for_room(lock, size, deadline_ns); waited != Sent::done) return waited;
    std::int64_t now = realtime_ns();
    Outgoing out;
    out.size = size;
    out = stamped(out, now);
    ordinal = out.ordinal;
    counters_->last_ns.set(static_cast<std::uint64_t>(now));
    frame->size = size;
    fill(frame, out);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    frame_drop(frame);
    if (note_unsent(size, now, false)) send_all(lock);
    return Sent::done;
}

// ---- sending

std::size_t Outlet::put_header(Peer &peer, const Outgoing &message) {
    Header header;
    header.type = static_cast<std::uint8_t>(FrameType::payload);
    header.data_size = message.size;
    header.ordinal = message.ordinal;
    header.timestamp_ns = message.timestamp_ns;
    header.drops = message.drops + std::exchange(peer.drops_to_tell, 0);
    header.vchan_plus_one = message.vchan_plus_one;
    header.properties_size = message.properties_size;
    header.header_size = static_cast<std::uint16_t>(
        encoded_header_size(peer.extended, header.drops, header.vchan_plus_one, header.properties_size));
    std::size_t at = peer.staging.size();
    peer.staging.resize(at + header.header_size);
    std::size_t written = encode_header(header, peer.staging.data() + at);
    if (written < header.header_size)
        std::memcpy(peer.staging.data() + at + written, message.properties, message.properties_size);
    return header.header_size;
}

void Outlet::gather(Peer &peer) {
    peer.staging.clear();
    peer.parts.clear();
    peer.part = 0;
    std::uint64_t held = 0;
    std::size_t begin = 0;
    std::size_t expected = std::min<std::size_t>(peer.queued_bytes + peer.queue.size() * 28, gather_bytes + 8192);
    if (peer.staging.capacity() < expected) peer.staging.reserve(expected);
    auto close_part = [&] {
        if (peer.staging.size() > begin) peer.parts.push_back({nullptr, begin, peer.staging.size() - begin});
        begin = peer.staging.size();
    };
    while (!peer.queue.empty() && peer.staging.size() < gather_bytes && peer.parts.size() + 2 < max_parts &&
           held < held_bytes_per_outbox) {
        Frame *frame = peer.queue.front();
        peer.queue.pop_front();
        peer.queued_bytes -= frame->size;
        ++peer.outbox_messages;
        peer.outbox_bytes += frame->size;
        Outgoing message{frame->payload(),      frame->size, frame->ordinal,       frame->timestamp_ns, frame->drops,
                         frame->vchan_plus_one, frame->properties(), frame->properties_size};
        put_header(peer, message);
        if (frame->size <= copy_limit_bytes) {
            std::size_t at = peer.staging.size();
            peer.staging.resize(at + frame->size);
            if (frame->size) std::memcpy(peer.staging.data() + at, frame->payload(), frame->size);
            frame_drop(frame);
            continue;
        }
        close_part();
        peer.parts.push_back({frame->payload(), 0, frame->size});
        peer.held.push_back(frame);
        held += frame->size;
    }
    close_part();
}

void Outlet::advance(Peer &peer, std::size_t bytes) {
    while (bytes) {
        Part &part = peer.parts[peer.part];
        std::size_t step = std::min(bytes, part.size);
        part.offset += step;
        part.size -= step;
        bytes -= step;
        if (!part.size) ++peer.part;
    }
    if (peer.part < peer.parts.size()) return;
    for (Frame *frame : peer.held) frame_drop(frame);
    peer.held.clear();
    peer.parts.clear();
    peer.part = 0;
    peer.delivered += peer.outbox_messages;
    counters_->delivered.add(peer.outbox_messages);
    counters_->bytes.add(peer.outbox_bytes);
    peer.outbox_messages = peer.outbox_bytes = 0;
}

// Sends what was queued when it was called, and on while a full gathering waits. True: the socket is full. The caller
// has set peer->sending.
bool Outlet::pump(Lock &lock, const PeerPtr &peer) {
    bool first = true;
    while (!peer->gone) {
        if (peer->parts.empty()) {
            if (peer->queue.empty() || (!first && peer->queued_bytes < gather_bytes)) return false;
            gather(*peer);
            if (peer->queue.empty()) first = false;
        }
        iovec vectors[max_parts];
        std::size_t count = 0;
        for (std::size_t i = peer->part; i < peer->parts.size() && count < max_parts; ++i, ++count) {
            const Part &part = peer->parts[i];
            const std::uint8_t *base = part.base ? part.base : peer->staging.data();
            vectors[count] = {const_cast<std::uint8_t *>(base + part.offset), part.size};
        }
        msghdr header{};
        header.msg_iov = vectors;
        header.msg_iovlen = count;
        lock.unlock();
        ssize_t sent;
        do sent = ::sendmsg(peer->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        int error = sent < 0 ? errno : 0;
        lock.lock();
        if (sent >= 0) advance(*peer, static_cast<std::size_t>(sent));
        else if (error == EAGAIN || error == EWOULDBLOCK) return true;
        else lose(peer, error);
    }
    return false;
}

// The sender leaves the peer: the loop goes on where the socket was full.
void Outlet::rest(const PeerPtr &peer, bool socket_full) {
    peer->sending = false;
    // Frames that came meanwhile and that nobody else has promised to send: the loop does, at once.
    if (!socket_full && !peer->queue.empty() && !unsent_bytes_) socket_full = true;
    if (peer->gone) {
        clear(*peer);
    } else if (socket_full != peer->blocked) {
        peer->blocked = socket_full;
        loop_->want_write(*peer, socket_full);
    }
    sent_.notify_all();
}

void Outlet::send_peer(Lock &lock, const PeerPtr &peer) {
    if (peer->sending || peer->gone) return;
    peer->sending = true;
    bool socket_full = pump(lock, peer);
    rest(peer, socket_full);
}

void Outlet::send_all(Lock &lock) {
    unsent_bytes_ = 0;
    if (peers_.size() == 1) {
        PeerPtr peer = peers_.front();
        if (!peer->blocked) send_peer(lock, peer);
    } else {
        std::vector<PeerPtr> peers = peers_;
        for (const auto &peer : peers)
            if (!peer->blocked) send_peer(lock, peer);
    }
    last_publish_ns_ = realtime_ns();
}

void Outlet::flush() {
    Lock lock(mutex_);
    send_all(lock);
}

bool Outlet::flush_due() {
    Lock lock(mutex_);
    if (!unsent_bytes_ || closed()) {
        armed_ = false;
        return false;
    }
    if (realtime_ns() - first_unsent_ns_ < gather_ns) return true;
    std::int64_t last = last_publish_ns_;
    send_all(lock);
    last_publish_ns_ = std::max(last, first_unsent_ns_);  // the loop's sending is no sign of a busy caller
    if (unsent_bytes_) return true;
    armed_ = false;
    return false;
}

void Outlet::writable(const PeerPtr &peer) {
    Lock lock(mutex_);
    if (peer->gone) return;
    if (peer->sending) {  // its sender sees to it; be quiet until it says so
        loop_->want_write(*peer, false);
        peer->blocked = false;
        return;
    }
    send_peer(lock, peer);
}

void Outlet::readable(const PeerPtr &peer) {
    std::uint8_t rubbish[4096];  // a subscriber has nothing to say after its handshake
    ssize_t n = ::recv(peer->fd, rubbish, sizeof rubbish, MSG_DONTWAIT);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
    int error = n < 0 ? errno : 0;
    Lock lock(mutex_);
    lose(peer, error);
}

Sent Outlet::wait_for_room(Lock &lock, std::uint64_t size, std::int64_t deadline_ns) {
    if (closed()) return Sent::closed;
    if (overflow_ != OverflowChoice::block || !any_full(size)) return Sent::done;
    return pump_until(lock, size, false, deadline_ns);
}

Sent Outlet::drain(std::int64_t deadline_ns) {
    Lock lock(mutex_);
    return pump_until(lock, 0, true, deadline_ns);
}

// Sends in the caller's thread until every peer has room for `size` (or has nothing left, where `empty` is asked for).
Sent Outlet::pump_until(Lock &lock, std::uint64_t size, bool empty, std::int64_t deadline_ns) {
    Sent result = Sent::done;
    std::vector<PeerPtr> mine;
    auto wanting = [&](const Peer &peer) { return empty ? peer.depth() > 0 : full(peer, size); };
    for (;;) {
        if (closed() && !empty) {
            result = Sent::closed;
            break;
        }
        bool all_done = true;
        std::vector<pollfd> descriptors{{wake_, POLLIN, 0}};
        std::vector<PeerPtr> now = peers_;
        for (const auto &peer : now) {
            if (!wanting(*peer) || peer->gone) continue;
            bool is_mine = std::find(mine.begin(), mine.end(), peer) != mine.end();
            if (!is_mine && peer->sending) {
                all_done = false;
                continue;
            }
            if (!is_mine) {
                peer->sending = true;
                mine.push_back(peer);
            }
            pump(lock, peer);
            if (!peer->gone && wanting(*peer)) {
                all_done = false;
                descriptors.push_back({peer->fd, POLLOUT, 0});
            }
        }
        if (all_done) break;
        int left = milliseconds_left(deadline_ns);
        if (left == 0) {
            result = Sent::timed_out;
            break;
        }
        if (descriptors.size() == 1) {  // the loop sends to all of them: it will be done soon
            sent_.wait_for(lock, std::chrono::milliseconds(left < 0 ? 20 : std::min(left, 20)));
            continue;
        }
        lock.unlock();
        int ready = ::poll(descriptors.data(), descriptors.size(), left);
        int error = errno;
        lock.lock();
        if (ready < 0 && error == EINTR) {
            result = Sent::interrupted;
            break;
        }
    }
    for (const auto &peer : mine) rest(peer, !peer->gone && peer->depth() > 0);
    return result;
}

// A large message goes from the caller's memory to the sockets that are free; what they cannot take is stored once.
void Outlet::send_direct(Lock &lock, const Outgoing &message) {
    struct Way {
        PeerPtr peer;
        std::vector<std::uint8_t> header;
        std::size_t sent = 0;
        bool done = false;
    };
    std::vector<Way> ways;
    Frame *frame = nullptr;
    bool store = false;
    for (const auto &peer : peers_) {
        if (peer->sending || peer->blocked || peer->depth() || !peer->parts.empty()) {
            store = true;
            continue;
        }
        peer->sending = true;
        ways.push_back({peer, {}, 0, false});
    }
    if (store) {
        frame = frame_new(message.size, message.properties_size);
        lock.unlock();
        fill(frame, message);
        lock.lock();
        for (const auto &peer : peers_)
            if (std::none_of(ways.begin(), ways.end(), [&](const Way &way) { return way.peer == peer; }))
                enqueue(*peer, frame);
    }
    for (Way &way : ways) {
        ++way.peer->matched;
        counters_->matched.add(1);
        way.peer->staging.clear();
        put_header(*way.peer, message);
        way.header.assign(way.peer->staging.begin(), way.peer->staging.end());
        way.peer->outbox_messages = 1;
        way.peer->outbox_bytes = message.size;
    }
    lock.unlock();
    std::vector<std::pair<Way *, int>> failed;
    for (;;) {
        std::vector<pollfd> descriptors;
        for (Way &way : ways) {
            while (!way.done) {
                iovec vectors[2];
                int count = 0;
                std::size_t header_left = way.sent < way.header.size() ? way.header.size() - way.sent : 0;
                if (header_left) vectors[count++] = {way.header.data() + way.sent, header_left};
                std::size_t offset = header_left ? 0 : way.sent - way.header.size();
                vectors[count++] = {const_cast<std::uint8_t *>(message.data + offset), message.size - offset};
                msghdr header{};
                header.msg_iov = vectors;
                header.msg_iovlen = static_cast<std::size_t>(count);
                ssize_t sent = ::sendmsg(way.peer->fd, &header, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (sent < 0 && errno == EINTR) continue;
                if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
                    descriptors.push_back({way.peer->fd, POLLOUT, 0});
                    break;
                }
                if (sent < 0) {
                    failed.emplace_back(&way, errno);
                    way.done = true;
                    break;
                }
                way.sent += static_cast<std::size_t>(sent);
                way.done = way.sent == way.header.size() + message.size;
            }
        }
        if (descriptors.empty() || overflow_ != OverflowChoice::block) break;
        if (::poll(descriptors.data(), descriptors.size(), direct_wait_ms) <= 0) break;
    }
    lock.lock();
    for (auto &[way, error] : failed) lose(way->peer, error);
    for (Way &way : ways) {
        Peer &peer = *way.peer;
        if (peer.gone) {
            rest(way.peer, false);
        } else if (way.done) {
            peer.part = 0;
            peer.parts.clear();
            ++peer.delivered;
            counters_->delivered.add(1);
            counters_->bytes.add(message.size);
            peer.outbox_messages = peer.outbox_bytes = 0;
            rest(way.peer, false);
        } else {
            if (!frame) frame = frame_of(message);
            std::size_t header_left = way.sent < way.header.size() ? way.header.size() - way.sent : 0;
            std::size_t offset = header_left ? 0 : way.sent - way.header.size();
            peer.staging.assign(way.header.end() - static_cast<std::ptrdiff_t>(header_left), way.header.end());
            peer.parts.clear();
            peer.part = 0;
            if (header_left) peer.parts.push_back({nullptr, 0, header_left});
            peer.parts.push_back({frame->payload(), offset, message.size - offset});
            peer.held.push_back(frame);
            ++frame->references;
            rest(way.peer, true);
        }
    }
    if (frame) frame_drop(frame);
    unsent_bytes_ = 0;
    if (store) send_all(lock);
}

void Outlet::close() {
    if (closed_.exchange(true)) return;
    wake(wake_);
    Lock lock(mutex_);
    // Orderly for the peer: a reset would take away what it has not read yet.
    for (const auto &peer : peers_) {
        std::uint8_t rubbish[4096];
        while (::recv(peer->fd, rubbish, sizeof rubbish, MSG_DONTWAIT) > 0) {
        }
    }
    while (!peers_.empty()) {
        PeerPtr peer = peers_.back();
        lose(peer, 0);
    }
    gone_.clear();
}

}  // namespace penstock::tcp
