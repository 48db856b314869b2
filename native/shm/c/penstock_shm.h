/* Shared-memory channels of Penstock for C and for whatever can call C.
 *
 * A C program publishes and subscribes to the same channels as Python does. Compile with the directory that
 * penstock.shm.include_directory() names, link with the file that penstock.shm.library_path() names.
 *
 * Rules: a handle is used by one thread at a time. Functions give 0 or more when they worked and a negative
 * penstock_shm_code when not; penstock_shm_error() then says why, for the calling thread. A handle does not survive a
 * fork: open one in the child.
 */
#ifndef PENSTOCK_SHM_H
#define PENSTOCK_SHM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PENSTOCK_SHM_MAX_VCHAN_ID 1024

enum penstock_shm_code {
    PENSTOCK_SHM_OK = 0,
    PENSTOCK_SHM_INVALID = -1,    /* an argument cannot be right */
    PENSTOCK_SHM_CAPACITY = -2,   /* a bound was reached: the text says who holds what */
    PENSTOCK_SHM_CORRUPTION = -3, /* shared memory is not what it must be */
    PENSTOCK_SHM_REFUSED = -4,    /* another type, another size, another user's channel */
    PENSTOCK_SHM_STATE = -5,      /* a step out of order */
    PENSTOCK_SHM_CLOSED = -6,
    PENSTOCK_SHM_TIMEOUT = -7,    /* the time is over, nothing happened */
    PENSTOCK_SHM_SYSTEM = -8      /* the operating system said no */
};

typedef struct penstock_shm_publisher penstock_shm_publisher;
typedef struct penstock_shm_subscriber penstock_shm_subscriber;

/* Zeroed by penstock_shm_options_init; a zero means "as the channel has it, or the default". */
typedef struct {
    size_t struct_size;          /* set by the init function */
    uint32_t slots;              /* publisher */
    uint64_t slot_size;          /* publisher */
    int reliable;
    int fixed_size;              /* publisher: slots never grow */
    uint32_t max_held;           /* max_reserved of a publisher, max_active_messages of a subscriber */
    const char *type;            /* or null */
    const char *mux;             /* the multiplexer of a virtual channel, or null */
    int32_t vchan_id;            /* -1: assigned */
    int checksum;                /* publisher: sum each message; subscriber: check */
    uint32_t max_publishers, max_subscribers;
    uint32_t mode;               /* of the files; 0: 0600 */
    int64_t spin_us;             /* look for so long before sleeping */
    int no_history;              /* subscriber: start with what comes */
    uint32_t metadata_size;      /* publisher: bytes of metadata a message */
    int retirement;              /* publisher: penstock_shm_retired tells what all have released */
    int activation;              /* publisher: publish an empty message on opening */
    int pass_activation;         /* subscriber: see it */
    int local;                   /* publisher: not to be bridged to other machines */
} penstock_shm_options;

/* A message that the subscriber holds until it is released. */
typedef struct {
    const void *data;
    size_t size;
    uint64_t ordinal;
    int64_t timestamp_ns;
    int32_t vchan_id; /* -1: none */
    uint32_t slot;    /* for release */
    int intact;       /* 0: the checksum does not match */
    int activation;   /* 1: says that a publisher has opened */
    const void *metadata; /* of metadata_size bytes; null: the channel has none */
    uint32_t metadata_size;
} penstock_shm_message;

/* Names a message without holding it. */
typedef struct {
    uint64_t sequence;
    uint32_t slot;
} penstock_shm_weak;

/* A channel as seen from outside; the texts live as long as the call. */
typedef struct {
    const char *name;
    const char *type;
    const char *problem; /* empty: its files are sound */
    uint32_t slots, publishers, subscribers;
    uint64_t slot_size, published, memory_bytes;
    int mux;
} penstock_shm_channel;

void penstock_shm_options_init(penstock_shm_options *options);
const char *penstock_shm_error(void);

/* --- publishing --- */
int penstock_shm_publisher_open(const char *name, const penstock_shm_options *options, penstock_shm_publisher **opened);
void penstock_shm_publisher_close(penstock_shm_publisher *publisher);

/* A buffer of `size` bytes in the channel itself; a channel that is not of fixed size grows for it. timeout_s < 0 waits
 * for ever (reliable publishers alone wait at all). */
int penstock_shm_reserve(penstock_shm_publisher *publisher, size_t size, double timeout_s, void **data, uint32_t *slot);
/* At most as many bytes as were reserved. An ordinal of 0: an unreliable publisher's message gave way to what reliable
 * subscribers had not read. */
