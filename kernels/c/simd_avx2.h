/* Eight floats at a time. The including file defines TARGET. */
#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 8
#define ROWS_MAX 3
#define VECTORS 4

typedef __m256 vec;

INLINE vec v_zero(void) { return _mm256_setzero_ps(); }
INLINE vec v_set(float x) { return _mm256_set1_ps(x); }
INLINE vec v_broadcast(const void *p) { return _mm256_castsi256_ps(_mm256_set1_epi32(*(const int32_t *)p)); }
INLINE vec v_load(const void *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(void *p, vec x) { _mm256_storeu_ps(p, x); }
INLINE float v_lowest_lane(vec x) { return _mm256_cvtss_f32(x); }
INLINE vec v_add(vec a, vec b) { return _mm256_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm256_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm256_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm256_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm256_max_ps(a, b); } /* b where one is NaN */
INLINE vec v_min(vec a, vec b) { return _mm256_min_ps(a, b); } /* b where one is NaN */

INLINE float v_highest(vec x) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
INLINE float v_sum(vec x) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

/* `x` in the first `count` lanes, `other` behind them; any count. */
INLINE vec v_first(vec x, int64_t count, vec other) {
    int near = count > LANES ? LANES : count < 0 ? 0 : (int)count;
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(other, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(near), lane)));
}

#include "exp2.h"

/* 2^x for x <= 127; zero below -126. */
INLINE vec v_exp2(vec x) {
    vec low = v_set(-126.0f);
    vec inside = _mm256_cmp_ps(x, low, _CMP_NLT_UQ);
    x = v_max(low, x);
    vec whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(inside, v_mul(exp2_of_fraction(v_sub(x, whole)), _mm256_castsi256_ps(power)));
}

INLINE vec v_from_bf16(const void *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE vec v_from_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }

/* The bits of bfloat16 numbers in 32-bit lanes: to the nearest, ties to even; NaN stays NaN. */
INLINE __m256i bf16_bits(vec x) {
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
}
INLINE void v_to_bf16(void *p, vec x) {
    __m256i bits = bf16_bits(x);
    _mm_storeu_si128(p, _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1)));
}
INLINE vec v_round_bf16(vec x) { return _mm256_castsi256_ps(_mm256_slli_epi32(bf16_bits(x), 16)); }
INLINE void v_to_f16(void *p, vec x) {
    _mm_storeu_si128(p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

INLINE vec v_from_int8(const void *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* e4m3's bits, moved to where float16 has them, mean a value that is smaller by 2^8. */
INLINE vec v_from_fp8(const void *p) {
    __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)), 7);
    return v_mul(_mm256_cvtph_ps(_mm_andnot_si128(_mm_set1_epi16(0x4000), moved)), v_set(256.0f));
}

/* The low bytes of 32-bit lanes that hold no more. */
INLINE void store_bytes(void *p, __m256i bytes) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
INLINE void v_to_int8(void *p, vec x) { /* |x| <= 127 */
    store_bytes(p, _mm256_and_si256(_mm256_cvtps_epi32(x), _mm256_set1_epi32(0xff)));
}
/* |x| <= 448; to the nearest, ties to even. What is subnormal is added to 2^14: the float's rounding puts it in place. */
INLINE void v_to_fp8(void *p, vec x) {
    __m256i bits = _mm256_castps_si256(x), size = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(size, 20), _mm256_set1_epi32(1));
    __m256i code = _mm256_srli_epi32(_mm256_add_epi32(size, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff))), 20);
    code = _mm256_sub_epi32(code, _mm256_set1_epi32(120 << 3));
    __m256i low = _mm256_castps_si256(v_add(_mm256_castsi256_ps(size), v_set(0x1p14f)));
    low = _mm256_sub_epi32(low, _mm256_set1_epi32(0x46800000));
    code = _mm256_blendv_epi8(code, low, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), size));
    store_bytes(p, _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80))));
}

/* Rows become columns: 8 x 8 words of 32 bits. */
INLINE void v_transpose(vec rows[LANES]) {
    vec pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        quads[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        quads[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xee);
        quads[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        quads[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2f128_ps(quads[i], quads[4 + i], 0x31);
    }
}
