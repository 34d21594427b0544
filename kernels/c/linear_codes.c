/* Rows of bfloat16 as int8 codes with a scale for each group of inputs: symmetric, the largest magnitude becomes 127. */
#include "linear_int.h"
#include "parallel.h"

#include <stdlib.h>

struct work {
    const struct linear *linear;
    const uint16_t *x;
    const struct codes *codes;
    int64_t rows, slice, next;
};

enum { SLICE = 16 }; /* rows that one thread takes at a time, at most */

static const float SMALLEST = 1e-30f; /* of a group's largest magnitude: below, its codes are zeros */
static const float ROUNDER = 12582912.0f; /* 1.5 * 2^23: a small float plus this is rounded to a whole number, ties to even */

/* Without floating comparisons: magnitudes of bfloat16 are ordered like their bits, and a NaN is above all. */
INLINE void quantize_group(const uint16_t *x, int64_t count, int8_t *values, float *scale, int32_t *sum) {
    uint16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = x[i] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    float most = from_bf16(largest);
    float factor = most < SMALLEST ? 0.0f : 127.0f / most;
    int32_t rounder, total = 0;
    memcpy(&rounder, &ROUNDER, sizeof rounder);
    for (int64_t i = 0; i < count; i++) {
        float rounded = from_bf16(x[i]) * factor + ROUNDER;
        int32_t bits;
        memcpy(&bits, &rounded, sizeof bits);
        values[i] = (int8_t)(bits - rounder);
        total += (int8_t)(bits - rounder);
    }
    *scale = most < SMALLEST ? 0.0f : most / 127.0f;
    *sum = total;
}

INLINE void quantize_rows(const struct work *work, int64_t first, int64_t last) {
    const struct codes *codes = work->codes;
    int64_t inputs = work->linear->inputs;
    for (int64_t row = first; row < last; row++) {
        int8_t *values = codes->values + row * codes->row_bytes;
        memset(values + inputs, 0, (size_t)(codes->row_bytes - inputs));
        for (int64_t group = 0; group < codes->groups; group++) {
            int64_t at = group * codes->group, count = inputs - at < codes->group ? inputs - at : codes->group;
            quantize_group(work->x + row * inputs + at, count, values + at, codes->scales + row * codes->groups + group,
                           codes->sums + row * codes->groups + group);
        }
    }
}

static void rows_plain(const struct work *work, int64_t first, int64_t last) { quantize_rows(work, first, last); }

#if defined(__x86_64__)
TARGET_AVX2 static void rows_avx2(const struct work *work, int64_t first, int64_t last) {
    quantize_rows(work, first, last);
}

TARGET_DOT static void rows_dot(const struct work *work, int64_t first, int64_t last) { quantize_rows(work, first, last); }
#endif

static void take_rows(void *data) {
    struct work *work = data;
    for (;;) {
        int64_t first = __atomic_fetch_add(&work->next, work->slice, __ATOMIC_RELAXED);
        int64_t last = first + work->slice < work->rows ? first + work->slice : work->rows;
        if (first >= work->rows)
            return;
#if defined(__x86_64__)
        if (work->linear->level >= LEVEL_AVX2) {
            (work->linear->level >= LEVEL_DOT ? rows_dot : rows_avx2)(work, first, last);
            continue;
        }
#endif
        rows_plain(work, first, last);
    }
}

/* Codes of x [rows, inputs]. Returns -1 where memory is lacking; else `baton_free_codes` gives it back. */
int baton_quantize(const struct linear *linear, const uint16_t *x, int64_t rows, int64_t group, struct codes *codes) {
    const int64_t whole = linear->level >= LEVEL_AMX ? group : STEP_BYTES; /* inputs that are read at a time */
    codes->row_bytes = (linear->inputs + whole - 1) / whole * whole;
    codes->group = group;
    codes->groups = (linear->inputs + group - 1) / group;
    size_t numbers = (size_t)(rows * codes->groups);
    codes->scales = malloc(numbers * (sizeof *codes->scales + sizeof *codes->sums) + (size_t)(rows * codes->row_bytes));
    if (!codes->scales)
        return -1;
    codes->sums = (int32_t *)(codes->scales + numbers);
    codes->values = (int8_t *)(codes->sums + numbers);
    struct work work = {linear, x, codes, rows, baton_slice(rows, linear->threads, SLICE), 0};
    baton_parallel(take_rows, &work, linear->threads, rows / work.slice);
    return 0;
}

void baton_free_codes(struct codes *codes) { free(codes->scales); }

/* The best level that this processor has for integer products, without matrix tiles. */
EXPORT int baton_int_level(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        return LEVEL_DOT;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return __builtin_cpu_supports("avxvnni") ? LEVEL_AVX_VNNI : LEVEL_AVX2;
#endif
    return LEVEL_PLAIN;
}
