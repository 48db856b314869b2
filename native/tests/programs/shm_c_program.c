/* What the C interface can do, against the same channel that Python uses: shm_c_program CHANNEL echoes what it reads
 * on CHANNEL/in to CHANNEL/out, then goes through options, cancel, resize, wait, callback and virtual channels. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "penstock_shm.h"

#define CHECK(condition)                                                                             \
    do {                                                                                             \
        if (!(condition)) {                                                                          \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, penstock_shm_error());       \
            exit(1);                                                                                 \
        }                                                                                            \
    } while (0)

static int veto(void *context, uint64_t from, uint64_t to) {
    ++*(int *)context;
    return to < 100000 && from < to;
}

static void count(void *context, penstock_shm_subscriber *subscriber, const penstock_shm_message *message) {
    (void)subscriber;
    *(size_t *)context += message->size;
}

static void echo(const char *in, const char *out) {
    penstock_shm_options options;
    penstock_shm_options_init(&options);
    options.reliable = 1;
    penstock_shm_publisher *publisher;
    penstock_shm_subscriber *subscriber;
    CHECK(penstock_shm_publisher_open(out, &options, &publisher) == 0);
    CHECK(penstock_shm_subscriber_open(in, &options, &subscriber) == 0);
    CHECK(penstock_shm_wait_ready(publisher, 1, 30) == 1);
    for (;;) {
        penstock_shm_message message;
        CHECK(penstock_shm_read(subscriber, 30, &message) == 1);
        void *data;
        uint32_t slot;
        uint64_t ordinal;
        CHECK(penstock_shm_reserve(publisher, message.size, 30, &data, &slot) == 0);
        memcpy(data, message.data, message.size);
        CHECK(penstock_shm_publish(publisher, slot, message.size, &ordinal) == 0);
        int last = message.size == 0;
        CHECK(penstock_shm_release(subscriber, &message) == 0);
        CHECK(penstock_shm_release(subscriber, &message) == PENSTOCK_SHM_STATE);
        if (last) break;
    }
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(publisher);
}

static void everything_else(const char *name) {
    penstock_shm_options options;
    penstock_shm_options_init(&options);
    options.slots = 8;
    options.slot_size = 64;
    options.type = "text";
    penstock_shm_publisher *publisher;
    penstock_shm_subscriber *subscriber;
    CHECK(penstock_shm_publisher_open(name, &options, &publisher) == 0);
    options.type = "other";
    CHECK(penstock_shm_subscriber_open(name, &options, &subscriber) == PENSTOCK_SHM_REFUSED);
    CHECK(strstr(penstock_shm_error(), "'text', not 'other'"));
    options.type = NULL;
    options.max_held = 2;
    CHECK(penstock_shm_subscriber_open(name, &options, &subscriber) == 0);

    void *data;
    uint32_t slot;
    CHECK(penstock_shm_reserve(publisher, 10, 0, &data, &slot) == 0);
    CHECK(penstock_shm_cancel(publisher, slot) == 0);
    CHECK(penstock_shm_cancel(publisher, slot) == PENSTOCK_SHM_STATE);
    penstock_shm_message message;
    CHECK(penstock_shm_read(subscriber, 0, &message) == 0);

    int asked = 0;
    char large[5000] = {0};
    CHECK(penstock_shm_on_resize(publisher, veto, &asked) == 0);
    uint64_t ordinal = 0;
    CHECK(penstock_shm_publish_copy(publisher, large, sizeof large, 0, &ordinal) == 0 && ordinal == 1 && asked == 1);
    CHECK(penstock_shm_slot_size(publisher) >= sizeof large);
    CHECK(penstock_shm_reserve(publisher, 1000000, 0, &data, &slot) == PENSTOCK_SHM_REFUSED);

    int pipes[2];
    CHECK(pipe(pipes) == 0);
    CHECK(penstock_shm_wait(subscriber, 30, pipes[0]) == 1);
    size_t bytes = 0;
    CHECK(penstock_shm_on_message(subscriber, count, &bytes) == 0);
    CHECK(penstock_shm_publish_copy(publisher, "abc", 3, 0, NULL) == 0);
    CHECK(penstock_shm_process_all(subscriber) == 2 && bytes == sizeof large + 3);
    CHECK(write(pipes[1], "x", 1) == 1);
    CHECK(penstock_shm_wait(subscriber, 30, pipes[0]) == 0);
    CHECK(penstock_shm_fileno(subscriber) >= 0);
    for (int i = 0; i < 30; ++i) CHECK(penstock_shm_publish_copy(publisher, "x", 1, 0, NULL) == 0);
    CHECK(penstock_shm_read_newest(subscriber, &message) == 1 && message.ordinal == 32);
    CHECK(penstock_shm_dropped(subscriber) == 29);
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(publisher);
    CHECK(penstock_shm_publisher_open("no slash", NULL, &publisher) == PENSTOCK_SHM_INVALID);
}

static void count_drops(void *context, penstock_shm_subscriber *subscriber, uint64_t count) {
    (void)subscriber;
    *(uint64_t *)context += count;
}

static void count_channels(void *context, const penstock_shm_channel *channel) {
    if (channel->slots == 9 && channel->publishers == 1 && channel->subscribers == 1 && !*channel->problem) ++*(int *)context;
}

static void newer(const char *name) {
    penstock_shm_options options;
    penstock_shm_options_init(&options);
    options.slots = 9;
    options.metadata_size = 10;
    options.retirement = 1;
    options.checksum = 1;
    options.activation = 1;
    options.pass_activation = 1;
    penstock_shm_publisher *publisher;
    penstock_shm_subscriber *subscriber;
    CHECK(penstock_shm_publisher_open(name, &options, &publisher) == 0);
    CHECK(penstock_shm_subscriber_open(name, &options, &subscriber) == 0);
    CHECK(penstock_shm_metadata_size(publisher) == 10);
    penstock_shm_message message;
    CHECK(penstock_shm_read(subscriber, 0, &message) == 1 && message.activation && message.size == 0);
    CHECK(penstock_shm_release(subscriber, &message) == 0);

    void *data;
    uint32_t slot;
    CHECK(penstock_shm_reserve(publisher, 5, 0, &data, &slot) == 0);
    memcpy(data, "hello", 5);
    CHECK(penstock_shm_set_metadata(publisher, slot, "12345678901", 11) == PENSTOCK_SHM_INVALID);
    CHECK(penstock_shm_set_metadata(publisher, slot, "meta", 4) == 0);
    CHECK(penstock_shm_publish(publisher, slot, 6, NULL) == PENSTOCK_SHM_INVALID);
    CHECK(strstr(penstock_shm_error(), "more than the 5"));
    CHECK(penstock_shm_publish(publisher, slot, 5, NULL) == 0);
    CHECK(penstock_shm_read(subscriber, 0, &message) == 1 && !message.activation && message.intact);
    CHECK(message.metadata_size == 10 && !memcmp(message.metadata, "meta\0\0\0\0\0", 10));

    penstock_shm_weak weak;
    penstock_shm_message again;
    int64_t then = message.timestamp_ns;
    CHECK(penstock_shm_weak_of(subscriber, &message, &weak) == 0);
    CHECK(penstock_shm_weak_read(subscriber, &weak, &again) == 1 && again.data == message.data);
    CHECK(penstock_shm_release(subscriber, &again) == 0);
    uint32_t released[16];
    CHECK(penstock_shm_retired(publisher, 0, released, 16) == 1);
    CHECK(penstock_shm_release(subscriber, &message) == 0);
    CHECK(penstock_shm_retired(publisher, 10, released, 16) == 1 && released[0] == slot);
    CHECK(penstock_shm_find(subscriber, then, &again) == 1 && again.ordinal == 2);
    CHECK(penstock_shm_release(subscriber, &again) == 0);
    CHECK(penstock_shm_find(subscriber, INT64_MAX, &again) == 0);

    uint64_t lost = 0;
    CHECK(penstock_shm_on_dropped(subscriber, count_drops, &lost) == 0);
    for (int i = 0; i < 20; ++i) CHECK(penstock_shm_publish_copy(publisher, "x", 1, 0, NULL) == 0);
    CHECK(penstock_shm_read(subscriber, 0, &message) == 1 && lost == 11);
    CHECK(penstock_shm_release(subscriber, &message) == 0);
    CHECK(penstock_shm_weak_read(subscriber, &weak, &again) == 0);
    CHECK(penstock_shm_publisher_fileno(publisher) >= 0);
    int channels = 0;
    CHECK(penstock_shm_channels(count_channels, &channels) >= 1 && channels == 1);
    CHECK(penstock_shm_activate(publisher) == 1);
    CHECK(penstock_shm_clean() >= 0);
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(publisher);
}

static void virtual_channels(const char *mux) {
    penstock_shm_options options;
    penstock_shm_options_init(&options);
    options.mux = mux;
    options.vchan_id = 7;
    penstock_shm_publisher *one, *two;
    penstock_shm_subscriber *subscriber;
    CHECK(penstock_shm_publisher_open("/one", &options, &one) == 0);
    CHECK(penstock_shm_publisher_vchan_id(one) == 7);
    options.vchan_id = -1;
    CHECK(penstock_shm_publisher_open("/two", &options, &two) == 0);
    CHECK(penstock_shm_subscriber_open("/two", &options, &subscriber) == 0);
    CHECK(penstock_shm_subscriber_vchan_id(subscriber) == penstock_shm_publisher_vchan_id(two));
    CHECK(penstock_shm_publish_copy(one, "1", 1, 0, NULL) == 0);
    CHECK(penstock_shm_publish_copy(two, "2", 1, 0, NULL) == 0);
    penstock_shm_message message;
    CHECK(penstock_shm_read(subscriber, 0, &message) == 1 && *(const char *)message.data == '2' && message.ordinal == 1);
    CHECK(penstock_shm_release(subscriber, &message) == 0);
    CHECK(penstock_shm_read(subscriber, 0, &message) == 0);

    // What its neighbour has overwritten is told by the next read, though no message of its own follows.
    uint64_t lost = 0;
    CHECK(penstock_shm_on_dropped(subscriber, count_drops, &lost) == 0);
    for (int i = 0; i < 3; ++i) CHECK(penstock_shm_publish_copy(two, "2", 1, 0, NULL) == 0);
    for (int i = 0; i < 1000; ++i) CHECK(penstock_shm_publish_copy(one, "1", 1, 0, NULL) == 0);
    CHECK(penstock_shm_read(subscriber, 0, &message) == 0 && lost == 3 && penstock_shm_dropped(subscriber) == 3);
    CHECK(penstock_shm_publish_copy(two, "2", 1, 0, NULL) == 0);
    CHECK(penstock_shm_read(subscriber, 0, &message) == 1 && message.ordinal == 5 && lost == 3);
    CHECK(penstock_shm_release(subscriber, &message) == 0);
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(one);
    penstock_shm_publisher_close(two);
}

int main(int argument_count, char **arguments) {
    char in[300], out[300], other[300], mux[300];
    if (argument_count != 2) return 2;
    snprintf(in, sizeof in, "%s/in", arguments[1]);
    snprintf(out, sizeof out, "%s/out", arguments[1]);
    snprintf(other, sizeof other, "%s/other", arguments[1]);
    snprintf(mux, sizeof mux, "%s/mux", arguments[1]);
    everything_else(other);
    newer(other);
    virtual_channels(mux);
    echo(in, out);
    puts("ok");
    return 0;
}
