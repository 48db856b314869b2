// QueueState as Python sees it; the broker extends it by what only a broker knows about messages.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "journal/queue_state.hpp"
#include "message/python.hpp"

namespace penstock::journal {

class BoundQueueState {
   public:
    explicit BoundQueueState(std::int64_t start) : state_(start) {}
    QueueState &state() { return state_; }

   protected:
    // The messages of a batch for which `deliver(entry, deliveries)` returns true, as a batch or None, and how often
    // each was delivered, four bytes each, or None if it is the first time for all.
    template <typename Deliver>
    std::pair<nanobind::object, nanobind::object> chosen(nanobind::handle batch, Deliver deliver) {
        const std::vector<Envelope> &entries = entries_of(batch);
        std::vector<Envelope> kept;
        std::string counts;
        bool repeated = false;
        kept.reserve(entries.size());
        for (const Envelope &entry : entries) {
            std::uint32_t deliveries = 0;
            if (!deliver(entry, deliveries)) continue;
            repeated |= deliveries > 1;
            kept.push_back(entry);
            counts.append(reinterpret_cast<const char *>(&deliveries), sizeof deliveries);
        }
        if (kept.empty()) return {nanobind::none(), nanobind::none()};
        nanobind::object sent = kept.size() == entries.size()
                                    ? nanobind::borrow(batch)
                                    : batch_over(std::move(kept), batch.ptr(), batch_channels(batch.ptr()));
        nanobind::object numbers = nanobind::none();
        if (repeated) numbers = nanobind::bytes(counts.data(), counts.size());
        return {sent, numbers};
    }

    QueueState state_;
};

}  // namespace penstock::journal
