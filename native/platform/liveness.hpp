// Whether a process that left its token in shared memory is still alive, without trusting pids.
//
// Each process has one file, alive.PID.RANDOM, with a POSIX record lock held for as long as it lives. The lock is the
// only kind that a forked child does not inherit, and it vanishes at any kind of death. It would also vanish when any
// descriptor of that file is closed in its own process: so it is opened once, here, and never again by its owner.
//
// Rules: may be called by any thread. Checking costs system calls: slow paths only.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace penstock {

// Incremented in the child at each fork. A handle keeps the value from its creation; a different value means that the
// handle belongs to the parent.
extern std::atomic<std::uint32_t> fork_generation_now;
inline std::uint32_t fork_generation() noexcept { return fork_generation_now.load(std::memory_order_relaxed); }

// This process's token (pid and random bits), never 0; made at the first call (and anew in a forked child).
// Throws std::system_error when the file cannot be made.
std::uint64_t process_token();

// Lets processes of other users check on this one (they may open the empty file, no more).
void process_token_share();

// False for 0, for a token without a file and for one whose lock nobody holds.
bool process_alive(std::uint64_t token);

// The pid of a live process as this process's PID namespace numbers it, which is another one than it has itself where it
// runs in a container; 0 where it has none here (look nothing up in /proc then); none where it is dead.
std::optional<int> process_holder(std::uint64_t token);

// Removes the files of this process at its end. It runs by itself at a normal exit; a process that is ended by a signal
// at the end of an interpreter (Ctrl-C in Python) calls it before.
void process_end() noexcept;

// "KIND.PID.RANDOM": what names of files that belong to a process begin with.
std::string process_file_name(const char *kind, std::uint64_t token);

// The name of this process's program, for processes that find it dead; for Python the name of the script or module.
// No options and no arguments: those may hold secrets.
const std::string &process_program();

// Removes the files of dead processes, their pages of counters too; gives how many. `before` gets the path of each such
// page before it goes.
int process_sweep(void (*before)(const std::string &page) = nullptr);

// While a NoFork exists no other thread of this process can fork, so that a child never inherits a lock taken meanwhile.
class NoFork {
   public:
    NoFork();
    ~NoFork();
    NoFork(const NoFork &) = delete;
    NoFork &operator=(const NoFork &) = delete;
};

}  // namespace penstock
