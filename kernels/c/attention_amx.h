/* The products of a tile of attention_tile.h on matrix tiles (AMX): up to 16 rows at a time, keys or values of 64 bytes of
   each of 16 rows. A row of a matrix tile does not depend on the others, so that few rows may come this way, too. */
enum { UNITS = 16 }; /* of a tile's row */

/* Tiles 0 to 3 are sums, 4 and 5 have `rows` rows of queries or weights, 6 and 7 keys or values. */
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
        _tile_loadd(7, keys + 16, 4 * TILE);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, keys + 32, 4 * TILE);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, keys + 48, 4 * TILE);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, scores, 4 * TILE);
    _tile_stored(1, scores + 16, 4 * TILE);
    _tile_stored(2, scores + 32, 4 * TILE);
    _tile_stored(3, scores + 48, 4 * TILE);
}

/* Tiles 4 and 5 have the weights. */
INLINE void add_two(float *sums, int64_t padded, const unit *values) {
    const unit *later = values + UNITS * padded;
    const int64_t stride = 4 * padded;
    _tile_loadd(0, sums, stride);
    _tile_loadd(6, values, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(1, sums + 16, stride);
    _tile_loadd(7, values + 16, stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, later, stride);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, later + 16, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
}

INLINE void add_one(float *sums, int64_t padded, const unit *values) {
    const int64_t stride = 4 * padded;
    _tile_loadd(0, sums, stride);
    _tile_loadd(6, values, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(6, values + UNITS * padded, stride);
    _tile_dpbf16ps(0, 5, 6);
    _tile_stored(0, sums, stride);
}

INLINE void shrink_row(float *sums, int64_t padded, float factor) {
    for (int64_t at = 0; at < padded; at += LANES)
        v_store(sums + at, v_mul(v_load(sums + at), v_set(factor)));
}

INLINE void attend_rows(const struct attention *a, const struct sizes *n, const struct buffers *b, int64_t row,
                        const int64_t *seen, struct ahead *next, int64_t rows) {
    const float *scales = is_coded(a->pool_dtype) ? b->scales : NULL;
    float *sums = b->sums + row * n->padded;
    int64_t at = 0;
    configure(rows);
    score(b->query + row * n->units, b->keys, n->units, b->scores);
    for (int r = 0; r < rows; r++) {
        float factor = weigh(b->scores + r * TILE, seen[r], a->scale, scales, b->highest + row + r,
                             b->totals + (row + r) * LANES, b->weights + r * WEIGHTS);
        if (factor != 1.0f)
            shrink_row(sums + r * n->padded, n->padded, factor);
        ask(next);
    }
    _tile_loadd(4, b->weights, 4 * WEIGHTS);
    _tile_loadd(5, b->weights + UNITS, 4 * WEIGHTS);
    for (; at + 32 <= n->padded; at += 32)
        add_two(sums + at, n->padded, b->values + at);
    if (at < n->padded)
        add_one(sums + at, n->padded, b->values + at);
}

INLINE void leave_products(void) { _tile_release(); }
