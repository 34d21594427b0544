/* Norm, rotation and gate, row by row, over the vectors of simd_*.h; the including file names the table in OPS. */
#include "layer.h"
#include "rows.h"
#include <math.h>
#include <string.h>

/* As if it had been stored between two operations. */
INLINE vec rounded(vec x, const int64_t dtype) { return dtype == FLOAT32 ? x : v_round_bf16(x); }

INLINE void norm_row(const struct norm *n, int64_t row, const int64_t dtype) {
    int64_t bytes = width(dtype), start = row * n->size * bytes;
    char *hidden = n->hidden + start;
    vec sum = v_zero();
    for (int64_t at = 0; at < n->size; at += LANES) {
        vec x = take(hidden + at * bytes, n->size - at, dtype);
        if (n->part) {
            x = rounded(v_add(x, take(n->part + start + at * bytes, n->size - at, dtype)), dtype);
            give(hidden + at * bytes, x, n->size - at, dtype);
        }
        sum = v_add(sum, v_mul(x, x));
    }
    vec scale = v_set(1.0f / sqrtf(v_sum(sum) / (float)n->size + n->eps));
    for (int64_t at = 0; at < n->size; at += LANES) {
        vec x = rounded(v_mul(take(hidden + at * bytes, n->size - at, dtype), scale), dtype);
        give(n->out + start + at * bytes, v_mul(x, take(n->weight + at * bytes, n->size - at, dtype)), n->size - at, dtype);
    }
}

static TARGET void norm(const void *arguments, int64_t first, int64_t last) {
    const struct norm *n = arguments;
    for (int64_t row = first; row < last; row++)
        if (n->dtype == FLOAT32)
            norm_row(n, row, FLOAT32);
        else
            norm_row(n, row, BFLOAT16);
}

static TARGET void norm_heads(const void *arguments, int64_t first, int64_t last) {
    const struct head_norm *n = arguments;
    int64_t row = n->head_dim * width(n->dtype);
    for (int64_t token = first; token < last; token++) {
        char *queries = n->heads + token * (n->query_heads + 2 * n->kv_heads) * row, *keys = queries + n->query_heads * row;
        struct norm query = {queries, NULL, n->query_norm, queries, n->head_dim, n->dtype, n->eps};
        struct norm key = {keys, NULL, n->key_norm, keys, n->head_dim, n->dtype, n->eps};
        norm(&query, 0, n->query_heads);
        norm(&key, 0, n->kv_heads);
    }
}

/* Both halves of one head turn: the first half of `to` is left * cos - right * sin. */
INLINE void rotate_head(const char *from, const char *cos, const char *sin, int64_t half, char *to, const int64_t dtype,
                        const int64_t to_dtype) {
    int64_t bytes = width(dtype), to_bytes = width(to_dtype);
    for (int64_t at = 0; at < half; at += LANES) {
        vec left = take(from + at * bytes, half - at, dtype), right = take(from + (half + at) * bytes, half - at, dtype);
        vec c = take(cos + at * bytes, half - at, dtype), s = take(sin + at * bytes, half - at, dtype);
        vec low = v_sub(rounded(v_mul(left, c), dtype), rounded(v_mul(right, s), dtype));
        vec high = v_add(rounded(v_mul(right, c), dtype), rounded(v_mul(left, s), dtype));
        give(to + at * to_bytes, rounded(low, dtype), half - at, to_dtype);
        give(to + (half + at) * to_bytes, rounded(high, dtype), half - at, to_dtype);
    }
}

INLINE void store_row(const char *from, int64_t dim, char *to, const int64_t dtype, const int64_t to_dtype) {
    if (dtype == to_dtype)
        memcpy(to, from, (size_t)(dim * width(dtype)));
    else
        for (int64_t at = 0; at < dim; at += LANES)
            give(to + at * width(to_dtype), take(from + at * width(dtype), dim - at, dtype), dim - at, to_dtype);
}

/* Codes and then their scale, the bits of kernels/kv_quantize.py: scale = largest magnitude / LARGEST, code = value / scale.
   A row with a value that is not finite gets no number as its scale, so that all of it stays without one. */
INLINE void code_row(const char *from, int64_t dim, char *to, const int64_t dtype, const int64_t kind) {
    const double largest = kind == INT8 ? 127 : 448;
    const float least = 0x1p-126f, most = nextafterf((float)(0x1.fffffep127 / largest), 0); /* products stay finite */
    vec top = v_zero(), finite = v_zero();
    for (int64_t at = 0; at < dim; at += LANES) {
        vec x = take(from + at * width(dtype), dim - at, dtype);
        top = v_max(top, v_max(x, v_sub(v_zero(), x)));
        finite = v_add(finite, v_mul(x, v_zero()));
    }
    float scale = v_highest(top) / (float)largest;
    scale = scale < least ? least : scale > most ? most : scale;
    if (v_sum(finite) != 0) {
        scale = NAN;
        memset(to, 0, (size_t)dim);
    } else
        for (int64_t at = 0; at < dim; at += LANES) {
            vec x = v_div(take(from + at * width(dtype), dim - at, dtype), v_set(scale));
            give(to + at, v_min(v_max(x, v_set((float)-largest)), v_set((float)largest)), dim - at, kind);
        }
    memcpy(to + dim, &scale, sizeof scale);
}

