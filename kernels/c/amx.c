/* Matrix tiles: whether they may be used, and the walk of the threads over parts of a layer; see linear.h and amx.h. */
#include "give_way.h"
#include "linear.h"
#include "parallel.h"

#if defined(__x86_64__) && defined(__linux__)
#include "amx.h"

#include <sys/syscall.h>
#include <unistd.h>

enum {
    ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18,
    BLOCK_BYTES = 1 << 20 /* of x, so many stay in the second-level cache */
};

struct walk {
    struct job *job;
    part_function *part;
};

int baton_has_amx(void) {
    enum { UNKNOWN, NO, YES };
    static int known;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found == UNKNOWN) {
        int able = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                   __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("avx512bf16");
        found = able && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? YES : NO;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == YES;
}

TARGET_AMX static void work(void *data) {
    const struct walk *walk = data;
    struct job *job = walk->job;
    const int64_t panels = (job->linear->outputs + WIDTH - 1) / WIDTH, panel_bytes = job->steps * STEP;
    const int64_t fit = BLOCK_BYTES / job->row_bytes / (2 * TILE_ROWS) * 2 * TILE_ROWS;
    const int64_t block = fit > 0 ? fit : 2 * TILE_ROWS, parts = (job->rows + block - 1) / block * panels;
    int64_t part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    while (part < parts) {
        const int64_t row = part / panels * block, left = job->rows - row;
        const int64_t following = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        const char *next = following < parts ? job->linear->packed + following % panels * panel_bytes : 0;
        walk->part(job, row, left < block ? left : block, part % panels, next);
        part = following;
        baton_give_way();
    }
    _tile_release();
}

void baton_run_amx(struct job *job, part_function *part) {
    struct walk walk = {job, part};
    job->next = 0;
    baton_parallel(work, &walk, job->linear->threads, (job->linear->outputs + WIDTH - 1) / WIDTH);
}
#else
int baton_has_amx(void) { return 0; }
#endif
