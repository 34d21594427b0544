/* Rows quantised to int8 times an int8 weight on matrix tiles; amx.h has the packing: of a panel first the left tiles of all
   groups, then the right ones, and the scales likewise. A group of 64 inputs is one tile, whose sums are exact, so the bits are those of linear_int8.c. */
#include "linear_int.h"

#if defined(__x86_64__) && defined(__linux__)
#include "amx.h"

enum { DOTS = TILE_ROWS * 16, SCALES_AHEAD = 8 /* groups */ };

/* Onto `sums` of `rows` rows and 16 outputs. A constant 16 keeps them in registers. */
TARGET_AMX INLINE void scale(const int32_t *dots, const float *scales, const float *row_scales, int64_t groups,
                             const int rows, __m512 *sums) {
    const __m512 factors = _mm512_loadu_ps(scales);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(dots + 16 * r)),
                                  _mm512_mul_ps(factors, _mm512_set1_ps(row_scales[r * groups])), sums[r]);
}

/* Up to 16 rows times 16 outputs. What a tile holds is scaled while the next group's is summed. */
TARGET_AMX INLINE void sum(const struct job *job, int64_t row, const int rows, const char *weights, const float *scales,
                           struct early *early, float *out) {
    int32_t dots[2][DOTS] __attribute__((aligned(64)));
    __m512 sums[TILE_ROWS];
    const char *x = job->x + row * job->row_bytes;
    const float *row_scales = job->row_scales + row * job->groups;
#pragma GCC unroll 16
    for (int r = 0; r < TILE_ROWS; r++)
        sums[r] = _mm512_setzero_ps();
    for (int64_t group = 0; group <= job->groups; group++) {
        if (group < job->groups) {
            ask(early);
            _mm_prefetch(scales + (group + SCALES_AHEAD) * 16, _MM_HINT_T0);
            _tile_zero(0);
            _tile_loadd(6, weights + group * TILE_BYTES, TILE_ROW);
            _tile_loadd(4, x + group * TILE_ROW, job->row_bytes);
            _tile_dpbssd(0, 4, 6);
            _tile_stored(0, dots[group & 1], TILE_ROW);
        }
        if (group > 0)
            scale(dots[(group - 1) & 1], scales + (group - 1) * 16, row_scales + group - 1, job->groups, rows, sums);
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
        _mm512_storeu_ps(out + r * WIDTH, sums[r]);
}

TARGET_AMX static void sum_all(const struct job *job, int64_t row, const char *weights, const float *scales,
                               struct early *early, float *out) {
    sum(job, row, TILE_ROWS, weights, scales, early, out);
}

TARGET_AMX static void sum_some(const struct job *job, int64_t row, int rows, const char *weights, const float *scales,
                                struct early *early, float *out) {
    sum(job, row, rows, weights, scales, early, out);
}

TARGET_AMX static void run_part(const struct job *job, int64_t first_row, int64_t rows, int64_t panel, const char *next) {
    float sums[TILE_ROWS * WIDTH], bias[WIDTH] = {0};
    const struct linear *linear = job->linear;
    const int64_t first = panel * WIDTH, width = linear->outputs - first < WIDTH ? linear->outputs - first : WIDTH;
    const char *weights = linear->packed + panel * job->steps * STEP;
    uint16_t *out = job->out + first_row * linear->outputs + first;
    struct early early = plan_early(job, weights, next, (rows + TILE_ROWS - 1) / TILE_ROWS, TILE_BYTES);
    if (linear->bias)
        memcpy(bias, linear->bias + first, (size_t)width * sizeof *bias);
    for (int64_t before = 0; rows > 0; rows -= TILE_ROWS, first_row += TILE_ROWS, out += TILE_ROWS * linear->outputs) {
        const int count = rows < TILE_ROWS ? (int)rows : TILE_ROWS;
        if (count != before)
            configure_tiles(before = count);
        early.out = out;
        early.rows = (count + 2 * job->steps - 1) / (2 * job->steps);
        for (int side = 0; side < 2; side++) {
            const char *tiles = weights + side * job->steps * TILE_BYTES;
            const float *scales = linear->scales + (2 * panel + side) * job->groups * 16;
            if (count == TILE_ROWS)
                sum_all(job, first_row, tiles, scales, &early, sums + side * 16);
            else
                sum_some(job, first_row, count, tiles, scales, &early, sums + side * 16);
        }
        finish_tiles(sums, bias, count, width, out, linear->outputs);
    }
}

void baton_int8_amx(struct job *job) { baton_run_amx(job, run_part); }
#else
void baton_int8_amx(struct job *job) { (void)job; }
#endif
