/* Types of numbers in memory, as kernels/native.py counts them. */
#ifndef BATON_NUMBERS_H
#define BATON_NUMBERS_H
#include <stdint.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* Bytes of one. */
static inline __attribute__((always_inline)) int64_t width(int64_t dtype) { return dtype == FLOAT32 ? 4 : 2; }

#endif
