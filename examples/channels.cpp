// A publisher and a subscriber of one channel in C++; in earnest they are two programs, in whatever language.
//
//     include=$(python -c 'from penstock import shm; print(shm.include_directory())')
//     library=$(python -c 'from penstock import shm; print(shm.library_path())')
//     c++ -std=c++17 channels.cpp -I$include $library -Wl,-rpath,$(dirname $library) -o channels && ./channels
#include <cstring>
#include <iostream>

#include "penstock_shm.hpp"

int main() {
    penstock_shm::Options options;
    options.slots = 16;
    penstock_shm::Publisher publisher("/example/cpp", options);
    penstock_shm::Subscriber subscriber("/example/cpp");
    subscriber.on_dropped([](std::uint64_t count) { std::cout << count << " were lost\n"; });

    penstock_shm::Draft draft = publisher.reserve(64);  // memory in the channel itself
    std::strcpy(static_cast<char *>(draft.data()), "hello from C++");
    draft.publish(14);
    publisher.reserve(10);  // cancelled: it is not published

    while (auto message = subscriber.read(0)) std::cout << message->text() << " (message " << message->ordinal() << ")\n";
    for (int i = 0; i < 40; ++i) publisher.publish("more");
    auto newest = subscriber.read_newest();
    auto weak = subscriber.weak_reference(*newest);
    newest->release();
    std::cout << "newest: " << subscriber.read_again(weak)->ordinal() << "\n";
    try {
        publisher.publish(std::string(1, 'x'), 0);
        penstock_shm::Publisher other("no slash");
    } catch (const penstock_shm::Error &error) {
        std::cout << error.what() << "\n";
    }
    return 0;
}
