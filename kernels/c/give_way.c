/* See give_way.h. A thread that has just woken waits for one that computes, up to the rest of its slice and then to the
   scheduler's next tick: milliseconds. Where engines take all cores, those are the messages of what they computed. */
#include "give_way.h"
#include "linear.h"
#include <sched.h>
#include <time.h>

static int64_t interval; /* ns; 0: never */
static _Thread_local int64_t latest;

EXPORT void baton_give_way_every(int64_t ns) { __atomic_store_n(&interval, ns, __ATOMIC_RELAXED); }

void baton_give_way(void) {
    const int64_t every = __atomic_load_n(&interval, __ATOMIC_RELAXED);
    if (every == 0)
        return;
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    const int64_t now = time.tv_sec * 1000000000ll + time.tv_nsec;
    if (now - latest < every)
        return;
    latest = now;
    sched_yield();
}