INLINE void rotate_tokens(const struct rotation *r, int64_t first, int64_t last, const int64_t dtype, const int64_t pool) {
    int64_t half = r->head_dim / 2, row = r->head_dim * width(dtype), pool_row = row_bytes(r->head_dim, pool);
    for (int64_t token = first; token < last; token++) {
        char *heads = r->heads + token * (r->query_heads + 2 * r->kv_heads) * row;
        const char *cos = r->cos + token * half * width(dtype), *sin = r->sin + token * half * width(dtype);
        int64_t block = r->slots[token] / r->block_size, offset = r->slots[token] % r->block_size;
        for (int64_t head = 0; head < r->query_heads; head++)
            rotate_head(heads + head * row, cos, sin, half, heads + head * row, dtype, dtype);
        char *keys = heads + r->query_heads * row, *values = keys + r->kv_heads * row;
        for (int64_t head = 0; head < r->kv_heads; head++) {
            int64_t to = ((block * r->kv_heads + head) * r->block_size + offset) * pool_row;
            if (is_coded(pool)) {
                rotate_head(keys + head * row, cos, sin, half, keys + head * row, dtype, dtype);
                code_row(keys + head * row, r->head_dim, r->keys + to, dtype, pool);
                code_row(values + head * row, r->head_dim, r->values + to, dtype, pool);
            } else {
                rotate_head(keys + head * row, cos, sin, half, r->keys + to, dtype, pool);
                store_row(values + head * row, r->head_dim, r->values + to, dtype, pool);
            }
        }
    }
}

static TARGET void rotate(const void *arguments, int64_t first, int64_t last) {
    const struct rotation *r = arguments;
    switch (5 * r->dtype + r->pool_dtype) {
    case 5 * FLOAT32 + FLOAT32: rotate_tokens(r, first, last, FLOAT32, FLOAT32); break;
    case 5 * FLOAT32 + BFLOAT16: rotate_tokens(r, first, last, FLOAT32, BFLOAT16); break;
    case 5 * FLOAT32 + FLOAT16: rotate_tokens(r, first, last, FLOAT32, FLOAT16); break;
    case 5 * FLOAT32 + INT8: rotate_tokens(r, first, last, FLOAT32, INT8); break;
    case 5 * FLOAT32 + FP8: rotate_tokens(r, first, last, FLOAT32, FP8); break;
    case 5 * BFLOAT16 + FLOAT32: rotate_tokens(r, first, last, BFLOAT16, FLOAT32); break;
    case 5 * BFLOAT16 + BFLOAT16: rotate_tokens(r, first, last, BFLOAT16, BFLOAT16); break;
    case 5 * BFLOAT16 + FLOAT16: rotate_tokens(r, first, last, BFLOAT16, FLOAT16); break;
    case 5 * BFLOAT16 + INT8: rotate_tokens(r, first, last, BFLOAT16, INT8); break;
    case 5 * BFLOAT16 + FP8: rotate_tokens(r, first, last, BFLOAT16, FP8); break;
    }
}

INLINE void gate_row(const struct gate *g, int64_t row, const int64_t dtype) {
    int64_t bytes = width(dtype);
    const char *gate = g->gate_up + 2 * row * g->size * bytes, *up = gate + g->size * bytes;
    char *out = g->out + row * g->size * bytes;
    for (int64_t at = 0; at < g->size; at += LANES) {
        int64_t count = g->size - at;
        vec x = take(gate + at * bytes, count, dtype);
        vec power = v_exp2(v_min(v_set(127.0f), v_mul(x, v_set(-1.44269504f))));
        vec silu = rounded(v_div(x, v_add(v_set(1.0f), power)), dtype);
        give(out + at * bytes, v_mul(silu, take(up + at * bytes, count, dtype)), count, dtype);
    }
}

static TARGET void gate(const void *arguments, int64_t first, int64_t last) {
    const struct gate *g = arguments;
    for (int64_t row = first; row < last; row++)
        if (g->dtype == FLOAT32)
            gate_row(g, row, FLOAT32);
        else
            gate_row(g, row, BFLOAT16);
}

const struct layer_ops OPS = {norm, norm_heads, rotate, gate};
