/* The products of a tile of attention_tile.h on matrix tiles (AMX): up to 16 rows at a time, in steps of 64 bytes of a row. A
   row of a matrix tile does not depend on the others, so that few rows come this way, too. */
enum { UNITS = 16, KEYS = 16 }; /* of a matrix tile's row; keys side by side in one */

/* Tiles 0 to 3 are sums of `rows` rows, 4 and 5 have as many of queries or weights, 6 and 7 keys or values. */
INLINE void configure(int64_t rows) {
    const uint8_t some = (uint8_t)rows;
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1, .rows = {some, some, some, some, some, some, UNITS, UNITS}};
    for (int tile = 0; tile < 8; tile++)
        tiles.row_bytes[tile] = 4 * UNITS;
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* of the instruction GCC believes that it reads eight bytes only */
    _tile_loadconfig(&tiles);
}

INLINE void score(const unit *query, const unit *keys, int64_t units, float *scores) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t u = 0; u < units; u += UNITS, keys += UNITS * TILE) {
        _tile_loadd(4, query + u, 4 * units);
        _tile_loadd(6, keys, 4 * TILE);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, keys + KEYS, 4 * TILE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys + 2 * KEYS, 4 * TILE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 3 * KEYS, 4 * TILE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, 4 * TILE);
    _tile_stored(1, scores + KEYS, 4 * TILE);
    _tile_stored(2, scores + 2 * KEYS, 4 * TILE);
    _tile_stored(3, scores + 3 * KEYS, 4 * TILE);
}

/* Add weighted values to `count` matrix tiles of sums; tiles 4 and 5 have the weights. */
INLINE void add_tiles(float *sums, int64_t padded, const unit *values, const int count) {
    const int64_t stride = 4 * padded;
    const unit *later = values + UNITS * padded;
    _tile_loadd(0, sums, stride);
    _tile_loadd(6, values, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (count > 1) {
        _tile_loadd(1, sums + LANES, stride);
        _tile_loadd(7, values + LANES, stride);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_loadd(6, later, stride);
    _tile_dpbf16ps(0, 5, 6);
    if (count > 1) {
        _tile_loadd(7, later + LANES, stride);
        _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, sums, stride);
    if (count > 1)
        _tile_stored(1, sums + LANES, stride);
}

INLINE void shrink_row(float *sums, int64_t padded, float factor) {
    for (int64_t at = 0; at < padded; at += LANES)
        v_store(sums + at, v_mul(v_load(sums + at), v_set(factor)));
}

/* One tile for `rows` rows of a head, the first being row `row` of the item's and row `at` of the head's, whose first row
   stands at `position` relative to the tile. */
INLINE void tile_rows(const struct attention *a, const struct sizes *n, const struct buffers *b, int64_t row, int64_t at,
                      int64_t rows, int64_t position, struct ahead *next) {
    const float *scales = is_coded(a->pool_dtype) ? b->scales : NULL;
    float *sums = b->sums + row * n->padded;
    score(b->query + row * n->units, b->keys, n->units, b->scores);
    for (int64_t r = 0; r < rows; r++) {
        const int64_t seen = position + (at + r) / n->share + 1;
        float factor = weigh(b->scores + r * TILE, seen, a->scale, scales, b->highest + row + r,
                             b->totals + (row + r) * LANES, b->weights + r * WEIGHTS);
        if (factor != 1.0f)
            shrink_row(sums + r * n->padded, n->padded, factor);
        ask(next);
    }
    _tile_loadd(4, b->weights, 4 * WEIGHTS);
    _tile_loadd(5, b->weights + UNITS, 4 * WEIGHTS);
    int64_t column = 0;
    for (; column + 2 * LANES <= n->padded; column += 2 * LANES)
        add_tiles(sums + column, n->padded, b->values + column, 2);
    if (column < n->padded)
        add_tiles(sums + column, n->padded, b->values + column, 1);
}

INLINE int64_t usual_rows(const struct sizes *n) { return n->rows < ROWS_MAX ? n->rows : ROWS_MAX; }

/* One tile for all rows of a head that see any of it, where the head's rows begin at row `first` of the item's,
   and the first of them stands at `position` relative to the tile. */
static TARGET void tile_head(const struct attention *a, const struct sizes *n, const struct buffers *b, int64_t first,
                             int64_t position, struct ahead *next) {
    const int64_t usual = usual_rows(n);
    for (int64_t row = position < 0 ? -position * n->share : 0; row < n->rows; row += usual) {
        const int64_t rows = n->rows - row < usual ? n->rows - row : usual;
        if (rows != usual)
            configure(rows);
        tile_rows(a, n, b, first + row, row, rows, position, next);
        if (rows != usual)
            configure(usual);
    }
}

INLINE void enter(const struct sizes *n) { configure(usual_rows(n)); }
INLINE void leave(void) { _tile_release(); }
