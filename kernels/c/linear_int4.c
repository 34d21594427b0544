/* Rows quantised to int8 in groups of 32 inputs times a 4-bit weight in the same groups, as GGUF's Q4_0 and Q4_1 have it.

   A panel holds for each group the codes of 64 outputs in four steps of four bytes (lower halves: inputs 0 to 15 of the
   group, upper halves: 16 to 31), then 64 scales and, where the weight has them, 64 minima, all float16. A weight is
   scale * (code - 8), or scale * code + minimum. A group's products are summed exactly, the groups in order in float32. */
#include "linear_int.h"

enum { GROUP = 32, CODE_BYTES = PANEL * GROUP / 2, SCALE_BYTES = 2 * PANEL, ZERO_CODE = 8, AHEAD = 4096 };

/* float16 to float32, subnormals too: exponent and fraction move, and a product sets the exponent right. */
INLINE float from_half(uint16_t bits) {
    const float magic = 5.192296858534828e33f; /* 2^112 */
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    value *= magic;
    memcpy(&wide, &value, sizeof wide);
    wide |= sign;
    memcpy(&value, &wide, sizeof value);
    return value;
}

INLINE uint16_t half_at(const char *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return bits;
}

static void tile_plain(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                       struct ahead ahead, float *out) {
    (void)ahead;
    (void)step; /* all groups are taken at once */
    const int has_minima = (int)job->linear->has_minima;
    memset(out, 0, (size_t)rows * PANEL * sizeof(float));
    for (int64_t group = 0; group < steps; group++, panel += job->step_bytes)
        for (int r = 0; r < rows; r++) {
            const int8_t *x = (const int8_t *)job->x + (row + r) * job->row_bytes + group * GROUP;
            const float scale = job->row_scales[(row + r) * job->groups + group];
            const int32_t sum = job->row_sums[(row + r) * job->groups + group];
            for (int i = 0; i < PANEL; i++) {
                float *total = out + r * PANEL + i;
                int32_t dot = has_minima ? 0 : -ZERO_CODE * sum;
                for (int k = 0; k < GROUP / 2; k++) {
                    const uint8_t both = (uint8_t)panel[k / STEP_BYTES * STEP_BYTES * PANEL + STEP_BYTES * i + k % STEP_BYTES];
                    dot += x[k] * (both & 15) + x[k + GROUP / 2] * (both >> 4);
                }
                *total += (float)dot * (from_half(half_at(panel + CODE_BYTES + 2 * i)) * scale);
                if (has_minima)
                    *total += from_half(half_at(panel + CODE_BYTES + SCALE_BYTES + 2 * i)) * (scale * (float)sum);
            }
        }
}

#if defined(__x86_64__)
#define HALVES_256(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define LOW_256(v) _mm256_and_si256(v, _mm256_set1_epi8(15))
#define HIGH_256(v) _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15))

#define TILE tile_avx2
#define TARGET TARGET_AVX2
#define VECTOR __m256i
#define FLOATS __m256
#define LANES 8
#define ROWS 4
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define SPLAT_INT _mm256_set1_epi32
#define SPLAT _mm256_set1_ps
#define LOW LOW_256
#define HIGH HIGH_256
#define DOT dot_avx2
#define HALVES HALVES_256
#define TO_FLOATS _mm256_cvtepi32_ps
#define FMA _mm256_fmadd_ps
#define TIMES _mm256_mul_ps
#define ZERO _mm256_setzero_ps
#define WRITE _mm256_storeu_ps
#define READ _mm256_loadu_ps
#include "linear_int4_tile.h"
TILE_FUNCTION(TARGET_AVX2, tile_avx2, FOUR_ROWS)

#define TILE tile_avx_vnni
#define TARGET TARGET_AVX_VNNI
#define VECTOR __m256i
#define FLOATS __m256
#define LANES 8
#define ROWS 4
#define LOAD(p) _mm256_loadu_si256((const __m256i *)(p))
#define SPREAD(p) _mm256_set1_epi32(step_of(p))
#define SPLAT_INT _mm256_set1_epi32
#define SPLAT _mm256_set1_ps
#define LOW LOW_256
#define HIGH HIGH_256
#define DOT _mm256_dpbusd_avx_epi32
#define HALVES HALVES_256
#define TO_FLOATS _mm256_cvtepi32_ps
#define FMA _mm256_fmadd_ps
#define TIMES _mm256_mul_ps
#define ZERO _mm256_setzero_ps
#define WRITE _mm256_storeu_ps
#define READ _mm256_loadu_ps
#include "linear_int4_tile.h"
TILE_FUNCTION(TARGET_AVX_VNNI, tile_avx_vnni, FOUR_ROWS)

#define TILE tile_dot
#define TARGET TARGET_DOT
#define VECTOR __m512i
#define FLOATS __m512
#define LANES 16
#define ROWS 4
#define LOAD(p) _mm512_loadu_si512(p)
#define SPREAD(p) _mm512_set1_epi32(step_of(p))
#define SPLAT_INT _mm512_set1_epi32
#define SPLAT _mm512_set1_ps
#define LOW(v) _mm512_and_si512(v, _mm512_set1_epi8(15))
#define HIGH(v) _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15))
#define DOT _mm512_dpbusd_epi32
#define HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define TO_FLOATS _mm512_cvtepi32_ps
#define FMA _mm512_fmadd_ps
#define TIMES _mm512_mul_ps
#define ZERO _mm512_setzero_ps
#define WRITE _mm512_storeu_ps
#define READ _mm512_loadu_ps
#include "linear_int4_tile.h"
TILE_FUNCTION(TARGET_DOT, tile_dot, FOUR_ROWS)
#endif

/* x [rows, inputs] -> out [rows, outputs], both bfloat16; the inputs are whole groups. Returns -1 where memory for the
   codes of x is lacking. */
EXPORT int baton_int4_linear(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out) {
    struct codes codes;
    if (baton_quantize(linear, x, rows, GROUP, &codes))
        return -1;
    struct job job = {.linear = linear, .tile = tile_plain, .finish = baton_finish_floats(linear->level >= LEVEL_DOT), .rows = rows,
                      .tile_rows = 4, .x = (const char *)codes.values, .row_bytes = codes.row_bytes,
                      .row_scales = codes.scales, .row_sums = codes.sums, .groups = codes.groups,
                      .steps = codes.groups, .step_bytes = CODE_BYTES + SCALE_BYTES * (1 + linear->has_minima),
                      .block_steps = codes.groups, .small_steps = codes.groups, .out = out};
#if defined(__x86_64__)
    static tile_function *const tiles[] = {tile_plain, tile_avx2, tile_avx_vnni, tile_dot};
    job.tile = tiles[linear->level];
#endif
    baton_run_linear(&job);
    baton_free_codes(&codes);
    return 0;
}
