/* Causal attention of some rows (a query token under a query head) over one sequence's pages, tile by tile.

   Every row's arithmetic is the same whatever comes with it: tiles of TILE keys from position 0, in each the products of a
   key one after the other, the weights relative to the highest score so far, then the values one after the other. Keys
   are lanes in the first half, dimensions are lanes in the second. Where the pool has codes, these are multiplied as they
   are, exactly; a key's scale is a factor of its scores, a value's of its weights.

   A unit is what one lane multiplies at a time: a float, or with PAIRS two bfloat16 numbers (and the weights are rounded
   to bfloat16). The including file has the vectors of simd_*.h, says whether PAIRS, and names the function in ATTEND. */
#include "attention_load.h"

struct sizes {
    int64_t units;   /* of a row of keys, padded to whole vectors */
    int64_t padded;  /* numbers of a row of values, padded to whole vectors */
    int64_t share;   /* query heads of a KV head */
    int64_t rows;    /* of one KV head */
};

struct buffers {
    unit *query;     /* [heads * rows, units] */
    float *sums;     /* [heads * rows, padded]: weighted values */
    float *totals;   /* [heads * rows, LANES]: of the weights */
    float *highest;  /* [heads * rows]: scores */
    unit *keys;      /* [units, TILE] */
    unit *values;    /* [TILE or TILE / 2, padded] */
    float *scores;   /* [ROWS_MAX, TILE] */
    float *scales;   /* [2, TILE]: of keys and values; used where the pool has codes */
    unit *weights;   /* [ROWS_MAX, TILE or TILE / 2] */
};

#if PAIRS
#define MULTIPLY_ADD(a, b, sum) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))

INLINE void store_weights(unit *weights, const float *scores) {
    for (int64_t key = 0; key < TILE; key += 2 * LANES) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(v_load(scores + key + LANES), v_load(scores + key));
        v_store(weights + key / 2, (vec)pairs);
    }
}
#else
#define MULTIPLY_ADD(a, b, sum) v_fma(a, b, sum)

INLINE void store_weights(unit *weights, const float *scores) { memcpy(weights, scores, 4 * TILE); }
#endif

