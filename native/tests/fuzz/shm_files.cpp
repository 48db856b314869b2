// The files of a channel in shared memory (control block, tables, virtual channels) with any bytes in them: a look from outside
// gives an answer.
// sources: shm/membership.cpp shm/joining.cpp shm/payload.cpp shm/bells.cpp shm/publisher.cpp shm/subscriber.cpp shm/files.cpp platform/checksum.cpp shm/deaths.cpp platform/deaths.cpp shm/directory.cpp platform/liveness.cpp platform/shared_directory.cpp counters/counters.cpp
#include "driver.hpp"

#include "platform/shared_directory.hpp"
#include "shm/membership.hpp"
#include "shm/publisher.hpp"

using namespace penstock;
using namespace penstock::shm;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    static std::vector<std::pair<std::string, std::vector<std::uint8_t>>> files;
    static Publisher *publisher = nullptr;
    if (!publisher) {
        fuzz::place();
        counters_hide();
        Options options;
        options.name = "/virtual";
        options.mux = "/mux";
        options.slots = 4;
        publisher = new Publisher(options, false);
        for (const auto &entry : std::filesystem::directory_iterator(shared_directory_path())) {
            const std::string name = entry.path().filename();
            if (name.find(".channel") == name.npos && name.find(".vchans.") == name.npos && name.find(".tables.") == name.npos) continue;
            std::vector<std::uint8_t> whole(std::filesystem::file_size(entry.path()));
            FILE *file = std::fopen(entry.path().c_str(), "rb");
            CHECK(file && std::fread(whole.data(), 1, whole.size(), file) == whole.size());
            std::fclose(file);
            files.emplace_back(entry.path(), std::move(whole));
        }
        std::sort(files.begin(), files.end());
        CHECK(files.size() >= 3);
    }
    fuzz::Input input(data, size);
    auto put = [&](std::size_t number, const std::uint8_t *from, std::size_t bytes, std::size_t at) {
        int file = open(files[number].first.c_str(), O_WRONLY | O_CLOEXEC);
        CHECK(file >= 0 && pwrite(file, from, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes));
        close(file);
    };
    for (int i = 0; i < 8 && input.left(); ++i) {
        const std::size_t number = input.number<std::uint8_t>() % files.size(), whole = files[number].second.size();
        auto bytes = input.bytes(1 + input.number<std::uint8_t>() % 64);
        bytes.resize(std::max<std::size_t>(bytes.size(), 1));
        const std::size_t at = input.number<std::uint16_t>() % (whole - bytes.size());
        put(number, bytes.data(), bytes.size(), at);
    }
    for (const ChannelView &view : list_channels())
        for (const auto &[id, name] : view.vchans) CHECK(std::uint32_t(id) < max_vchans && name.size() <= sizeof(Vchan::name));
    for (std::size_t number = 0; number < files.size(); ++number)
        put(number, files[number].second.data(), files[number].second.size(), 0);
    return 0;
}
