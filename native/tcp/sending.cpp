// The sending half of Outlet: from queues to sockets, in the caller's thread or the loop's.
#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <utility>

#include "platform/signals.hpp"
#include "tcp/inlet.hpp"
#include "tcp/outlet.hpp"

namespace penstock::tcp {

namespace {
constexpr std::size_t max_parts = 64;
constexpr std::size_t held_bytes_per_outbox = 1024 * 1024;
constexpr int direct_wait_ms = 2;

int milliseconds_left(std::int64_t deadline_ns) {
    if (deadline_ns < 0) return -1;
    std::int64_t left = deadline_ns - monotonic_ns();
    return left <= 0 ? 0 : static_cast<int>(std::min<std::int64_t>((left + 999'999) / 1'000'000, 1 << 30));
}
}  // namespace

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
        peer.held.push_back(frame);
        if (frame->size <= copy_limit_bytes) {
            std::size_t at = peer.staging.size();
            peer.staging.resize(at + frame->size);
            if (frame->size) std::memcpy(peer.staging.data() + at, frame->payload(), frame->size);
            continue;
        }
        close_part();
        peer.parts.push_back({frame->payload(), 0, frame->size});
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
    for (Frame *frame : peer.held) store_.drop(frame);
    peer.held.clear();
    peer.parts.clear();
    peer.part = 0;
    peer.delivered += peer.outbox_messages;
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
        constexpr int flags = MSG_DONTWAIT | MSG_NOSIGNAL;
        lock.unlock();
        ssize_t sent;
        do
            sent = count == 1 ? ::send(peer->fd, vectors[0].iov_base, vectors[0].iov_len, flags)
                              : ::sendmsg(peer->fd, &header, flags);
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
    // Frames were queued meanwhile and no other thread is about to send them: the loop does so at once.
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

long Outlet::gathering_ns() const noexcept {
    return std::clamp(gather_peer_ns * static_cast<long>(peers_.size()), gather_ns, gather_most_ns);
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
    if (realtime_ns() - first_unsent_ns_ < gathering_ns()) return true;
    std::int64_t last = last_publish_ns_;
    send_all(lock);
    last_publish_ns_ = std::max(last, first_unsent_ns_);  // sends by the loop do not mean that a caller is busy
    if (unsent_bytes_) return true;
    armed_ = false;
    return false;
}

void Outlet::writable(const PeerPtr &peer) {
    Lock lock(mutex_);
    if (peer->gone) return;
    if (peer->sending) {  // another thread sends to it now and will watch the socket again when it stops
        loop_->want_write(*peer, false);
        peer->blocked = false;
        return;
    }
    send_peer(lock, peer);
}

void Outlet::readable(const PeerPtr &peer) {
    std::uint8_t rubbish[4096];  // a subscriber sends nothing after its handshake: discard it
    ssize_t n = ::recv(peer->fd, rubbish, sizeof rubbish, MSG_DONTWAIT);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
    int error = n < 0 ? errno : 0;
    Lock lock(mutex_);
    lose(peer, error);
}

bool Outlet::lock_for_a_moment(std::int64_t deadline_ns) {
    using namespace std::chrono_literals;
    if (deadline_ns != 0) {
        std::chrono::nanoseconds moment = 50ms;
        if (deadline_ns > 0) moment = std::clamp<std::chrono::nanoseconds>(std::chrono::nanoseconds(deadline_ns - monotonic_ns()), 0ns, moment);
        return turn_.try_lock_for(moment);
    }
    while (!turn_.try_lock_for(1ms))
        if (waits_for_room_.load(std::memory_order_acquire)) return false;
    return true;
}

Sent Outlet::wait_for_room(Lock &lock, std::uint64_t size, std::int64_t deadline_ns) {
    if (closed()) return Sent::closed;
    if (overflow_ != OverflowChoice::block || !any_full(size)) return Sent::done;
    if (deadline_ns != 0) waits_for_room_.store(true, std::memory_order_release);
    Sent sent = pump_until(lock, size, false, deadline_ns);
    waits_for_room_.store(false, std::memory_order_release);
    return sent;
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
        const bool in_part = (left < 0 || left > signal_slice_ms) && is_main_thread();
        int ready = ::poll(descriptors.data(), descriptors.size(), in_part ? signal_slice_ms : left);
        int error = errno;
        lock.lock();
        if ((ready < 0 && error == EINTR) || (ready == 0 && in_part)) {
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
    auto free_now = [](const PeerPtr &peer) {
        return !peer->sending && !peer->blocked && !peer->depth() && peer->parts.empty();
    };
    bool store = !std::all_of(peers_.begin(), peers_.end(), free_now);
    Frame *frame = store ? store_.make(message.size, message.properties_size) : nullptr;
    store_.publish(message.size);
    for (const auto &peer : peers_) {
        if (!free_now(peer)) continue;
        peer->sending = true;
        ways.push_back({peer, {}, 0, false});
    }
    if (store) {
        store_.adopt(frame);
        lock.unlock();
        frame->fill(message);
        lock.lock();
        for (const auto &peer : peers_)
            if (std::none_of(ways.begin(), ways.end(), [&](const Way &way) { return way.peer == peer; }))
                enqueue(*peer, frame);
    }
    for (Way &way : ways) {
        ++way.peer->matched;
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
    bool lost = false;
    for (Way &way : ways) {
        Peer &peer = *way.peer;
        if (!peer.gone && !way.done && !frame) {
            try {
                frame = store_.make(message);
                store_.adopt(frame);
            } catch (const std::bad_alloc &) {
                lose(way.peer, ENOMEM);  // half a frame was sent: without the rest the stream would be broken
            }
        }
        if (peer.gone) {
            lost = true;
            rest(way.peer, false);
        } else if (way.done) {
            peer.part = 0;
            peer.parts.clear();
            ++peer.delivered;
            peer.outbox_messages = peer.outbox_bytes = 0;
            rest(way.peer, false);
        } else {
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
    if (frame) {
        if (lost) frame->lose(DropReason::closed);
        store_.drop(frame);
    } else {
        store_.settle(lost ? static_cast<std::uint8_t>(DropReason::closed) + 1 : 0);
    }
    unsent_bytes_ = 0;
    if (store) send_all(lock);
}

}  // namespace penstock::tcp