/* Scores of `rows` rows: a key's products one after the other. */
INLINE void score(const unit *query, const unit *keys, int64_t units, float *scores, struct ahead *next, const int rows) {
    for (int64_t key = 0; key < TILE; key += VECTORS * LANES) {
        vec sum[ROWS_MAX][VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                sum[r][v] = v_zero();
        for (int64_t u = 0; u < units; u++) {
            vec column[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                column[v] = v_load(keys + u * TILE + key + v * LANES);
            for (int r = 0; r < rows; r++) {
                vec number = v_broadcast(query + r * units + u);
                for (int v = 0; v < VECTORS; v++)
                    sum[r][v] = MULTIPLY_ADD(number, column[v], sum[r][v]);
            }
            ask(next);
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                v_store(scores + r * TILE + key + v * LANES, sum[r][v]);
    }
}

/* Turn a row's scores of its first `seen` keys into weights; returns what earlier sums shrink by. `scales`: or NULL. */
INLINE float weigh(float *scores, int64_t seen, float scale, const float *scales, float *highest, float *totals,
                   unit *weights) {
    vec top = v_set(-INFINITY), sum = v_zero();
    for (int64_t key = 0; key < TILE; key += LANES) {
        vec s = v_mul(v_load(scores + key), v_set(scale));
        if (scales)
            s = v_mul(s, v_load(scales + key));
        if (seen < key + LANES)
            s = v_first(s, seen - key, v_set(-INFINITY));
        v_store(scores + key, s);
        top = v_max(top, s);
    }
    float now = v_highest(top), before = *highest;
    if (now < before)
        now = before;
    for (int64_t key = 0; key < TILE; key += LANES) {
        vec weight = v_exp2(v_sub(v_load(scores + key), v_set(now)));
        v_store(scores + key, scales ? v_mul(weight, v_load(scales + TILE + key)) : weight);
        sum = v_add(sum, weight);
    }
    store_weights(weights, scores);
    vec shrink = now == before ? v_set(1.0f) : v_exp2(v_set(before - now));
    v_store(totals, v_fma(v_load(totals), shrink, sum));
    *highest = now;
    return v_lowest_lane(shrink);
}

/* Add weighted values to `count` vectors of `rows` rows. */
INLINE void add_columns(float *sums, int64_t padded, const unit *values, const unit *weights, const float *shrink,
                        struct ahead *next, const int rows, const int count) {
    vec sum[ROWS_MAX][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < count; v++)
            sum[r][v] = v_mul(v_load(sums + r * padded + v * LANES), v_set(shrink[r]));
    for (int64_t key = 0; key < WEIGHTS; key++) {
        vec value[VECTORS];
        for (int v = 0; v < count; v++)
            value[v] = v_load(values + key * padded + v * LANES);
        for (int r = 0; r < rows; r++) {
            vec weight = v_broadcast(weights + r * WEIGHTS + key);
            for (int v = 0; v < count; v++)
                sum[r][v] = MULTIPLY_ADD(weight, value[v], sum[r][v]);
        }
        ask(next);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < count; v++)
            v_store(sums + r * padded + v * LANES, sum[r][v]);
}

/* One tile for `rows` rows of a head, the first being row `row` of the item's; row i sees seen[i] keys of the tile. */
INLINE void tile_rows(const struct attention *a, const struct sizes *n, const struct buffers *b, int64_t row,
                      const int64_t *seen, struct ahead *next, const int rows) {
    float shrink[ROWS_MAX];
    const float *scales = is_coded(a->pool_dtype) ? b->scales : NULL;
    score(b->query + row * n->units, b->keys, n->units, b->scores, next, rows);
    for (int r = 0; r < rows; r++)
        shrink[r] = weigh(b->scores + r * TILE, seen[r], a->scale, scales, b->highest + row + r,
                          b->totals + (row + r) * LANES, b->weights + r * WEIGHTS);
    float *sums = b->sums + row * n->padded;
    int64_t at = 0;
    for (; at + VECTORS * LANES <= n->padded; at += VECTORS * LANES)
        add_columns(sums + at, n->padded, b->values + at, b->weights, shrink, next, rows, VECTORS);
    for (; at < n->padded; at += LANES)
        add_columns(sums + at, n->padded, b->values + at, b->weights, shrink, next, rows, 1);
}

/* One tile for all rows of a head that see any of it, where the head's rows begin at row `first` of the item's,
   and the first of them stands at `position` relative to the tile. */
static TARGET void tile_head(const struct attention *a, const struct sizes *n, const struct buffers *b, int64_t first,
                             int64_t position, struct ahead *next) {
    int64_t row = position < 0 ? -position * n->share : 0;
    while (row < n->rows) {
        int64_t seen[ROWS_MAX], rows = n->rows - row < ROWS_MAX ? n->rows - row : ROWS_MAX;
        for (int64_t r = 0; r < rows; r++)
            seen[r] = position + (row + r) / n->share + 1;
        switch (rows) {
        case 1: tile_rows(a, n, b, first + row, seen, next, 1); break;
        case 2: tile_rows(a, n, b, first + row, seen, next, 2); break;
        case 3: tile_rows(a, n, b, first + row, seen, next, 3); break;
#if ROWS_MAX == 6
        case 4: tile_rows(a, n, b, first + row, seen, next, 4); break;
        case 5: tile_rows(a, n, b, first + row, seen, next, 5); break;
        case 6: tile_rows(a, n, b, first + row, seen, next, 6); break;
#endif
        }
        row += rows;
    }
    while (next->offset != next->end)
        ask(next);
}

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
        }
    }
    give_results(a, item, &n, &b);
}
