#include "tcp/outlet.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "tcp/inlet.hpp"

namespace penstock::tcp {

namespace {
std::atomic<std::uint64_t> next_peer_id{1};

void wake(int descriptor) {
    std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(descriptor, &one, sizeof one);
}

void unwake(int descriptor) {
    std::uint64_t value;
    [[maybe_unused]] auto n = ::read(descriptor, &value, sizeof value);
}
}  // namespace

Peer::~Peer() {
    if (fd >= 0) ::close(fd);
}

Outlet::Outlet(std::shared_ptr<Loop> loop, OverflowChoice overflow, std::uint64_t queue_messages,
               std::uint64_t queue_bytes, std::int64_t block_timeout_ns, const std::string &name, const Kept &kept)
    : loop_(std::move(loop)),
      overflow_(overflow),
      queue_messages_(queue_messages),
      queue_bytes_(queue_bytes),
      block_timeout_ns_(block_timeout_ns),
      kept_(kept),
      counters_(counters_take("tcp", "publisher", name)),
      store_(counters_) {
    gone_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (gone_event_ < 0 || wake_ < 0) {
        int error = errno;
        if (gone_event_ >= 0) ::close(gone_event_);
        if (wake_ >= 0) ::close(wake_);
        counters_give(counters_);
        throw std::system_error(error, std::generic_category(), "eventfd for a tcp publisher");
    }
    generation_ = fork_generation();
    counters_->capacity.set(queue_messages);
}

Outlet::~Outlet() {
    if (forked()) {  // the threads, locks and sockets belong to the parent process: leave them alone
        store_.abandon();
        return;
    }
    close();
    ::close(gone_event_);
    ::close(wake_);
    counters_give(counters_);
}

Frame *Outlet::reserve(std::uint64_t size) {
    Lock lock(mutex_);
    return store_.make(size, 0);
}

void Outlet::drop_frame(Frame *frame) {
    Lock lock(mutex_);
    store_.drop(frame);
}

// ---- peers

std::uint64_t Outlet::add(int fd, bool extended, const std::string &answer, std::size_t ordinal_offset,
                          bool past) {
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
    if (past) give_past(*peer);
    const std::size_t past_offset = ordinal_offset + sizeof next_ordinal + 4;
    std::uint64_t told = 0;  // if the caller has set the number, it stays
    if (ordinal_offset && past_offset + sizeof told <= answer.size()) std::memcpy(&told, answer.data() + past_offset, sizeof told);
    if (ordinal_offset && past_offset + sizeof told <= answer.size() && !told)
        std::memcpy(peer->staging.data() + past_offset, &peer->past_messages, sizeof peer->past_messages);
    peers_.push_back(peer);
    counters_->peers.set(peers_.size());
    loop_->add(shared_from_this(), peer);
    send_peer(lock, peer);
    return peer->id;
}

// Under the lock, as publishing is: what is not in the history yet will be queued for the peer when it is published.
void Outlet::give_past(Peer &peer) {
    const std::int64_t since = kept_.age_ns ? realtime_ns() - kept_.age_ns : INT64_MIN;
    for (Frame *frame : history_) {
        if (frame->published_ns < since) continue;
        ++peer.matched;
        ++peer.past_messages;
        peer.past_bytes += frame->size;
        peer.queue.push_back(frame);
        ++frame->references;
    }
    peer.queued_bytes += peer.past_bytes;
}

void Outlet::forget_oldest() {
    Frame *frame = history_.front();
    history_.pop_front();
    history_bytes_ -= frame->size;
    frame->kept = false;
    store_.drop(frame);
}

void Outlet::keep(Frame *frame, std::int64_t now) {
    if (!kept_.messages) return;
    frame->published_ns = last_published_ns_;
    history_.push_back(frame);
    history_bytes_ += frame->size;
    frame->kept = true;
    ++frame->references;
    auto beyond = [&] {
        return history_.size() > kept_.messages || history_bytes_ > kept_.bytes ||
               (kept_.age_ns && history_.front()->published_ns < now - kept_.age_ns);
    };
    while (history_.size() > 1 && beyond()) forget_oldest();
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

// A peer that acknowledges nothing although data was sent is behind a cut cable. One that reads nothing but is alive
// still answers the probes of its closed window: it is only slow. Those probes become rarer and rarer, so the time of
// the last answer proves nothing; a probe that stays unanswered does (an answer resets their number to 0). Without a
// route, as when this machine's own cable was pulled, repeats fail and do not count as sent: their number tells.
std::size_t Outlet::drop_silent(std::uint32_t timeout_ms) {
    Lock lock(mutex_);
    std::vector<PeerPtr> silent;
    for (const auto &peer : peers_) {
        tcp_info info{};
        socklen_t size = sizeof info;
        if (::getsockopt(peer->fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) continue;
        const std::int64_t now = monotonic_ns();
        const std::int64_t last_answer = now - std::int64_t{info.tcpi_last_ack_recv} * 1'000'000;
        const bool sent_since = info.tcpi_unacked > 0 && info.tcpi_last_data_sent < info.tcpi_last_ack_recv;
        if (!info.tcpi_probes && !info.tcpi_retransmits && !sent_since) peer->owing_ns = 0;
        else if (!peer->owing_ns || last_answer > peer->owing_ns) peer->owing_ns = now;
        if (peer->owing_ns && now - peer->owing_ns > std::int64_t{timeout_ms} * 1'000'000) silent.push_back(peer);
    }
    for (const auto &peer : silent) lose(peer, ETIMEDOUT);
    return silent.size();
}

void Outlet::clear(Peer &peer) {
    std::uint64_t lost = peer.depth();
    auto lose_frame = [&](Frame *frame) {
        frame->lose(DropReason::closed);
        store_.drop(frame);
    };
    for (Frame *frame : peer.queue) lose_frame(frame);
    for (Frame *frame : peer.held) lose_frame(frame);
    peer.queue.clear();
    peer.held.clear();
    peer.parts.clear();
    peer.staging.clear();
    peer.queued_bytes = peer.outbox_bytes = peer.outbox_messages = 0;
    peer.dropped_closed += lost;
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
    gone_.push_back({kept->id, error, lost, kept->dropped_overflow});
    wake(gone_event_);
    sent_.notify_all();
}

void Outlet::close() {
    if (closed_.exchange(true)) return;
    wake(wake_);
    Lock lock(mutex_);
    // Shut down in order: a reset would discard what the peer has not read yet.
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
    while (!history_.empty()) forget_oldest();
    counters_retire(counters_);
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
    std::uint64_t bytes = store_.bytes();
    for (const auto &peer : peers_) bytes += peer->staging.capacity();
    return bytes;
}

// ---- queues

bool Outlet::full(const Peer &peer, std::uint64_t size) const noexcept {
    std::uint64_t depth = peer.depth();
    return depth >= queue_messages_ + peer.past_messages ||
           (depth && peer.bytes() + size > queue_bytes_ + peer.past_bytes);
}

bool Outlet::any_full(std::uint64_t size) const noexcept {
    for (const auto &peer : peers_)
        if (full(*peer, size)) return true;
    return false;
}

Outgoing Outlet::stamped(const Outgoing &message, std::int64_t now) {
    Outgoing out = message;
    if (!out.ordinal) out.ordinal = last_ordinal_ + 1;
    last_published_ns_ = std::max(now, last_published_ns_);
    if (out.timestamp_ns == Outgoing::no_time) out.timestamp_ns = last_published_ns_;
    last_ordinal_ = out.ordinal;
    return out;
}

void Outlet::enqueue(Peer &peer, Frame *frame) {
    ++peer.matched;
    if (overflow_ != OverflowChoice::block && full(peer, frame->size)) {
        if (overflow_ == OverflowChoice::drop_newest) {
            ++peer.dropped_overflow;
            ++peer.drops_to_tell;
            frame->lose(DropReason::overflow);
            return;
        }
        while (!peer.queue.empty() && full(peer, frame->size)) {
            Frame *oldest = peer.queue.front();
            peer.queue.pop_front();
            peer.queued_bytes -= oldest->size;
            oldest->lose(DropReason::overflow);
            store_.drop(oldest);
            ++peer.dropped_overflow;
            ++peer.drops_to_tell;
        }
    }
    peer.queue.push_back(frame);
    peer.queued_bytes += frame->size;
    ++frame->references;
}

// Notes that frames wait to be gathered; true when they are to be sent now.
bool Outlet::note_unsent(std::uint64_t size, std::int64_t now, bool more) {
    const std::int64_t gap_ns = now - last_publish_ns_;
    const std::int64_t idle_ns = idle_gap_ns + idle_gap_peer_ns * static_cast<std::int64_t>(peers_.size() - 1);
    const bool idle = !more && (gap_ns >= idle_ns || gap_ns < clock_set_back_ns);
    last_publish_ns_ = now;
    if (!unsent_bytes_) first_unsent_ns_ = now;
    unsent_bytes_ += size + plain_header_size;
    if (idle || unsent_bytes_ >= gather_bytes || (!more && now - first_unsent_ns_ >= gathering_ns())) return true;
    const bool arm = !armed_ && !more;
    if (arm) {
        armed_ = true;
        loop_->arm(shared_from_this());
    }
    // The time that publishing takes is no pause of the caller; it is short but for this.
    if (arm || peers_.size() > 1) last_publish_ns_ = realtime_ns();
    return false;
}

Quick Outlet::quick(const Outgoing &message, std::uint64_t &ordinal, bool more) {
    std::int64_t now = realtime_ns();
    Lock lock(mutex_);
    if (closed()) return Quick::closed;
    if (peers_.empty() && !kept_.messages) {
        ordinal = stamped(message, now).ordinal;
        counters_->last_ns.set(static_cast<std::uint64_t>(now));
        store_.publish(message.size);
        store_.settle(0);
        return Quick::done;
    }
    if (message.size >= direct_bytes || (overflow_ == OverflowChoice::block && any_full(message.size)))
        return Quick::slow;
    Outgoing out = stamped(message, now);
    ordinal = out.ordinal;
    counters_->last_ns.set(static_cast<std::uint64_t>(now));
    Frame *frame = store_.make(out);
    store_.publish(frame);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    keep(frame, now);
    store_.drop(frame);
    if (peers_.empty()) return Quick::done;
    return note_unsent(out.size, now, more) ? Quick::flush : Quick::done;
}

Sent Outlet::publish(const Outgoing &message, std::uint64_t &ordinal, std::int64_t deadline_ns) {
    Lock lock(mutex_);
    if (Sent waited = wait_for_room(lock, message.size, deadline_ns); waited != Sent::done) return waited;
    std::int64_t now = realtime_ns();
    Outgoing out = stamped(message, now);
    ordinal = out.ordinal;
    counters_->last_ns.set(static_cast<std::uint64_t>(now));
    if (out.size >= direct_bytes && !kept_.messages) {  // a message for the history is copied anyway
        send_direct(lock, out);
        last_publish_ns_ = realtime_ns();
        return Sent::done;
    }
    Frame *frame = store_.make(out);
    store_.publish(frame);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    keep(frame, now);
    store_.drop(frame);
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
    frame->fill(out);
    store_.publish(frame);
    for (const auto &peer : peers_) enqueue(*peer, frame);
    keep(frame, now);
    store_.drop(frame);
    if (note_unsent(size, now, false)) send_all(lock);
    return Sent::done;
}

}  // namespace penstock::tcp
