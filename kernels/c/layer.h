/* What the variants of the small operations of a layer share. */
#ifndef BATON_LAYER_H
#define BATON_LAYER_H
#include "numbers.h"

/* `hidden` becomes hidden + part unless there is no part; its norm times `weight` goes to `out`. */
struct norm {
    char *hidden;       /* [rows, size] */
    const char *part;   /* [rows, size], or NULL */
    const char *weight; /* [size] */
    char *out;          /* [rows, size] */
    int64_t size, dtype;
    float eps;
};

/* Queries are rotated in place; rotated keys, and values, become rows of the pools. */
struct rotation {
    char *heads;           /* [tokens, query_heads + 2 * kv_heads, head_dim] */
    const char *cos, *sin; /* [tokens, head_dim / 2] in the dtype of the heads */
    const int64_t *slots;  /* [tokens]: block * block_size + offset */
    char *keys, *values;   /* [blocks, kv_heads, block_size, head_dim] */
    int64_t query_heads, kv_heads, head_dim, block_size, dtype, pool_dtype;
};

/* silu(gate) * up */
struct gate {
    const char *gate_up; /* [rows, 2 * size] */
    char *out;           /* [rows, size] */
    int64_t size, dtype;
};

/* Each works on rows [first, last). Numbers are float32, or bfloat16 with every product and every sum rounded, as torch
   does from one operation to the next. */
typedef void row_work(const void *arguments, int64_t first, int64_t last);

struct layer_ops {
    row_work *norm, *rotate, *gate;
};
extern const struct layer_ops baton_layer_scalar, baton_layer_avx2, baton_layer_avx512;

#endif
