/* Work on the threads that torch has already. */
#ifndef BATON_PARALLEL_H
#define BATON_PARALLEL_H

#include <stdint.h>

/* Call work(data) on `threads` threads at the same time, no more than the work has parts, and return when all are done.
   Torch's OpenMP runtime, which is loaded, lends its threads: a second set would take turns with those that spin. Without
   one, work runs on this thread alone; so it takes what there is to do piece by piece from a shared counter. */
void baton_parallel(void (*work)(void *), void *data, int64_t threads, int64_t parts);

/* Call lead(data) on this thread. Meanwhile `threads` - 1 others wait awake for its calls of baton_parallel, which then
   begin and end in less than a microsecond, not in the ten or twenty that OpenMP takes. */
void baton_lead(void (*lead)(void *), void *data, int64_t threads);

/* How many of `rows` a thread takes at a time: `most` of them, since OpenMP's way costs as much as many rows do; among threads
   that wait awake, an equal share. */
int64_t baton_slice(int64_t rows, int64_t threads, int64_t most);

/* Whether calls run on more than one thread where they are told to. */
int baton_has_threads(void);

#endif
