/* Causal attention of some rows (a query token under a query head) over one sequence's pages, tile by tile.

   Every row's arithmetic is the same whatever comes with it: tiles of TILE keys from position 0, in each the products of a
   key one after the other, the weights relative to the highest score so far, then the values one after the other. Keys
   are lanes in the first half, dimensions are lanes in the second. Where the pool has codes, these are multiplied as they
   are, exactly; a key's scale is a factor of its scores, a value's of its weights.

   A unit is what one lane multiplies at a time: a float, or with PAIRS two bfloat16 numbers (and the weights are rounded
   to bfloat16). The including file has the vectors of simd_*.h, says whether PAIRS, names the function in ATTEND, and
   defines MATRIX_TILES where products run on these. */
#include "attention_weights.h"
#ifdef MATRIX_TILES
#include "attention_amx.h"
#else
#include "attention_products.h"
#endif

INLINE char *cut(char **scratch, int64_t bytes) {
    char *start = *scratch;
    *scratch += (bytes + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
    return start;
}

INLINE struct buffers carve(char *scratch, const struct sizes *n, int64_t heads) {
    int64_t rows = heads * n->rows;
    return (struct buffers){
        .keys = (unit *)cut(&scratch, 4 * n->units * TILE),
        .values = (unit *)cut(&scratch, 4 * n->padded * WEIGHTS),
        .scores = (float *)cut(&scratch, 4 * ROWS_MAX * TILE),
        .scales = (float *)cut(&scratch, 4 * 2 * TILE),
        .weights = (unit *)cut(&scratch, 4 * ROWS_MAX * WEIGHTS),
        .highest = (float *)cut(&scratch, 4 * rows),
        .totals = (float *)cut(&scratch, 4 * rows * LANES),
        .sums = (float *)cut(&scratch, 4 * rows * n->padded),
        .query = (unit *)cut(&scratch, 4 * rows * n->units),
    };
}

/* Rows of a KV head: its query heads under the first token, then under the second. */
INLINE void take_queries(const struct attention *a, const struct item *item, const struct sizes *n,
                         const struct buffers *b) {
    int64_t size = width(a->query_dtype), row = 0;
    for (int64_t head = 0; head < item->heads; head++)
        for (int64_t token = 0; token < item->tokens; token++)
            for (int64_t i = 0; i < n->share; i++, row++) {
                int64_t from = (item->first_token + token) * a->query_stride +
                               ((item->first_head + head) * n->share + i) * a->head_dim;
                const char *start = a->query + from * size;
                load_row(b->query + row * n->units, start, n->units, a->head_dim, a->query_dtype);
                b->highest[row] = -INFINITY;
                memset(b->totals + row * LANES, 0, 4 * LANES);
                memset(b->sums + row * n->padded, 0, (size_t)(4 * n->padded));
            }
}

INLINE void give_results(const struct attention *a, const struct item *item, const struct sizes *n,
                         const struct buffers *b) {
    int64_t size = width(a->query_dtype), row = 0;
    for (int64_t head = 0; head < item->heads; head++)
        for (int64_t token = 0; token < item->tokens; token++)
            for (int64_t i = 0; i < n->share; i++, row++) {
                int64_t to = ((item->first_token + token) * a->query_heads +
                              (item->first_head + head) * n->share + i) * a->head_dim;
                vec part = v_set(1.0f / v_sum(v_load(b->totals + row * LANES)));
                for (int64_t at = 0; at < a->head_dim; at += LANES)
                    give(a->out + (to + at) * size, v_mul(v_load(b->sums + row * n->padded + at), part), a->head_dim - at,
                         a->query_dtype);
            }
}

INLINE void load_rows(const struct attention *a, const struct places *here, struct ahead *next, const char *keys,
                      const char *values, const struct sizes *n, const struct buffers *b, const int64_t dtype) {
    load_keys(a, here, next, keys, n->units, b->keys, dtype);
    load_values(a, here, next, values, n->padded, b->values, dtype);
}

INLINE void load_tile(const struct attention *a, const struct places *here, struct ahead *next, int64_t head,
                      const struct sizes *n, const struct buffers *b) {
    const char *keys = a->keys + head, *values = a->values + head;
    if (is_coded(a->pool_dtype)) {
        load_scales(a, here, keys, b->scales);
        load_scales(a, here, values, b->scales + TILE);
    }
    switch (a->pool_dtype) {
#if !PAIRS
    case FLOAT32: load_rows(a, here, next, keys, values, n, b, FLOAT32); break;
    case FLOAT16: load_rows(a, here, next, keys, values, n, b, FLOAT16); break;
#endif
    case BFLOAT16: load_rows(a, here, next, keys, values, n, b, BFLOAT16); break;
    case INT8: load_rows(a, here, next, keys, values, n, b, INT8); break;
    case FP8: load_rows(a, here, next, keys, values, n, b, FP8); break;
    }
}

TARGET void ATTEND(const struct attention *a, const struct item *item, const struct item *next, char *scratch) {
    int64_t share = a->query_heads / a->kv_heads, s = item->sequence;
    struct sizes n = {whole(PAIRS ? (a->head_dim + 1) / 2 : a->head_dim), whole(a->head_dim), share, item->tokens * share};
    struct buffers b = carve(scratch, &n, item->heads);
    struct places places[2];
    int64_t position = a->context_lens[s] - a->cu_seqlens[s + 1] + item->first_token; /* of the first token */
    int64_t end = position + item->tokens; /* of what is seen */
    int64_t row = row_bytes(a->head_dim, a->pool_dtype), page = a->block_size * row;
    take_queries(a, item, &n, &b);
    enter(&n);
    find_places(a, s, 0, &places[0]);
    for (int64_t first = 0, turn = 0; first < end; first += TILE, turn ^= 1) {
        if (first + TILE < end)
            find_places(a, s, first + TILE, &places[turn ^ 1]);
        else
            find_places(a, next->sequence, 0, &places[turn ^ 1]);
        for (int64_t head = 0; head < item->heads; head++) {
            int64_t start = (item->first_head + head) * page;
            const int64_t *following = places[turn ^ 1].offset;
            struct ahead ahead = {a->keys + start, a->values + start, following, following + TILE, 0, row};
            load_tile(a, &places[turn], &ahead, start, &n, &b);
            tile_head(a, &n, &b, head * n.rows, position - first, &ahead);
            while (ahead.offset != ahead.end)
                ask(&ahead);
        }
    }
    leave();
    give_results(a, item, &n, &b);
}
