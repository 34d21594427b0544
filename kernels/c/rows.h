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
    return dtype == FLOAT32 ? v_load(p) : dtype == BFLOAT16 ? v_from_bf16(p) : v_from_f16(p);
}

INLINE void give(char *p, vec x, int64_t count, const int64_t dtype) {
    char whole[4 * LANES], *to = count < LANES ? whole : p;
    if (dtype == FLOAT32)
        v_store(to, x);
    else if (dtype == BFLOAT16)
        v_to_bf16(to, x);
    else
        v_to_f16(to, x);
    if (count < LANES)
        memcpy(p, whole, (size_t)(count * width(dtype)));
}
