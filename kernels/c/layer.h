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

/* Queries are rotated in place (keys too, where the pool has codes); rotated keys, and values, become rows of the pools. */
struct rotation {
    char *heads;           /* [tokens, query_heads + 2 * kv_heads, head_dim] */
    const char *cos, *sin; /* [tokens, head_dim / 2] in the dtype of the heads */
    const int64_t *slots;  /* [tokens]: block * block_size + offset */
    char *keys, *values;   /* [blocks, kv_heads, block_size, head_dim]; a scale behind each row of codes */
    int64_t query_heads, kv_heads, head_dim, block_size, dtype, pool_dtype;
};

/* The heads of each token under a norm of their own, in place. */
struct head_norm {
    char *heads; /* as in `rotation` */
    const char *query_norm, *key_norm; /* [head_dim] */
    int64_t query_heads, kv_heads, head_dim, dtype;
    float eps;
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
    row_work *norm, *norm_heads, *rotate, *gate;
};
extern const struct layer_ops baton_layer_scalar, baton_layer_avx2, baton_layer_avx512;

/* Over all rows, on up to `threads` threads. `level`: at most 0 scalar, 1 AVX2, 2 AVX-512. Pointers are as in the structures
   above; without `part` nothing is added. */
void baton_norm(char *hidden, const char *part, const char *weight, char *out, int64_t rows, int64_t size, int64_t dtype,
                float eps, int threads, int level);
void baton_norm_heads(char *heads, const char *query_norm, const char *key_norm, int64_t tokens, int64_t query_heads,
                      int64_t kv_heads, int64_t head_dim, int64_t dtype, float eps, int threads, int level);
void baton_rotate(char *heads, const char *cos, const char *sin, const int64_t *slots, char *keys, char *values,
                  int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size, int64_t dtype,
                  int64_t pool_dtype, int threads, int level);
void baton_gate(const char *gate_up, char *out, int64_t rows, int64_t size, int64_t dtype, int threads, int level);

#endif
