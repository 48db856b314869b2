#include "counters/counters.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <mutex>
#include <optional>

#include "platform/deaths.hpp"
#include "platform/liveness.hpp"
#include "platform/shared_directory.hpp"

namespace penstock {

namespace {

constexpr std::size_t block_size = sizeof(Counters);
constexpr std::size_t block_count = 127;
constexpr std::size_t page_size = block_size * (block_count + 1);
constexpr char magic[8] = {'P', 'E', 'N', 'S', 'C', 'N', 'T', '4'};

struct PageHeader {
    char magic[8];
    std::uint32_t page_size, block_size, block_count, pid;
    std::uint64_t token;  // of its process, to check whether that is alive
    char program[32];
    char zero[1088];
};
static_assert(sizeof(PageHeader) == block_size);

struct Page {
    PageHeader *header = nullptr;
    std::string path;  // empty: private memory
    Counters *blocks() const { return reinterpret_cast<Counters *>(reinterpret_cast<char *>(header) + block_size); }
};

bool inside_character(char byte) { return (byte & 0xC0) == 0x80; }

// Cuts text that is too long, never inside a UTF-8 character (which has up to three bytes after its first).
void copy_text(char *to, std::size_t room, std::string_view text) {
    std::size_t size = text.size() < room - 1 ? text.size() : room - 1;
    for (int back = 0; back < 3 && size && size < text.size() && inside_character(text[size]); ++back) --size;
    std::memcpy(to, text.data(), size);
    std::memset(to + size, 0, room - size);
}

// FNV-1a: two names that look alike differ by it. Never 0, which says that the name is whole.
std::uint64_t hash_of(std::string_view text) {
    std::uint64_t hash = 0xcbf29ce484222325u;
    for (char byte : text) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
    return hash ? hash : 1;
}

// Keeps the beginning and the end of a name that is too long: the beginning shows the reach, the end the channel.
void copy_name(Counters &block, std::string_view name) {
    constexpr std::string_view cut = "\u2026";
    constexpr std::size_t room = sizeof block.name - 1 - cut.size();
    block.name_hash = 0;
    if (name.size() < sizeof block.name) return copy_text(block.name, sizeof block.name, name);
    std::size_t head = room / 2, tail = name.size() - room / 2;
    for (int back = 0; back < 3 && inside_character(name[head]); ++back) --head;
    for (int on = 0; on < 3 && inside_character(name[tail]); ++on) ++tail;
    std::string kept(name.substr(0, head));
    kept.append(cut).append(name.substr(tail));
    copy_text(block.name, sizeof block.name, kept);
    block.name_hash = hash_of(name);
}

std::string read_name(const Counters &block) {
    std::string text(block.name, strnlen(block.name, sizeof block.name));
    if (!block.name_hash) return text;
    char hash[24];
    std::snprintf(hash, sizeof hash, " [%016llx]", static_cast<unsigned long long>(block.name_hash));
    return text + hash;
}

std::string program_name() {
    char text[256];
    int file = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t size = file < 0 ? 0 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (size <= 0) return "";
    text[size] = 0;
    std::string first(text);
    // For an interpreter, show the script's name instead.
    if (std::size_t next = first.size() + 1; first.find("python") != std::string::npos && next < std::size_t(size))
        if (std::string script(text + next); !script.empty() && script[0] != '-') first = script;
    return first.substr(first.find_last_of('/') + 1);
}

// All of this process's pages. Never destroyed: finalisers of other threads may still count while the process ends.
struct Registry {
    std::mutex mutex;
    std::vector<Page> pages;
    std::uint64_t takings = 0;
    int owner = 0;  // pid; another one after a fork
    std::atomic<bool> hidden{false};  // pages are private memory

    static Registry &get() {
        static Registry *registry = [] {
            auto *made = new Registry;
            pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                           [] {
                               // The inherited pages belong to the parent: the child leaves them and makes new ones.
                               get().pages.clear();
                               get().owner = 0;
                               get().mutex.unlock();
                           });
            std::atexit(counters_end);
            return made;
        }();
        return *registry;
    }

    // Not after a fork: the block is the parent's.
    bool owns(const Counters *block) const {
        for (const Page &page : pages)
            if (block >= page.blocks() && block < page.blocks() + block_count) return true;
        return false;
    }

    void unlink_all() {
        std::lock_guard lock(mutex);
        if (owner != getpid()) return;
        for (Page &page : pages)
            if (!page.path.empty()) unlink(page.path.c_str());
        for (Page &page : pages) page.path.clear();
    }

