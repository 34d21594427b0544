/* Rows of bfloat16 times a bfloat16 weight on matrix tiles; amx.h has the packing: the two tiles of a step lie
   side by side. Up to 32 rows times a panel are summed in
   four tiles, from the first input to the last. Rows of x are read past the first-level cache, where the panel stays that all
   of them need. */
#include "linear.h"

#if defined(__x86_64__) && defined(__linux__)
#include "amx.h"

#include <stdlib.h>

enum { PAIR = 2 * TILE_ROWS };

/* To sums [32, 32]; `below`: there are more than 16 rows. */
TARGET_AMX INLINE void sum(const char *x, int64_t row_bytes, const char *weights, int64_t steps, struct early *early,
                           const int below, float *sums) {
    enum { STRIDE = WIDTH * sizeof(float) };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; steps > 0; steps--, x += TILE_ROW, weights += STEP) {
        ask(early);
        _tile_loadd(6, weights, TILE_ROW);
        _tile_stream_loadd(4, x, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_BYTES, TILE_ROW);
        _tile_dpbf16ps(1, 4, 7);
        if (below) {
            _tile_stream_loadd(5, x + TILE_ROWS * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, STRIDE);
    _tile_stored(1, sums + 16, STRIDE);
    if (below) {
        _tile_stored(2, sums + TILE_ROWS * WIDTH, STRIDE);
        _tile_stored(3, sums + TILE_ROWS * WIDTH + 16, STRIDE);
    }
}

TARGET_AMX static void run_part(const struct job *job, int64_t first_row, int64_t rows, int64_t panel, const char *next) {
    float sums[PAIR * WIDTH] __attribute__((aligned(64))), bias[WIDTH] = {0};
    const struct linear *linear = job->linear;
    const int64_t first = panel * WIDTH, width = linear->outputs - first < WIDTH ? linear->outputs - first : WIDTH;
    const char *weights = linear->packed + panel * job->steps * STEP, *x = job->x + first_row * job->row_bytes;
    uint16_t *out = job->out + first_row * linear->outputs + first;
    struct early early = plan_early(job, weights, next, (rows + PAIR - 1) / PAIR, STEP);
    if (linear->bias)
        memcpy(bias, linear->bias + first, (size_t)width * sizeof *bias);
    for (int64_t before = 0; rows > 0; rows -= PAIR, x += PAIR * job->row_bytes, out += PAIR * linear->outputs) {
        const int64_t count = rows < PAIR ? rows : PAIR;
        if (count != before)
            configure_tiles(before = count);
        early.out = out;
        early.rows = (count + job->steps - 1) / job->steps;
        if (count > TILE_ROWS)
            sum(x, job->row_bytes, weights, job->steps, &early, 1, sums);
        else
            sum(x, job->row_bytes, weights, job->steps, &early, 0, sums);
        finish_tiles(sums, bias, count, width, out, linear->outputs);
    }
}

/* Rows of whole steps: x with zeros behind every row. NULL where memory is lacking. */
static char *fill_up(const char *x, int64_t rows, int64_t bytes, int64_t row_bytes) {
    char *filled = calloc((size_t)rows, (size_t)row_bytes);
    for (int64_t row = 0; filled && row < rows; row++)
        memcpy(filled + row * row_bytes, x + row * bytes, (size_t)bytes);
    return filled;
}

int baton_bf16_amx(const struct linear *linear, const char *x, int64_t rows, uint16_t *out) {
    const int64_t bytes = 2 * linear->inputs, steps = (bytes + TILE_ROW - 1) / TILE_ROW;
    char *filled = NULL;
    if (bytes % TILE_ROW && !(filled = fill_up(x, rows, bytes, steps * TILE_ROW)))
        return -1;
    struct job job = {.linear = linear, .x = filled ? filled : x, .rows = rows, .row_bytes = steps * TILE_ROW,
                      .steps = steps, .out = out};
    baton_run_amx(&job, run_part);
    free(filled);
    return 0;
}
#else
int baton_bf16_amx(const struct linear *linear, const char *x, int64_t rows, uint16_t *out) {
    (void)linear, (void)x, (void)rows, (void)out;
    return -1;
}
#endif
