/* The walk over panels and rows that all linear layers share; see linear.h. */
#include "give_way.h"
#include "linear.h"
#include "parallel.h"

enum {
    FEW_ROWS = 16, /* whose parts are so short that a look at the clock would be felt */
    LINE = 64, AHEAD = 4096 /* bytes */
};

struct block {
    const char *at;
    int64_t bytes;
};

static const char *panel_at(const struct job *job, int64_t panel) {
    return job->linear->packed + panel * job->steps * job->step_bytes;
}

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Of walk `walk` of `walks` over a block. A single one asks for what it needs soon itself; several share the lines of the
   next block, which come from memory while this one, in a cache, is computed with. */
static struct ahead plan_ahead(const struct job *job, struct block block, struct block next, int64_t walk, int64_t walks) {
    if (walks == 1)
        return (struct ahead){block.at + AHEAD, job->step_bytes};
    const int64_t lines = job->step_bytes / LINE, first = walk * lines / walks, last = (walk + 1) * lines / walks;
    const int64_t before = first * LINE * (block.bytes / job->step_bytes);
    if (first == last || before >= next.bytes)
        return (struct ahead){block.at, 0};
    return (struct ahead){next.at + before, (last - first) * LINE};
}

/* Steps that are taken at a time. Two or three walks pass so quickly that they would ask for a large block at once, which
   processors do not take. */
static int64_t steps_at_once(const struct job *job, int64_t walks) {
    return smaller(job->steps, walks == 2 || walks == 3 ? job->small_steps : job->block_steps);
}

/* Up to BLOCK_ROWS rows times one panel, piece by piece. `next` is the panel that comes afterwards. */
static void run_part(const struct job *job, int64_t first_row, int64_t panel, int64_t next) {
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    const int64_t rows = smaller(job->rows - first_row, BLOCK_ROWS), walks = (rows + job->tile_rows - 1) / job->tile_rows;
    const int64_t most = steps_at_once(job, walks), bytes = most * job->step_bytes;
    const struct block following = {panel_at(job, next), next == panel ? 0 : bytes};
    struct block block = {panel_at(job, panel), bytes};
    for (int64_t step = 0; step < job->steps; step += most) {
        const int64_t steps = smaller(job->steps - step, most), left = job->steps - step - steps;
        const struct block after = {block.at + block.bytes, smaller(left, most) * job->step_bytes};
        for (int64_t row = 0, walk = 0; walk < walks; walk++) {
            const int64_t count = (rows - row + walks - walk - 1) / (walks - walk);
            const struct ahead ahead = plan_ahead(job, block, left ? after : following, walk, walks);
            job->tile(job, first_row + row, (int)count, step, steps, block.at, ahead, sums + row * PANEL);
            row += count;
        }
        block = after;
    }
    job->finish(job, sums, first_row, rows, panel);
}

static void work(void *data) {
    struct job *job = data;
    const int64_t blocks = (job->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t parts = blocks * ((job->linear->outputs + PANEL - 1) / PANEL);
    int64_t part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    while (part < parts) {
        const int64_t next = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        run_part(job, part % blocks * BLOCK_ROWS, part / blocks, (next < parts ? next : part) / blocks);
        part = next;
        if (job->rows > FEW_ROWS)
            baton_give_way();
    }
}

void baton_run_linear(struct job *job) {
    job->next = 0;
    baton_parallel(work, job, job->linear->threads, (job->linear->outputs + PANEL - 1) / PANEL);
}
