/* The C interface of a gateway's module: what a shared library offers to be loaded by the loader "native".
 *
 * The library exports one function, penstock_module, which gives its table of functions. For each module of the
 * gateway's file that names the library, the gateway calls create once, then start, then receive for each message, one
 * at a time and in order, then destroy. Calls for one module never overlap, but may come from different threads.
 *
 * publish may be called from any thread from start on until destroy is called; in create and destroy it is refused. It
 * copies the message. It may wait while a sink's queue is full (that is back-pressure) and gives 0, or -1 when the message
 * was refused; the gateway's log says why.
 *
 * A message that receive is given belongs to the gateway and is gone when receive returns.
 *
 *     cc -shared -fPIC -o mine.so mine.c -I "$(python -c 'import penstock.gateway as g; print(g.include_directory())')"
 */
#ifndef PENSTOCK_MODULE_H
#define PENSTOCK_MODULE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PENSTOCK_MODULE_VERSION 1u

typedef struct penstock_message {
    const char *properties;   /* key NUL value NUL ..., UTF-8, no key twice; null when there are none */
    uint64_t properties_size; /* bytes of them, all NULs counted */
    const uint8_t *content;   /* null only where content_size is 0 */
    uint64_t content_size;
} penstock_message;

typedef struct penstock_host {
    uint32_t version; /* PENSTOCK_MODULE_VERSION of the gateway */
    int (*publish)(void *broker, const penstock_message *message);
    /* A line in the gateway's log; level as in Python: 10 debug, 20 info, 30 warning, 40 error. */
    void (*log)(void *broker, int level, const char *text);
} penstock_host;

typedef struct penstock_module_api {
    uint32_t version; /* PENSTOCK_MODULE_VERSION that the library was compiled with */
    /* The module, or null when it cannot be made. host and broker stay valid until destroy has returned;
     * configuration is the module's args as JSON and is gone when create returns. */
    void *(*create)(const penstock_host *host, void *broker, const char *configuration);
    int (*start)(void *module);                                     /* may be null; 0: well */
    int (*receive)(void *module, const penstock_message *message); /* 0: well; else counted as a failure */
    void (*destroy)(void *module);
} penstock_module_api;

const penstock_module_api *penstock_module(void);

#ifdef __cplusplus
}
#endif
#endif
