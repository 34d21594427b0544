/* Parts of a row of numbers in memory, as vectors of simd_*.h and back. */
#include "numbers.h"
#include <string.h>

/* `count` numbers, at most LANES of them, and zeros. */
INLINE vec take(const char *p, int64_t count, const int64_t dtype) {
    char whole[4 * LANES];
    if (count < LANES) {
        memset(whole, 0, sizeof whole);
        memcpy(whole, p, (size_t)(count * width(dtype)));
        p = whole;
    }
    switch (dtype) {
    case FLOAT32: return v_load(p);
    case BFLOAT16: return v_from_bf16(p);
    case FLOAT16: return v_from_f16(p);
    case INT8: return v_from_int8(p);
    default: return v_from_fp8(p);
    }
}

INLINE void give(char *p, vec x, int64_t count, const int64_t dtype) {
    char whole[4 * LANES], *to = count < LANES ? whole : p;
    switch (dtype) {
    case FLOAT32: v_store(to, x); break;
    case BFLOAT16: v_to_bf16(to, x); break;
    case FLOAT16: v_to_f16(to, x); break;
    case INT8: v_to_int8(to, x); break;
    default: v_to_fp8(to, x); break;
    }
    if (count < LANES)
        memcpy(p, whole, (size_t)(count * width(dtype)));
}
