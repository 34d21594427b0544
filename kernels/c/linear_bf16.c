/* Rows of bfloat16 times a packed bfloat16 weight, summed in float32; called from kernels/linear.py without the GIL. */
#include "linear.h"

enum { BLOCK_STEPS = 512, SMALL_STEPS = 32 }; /* blocks that stay in the second- and in the first-level cache */

INLINE void finish(const struct job *job, const float *sums, int64_t first_row, int64_t rows, int64_t panel) {
    const struct linear *linear = job->linear;
    int64_t first = panel * PANEL, width = linear->outputs - first < PANEL ? linear->outputs - first : PANEL;
    float bias[PANEL] = {0};
    if (linear->bias)
        memcpy(bias, linear->bias + first, (size_t)width * sizeof *bias);
    for (int64_t row = 0; row < rows; row++) {
        uint16_t done[PANEL], *out = job->out + (first_row + row) * linear->outputs + first;
        for (int i = 0; i < PANEL; i++)
            done[i] = to_bf16(sums[row * PANEL + i] + bias[i]);
        memcpy(out, done, (size_t)width * sizeof *out);
    }
}

static void finish_plain(const struct job *job, const float *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}

static void tile_plain(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                       struct ahead ahead, float *out) {
    (void)ahead;
    const char *x = job->x + row * job->row_bytes + step * STEP_BYTES;
    for (int r = 0; r < rows; r++, x += job->row_bytes) {
        float *sums = out + r * PANEL;
        if (step == 0)
            memset(sums, 0, PANEL * sizeof *sums);
        const uint16_t *values = (const uint16_t *)x, *weights = (const uint16_t *)panel;
        for (int64_t i = 0; i < steps; i++, values += 2, weights += 2 * PANEL) {
            float low = from_bf16(values[0]), high = from_bf16(values[1]);
            for (int n = 0; n < PANEL; n++)
                sums[n] += low * from_bf16(weights[2 * n]) + high * from_bf16(weights[2 * n + 1]);
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_AVX2 __attribute__((target("avx2,fma")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma")))
#define TARGET_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma")))

/* The two products of a step: the lower halves of the lanes, then the upper ones. */
TARGET_AVX2 INLINE __m256 dot_avx2(__m256 sums, __m256i w, __m256i x) {
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    sums = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
                           _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), sums);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w, high)),
                           _mm256_castsi256_ps(_mm256_and_si256(x, high)), sums);
}

TARGET_AVX512 INLINE __m512 dot_avx512(__m512 sums, __m512i w, __m512i x) {
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    sums = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(w, 16)),
                           _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), sums);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(w, high)),
                           _mm512_castsi512_ps(_mm512_and_si512(x, high)), sums);
}

INLINE int32_t step_of(const char *x) {
    int32_t step;
    memcpy(&step, x, sizeof step);
    return step;
}

#define TILE tile_avx2
#define TARGET TARGET_AVX2
#define VECTOR __m256
#define ELEMENT float
#define LANES 8
#define SPAN 2
#define ROWS 4
#define START(p) (step > 0 ? _mm256_loadu_ps(p) : _mm256_setzero_ps())
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define DOT dot_avx2
#define WRITE(p, sums) _mm256_storeu_ps(p, sums)
#include "linear_tile.h"
TILE_FUNCTION(TARGET_AVX2, tile_avx2, FOUR_ROWS)

#define TILE tile_avx512
#define TARGET TARGET_AVX512
#define VECTOR __m512
#define ELEMENT float
#define LANES 16
#define SPAN 2
#define ROWS 6
#define START(p) (step > 0 ? _mm512_loadu_ps(p) : _mm512_setzero_ps())
#define LOAD(p) _mm512_loadu_si512(p)
#define SPREAD(p) _mm512_set1_epi32(step_of(p))
#define DOT dot_avx512
#define WRITE(p, sums) _mm512_storeu_ps(p, sums)
#include "linear_tile.h"
TILE_FUNCTION(TARGET_AVX512, tile_avx512, SIX_ROWS)

#define TILE tile_dot
#define TARGET TARGET_DOT
#define VECTOR __m512
#define ELEMENT float
#define LANES 16
#define SPAN 4
#define ROWS 6
#define START(p) (step > 0 ? _mm512_loadu_ps(p) : _mm512_setzero_ps())
#define LOAD(p) ((__m512bh)_mm512_loadu_si512(p))
#define SPREAD(p) ((__m512bh)_mm512_set1_epi32(step_of(p)))
#define DOT _mm512_dpbf16_ps
#define WRITE(p, sums) _mm512_storeu_ps(p, sums)
#include "linear_tile.h"
TILE_FUNCTION(TARGET_DOT, tile_dot, SIX_ROWS)

TARGET_AVX2 static void finish_avx2(const struct job *job, const float *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}

TARGET_AVX512 static void finish_avx512(const struct job *job, const float *sums, int64_t first_row, int64_t rows, int64_t panel) {
    finish(job, sums, first_row, rows, panel);
}
#endif

finish_function *baton_finish_floats(int wide) {
#if defined(__x86_64__)
    if (wide)
        return finish_avx512;
    if (__builtin_cpu_supports("avx2"))
        return finish_avx2;
#endif
    (void)wide;
    return finish_plain;
}

/* The best level that this processor has. */
EXPORT int baton_bf16_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return baton_has_amx() ? LEVEL_AMX : __builtin_cpu_supports("avx512bf16") ? LEVEL_DOT : LEVEL_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return LEVEL_AVX2;
#endif
    return LEVEL_PLAIN;
}

/* x [rows, inputs] -> out [rows, outputs], both bfloat16; the inputs are even in number. Returns -1 where
   memory is lacking. */
EXPORT int baton_bf16_linear(const struct linear *linear, const char *x, int64_t rows, uint16_t *out) {
    if (linear->level >= LEVEL_AMX)
        return baton_bf16_amx(linear, x, rows, out);
    struct job job = {.linear = linear, .tile = tile_plain, .x = x, .rows = rows, .tile_rows = 4,
                      .row_bytes = 2 * linear->inputs, .steps = linear->inputs / 2, .step_bytes = PANEL * STEP_BYTES,
                      .block_steps = BLOCK_STEPS, .small_steps = SMALL_STEPS, .out = out, .finish = baton_finish_floats(linear->level >= LEVEL_AVX512)};
#if defined(__x86_64__)
    static tile_function *const tiles[] = {tile_plain, tile_avx2, tile_avx512, tile_dot};
    job.tile = tiles[linear->level];
    job.tile_rows = linear->level >= LEVEL_AVX512 ? 6 : 4;
#endif
    baton_run_linear(&job);
    return 0;
}
