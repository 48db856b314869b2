// Outbox: what waits to be written to one connection, as a list of pieces that go out by vectored writes. Payloads are
// referred to where they lie (a mapped segment), never copied; headers and replies are formatted into the outbox's own
// chunks.
//
// Rules
//   - Not thread-safe. `hold` of a payload is released (through `release`) once its last byte was written.
//   - The caller bounds it: pending_bytes() says how much waits.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

namespace penstock::broker {

struct Delivery {
    const std::uint8_t *data;
    std::size_t size;
    std::string_view topic;
    std::int64_t position;
    std::uint64_t ordinal;
    std::int64_t timestamp_ns;
    std::uint32_t deliveries;
    const std::uint8_t *properties = nullptr;  // encoded
    std::size_t properties_size = 0;
};

class Outbox {
   public:
    using Release = void (*)(void *hold);

    explicit Outbox(Release release) : release_(release) {}
    Outbox(const Outbox &) = delete;
    Outbox &operator=(const Outbox &) = delete;
    ~Outbox() { clear(); }

    void text(std::string_view bytes);
    // MSG lines with their data; `hold` keeps all of it in place and is taken over.
    void framed(std::string_view queue, const Delivery *deliveries, std::size_t count, void *hold);
    // The bare data, not reported by sent().
    void payloads(const Delivery *deliveries, std::size_t count, void *hold);
    // The bare data, for a client without HELLO; sent() reports what was sent.
    void bare(const Delivery *deliveries, std::size_t count, void *hold);
    // Bytes of another memory, kept by `hold` until written.
    void lent(const std::uint8_t *data, std::size_t size, void *hold);

    // Bytes written, 0 when the socket takes none now, -1 with errno. No Python is touched: `release` is not called
    // here but by settle(), which the caller runs afterwards.
    std::int64_t send(int descriptor);
    void settle();
    // For sockets that are not plain (TLS): the next contiguous bytes, and that so many of them were taken.
    std::string_view front() const noexcept;
    void advance(std::size_t bytes);
    void clear();

    std::size_t pending_bytes() const noexcept { return pending_; }
    std::uint64_t sent_bytes() const noexcept { return total_; }  // since the beginning
    // Positions of bare messages that lie wholly before `end` (of all bytes sent), as closed runs; each is told once.
    std::vector<std::pair<std::int64_t, std::int64_t>> take_sent(std::uint64_t end);

   private:
    struct Piece {
        const std::uint8_t *data;
        std::size_t size;
        void *hold;             // given back after this piece, or null
        std::int64_t position;  // of the bare message that ends with this piece, or -1
        std::uint64_t chunk;    // number of the chunk that `data` is in, or 0
    };
    struct Chunk {
        std::unique_ptr<char[]> bytes;
        std::size_t capacity, used;
        std::uint64_t number;
    };

    char *room(std::size_t bytes);
    void add_text(const char *data, std::size_t bytes);
    void refer(const std::uint8_t *data, std::size_t bytes);

    Release release_;
    std::deque<Piece> pieces_;
    std::deque<Chunk> chunks_;
    std::size_t pending_ = 0, offset_ = 0;  // offset_ into the first piece
    std::uint64_t chunk_number_ = 0;
    std::vector<void *> done_;
    std::uint64_t total_ = 0;
    struct Sent {
        std::int64_t position;
        std::uint64_t end;  // of its last byte, among all bytes sent
    };
    std::deque<Sent> sent_;
};

}  // namespace penstock::broker
