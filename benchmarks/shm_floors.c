/* What the machine itself can do: shm_floors eventfd|spin COUNT CORE_A CORE_B prints the median round trip in seconds,
 * shm_floors memcpy COUNT BYTES prints bytes a second (written and read once each, as a message is),
 * shm_floors handoff COUNT CORE_A CORE_B BYTES SLOTS the same from one process to another, both spinning. */
#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}
static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argument_count, char **arguments) {
    if (argument_count < 4) return 2;
    long count = atol(arguments[2]);
    if (!strcmp(arguments[1], "memcpy")) {
        size_t size = (size_t)atol(arguments[3]);
        char *from = malloc(size), *between = malloc(size), *to = malloc(size);
        memset(from, 1, size), memset(between, 2, size), memset(to, 3, size);
        double began = now();
        for (long i = 0; i < count; ++i) {
            from[i % (long)size] = (char)i;
            memcpy(between, from, size);
            memcpy(to, between, size);
            __asm__ volatile("" ::: "memory");
        }
        printf("%.0f\n", (double)count * (double)size / (now() - began));
        return 0;
    }
    if (!strcmp(arguments[1], "handoff")) {
        if (argument_count < 7) return 2;
        size_t size = (size_t)atol(arguments[5]);
        long slots = atol(arguments[6]);
        volatile uint32_t *turn = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        char *between = mmap(NULL, size * (size_t)slots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        char *own = malloc(size);
        memset(own, 1, size), memset(between, 2, size * (size_t)slots);
        pid_t reader = fork();
        pin(atoi(arguments[reader == 0 ? 4 : 3]));
        double began = now();
        for (long i = 0; i < count; ++i) {
            char *slot = between + size * (size_t)(i % slots);
            if (reader == 0) {
                while (__atomic_load_n(&turn[0], __ATOMIC_SEQ_CST) <= (uint32_t)i) {
                }
                memcpy(own, slot, size);
                __atomic_store_n(&turn[32], (uint32_t)i + 1, __ATOMIC_SEQ_CST);
            } else {
                while (i - (long)__atomic_load_n(&turn[32], __ATOMIC_SEQ_CST) >= slots) {
                }
                memcpy(slot, own, size);
                __atomic_store_n(&turn[0], (uint32_t)i + 1, __ATOMIC_SEQ_CST);
            }
        }
        if (reader == 0) _exit(0);
        waitpid(reader, NULL, 0);
        printf("%.0f\n", (double)count * (double)size / (now() - began));
        return 0;
    }
    int core_a = atoi(arguments[3]), core_b = atoi(arguments[4]), spin = !strcmp(arguments[1], "spin");
    volatile uint32_t *turn = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int there = eventfd(0, 0), back = eventfd(0, 0);
    uint64_t one = 1, got;
    pid_t child = fork();
    if (child == 0) {
        pin(core_b);
        for (long i = 0; i < count; ++i) {
            if (spin) {
                while (__atomic_load_n(&turn[0], __ATOMIC_SEQ_CST) != (uint32_t)i + 1)
                    if (core_a == core_b) sched_yield();
                __atomic_store_n(&turn[32], (uint32_t)i + 1, __ATOMIC_SEQ_CST);
            } else if (read(there, &got, 8) != 8 || write(back, &one, 8) != 8) {
                _exit(1);
            }
        }
        _exit(0);
    }
    pin(core_a);
    double *times = malloc(sizeof(double) * (size_t)count);
    for (long i = 0; i < count; ++i) {
        double began = now();
        if (spin) {
            __atomic_store_n(&turn[0], (uint32_t)i + 1, __ATOMIC_SEQ_CST);
            while (__atomic_load_n(&turn[32], __ATOMIC_SEQ_CST) != (uint32_t)i + 1)
                if (core_a == core_b) sched_yield();
        } else if (write(there, &one, 8) != 8 || read(back, &got, 8) != 8) {
            return 1;
        }
        times[i] = now() - began;
    }
    waitpid(child, NULL, 0);
    qsort(times, (size_t)count, sizeof(double), compare);
    printf("%.9f\n", times[count / 2]);
    return 0;
}
