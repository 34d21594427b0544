/* Rows of bfloat16 times a bfloat16 weight on matrix tiles (AMX).

   The weight is packed in panels of 32 outputs, a panel in steps of 32 inputs, and a step is two tiles of 16 outputs: a
   row of a tile holds two inputs of each. Up to 32 rows times a panel are summed in four tiles from the first input to
   the last. Rows of x are read past the first-level cache, where a panel stays that all row pairs need. */
#include "linear.h"
#include "parallel.h"

#if defined(__x86_64__) && defined(__linux__)
#include "amx.h"

#include <stdlib.h>

enum {
    WIDTH = 32, PAIR = 2 * TILE_ROWS,    /* outputs of a panel, rows whose sums are made at a time */
    STEP = 2 * TILE_BYTES,
    BLOCK_BYTES = 1 << 20,               /* of x that are to stay in the second-level cache */
    AHEAD = 4096, LINE = 64
};

/* What is asked for early: in each step so many lines from `at` on, where after `end` comes `next`, and the lines of so
   many rows of the output. */
struct early {
    const char *at, *end, *next;
    int64_t lines, rows, outputs;
    const uint16_t *out;
};

TARGET_AMX INLINE void ask(struct early *early) {
    if (early->at >= early->end) {
        early->at = early->next;
        early->end = early->next + ((int64_t)1 << 40);
    }
    for (int64_t i = 0; i < early->lines; i++)
        _mm_prefetch(early->at + i * LINE, _MM_HINT_T1);
    early->at += early->lines * LINE;
    for (int64_t i = 0; i < early->rows; i++, early->out += early->outputs)
        __builtin_prefetch(early->out, 1);
}

/* sums [32, 32] of up to 32 rows; with `below` more than 16. */
TARGET_AMX INLINE void sum(const char *x, int64_t row_bytes, const char *weights, int64_t steps, struct early *early,
                           const int below, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; steps > 0; steps--, x += ROW_BYTES, weights += STEP) {
        ask(early);
        _tile_loadd(6, weights, ROW_BYTES);
        _tile_stream_loadd(4, x, row_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE_BYTES, ROW_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        if (below) {
            _tile_stream_loadd(5, x + TILE_ROWS * row_bytes, row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, sizeof(float) * WIDTH);
    _tile_stored(1, sums + 16, sizeof(float) * WIDTH);
    if (below) {
        _tile_stored(2, sums + TILE_ROWS * WIDTH, sizeof(float) * WIDTH);
        _tile_stored(3, sums + TILE_ROWS * WIDTH + 16, sizeof(float) * WIDTH);
    }
}

/* Rows of sums plus bias, of which `mask` has the outputs that there are, to bfloat16. */
TARGET_AMX INLINE void finish(const float *sums, const float *bias, int64_t rows, __mmask32 mask, uint16_t *out,
                              int64_t outputs) {
    const __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + 16);
    for (; rows > 0; rows--, sums += WIDTH, out += outputs) {
        __m512bh both = _mm512_cvtne2ps_pbh(_mm512_add_ps(_mm512_loadu_ps(sums + 16), high),
                                            _mm512_add_ps(_mm512_loadu_ps(sums), low));
        _mm512_mask_storeu_epi16(out, mask, (__m512i)both);
    }
}

/* Rows of x times a panel. `next`: the panel that this thread takes afterwards, or NULL. */
TARGET_AMX static void run_part(const struct job *job, int64_t first_row, int64_t rows, int64_t panel, const char *next) {
    float sums[PAIR * WIDTH] __attribute__((aligned(64))), bias[WIDTH] = {0};
    const struct linear *linear = job->linear;
    const int64_t panel_bytes = job->steps * STEP;
    const int64_t first = panel * WIDTH, width = linear->outputs - first < WIDTH ? linear->outputs - first : WIDTH;
    const int64_t pairs = (rows + PAIR - 1) / PAIR;
    const char *weights = linear->packed + panel * panel_bytes, *x = job->x + first_row * job->row_bytes;
    const __mmask32 mask = (__mmask32)(0xffffffffu >> (WIDTH - width));
    uint16_t *out = job->out + first_row * linear->outputs + first;
    struct early early = {.at = next, .end = next, .next = next, .lines = next ? (STEP / LINE + pairs - 1) / pairs : 0,
                          .rows = (PAIR + job->steps - 1) / job->steps, .outputs = linear->outputs};
    if (pairs == 1) {
        early.at = weights + AHEAD;
        early.end = weights + panel_bytes;
        early.next = next ? next : weights;
        early.lines = STEP / LINE;
    }
    if (linear->bias)
        memcpy(bias, linear->bias + first, (size_t)width * sizeof *bias);
    for (int64_t before = 0; rows > 0; rows -= PAIR, x += PAIR * job->row_bytes, out += PAIR * linear->outputs) {
        const int64_t count = rows < PAIR ? rows : PAIR;
        if (count != before)
            configure_tiles(before = count);
        early.out = out;
        if (count > TILE_ROWS)
            sum(x, job->row_bytes, weights, job->steps, &early, 1, sums);
        else
            sum(x, job->row_bytes, weights, job->steps, &early, 0, sums);
        finish(sums, bias, count, mask, out, linear->outputs);
    }
}

TARGET_AMX static void work(void *data) {
    struct job *job = data;
    const int64_t panels = (job->linear->outputs + WIDTH - 1) / WIDTH, panel_bytes = job->steps * STEP;
    const int64_t fit = BLOCK_BYTES / job->row_bytes / PAIR * PAIR;
    const int64_t block = fit > PAIR ? fit : PAIR, parts = (job->rows + block - 1) / block * panels;
    int64_t part = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
    while (part < parts) {
        const int64_t row = part / panels * block, panel = part % panels;
        const int64_t following = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        const char *next = following < parts ? job->linear->packed + following % panels * panel_bytes : NULL;
        run_part(job, row, job->rows - row < block ? job->rows - row : block, panel, next);
        part = following;
    }
    _tile_release();
}

/* Rows of whole steps: x with zeros behind every row. NULL where memory is lacking. */
static char *fill_up(const char *x, int64_t rows, int64_t bytes, int64_t row_bytes) {
    char *filled = calloc((size_t)rows, (size_t)row_bytes);
    for (int64_t row = 0; filled && row < rows; row++)
        memcpy(filled + row * row_bytes, x + row * bytes, (size_t)bytes);
    return filled;
}

int baton_bf16_amx(const struct linear *linear, const char *x, int64_t rows, uint16_t *out) {
    const int64_t bytes = 2 * linear->inputs, steps = (bytes + ROW_BYTES - 1) / ROW_BYTES;
    char *filled = NULL;
    if (bytes % ROW_BYTES && !(filled = fill_up(x, rows, bytes, steps * ROW_BYTES)))
        return -1;
    struct job job = {.linear = linear, .x = filled ? filled : x, .rows = rows, .row_bytes = steps * ROW_BYTES,
                      .steps = steps, .step_bytes = STEP, .out = out};
    baton_parallel(work, &job, linear->threads, (linear->outputs + WIDTH - 1) / WIDTH);
    free(filled);
    return 0;
}
#else
int baton_bf16_amx(const struct linear *linear, const char *x, int64_t rows, uint16_t *out) {
    (void)linear, (void)x, (void)rows, (void)out;
    return -1;
}
#endif
