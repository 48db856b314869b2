// Puts right checksums into the bytes of a journal, so that what lies behind them is reached: a forger can do the same.
#pragma once

#include <cstring>
#include <vector>

#include "journal/checksum.hpp"
#include "journal/format.hpp"

namespace penstock::fuzz {

using namespace penstock::journal;

template <typename Part>
Part load(const std::vector<std::uint8_t> &bytes, std::size_t at) {
    Part part;
    std::memcpy(&part, bytes.data() + at, sizeof part);
    return part;
}
template <typename Part>
void store(std::vector<std::uint8_t> &bytes, std::size_t at, const Part &part) {
    std::memcpy(bytes.data() + at, &part, sizeof part);
}

// A body is short instructions, not bytes of the format, which chance would hardly find: each byte says what comes next.
inline void add_records(std::vector<std::uint8_t> &log, Input &input, std::uint64_t nonce, std::uint64_t first) {
    std::uint64_t position = first;
    while (input.left() && log.size() < 20'000) {
        const auto how = input.number<std::uint8_t>();
        const std::size_t start = log.size();
        BatchHeader header{batch_magic, 0, nonce, position, 0, 0, 0, 0, position, how & 7u, 0};
        if (how & 8) header.first_position = position + input.number<std::int8_t>();
        log.resize(start + sizeof header);
        std::vector<std::uint32_t> words;
        std::uint64_t here = header.first_position;
        for (unsigned i = 0; i < (how >> 4) % 4u; ++i) {
            RecordHeader record{};
            const auto kind = input.number<std::uint8_t>();
            record.kind = static_cast<std::uint8_t>(1 + kind % 3);
            record.flags = kind >> 6;
            record.topic = kind & 32 ? input.number<std::uint32_t>() : 1 + (kind >> 2) % 4u;
            auto data = input.bytes(input.number<std::uint8_t>());
            record.data_bytes = static_cast<std::uint32_t>(data.size());
            if (kind & 16 && data.size() > 8) {
                record.properties_bytes = data[0] % 4;
                record.id_bytes = data[1] % 3;
                record.key_bytes = data[2] % 3;
                record.data_bytes -= record.properties_bytes + record.id_bytes + record.key_bytes;
            }
            record.bytes = static_cast<std::uint32_t>(padded(sizeof record + data.size()));
            record.ordinal = position;
            record.stored_ns = record.timestamp_ns = static_cast<std::int64_t>(position);
            record.position_low = static_cast<std::uint32_t>(here);
            const std::size_t at = log.size();
            log.resize(at + record.bytes);
            store(log, at, record);
            if (!data.empty()) std::memcpy(log.data() + at + sizeof record, data.data(), data.size());
            record.checksum = crc32c(record_seed(nonce, here), log.data() + at + 4, record.bytes - 4);
            store(log, at, record);
            words.push_back(record.checksum);
            ++header.records;
            if (record.kind == kind_message) ++header.messages, ++here;
        }
        header.bytes = log.size() - start;
        if (how & 128) header.bytes += input.number<std::uint16_t>();
        seal_header(header, words.data(), words.size());
        store(log, start, header);
        position = here;
        if (how == 255 && log.size() > start + 8) log[start + input.number<std::uint8_t>() % (log.size() - start)] ^= 1;
    }
}

}  // namespace penstock::fuzz
