/* See parallel.h. */
#include "parallel.h"
#include <stddef.h>

/* OpenMP's entry, of the library that torch brings; absent where torch has threads of another kind. */
extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));

void baton_parallel(void (*work)(void *), void *data, int64_t threads, int64_t parts) {
    if (threads > parts)
        threads = parts;
    if (threads > 1 && GOMP_parallel != NULL)
        GOMP_parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

__attribute__((visibility("default"))) int baton_has_threads(void) { return GOMP_parallel != NULL; }
