/* Rows quantised to int8 times a packed int8 weight with one scale for each output, summed exactly in int32. */
#include "linear_int.h"

#define JOIN(a, b) a##b
#define PASTE(a, b) JOIN(a, b)

enum { BLOCK_STEPS = 512, AHEAD = 4096 }; /* a block stays in the second-level cache; bytes that are asked for early */

/* Codes of a weight are stored with 128 added, which the sum of a row's own codes takes out again. */
INLINE void finish(const struct job *job, const int32_t *sums, int64_t first_row, int64_t rows, int64_t panel) {
    const struct linear *linear = job->linear;
    int64_t first = panel * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    float scales[PANEL] = {0}, bias[PANEL] = {0};
    memcpy(scales, linear->scales + first, (size_t)width * sizeof *scales);
    if (linear->bias)
        memcpy(bias, linear->bias + first, (size_t)width * sizeof *bias);
    for (int64_t row = 0; row < rows; row++) {
        uint16_t done[PANEL], *out = job->out + (first_row + row) * linear->outputs + first;
        float scale = job->row_scales[first_row + row];
        int32_t excess = 128 * job->row_sums[first_row + row];
        for (int i = 0; i < PANEL; i++)
            done[i] = to_bf16((float)(sums[row * PANEL + i] - excess) * scales[i] * scale + bias[i]);
        memcpy(out, done, (size_t)width * sizeof *out);
    }
}

static void finish_plain(const struct job *job, const void *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}

static void tile_plain(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                       void *out) {
    const char *x = job->x + row * job->row_bytes + step * STEP_BYTES;
    for (int r = 0; r < rows; r++, x += job->row_bytes) {
        int32_t *sums = (int32_t *)out + r * PANEL;
        if (step == 0)
            memset(sums, 0, PANEL * sizeof *sums);
        const int8_t *values = (const int8_t *)x;
        const uint8_t *weights = (const uint8_t *)panel;
        for (int64_t i = 0; i < steps; i++, values += 4, weights += 4 * PANEL)
            for (int n = 0; n < PANEL; n++)
                for (int part = 0; part < 4; part++)
                    sums[n] += values[part] * weights[4 * n + part];
    }
}

#if defined(__x86_64__)
#define TILE tile_avx2
#define TARGET TARGET_AVX2
#define VECTOR __m256i
#define ELEMENT int32_t
#define LANES 8
#define SPAN 2
#define ROWS 4
#define ZERO() _mm256_setzero_si256()
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define DOT dot_avx2
#define READ(p) _mm256_loadu_si256((const __m256i *)(p))
#define WRITE(p, sums) _mm256_storeu_si256((__m256i *)(p), sums)
#include "linear_tile.h"

#define TILE tile_avx_vnni
#define TARGET TARGET_AVX_VNNI
#define VECTOR __m256i
#define ELEMENT int32_t
#define LANES 8
#define SPAN 2
#define ROWS 4
#define ZERO() _mm256_setzero_si256()
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define DOT _mm256_dpbusd_avx_epi32
#define READ(p) _mm256_loadu_si256((const __m256i *)(p))
#define WRITE(p, sums) _mm256_storeu_si256((__m256i *)(p), sums)
#include "linear_tile.h"

#define TILE tile_dot
#define TARGET TARGET_DOT
#define VECTOR __m512i
#define ELEMENT int32_t
#define LANES 16
#define SPAN 4
#define ROWS 6
#define ZERO() _mm512_setzero_si512()
#define LOAD(p) _mm512_loadu_si512(p)
#define SPREAD(p) _mm512_set1_epi32(step_of(p))
#define DOT _mm512_dpbusd_epi32
#define READ(p) _mm512_loadu_si512(p)
#define WRITE(p, sums) _mm512_storeu_si512(p, sums)
#include "linear_tile.h"

TARGET_AVX2 static void finish_avx2(const struct job *job, const void *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}

TARGET_DOT static void finish_dot(const struct job *job, const void *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}
#endif

/* x [rows, inputs] -> out [rows, outputs], both bfloat16. Returns -1 where memory for the codes of x is lacking. */
EXPORT int baton_int8_linear(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out) {
    struct codes codes;
    if (baton_quantize(linear, x, rows, linear->inputs, &codes))
        return -1;
    struct job job = {.linear = linear, .tile = tile_plain, .finish = finish_plain, .rows = rows, .tile_rows = 4,
                      .x = (const char *)codes.values, .row_bytes = codes.row_bytes, .row_scales = codes.scales,
                      .row_sums = codes.sums, .groups = 1, .steps = codes.row_bytes / STEP_BYTES,
                      .step_bytes = PANEL * STEP_BYTES, .block_steps = BLOCK_STEPS, .out = out};
#if defined(__x86_64__)
    static tile_function *const tiles[] = {tile_plain, tile_avx2, tile_avx_vnni, tile_dot};
    job.tile = tiles[linear->level];
    if (linear->level >= LEVEL_AVX2)
        job.finish = linear->level >= LEVEL_DOT ? finish_dot : finish_avx2;
    job.tile_rows = linear->level >= LEVEL_DOT ? 6 : 4;
#endif
    baton_run_linear(&job);
    baton_free_codes(&codes);
    return 0;
}
