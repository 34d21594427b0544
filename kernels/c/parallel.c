/* See parallel.h. */
#include "parallel.h"
#include <sched.h>
#include <stddef.h>

/* OpenMP's entry, of the library that torch brings; absent where torch has threads of another kind. */
extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags) __attribute__((weak));

/* The leader of a team offers work in rounds. A member that sees an offer takes a seat, works and leaves; the leader works
   too, then takes the free seats back and waits for those who sit. So a member that has no core at the moment is never
   waited for, and as the work is taken from a shared counter, who comes decides nothing but the time.

   One number is all they share: the round, the free seats in it, and the members that sit. */
enum { SEAT_SHIFT = 16, ROUND_SHIFT = 32, SPINS = 2000 };
static const uint64_t SITTER = 1, SEAT = 1ull << SEAT_SHIFT, ROUND = 1ull << ROUND_SHIFT, OVER = UINT64_MAX;
static const uint64_t SITTERS = 0xffff, SEATS = 0xffffull << SEAT_SHIFT;

struct team {
    uint64_t state __attribute__((aligned(64)));
    void (*work)(void *);
    void *data;
    void (*lead)(void *) __attribute__((aligned(64)));
    void *lead_data;
};

static _Thread_local struct team *leading; /* by this thread */

/* Another look in a moment; after a while another thread may have the core, as it may be the one that is waited for. */
static void wait(int *looks) {
    if (++*looks > SPINS)
        sched_yield();
    else
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#else
        __asm__ volatile("");
#endif
}

static void serve(struct team *team) {
    uint64_t served = 0;
    for (int looks = 0;; wait(&looks)) {
        uint64_t state = __atomic_load_n(&team->state, __ATOMIC_ACQUIRE);
        if (state == OVER)
            return;
        if (!(state & SEATS) || state >> ROUND_SHIFT == served ||
            !__atomic_compare_exchange_n(&team->state, &state, state - SEAT + SITTER, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            continue;
        team->work(team->data);
        __atomic_fetch_sub(&team->state, SITTER, __ATOMIC_RELEASE);
        served = state >> ROUND_SHIFT;
        looks = 0;
    }
}

static void offer(struct team *team, void (*work)(void *), void *data, int64_t seats) {
    uint64_t round = (team->state & ~(ROUND - 1)) + ROUND; /* nobody sits, and no seat is free: it is the leader's alone */
    team->work = work;
    team->data = data;
    __atomic_store_n(&team->state, round + (uint64_t)seats * SEAT, __ATOMIC_RELEASE);
    work(data);
    __atomic_fetch_and(&team->state, ~SEATS, __ATOMIC_RELAXED);
    for (int looks = 0; __atomic_load_n(&team->state, __ATOMIC_ACQUIRE) & SITTERS; wait(&looks))
        ;
}

static void join(void *data) {
    struct team *team = data;
    if (leading != team) {
        serve(team);
        return;
    }
    team->lead(team->lead_data);
    __atomic_store_n(&team->state, OVER, __ATOMIC_RELEASE);
}

void baton_lead(void (*lead)(void *), void *data, int64_t threads) {
    struct team team = {.lead = lead, .lead_data = data};
    if (threads < 2 || GOMP_parallel == NULL || leading != NULL) {
        lead(data);
        return;
    }
    leading = &team;
    GOMP_parallel(join, &team, (unsigned)threads, 0);
    leading = NULL;
}

void baton_parallel(void (*work)(void *), void *data, int64_t threads, int64_t parts) {
    if (threads > parts)
        threads = parts;
    if (threads > 1 && leading != NULL)
        offer(leading, work, data, threads - 1);
    else if (threads > 1 && GOMP_parallel != NULL)
        GOMP_parallel(work, data, (unsigned)threads, 0);
    else
        work(data);
}

int64_t baton_slice(int64_t rows, int64_t threads, int64_t most) {
    int64_t share = (rows + threads - 1) / threads;
    return leading == NULL || share > most ? most : share > 0 ? share : 1;
}

__attribute__((visibility("default"))) int baton_has_threads(void) { return GOMP_parallel != NULL; }
