/* One float at a time: any processor. The including file defines TARGET. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 1
#define ROWS_MAX 3
#define VECTORS 4

typedef float vec;

INLINE vec v_zero(void) { return 0.0f; }
INLINE vec v_set(float x) { return x; }
INLINE vec v_load(const void *p) { return *(const float *)p; }
INLINE vec v_broadcast(const void *p) { return v_load(p); }
INLINE void v_store(void *p, vec x) { *(float *)p = x; }
INLINE float v_lowest_lane(vec x) { return x; }
INLINE vec v_add(vec a, vec b) { return a + b; }
INLINE vec v_sub(vec a, vec b) { return a - b; }
INLINE vec v_mul(vec a, vec b) { return a * b; }
INLINE vec v_div(vec a, vec b) { return a / b; }
INLINE vec v_fma(vec a, vec b, vec c) { return a * b + c; }
INLINE vec v_max(vec a, vec b) { return a > b ? a : b; } /* b where one is NaN */
INLINE vec v_min(vec a, vec b) { return a < b ? a : b; } /* b where one is NaN */
INLINE float v_highest(vec x) { return x; }
INLINE float v_sum(vec x) { return x; }
INLINE vec v_first(vec x, int64_t count, vec other) { return count > 0 ? x : other; }

INLINE float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

#include "exp2.h"

/* 2^x for x <= 127; zero below -126. */
INLINE vec v_exp2(vec x) {
    if (x < -126.0f)
        return 0.0f;
    float whole = rintf(x);
    return exp2_of_fraction(x - whole) * from_bits((uint32_t)((int32_t)whole + 127) << 23);
}

INLINE vec v_from_bf16(const void *p) { return from_bits((uint32_t)*(const uint16_t *)p << 16); }
INLINE vec v_from_f16(const void *p) {
    uint32_t bits = *(const uint16_t *)p;
    /* The exponent moves from bias 15 to 127; what was subnormal, infinite or NaN is put right by a product. */
    float size = from_bits((bits & 0x7fff) << 13) * 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00)
        size = from_bits(0x7f800000 | (bits & 0x3ff) << 13);
    return from_bits(to_bits(size) | (bits & 0x8000) << 16);
}

/* To the nearest, ties to even; NaN stays NaN. */
INLINE uint32_t bf16_bits(float x) {
    uint32_t bits = to_bits(x);
    return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
INLINE void v_to_bf16(void *p, vec x) { *(uint16_t *)p = (uint16_t)bf16_bits(x); }
INLINE vec v_round_bf16(vec x) { return from_bits(bf16_bits(x) << 16); }
INLINE void v_to_f16(void *p, vec x) {
    uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    uint32_t half;
    if (size > 0x7f800000)
        half = 0x7e00;
    else if (size >= 0x477ff000)
        half = 0x7c00;
    else if (size < 0x38800000) /* subnormal: added to 0.5, the float's own rounding puts the bits in place */
        half = to_bits(from_bits(size) + 0.5f) - 0x3f000000;
    else
        half = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
    *(uint16_t *)p = (uint16_t)(sign | half);
}

/* e4m3's bits as a float's mean a value that is smaller by 2^120. */
INLINE vec v_from_fp8(const void *p) {
    uint32_t code = *(const uint8_t *)p;
    return from_bits(to_bits(from_bits((code & 0x7f) << 20) * 0x1p120f) | (code & 0x80) << 24);
}
INLINE vec v_from_int8(const void *p) { return (float)*(const int8_t *)p; }
INLINE void v_to_int8(void *p, vec x) { *(int8_t *)p = (int8_t)rintf(x); } /* |x| <= 127 */

/* |x| <= 448; to the nearest, ties to even. */
INLINE void v_to_fp8(void *p, vec x) {
    uint32_t sign = to_bits(x) >> 24 & 0x80, size = to_bits(x) & 0x7fffffff, code;
    if (size < 0x3c800000) /* subnormal: added to 2^14, the float's own rounding puts the bits in place */
        code = to_bits(from_bits(size) + 0x1p14f) - 0x46800000;
    else
        code = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    *(uint8_t *)p = (uint8_t)(sign | code);
}

INLINE void v_transpose(vec rows[LANES]) { (void)rows; }