int penstock_shm_publish(penstock_shm_publisher *publisher, uint32_t slot, size_t size, uint64_t *ordinal);
/* Metadata of a reserved message: at most metadata_size bytes, the rest are zeros. */
int penstock_shm_set_metadata(penstock_shm_publisher *publisher, uint32_t slot, const void *metadata, size_t size);
uint32_t penstock_shm_metadata_size(const penstock_shm_publisher *publisher);
/* An empty message that says this publisher is there: 1, or 0 where no slot was free. */
int penstock_shm_activate(penstock_shm_publisher *publisher);
/* Slots whose message all have released since the last call: how many there are, of which `room` are stored; the others
 * are left for the next call. INT_MAX where there are more. */
int penstock_shm_retired(penstock_shm_publisher *publisher, double timeout_s, uint32_t *slots, size_t room);
/* Readable when a slot may be had; each call arms it anew. */
int penstock_shm_publisher_fileno(penstock_shm_publisher *publisher);
int penstock_shm_cancel(penstock_shm_publisher *publisher, uint32_t slot);
/* reserve, copy and publish in one */
int penstock_shm_publish_copy(penstock_shm_publisher *publisher, const void *data, size_t size, double timeout_s,
                              uint64_t *ordinal);
/* Called before slots grow; 0 vetoes. Null unsets it. */
int penstock_shm_on_resize(penstock_shm_publisher *publisher, int (*function)(void *context, uint64_t from, uint64_t to),
                           void *context);
uint64_t penstock_shm_slot_size(penstock_shm_publisher *publisher);
int32_t penstock_shm_publisher_vchan_id(const penstock_shm_publisher *publisher);
/* 1 when so many subscribers are there, 0 when the time is over. */
int penstock_shm_wait_ready(penstock_shm_publisher *publisher, uint32_t subscribers, double timeout_s);
/* 1: a slot may be had; 0: the time is over, or `descriptor` (-1: none) is readable. One that is not open is an error. */
int penstock_shm_publisher_wait(penstock_shm_publisher *publisher, double timeout_s, int descriptor);

/* --- subscribing --- */
int penstock_shm_subscriber_open(const char *name, const penstock_shm_options *options, penstock_shm_subscriber **opened);
void penstock_shm_subscriber_close(penstock_shm_subscriber *subscriber);

/* 1 with a message, 0 without (the time is over, or with timeout_s 0 as many are held as may be). A signal does not end
 * it, nor any other wait: give a time, or wait with a `descriptor` that the signal's function writes to. */
int penstock_shm_read(penstock_shm_subscriber *subscriber, double timeout_s, penstock_shm_message *message);
int penstock_shm_read_newest(penstock_shm_subscriber *subscriber, penstock_shm_message *message);
int penstock_shm_release(penstock_shm_subscriber *subscriber, const penstock_shm_message *message);
/* The first message that is still there at or after that time: 1, or 0 where there is none. */
int penstock_shm_find(penstock_shm_subscriber *subscriber, int64_t timestamp_ns, penstock_shm_message *message);
/* A weak reference to a message that is held, and the message again while its slot is unchanged: 1, else 0. */
int penstock_shm_weak_of(penstock_shm_subscriber *subscriber, const penstock_shm_message *message, penstock_shm_weak *weak);
int penstock_shm_weak_read(penstock_shm_subscriber *subscriber, const penstock_shm_weak *weak, penstock_shm_message *message);
/* Told by the next read when messages were overwritten before they were read; null unsets it. */
int penstock_shm_on_dropped(penstock_shm_subscriber *subscriber,
                            void (*function)(void *context, penstock_shm_subscriber *subscriber, uint64_t count),
                            void *context);
/* 1: something to read; 0: the time is over, or `descriptor` (-1: none) is readable. One that is not open is an error. */
int penstock_shm_wait(penstock_shm_subscriber *subscriber, double timeout_s, int descriptor);
/* Readable when a message may be there, after a read that gave none. */
int penstock_shm_fileno(penstock_shm_subscriber *subscriber);
/* What process_all calls with each message (released when it returns); null unsets it. */
int penstock_shm_on_message(penstock_shm_subscriber *subscriber,
                            void (*function)(void *context, penstock_shm_subscriber *subscriber,
                                             const penstock_shm_message *message),
                            void *context);
/* Those that are there when it is called: how many there were. */
int penstock_shm_process_all(penstock_shm_subscriber *subscriber);
uint64_t penstock_shm_dropped(const penstock_shm_subscriber *subscriber);
int32_t penstock_shm_subscriber_vchan_id(const penstock_shm_subscriber *subscriber);

/* --- the machine --- */
/* Calls the function with every channel; gives how many there are. */
int penstock_shm_channels(void (*function)(void *context, const penstock_shm_channel *channel), void *context);
/* Removes what killed processes left; gives how many channels went. */
int penstock_shm_clean(void);

#ifdef __cplusplus
}
#endif
#endif
