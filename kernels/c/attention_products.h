/* The products of a tile of attention_tile.h in vectors: up to ROWS_MAX rows have their sums in registers. */
#if PAIRS
#define MULTIPLY_ADD(a, b, sum) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
#else
#define MULTIPLY_ADD(a, b, sum) v_fma(a, b, sum)
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
}

INLINE void enter(const struct sizes *n) { (void)n; }
INLINE void leave(void) {}
