/* The inner loop of a 4-bit layer, once for each instruction set. Included with these defined:

   TILE, TARGET              the function is TILE_rows; its target attribute
   VECTOR, FLOATS, LANES     integer and float vectors, and outputs of one
   ROWS                      most rows; at most 2 * ROWS sums of a group are in registers
   LOAD(p), SPREAD(p), SPLAT_INT(i), SPLAT(f)  codes, one step of x, one number in every lane
   LOW(v), HIGH(v), DOT(sums, weights, x)      lower and upper halves of the bytes; products
   HALVES(p), TO_FLOATS(v), FMA(a, b, c), TIMES(a, b), ZERO(), READ(p), WRITE(p, v) */

TARGET INLINE void PASTE(TILE, _group)(const struct job *job, int64_t row, const int rows, int64_t group, int lane,
                                       const int span, const char *codes, const int has_minima, float *out) {
    VECTOR dots[ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < span; v++)
            dots[r][v] = SPLAT_INT(has_minima ? 0 : -ZERO_CODE * job->row_sums[(row + r) * job->groups + group]);
    const char *x = job->x + row * job->row_bytes + group * GROUP;
    for (int step = 0; step < 4; step++, x += STEP_BYTES) {
        VECTOR low[4], high[4];
#pragma GCC unroll 4
        for (int v = 0; v < span; v++) {
            const char *both = codes + (step * PANEL + lane + v * LANES) * STEP_BYTES;
            __builtin_prefetch(both + AHEAD);
            low[v] = LOW(LOAD(both));
            high[v] = HIGH(LOAD(both));
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < span; v++) {
                dots[r][v] = DOT(dots[r][v], low[v], SPREAD(x + r * job->row_bytes));
                dots[r][v] = DOT(dots[r][v], high[v], SPREAD(x + r * job->row_bytes + GROUP / 2));
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const int64_t place = (row + r) * job->groups + group;
        const FLOATS scale = SPLAT(job->row_scales[place]);
        const FLOATS sum = SPLAT(job->row_scales[place] * (float)job->row_sums[place]);
#pragma GCC unroll 4
        for (int v = 0; v < span; v++) {
            const char *numbers = codes + CODE_BYTES + 2 * (lane + v * LANES);
            float *total = out + r * PANEL + lane + v * LANES;
            FLOATS value = FMA(TO_FLOATS(dots[r][v]), TIMES(HALVES(numbers), scale), group ? READ(total) : ZERO());
            WRITE(total, has_minima ? FMA(HALVES(numbers + SCALE_BYTES), sum, value) : value);
        }
    }
}

TARGET INLINE void PASTE(TILE, _rows)(const struct job *job, int64_t row, const int rows, int64_t step, int64_t steps,
                                      const char *panel, struct ahead ahead, float *out) {
    (void)step, (void)ahead; /* all groups are taken at once; each asks for what comes soon */
    const int span = rows > 2 ? 2 : 4; /* enough sums at a time to hide how long one takes */
    for (int64_t group = 0; group < steps; group++, panel += job->step_bytes)
        for (int lane = 0; lane < PANEL; lane += span * LANES) {
            if (job->linear->has_minima)
                PASTE(TILE, _group)(job, row, rows, group, lane, span, panel, 1, out);
            else
                PASTE(TILE, _group)(job, row, rows, group, lane, span, panel, 0, out);
        }
}

#undef TILE
#undef TARGET
#undef VECTOR
#undef FLOATS
#undef LANES
#undef ROWS
#undef LOAD
#undef SPREAD
#undef SPLAT_INT
#undef SPLAT
#undef LOW
#undef HIGH
#undef DOT
#undef HALVES
#undef TO_FLOATS
#undef FMA
#undef TIMES
#undef ZERO
#undef READ
#undef WRITE
