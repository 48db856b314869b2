/* The floor of the TCP benchmarks: the same frames, sent and received by C, between two processes.
 *   floor rate COUNT SIZE RECEIVERS      prints the seconds it took
 *   floor echo COUNT SIZE same|two       prints the median round trip in seconds, both on one core or on two */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void pin(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

static void take(int fd, char *data, size_t size) {
    while (size) {
        ssize_t n = read(fd, data, size);
        if (n <= 0) exit(1);
        data += n;
        size -= n;
    }
}

static void give(int fd, char *header, char *data, size_t size) {
    struct iovec parts[2] = {{header, 12}, {data, size}};
    size_t left = 12 + size;
    int first = 0;
    while (left) {
        ssize_t n = writev(fd, parts + first, 2 - first);
        if (n <= 0) exit(1);
        left -= n;
        while (first < 2 && (size_t)n >= parts[first].iov_len) n -= parts[first++].iov_len;
        if (first < 2) parts[first].iov_base = (char *)parts[first].iov_base + n, parts[first].iov_len -= n;
    }
}

static int compare(const void *a, const void *b) {
    double d = *(const double *)a - *(const double *)b;
    return d < 0 ? -1 : d > 0;
}

int main(int argc, char **argv) {
    if (argc < 5) return 2;
    long count = atol(argv[2]);
    size_t size = atol(argv[3]);
    int echo = !strcmp(argv[1], "echo"), one = 1;
    int receivers = echo ? 1 : atoi(argv[4]);
    int same = echo && !strcmp(argv[4], "same");
    char header[12] = {12};
    uint64_t length = size;
    memcpy(header + 4, &length, 8);
    char *data = calloc(1, size + 1);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t at_size = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 64)) return 1;
    getsockname(listener, (struct sockaddr *)&at, &at_size);
    int peers[64];
    for (int i = 0; i < receivers; ++i) {
        if (fork() == 0) {
            pin(same ? 0 : 1);
            int fd = socket(AF_INET, SOCK_STREAM, 0);
            if (connect(fd, (struct sockaddr *)&at, sizeof at)) return 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            /* Small frames are read through a buffer: one read a frame would measure the reader. */
            if (!echo && size < 4096) {
                size_t left = count * (12 + size), room = 1 << 17;
                char *buffer = malloc(room);
                while (left) {
                    ssize_t n = read(fd, buffer, room < left ? room : left);
                    if (n <= 0) return 1;
                    left -= n;
                }
            } else {
                for (long k = 0; k < count; ++k) {
                    take(fd, header, 12);
                    take(fd, data, size);
                    if (echo) give(fd, header, data, size);
                }
            }
            if (write(fd, "d", 1) != 1) return 1;
            return 0;
        }
        peers[i] = accept(listener, 0, 0);
        setsockopt(peers[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    }
    pin(0);
    double *took = malloc(sizeof(double) * (count + 1)), began = now();
    for (long k = 0; k < count; ++k) {
        double sent = now();
        for (int i = 0; i < receivers; ++i) give(peers[i], header, data, size);
        if (echo) {
            char back[12];
            take(peers[0], back, 12);
            take(peers[0], data, size);
            took[k] = now() - sent;
        }
    }
    for (int i = 0; i < receivers; ++i) take(peers[i], data, 1);
    double all = now() - began;
    while (wait(0) > 0) {
    }
    if (echo) {
        qsort(took, count, sizeof(double), compare);
        printf("%.9f\n", took[count / 2]);
    } else {
        printf("%.9f\n", all);
    }
    return 0;
}
