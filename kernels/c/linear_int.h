/* Integer dot products of four bytes for each output (weights unsigned, x signed), one for each instruction set. */
#ifndef BATON_LINEAR_INT_H
#define BATON_LINEAR_INT_H

#include "linear.h"

/* x as integers: codes [rows, padded inputs], and for each group of inputs the scale and the sum of the codes. */
struct codes {
    int8_t *values;
    float *scales;
    int32_t *sums;
    int64_t row_bytes, group, groups; /* group: inputs, padded too */
};

int baton_quantize(const struct linear *linear, const uint16_t *x, int64_t rows, int64_t group, struct codes *codes);
void baton_free_codes(struct codes *codes);
int baton_int_level(void);
void baton_int8_amx(struct job *job);

#if defined(__x86_64__)
#include <immintrin.h>

#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define TARGET_AVX_VNNI __attribute__((target("avx2,fma,f16c,avxvnni")))
#define TARGET_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c")))

/* Without VNNI: even and odd bytes as 16-bit numbers, whose products and sums are exact. */
TARGET_AVX2 INLINE __m256i dot_avx2(__m256i sums, __m256i w, __m256i x) {
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}

INLINE int32_t step_of(const void *x) {
    int32_t step;
    memcpy(&step, x, sizeof step);
    return step;
}
#endif
#endif
