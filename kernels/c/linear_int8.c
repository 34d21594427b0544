/* Rows quantised to int8 in groups of 64 inputs times a packed int8 weight in the same groups; the products of a group
   are summed exactly, the groups in order in float32. Codes of a weight are stored with 128 added: the instructions want one
   factor unsigned. Its scales are [panels, groups, 64]. */
#include "linear_int.h"

enum { GROUP = 64, GROUP_STEPS = GROUP / STEP_BYTES, EXCESS = 128 };

static int steps_of(const struct job *job, int64_t group) {
    int64_t left = job->steps - group * GROUP_STEPS;
    return (int)(left < GROUP_STEPS ? left : GROUP_STEPS);
}

static const float *scales_of(const struct job *job, const char *panel) {
    int64_t index = (panel - job->linear->packed) / (job->steps * job->step_bytes);
    return job->linear->scales + index * job->groups * PANEL;
}

static void tile_plain(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                       struct ahead ahead, float *out) {
    (void)ahead;
    (void)step, (void)steps; /* all of them are taken at once */
    const float *scales = scales_of(job, panel);
    memset(out, 0, (size_t)rows * PANEL * sizeof(float));
    for (int64_t group = 0; group < job->groups; group++, scales += PANEL)
        for (int r = 0; r < rows; r++) {
            const int8_t *x = (const int8_t *)job->x + (row + r) * job->row_bytes + group * GROUP;
            const uint8_t *codes = (const uint8_t *)panel + group * GROUP * PANEL;
            const int64_t place = (row + r) * job->groups + group;
            int32_t sums[PANEL];
            for (int i = 0; i < PANEL; i++)
                sums[i] = -EXCESS * job->row_sums[place];
            for (int k = steps_of(job, group); k > 0; k--, x += STEP_BYTES, codes += STEP_BYTES * PANEL)
                for (int i = 0; i < PANEL; i++)
                    for (int part = 0; part < STEP_BYTES; part++)
                        sums[i] += x[part] * codes[STEP_BYTES * i + part];
            for (int i = 0; i < PANEL; i++)
                out[r * PANEL + i] += (float)sums[i] * (scales[i] * job->row_scales[place]);
        }
}

#if defined(__x86_64__)
#define TILE tile_avx2
#define TARGET TARGET_AVX2
#define VECTOR __m256i
#define LANES 8
#define SPAN 2
#define ROWS 4
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define DOT dot_avx2
#define FLOATS __m256
#define SPLAT_INT _mm256_set1_epi32
#define SPLAT _mm256_set1_ps
#define TO_FLOATS _mm256_cvtepi32_ps
#define FMA _mm256_fmadd_ps
#define TIMES _mm256_mul_ps
#define ZERO _mm256_setzero_ps
#define READ _mm256_loadu_ps
#define WRITE _mm256_storeu_ps
#include "linear_int8_tile.h"
TILE_FUNCTION(TARGET_AVX2, tile_avx2, FOUR_ROWS)

#define TILE tile_avx_vnni
#define TARGET TARGET_AVX_VNNI
#define VECTOR __m256i
#define LANES 8
#define SPAN 2
#define ROWS 4
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define DOT _mm256_dpbusd_avx_epi32
#define FLOATS __m256
#define SPLAT_INT _mm256_set1_epi32
#define SPLAT _mm256_set1_ps
#define TO_FLOATS _mm256_cvtepi32_ps
#define FMA _mm256_fmadd_ps
#define TIMES _mm256_mul_ps
#define ZERO _mm256_setzero_ps
#define READ _mm256_loadu_ps
#define WRITE _mm256_storeu_ps
#include "linear_int8_tile.h"
TILE_FUNCTION(TARGET_AVX_VNNI, tile_avx_vnni, FOUR_ROWS)

#define TILE tile_dot
#define TARGET TARGET_DOT
#define VECTOR __m512i
#define LANES 16
#define SPAN 4
#define ROWS 6
#define LOAD(p) _mm512_loadu_si512(p)
#define SPREAD(p) _mm512_set1_epi32(step_of(p))
#define DOT _mm512_dpbusd_epi32
#define FLOATS __m512
#define SPLAT_INT _mm512_set1_epi32
#define SPLAT _mm512_set1_ps
#define TO_FLOATS _mm512_cvtepi32_ps
#define FMA _mm512_fmadd_ps
#define TIMES _mm512_mul_ps
#define ZERO _mm512_setzero_ps
#define READ _mm512_loadu_ps
#define WRITE _mm512_storeu_ps
#include "linear_int8_tile.h"
TILE_FUNCTION(TARGET_DOT, tile_dot, SIX_ROWS)
#endif

EXPORT int baton_int8_level(void) {
    const int level = baton_int_level();
    return level == LEVEL_DOT && baton_has_amx() ? LEVEL_AMX : level;
}

/* x [rows, inputs] -> out [rows, outputs], both bfloat16. Returns -1 where memory for the codes of x is lacking. */
EXPORT int baton_int8_linear(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out) {
    struct codes codes;
    if (baton_quantize(linear, x, rows, GROUP, &codes))
        return -1;
    struct job job = {.linear = linear, .tile = tile_plain, .finish = baton_finish_floats(linear->level >= LEVEL_DOT),
                      .rows = rows, .tile_rows = 4, .x = (const char *)codes.values, .row_bytes = codes.row_bytes,
                      .row_scales = codes.scales, .row_sums = codes.sums, .groups = codes.groups,
                      .steps = codes.row_bytes / STEP_BYTES, .step_bytes = PANEL * STEP_BYTES, .out = out};
    job.block_steps = job.small_steps = job.steps;
    if (linear->level >= LEVEL_AMX) {
        job.steps = codes.groups;
        baton_int8_amx(&job);
        baton_free_codes(&codes);
        return 0;
    }
#if defined(__x86_64__)
    static tile_function *const tiles[] = {tile_plain, tile_avx2, tile_avx_vnni, tile_dot};
    job.tile = tiles[linear->level];
    job.tile_rows = linear->level >= LEVEL_DOT ? 6 : 4;
#endif
    baton_run_linear(&job);
    baton_free_codes(&codes);
    return 0;
}