    Page make_page(const std::string &directory, std::uint64_t token) {
        Page page;
        std::string path = directory + "/" + process_file_name("counters", token) + "." + std::to_string(pages.size());
        int file = -1;
        if (token) file = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
        void *memory = MAP_FAILED;
        if (file >= 0) {
            if (posix_fallocate(file, 0, page_size) == 0)  // allocate now: a full file system would raise SIGBUS later
                memory = mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            close(file);
            if (memory == MAP_FAILED) unlink(path.c_str());
            else page.path = path;
        }
        if (memory == MAP_FAILED)
            memory = mmap(nullptr, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) std::abort();  // 144 KiB cannot be had: nothing else will work either
        page.header = static_cast<PageHeader *>(memory);
        page.header->page_size = page_size;
        page.header->block_size = block_size;
        page.header->block_count = block_count;
        page.header->pid = static_cast<std::uint32_t>(getpid());
        page.header->token = token;
        copy_text(page.header->program, sizeof page.header->program, program_name());
        std::memcpy(page.header->magic, magic, sizeof magic);
        return page;
    }
};

thread_local std::string kind_of_thread;

// Removes the pages of dead processes, once per process.
void sweep_once() {
    static std::atomic<std::uint32_t> swept{0};
    if (swept.exchange(fork_generation()) != fork_generation()) counters_sweep();
}

constexpr std::uint64_t retired = std::uint64_t(1) << 63;  // in Counters::used: its handle is closed

bool is_listed(const Counters &block) {
    std::uint64_t used = block.used.load(std::memory_order_acquire);
    return used && !(used & retired);
}

std::string read_text(const char *text, std::size_t room) { return std::string(text, strnlen(text, room)); }

// Calls `look(header, page)` with a page that is one of ours.
template <typename Look>
void with_page(const std::string &path, Look look) {
    int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (file < 0) return;
    struct stat status {};
    bool whole = fstat(file, &status) == 0 && S_ISREG(status.st_mode) && status.st_size == off_t(page_size);
    void *memory = whole ? mmap(nullptr, page_size, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    close(file);
    if (memory == MAP_FAILED) return;
    auto *header = static_cast<PageHeader *>(memory);
    if (std::memcmp(header->magic, magic, sizeof magic) == 0 && header->block_size == block_size)
        look(*header, Page{header, path});
    munmap(memory, page_size);
}

void read_page(const std::string &path, std::vector<CountersCopy> &found) {
    with_page(path, [&](const PageHeader &header, const Page &page) {
        std::optional<int> pid = process_holder(header.token);
        for (std::uint32_t i = 0; pid && i < block_count; ++i) {
            if (!is_listed(page.blocks()[i])) continue;
            CountersCopy copy = counters_copy(&page.blocks()[i]);
            copy.pid = *pid ? *pid : static_cast<int>(header.pid);
            copy.here = *pid != 0;
            copy.process = header.token;
            copy.index = i;
            copy.program = read_text(header.program, sizeof header.program);
            found.push_back(std::move(copy));
        }
    });
}

MemberRecord member_of(const Counters &block) {
    MemberRecord record;
    record.count = block.delivered.get();
    if (std::strncmp(block.kind, "publisher", sizeof block.kind) == 0) record.count = std::max(record.count, block.matched.get());
    record.bytes = block.bytes.get();
    record.dropped = block.lost();
    record.opened_ns = block.opened_ns;
    record.time_ns = std::int64_t(block.last_ns.get());
    record.waiting = block.depth.get();
    record.in_flight = std::uint64_t(std::max<std::int64_t>(0, block.in_flight()));
    copy_text(record.room, sizeof record.room, read_text(block.room, sizeof block.room));
    copy_text(record.kind, sizeof record.kind, read_text(block.kind, sizeof block.kind));
    copy_text(record.name, sizeof record.name, read_name(block));
    return record;
}

// The handles of a dead process, from its page. Shared memory is left out: its channels know more. Buses come last,
// because a gateway has many of them inside.
void note_dead_page(const std::string &path) {
    with_page(path, [](const PageHeader &header, const Page &page) {
        Dead dead{header.pid, read_text(header.program, sizeof header.program), {}};
        for (bool bus : {false, true})
            for (std::uint32_t i = 0; i < block_count; ++i) {
                const Counters &block = page.blocks()[i];
                std::string room = read_text(block.room, sizeof block.room);
                if (is_listed(block) && room != "shm" && (room == "bus") == bus)
                    dead.members.push_back(member_of(block));
            }
        if (!dead.members.empty()) write_deaths({{header.token, dead}});
    });
}

// Calls `look(path)` for each page in the shared directory.
template <typename Look>
void each_page(Look look) {
    std::string directory = counters_directory();
    DIR *listing = directory.empty() ? nullptr : opendir(directory.c_str());
    if (!listing) return;
    while (dirent *entry = readdir(listing))
        if (std::strncmp(entry->d_name, "counters.", 9) == 0) look(directory + "/" + entry->d_name);
    closedir(listing);
}

}  // namespace

std::string counters_directory() {
    try {
        return shared_directory_path();
    } catch (const std::exception &) {
        return "";
    }
}

Counters *counters_take(std::string_view room, std::string_view kind, std::string_view name) {
    Registry &registry = Registry::get();
    // Before taking the lock: these calls take a lock that fork handlers take too.
    std::string directory = counters_directory();
    std::uint64_t token = 0;
    try {
        if (!registry.hidden.load()) {
            token = process_token();
            sweep_once();
        }
    } catch (const std::exception &) {  // there is no shared directory: count in private memory
    }
    std::lock_guard lock(registry.mutex);
    registry.owner = getpid();
    Counters *free_block = nullptr;
    for (Page &page : registry.pages)
        for (std::size_t i = 0; i < block_count && !free_block; ++i)
            if (!page.blocks()[i].used.load(std::memory_order_relaxed)) free_block = &page.blocks()[i];
    if (!free_block) {
        registry.pages.push_back(registry.make_page(directory, token));
        free_block = registry.pages.back().blocks();
    }
    std::memset(static_cast<void *>(free_block), 0, block_size);
    copy_text(free_block->room, sizeof free_block->room, room);
    copy_text(free_block->kind, sizeof free_block->kind, kind_of_thread.empty() ? kind : kind_of_thread);
    copy_name(*free_block, name);
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    free_block->opened_ns = std::uint64_t(now.tv_sec) * 1000000000u + std::uint64_t(now.tv_nsec);
    free_block->used.store(++registry.takings, std::memory_order_release);
    return free_block;
}

void Counters::note_read() noexcept {
#ifdef CLOCK_REALTIME_COARSE
    constexpr clockid_t clock = CLOCK_REALTIME_COARSE;
#else
    constexpr clockid_t clock = CLOCK_REALTIME;
#endif
    timespec now{};
    clock_gettime(clock, &now);
    last_ns.set(std::uint64_t(now.tv_sec) * 1'000'000'000u + std::uint64_t(now.tv_nsec));
}

void Counters::measure(std::int64_t timestamp_ns) noexcept {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    std::int64_t now_ns = std::int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
    last_ns.set(std::uint64_t(now_ns));
    if (timestamp_ns > 0) note_latency(now_ns > timestamp_ns ? std::uint64_t(now_ns - timestamp_ns) : 1);  // clocks may differ; 0: never
}

void counters_kind(std::string_view kind) { kind_of_thread = kind; }

void counters_end() noexcept { Registry::get().unlink_all(); }

void counters_hide() noexcept { Registry::get().hidden.store(true); }

void counters_rename(Counters *counters, std::string_view name) {
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    if (!registry.owns(counters) || !is_listed(*counters)) return;
    counters->used.store(0, std::memory_order_release);
    copy_name(*counters, name);
    counters->used.store(++registry.takings, std::memory_order_release);
}

void counters_give(Counters *counters) noexcept {
    if (!counters) return;
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    if (registry.owns(counters)) counters->used.store(0, std::memory_order_release);
}

void counters_retire(Counters *counters) noexcept {
    if (!counters) return;
    Registry &registry = Registry::get();
    std::lock_guard lock(registry.mutex);
    if (registry.owns(counters)) counters->used.fetch_or(retired, std::memory_order_release);
}

void counters_state(Counters *counters, std::string_view text) noexcept {
    copy_text(counters->state, sizeof counters->state, text);
}

std::string counters_name(std::string_view name) {
    Counters block{};
    copy_name(block, name);
    return read_name(block);
}

CountersCopy counters_copy(const Counters *c) {
    CountersCopy copy;
    copy.used = c->used.load(std::memory_order_acquire);
    copy.opened_ns = c->opened_ns;
    copy.room = read_text(c->room, sizeof c->room);
    copy.kind = read_text(c->kind, sizeof c->kind);
    copy.name = read_name(*c);
    copy.name_cut = c->name_hash != 0;
    copy.state = read_text(c->state, sizeof c->state);
    // Read delivered and dropped before matched, so that counting in between never looks like a loss.
    copy.delivered = c->delivered.get();
    copy.expired = c->expired.get();
    for (std::size_t i = 0; i < drop_reason_count; ++i) copy.dropped[i] = c->dropped[i].get();
    copy.matched = c->matched.get();
    copy.bytes = c->bytes.get();
    copy.redelivered = c->redelivered.get();
    copy.errors = c->errors.get();
    copy.depth = c->depth.get();
    copy.capacity = c->capacity.get();
    copy.peers = c->peers.get();
    copy.memory_bytes = c->memory_bytes.get();
    copy.last_ns = c->last_ns.get();
    copy.latency_ns = c->latency_ns.get();
    copy.lag = c->lag.get();
    copy.position = c->position.get();
    copy.latency_sum_ns = c->latency_sum_ns.get();
    for (std::size_t i = 0; i < latency_bucket_count; ++i) copy.latency_counts[i] = c->latency_counts[i].get();
    return copy;
}

std::vector<CountersCopy> counters_read() {
    std::vector<CountersCopy> found;
    if (!counters_directory().empty()) counters_sweep();
    each_page([&](const std::string &path) { read_page(path, found); });
    return found;
}

void counters_sweep() { process_sweep(note_dead_page); }

void counters_look_for_deaths() {
    each_page([](const std::string &path) {
        bool dead = false;
        with_page(path, [&](const PageHeader &header, const Page &) { dead = !process_alive(header.token); });
        if (dead) note_dead_page(path);
    });
}

}  // namespace penstock
