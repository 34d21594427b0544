/* The walk over panels and rows that all linear layers share; see linear.h. */
#include "linear.h"
#include "parallel.h"

/* Up to BLOCK_ROWS rows times one panel. The panel is taken in pieces that stay in the second-level cache. */
static void run_part(const struct job *job, int64_t first_row, int64_t panel) {
    float sums[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t rows = job->rows - first_row < BLOCK_ROWS ? job->rows - first_row : BLOCK_ROWS;
    const char *weights = job->linear->packed + panel * job->steps * job->step_bytes;
    for (int64_t step = 0; step < job->steps; step += job->block_steps) {
        int64_t steps = job->steps - step < job->block_steps ? job->steps - step : job->block_steps;
        int64_t tiles = (rows + job->tile_rows - 1) / job->tile_rows;
        for (int64_t row = 0; tiles > 0; tiles--) {
            int64_t count = (rows - row + tiles - 1) / tiles;
            job->tile(job, first_row + row, (int)count, step, steps, weights + step * job->step_bytes, sums + row * PANEL);
            row += count;
        }
    }
    job->finish(job, sums, first_row, rows, panel);
}

static void work(void *data) {
    struct job *job = data;
    int64_t blocks = (job->rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    int64_t parts = blocks * ((job->linear->outputs + PANEL - 1) / PANEL);
    for (;;) {
        int64_t part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (part >= parts)
            return;
        run_part(job, part % blocks * BLOCK_ROWS, part / blocks);
    }
}

void baton_run_linear(struct job *job) {
    job->next = 0;
    baton_parallel(work, job, job->linear->threads, (job->linear->outputs + PANEL - 1) / PANEL);
}
