#include "broker/outbox.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

namespace penstock::broker {

namespace {

constexpr std::size_t chunk_bytes = 64 * 1024;
constexpr std::size_t most_pieces = 1024;  // IOV_MAX
constexpr std::size_t header_numbers = 4 * 21 + 12 + 16 + 12;

char *put(char *at, std::string_view text) {
    std::memcpy(at, text.data(), text.size());
    return at + text.size();
}

template <typename Number>
char *put_number(char *at, Number value) {
    *at++ = ' ';
    return std::to_chars(at, at + 20, value).ptr;
}

}  // namespace

char *Outbox::room(std::size_t bytes) {
    if (chunks_.empty() || chunks_.back().capacity - chunks_.back().used < bytes) {
        const std::size_t capacity = std::max(bytes, chunks_.empty() && bytes < 4096 ? std::size_t{4096} : chunk_bytes);
        chunks_.push_back({std::make_unique_for_overwrite<char[]>(capacity), capacity, 0, ++chunk_number_});
    }
    return chunks_.back().bytes.get() + chunks_.back().used;
}

// `data` was written at the place that room() returned. Extends the last piece if that ends just before it.
void Outbox::add_text(const char *data, std::size_t bytes) {
    chunks_.back().used += bytes;
    pending_ += bytes;
    const auto *start = reinterpret_cast<const std::uint8_t *>(data);
    if (!pieces_.empty() && !pieces_.back().hold && pieces_.back().position < 0 &&
        pieces_.back().data + pieces_.back().size == start && chunks_.back().used != bytes) {
        pieces_.back().size += bytes;
        return;
    }
    pieces_.push_back({start, bytes, nullptr, -1, chunks_.back().number});
}

// Bytes that a hold, added later, keeps in place; extends the last piece if they follow it, as properties follow data.
void Outbox::refer(const std::uint8_t *data, std::size_t bytes) {
    if (!bytes) return;
    pending_ += bytes;
    Piece *last = pieces_.empty() ? nullptr : &pieces_.back();
    if (last && !last->hold && !last->chunk && last->position < 0 && last->data + last->size == data) last->size += bytes;
    else pieces_.push_back({data, bytes, nullptr, -1, 0});
}

void Outbox::text(std::string_view bytes) {
    if (bytes.empty()) return;
    char *at = room(bytes.size());
    std::memcpy(at, bytes.data(), bytes.size());
    add_text(at, bytes.size());
}

void Outbox::framed(std::string_view queue, const Delivery *deliveries, std::size_t count, void *hold) {
    for (std::size_t i = 0; i < count; ++i) {
        const Delivery &message = deliveries[i];
        char *const start = room(queue.size() + message.topic.size() + header_numbers);
        char *at = put(start, "MSG ");
        at = put(at, queue);
        *at++ = ' ';
        at = put(at, message.topic);
        at = put_number(at, message.position);
        at = put_number(at, message.ordinal);
        at = put_number(at, message.timestamp_ns);
        at = put_number(at, message.deliveries);
        at = put_number(at, message.size);
        if (message.properties_size) {
            char *const blank = at;
            at = put_number(at, message.properties_size);
            *blank = '+';
        }
        *at++ = '\n';
        add_text(start, static_cast<std::size_t>(at - start));
        refer(message.data, message.size);
        refer(message.properties, message.properties_size);
        char *newline = room(1);
        *newline = '\n';
        add_text(newline, 1);
    }
    if (hold) pieces_.push_back({nullptr, 0, hold, -1, 0});
}

void Outbox::bare(const Delivery *deliveries, std::size_t count, void *hold) {
    for (std::size_t i = 0; i < count; ++i) {
        pieces_.push_back({deliveries[i].data, deliveries[i].size, nullptr, deliveries[i].position, 0});
        pending_ += deliveries[i].size;
    }
    if (hold) pieces_.push_back({nullptr, 0, hold, -1, 0});
}

void Outbox::payloads(const Delivery *deliveries, std::size_t count, void *hold) {
    for (std::size_t i = 0; i < count; ++i) lent(deliveries[i].data, deliveries[i].size, nullptr);
    if (hold) pieces_.push_back({nullptr, 0, hold, -1, 0});
}

void Outbox::lent(const std::uint8_t *data, std::size_t size, void *hold) {
    pieces_.push_back({data, size, hold, -1, 0});
    pending_ += size;
}

void Outbox::advance(std::size_t bytes) {
    pending_ -= bytes;
    total_ += bytes;
    while (!pieces_.empty()) {
        const Piece &piece = pieces_.front();
        const std::size_t left = piece.size - offset_;
        if (bytes < left) {
            offset_ += bytes;
            return;
        }
        bytes -= left;
        offset_ = 0;
        if (piece.hold) done_.push_back(piece.hold);
        if (piece.position >= 0) sent_.push_back({piece.position, total_ - bytes});
        while (piece.chunk && chunks_.front().number < piece.chunk) chunks_.pop_front();
        pieces_.pop_front();
    }
    chunks_.clear();
}

std::string_view Outbox::front() const noexcept {
    for (const Piece &piece : pieces_) {
        const std::size_t skip = &piece == &pieces_.front() ? offset_ : 0;
        if (piece.size > skip) return {reinterpret_cast<const char *>(piece.data) + skip, piece.size - skip};
    }
    return {};
}

std::int64_t Outbox::send(int descriptor) {
    std::int64_t total = 0;
    while (!pieces_.empty()) {
        iovec parts[most_pieces];
        std::size_t count = 0, wanted = 0;
        for (auto piece = pieces_.begin(); piece != pieces_.end() && count < most_pieces; ++piece) {
            const std::size_t skip = piece == pieces_.begin() ? offset_ : 0;
            if (piece->size == skip) continue;
            parts[count++] = {const_cast<std::uint8_t *>(piece->data) + skip, piece->size - skip};
            wanted += piece->size - skip;
        }
        if (!count) {
            advance(0);
            continue;
        }
        msghdr message{};
        message.msg_iov = parts;
        message.msg_iovlen = count;
        const ssize_t sent = ::sendmsg(descriptor, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) {
            if (errno == EINTR) continue;
            if (errno == EAGAIN || errno == EWOULDBLOCK) return total;
            return -1;
        }
        total += sent;
        advance(static_cast<std::size_t>(sent));
        if (static_cast<std::size_t>(sent) < wanted) return total;
    }
    return total;
}

void Outbox::settle() {
    for (void *hold : done_) release_(hold);
    done_.clear();
}

void Outbox::clear() {
    for (const Piece &piece : pieces_)
        if (piece.hold) done_.push_back(piece.hold);
    pieces_.clear();
    chunks_.clear();
    pending_ = offset_ = 0;
    settle();
}

std::vector<std::pair<std::int64_t, std::int64_t>> Outbox::take_sent(std::uint64_t end) {
    std::vector<std::pair<std::int64_t, std::int64_t>> runs;
    for (; !sent_.empty() && sent_.front().end <= end; sent_.pop_front()) {
        const std::int64_t position = sent_.front().position;
        if (!runs.empty() && runs.back().second + 1 == position) runs.back().second = position;
        else runs.emplace_back(position, position);
    }
    return runs;
}

}  // namespace penstock::broker
