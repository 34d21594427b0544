/* Types of numbers in memory, as kernels/native.py counts them. */
#ifndef BATON_NUMBERS_H
#define BATON_NUMBERS_H
#include <stdint.h>

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, FP8 };

#define ALWAYS static inline __attribute__((always_inline))

/* Whether it stands for code times scale, with a float scale behind each row. */
ALWAYS int is_coded(int64_t dtype) { return dtype >= INT8; }

/* Bytes of one. */
ALWAYS int64_t width(int64_t dtype) { return dtype == FLOAT32 ? 4 : is_coded(dtype) ? 1 : 2; }

/* Bytes of a row of a pool. */
ALWAYS int64_t row_bytes(int64_t dim, int64_t dtype) { return dim * width(dtype) + (is_coded(dtype) ? 4 : 0); }

#endif
