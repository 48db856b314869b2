// Many threads take, count and give blocks while others read all pages.
// sources: counters/counters.cpp platform/shared_directory.cpp platform/liveness.cpp platform/deaths.cpp platform/checksum.cpp
#include "counters/counters.hpp"

#include <cstdio>
#include <cstdlib>
#include <thread>

using namespace penstock;

int main() {
    char directory[] = "/tmp/penstock-counters-XXXXXX";
    if (!mkdtemp(directory)) return 1;
    setenv("PENSTOCK_SHM_DIR", directory, 1);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
        threads.emplace_back([] {
            for (int i = 0; i < 2000; ++i) {
                Counters *counters = counters_take("test", "x", "name");
                counters->matched.add(3);
                counters->delivered.add_shared(2);
                counters->drop(DropReason::overflow);
                if (counters->in_flight() != 0) std::abort();
                counters_give(counters);
            }
        });
    threads.emplace_back([] {
        for (int i = 0; i < 50; ++i)
            for (const CountersCopy &copy : counters_read())
                if (copy.matched > 3) std::abort();
    });
    for (std::thread &thread : threads) thread.join();
    if (!counters_read().empty()) return 2;
    std::string command = std::string("rm -rf ") + directory;
    std::puts("counters: ok");
    return std::system(command.c_str());
}
