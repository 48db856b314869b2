/* A publisher and a subscriber of one channel in C; in earnest they are two programs, in whatever language.
 *
 *     include=$(python -c 'from penstock import shm; print(shm.include_directory())')
 *     library=$(python -c 'from penstock import shm; print(shm.library_path())')
 *     cc channels.c -I$include $library -Wl,-rpath,$(dirname $library) -o channels && ./channels
 */
#include <stdio.h>
#include <string.h>

#include "penstock_shm.h"

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, penstock_shm_error());
    return 1;
}

int main(void) {
    penstock_shm_options options;
    penstock_shm_options_init(&options);
    options.slots = 16;
    options.metadata_size = 8;
    penstock_shm_publisher *publisher;
    penstock_shm_subscriber *subscriber;
    if (penstock_shm_publisher_open("/example/c", &options, &publisher) < 0) return fail("publisher");
    if (penstock_shm_subscriber_open("/example/c", NULL, &subscriber) < 0) return fail("subscriber");

    void *data; /* memory in the channel itself */
    uint32_t slot;
    if (penstock_shm_reserve(publisher, 64, 1.0, &data, &slot) < 0) return fail("reserve");
    int size = snprintf(data, 64, "hello from C");
    if (penstock_shm_set_metadata(publisher, slot, "front", 5) < 0) return fail("metadata");
    if (penstock_shm_publish(publisher, slot, (size_t)size, NULL) < 0) return fail("publish");

    penstock_shm_message message;
    if (penstock_shm_read(subscriber, 1.0, &message) != 1) return fail("read");
    printf("%.*s (%s, message %llu)\n", (int)message.size, (const char *)message.data, (const char *)message.metadata,
           (unsigned long long)message.ordinal);
    penstock_shm_release(subscriber, &message);
    penstock_shm_subscriber_close(subscriber);
    penstock_shm_publisher_close(publisher);
    return 0;
}
