/* Preloaded by `make steady PART=slow-disk`: every fsync and fdatasync takes 20 ms longer, as on a slow disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>

static int later(const char *name, int descriptor) {
    struct timespec left = {0, 20 * 1000 * 1000};
    while (nanosleep(&left, &left) != 0) {
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(descriptor);
}

int fsync(int descriptor) { return later("fsync", descriptor); }

int fdatasync(int descriptor) { return later("fdatasync", descriptor); }
