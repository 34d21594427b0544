/* Sixteen floats at a time. The including file defines TARGET. */
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
#define ROWS_MAX 6
#define VECTORS 4

typedef __m512 vec;

INLINE vec v_zero(void) { return _mm512_setzero_ps(); }
INLINE vec v_set(float x) { return _mm512_set1_ps(x); }
INLINE vec v_broadcast(const void *p) { return _mm512_castsi512_ps(_mm512_set1_epi32(*(const int32_t *)p)); }
INLINE vec v_load(const void *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(void *p, vec x) { _mm512_storeu_ps(p, x); }
INLINE float v_lowest_lane(vec x) { return _mm512_cvtss_f32(x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); } /* b where one is NaN */
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); } /* b where one is NaN */
INLINE float v_highest(vec x) { return _mm512_reduce_max_ps(x); }
INLINE float v_sum(vec x) { return _mm512_reduce_add_ps(x); }

/* `x` in the first `count` lanes, `other` behind them; any count. */
INLINE vec v_first(vec x, int64_t count, vec other) {
    __mmask16 mask = count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
    return _mm512_mask_blend_ps(mask, other, x);
}

#include "exp2.h"

/* 2^x for x <= 127; zero from -200 down. */
INLINE vec v_exp2(vec x) {
    x = v_max(v_set(-200.0f), x);
    vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_of_fraction(v_sub(x, whole)), whole);
}

INLINE vec v_from_bf16(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE vec v_from_f16(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }

/* The bits of bfloat16 numbers in 32-bit lanes: to the nearest, ties to even; NaN stays NaN. */
INLINE __m512i bf16_bits(vec x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
}
INLINE void v_to_bf16(void *p, vec x) { _mm256_storeu_si256(p, _mm512_cvtepi32_epi16(bf16_bits(x))); }
INLINE vec v_round_bf16(vec x) { return _mm512_castsi512_ps(_mm512_slli_epi32(bf16_bits(x), 16)); }
INLINE void v_to_f16(void *p, vec x) {
    _mm256_storeu_si256(p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vec v_from_int8(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
/* e4m3's bits, moved to where float16 has them, mean a value that is smaller by 2^8. */
INLINE vec v_from_fp8(const void *p) {
    __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), 7);
    return v_mul(_mm512_cvtph_ps(_mm256_andnot_si256(_mm256_set1_epi16(0x4000), moved)), v_set(256.0f));
}
INLINE void v_to_int8(void *p, vec x) { _mm_storeu_si128(p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x))); } /* |x| <= 127 */
/* |x| <= 448; to the nearest, ties to even. What is subnormal is added to 2^14: the float's rounding puts it in place. */
INLINE void v_to_fp8(void *p, vec x) {
    __m512i bits = _mm512_castps_si512(x), size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(size, 20), _mm512_set1_epi32(1));
    __m512i code = _mm512_srli_epi32(_mm512_add_epi32(size, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff))), 20);
    code = _mm512_sub_epi32(code, _mm512_set1_epi32(120 << 3));
    __m512i low = _mm512_castps_si512(v_add(_mm512_castsi512_ps(size), v_set(0x1p14f)));
    __mmask16 subnormal = _mm512_cmplt_epi32_mask(size, _mm512_set1_epi32(0x3c800000));
    code = _mm512_mask_sub_epi32(code, subnormal, low, _mm512_set1_epi32(0x46800000));
    code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80)));
    _mm_storeu_si128(p, _mm512_cvtepi32_epi8(code));
}

/* Rows become columns: 16 x 16 words of 32 bits. */
INLINE void v_transpose(vec rows[LANES]) {
    __m512d pairs[16];
    vec quads[16];
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_castps_pd(_mm512_unpacklo_ps(rows[i], rows[i + 1]));
        pairs[i + 1] = _mm512_castps_pd(_mm512_unpackhi_ps(rows[i], rows[i + 1]));
    }
    for (int i = 0; i < 16; i += 4) {
        quads[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i], pairs[i + 2]));
        quads[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i], pairs[i + 2]));
        quads[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(pairs[i + 1], pairs[i + 3]));
        quads[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(pairs[i + 1], pairs[i + 3]));
    }
    for (int i = 0; i < 4; i++) {
        vec low = _mm512_shuffle_f32x4(quads[i], quads[4 + i], 0x88);
        vec high = _mm512_shuffle_f32x4(quads[8 + i], quads[12 + i], 0x88);
        rows[i] = _mm512_shuffle_f32x4(low, high, 0x88);
        rows[8 + i] = _mm512_shuffle_f32x4(low, high, 0xdd);
        low = _mm512_shuffle_f32x4(quads[i], quads[4 + i], 0xdd);
        high = _mm512_shuffle_f32x4(quads[8 + i], quads[12 + i], 0xdd);
        rows[4 + i] = _mm512_shuffle_f32x4(low, high, 0x88);
        rows[12 + i] = _mm512_shuffle_f32x4(low, high, 0xdd);
    }
}
