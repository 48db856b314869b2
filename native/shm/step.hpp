// Named steps between the writes to shared memory. A test build (PENSTOCK_STEPS) stops or kills itself at one; in the
// package they compile to nothing.
#pragma once

#ifdef PENSTOCK_STEPS
namespace penstock::shm {
inline void (*step_hook)(const char *name) = nullptr;
}
#define PENSTOCK_STEP(name)                                          \
    do {                                                             \
        if (penstock::shm::step_hook) penstock::shm::step_hook(name); \
    } while (0)
#else
#define PENSTOCK_STEP(name) \
    do {                    \
    } while (0)
#endif
