// The page of counters of a live process with any bytes in it: everybody else reads it.
// sources: counters/counters.cpp platform/shared_directory.cpp platform/liveness.cpp platform/deaths.cpp platform/checksum.cpp
#include "driver.hpp"

#include "counters/counters.hpp"

using namespace penstock;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    static std::vector<std::uint8_t> whole;
    static const std::string page = [] {
        fuzz::place();
        counters_take("room", "publisher", "a name");
        counters_take("room", "subscriber", std::string(600, 'x'));
        std::string found;
        for (const auto &entry : std::filesystem::directory_iterator(counters_directory()))
            if (entry.path().filename().string().starts_with("counters.")) found = entry.path();
        CHECK(!found.empty());
        whole.resize(std::filesystem::file_size(found));
        FILE *file = std::fopen(found.c_str(), "rb");
        CHECK(file && std::fread(whole.data(), 1, whole.size(), file) == whole.size());
        std::fclose(file);
        return found;
    }();
    fuzz::Input input(data, size);
    int file = open(page.c_str(), O_WRONLY | O_CLOEXEC);
    CHECK(file >= 0);
    auto put = [&](const std::uint8_t *from, std::size_t bytes, std::size_t at) {
        CHECK(pwrite(file, from, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes));
    };
    while (input.left()) {
        std::size_t at = input.number<std::uint16_t>() % 4096;
        auto bytes = input.bytes(1 + input.number<std::uint8_t>());
        put(bytes.data(), bytes.size(), at);
    }
    for (const CountersCopy &copy : counters_read()) CHECK(copy.name.size() <= 512 && copy.program.size() <= 32);
    counters_look_for_deaths();
    put(whole.data(), 8192, 0);
    close(file);
    return 0;
}
