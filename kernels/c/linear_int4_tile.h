/* The inner loop of a 4-bit layer, once for each instruction set. Included with these defined:

   TILE, TARGET              name of the function and its target attribute
   VECTOR, FLOATS, LANES     integer and float vectors, and outputs of one
   SPAN, ROWS                vectors side by side and most rows, whose float sums stay in registers
   LOAD(p), SPREAD(p), SPLAT_INT(i), SPLAT(f)  codes, one step of x, one number in every lane
   LOW(v), HIGH(v), DOT(sums, weights, x)      lower and upper halves of the bytes; products
   HALVES(p), TO_FLOATS(v), FMA(a, b, c), TIMES(a, b), ZERO(), WRITE(p, v) */

TARGET INLINE void PASTE(TILE, _rows)(const struct job *x, int64_t row, const int rows, const char *panel, int64_t groups,
                                      const int has_minima, float *out) {
    const int64_t group_bytes = CODE_BYTES + SCALE_BYTES * (1 + has_minima);
    for (int first = 0; first < PANEL; first += LANES * SPAN) {
        FLOATS sums[ROWS][SPAN];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                sums[r][v] = ZERO();
        const char *codes = panel;
        for (int64_t group = 0; group < groups; group++, codes += group_bytes) {
            if (LANES * SPAN == PANEL)
#pragma GCC unroll 24
                for (int line = 0; line < CODE_BYTES + SCALE_BYTES * (1 + has_minima); line += 64)
                    __builtin_prefetch(codes + AHEAD + line);
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++) {
                const int lane = first + v * LANES;
                VECTOR dots[ROWS];
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
                    dots[r] = SPLAT_INT(has_minima ? 0 : -ZERO_CODE * x->row_sums[(row + r) * x->groups + group]);
#pragma GCC unroll 4
                for (int step = 0; step < 4; step++) {
                    const VECTOR both = LOAD(codes + step * PANEL * STEP_BYTES + lane * STEP_BYTES);
                    const VECTOR low = LOW(both), high = HIGH(both);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        const char *values = x->x + (row + r) * x->row_bytes + group * GROUP + step * STEP_BYTES;
                        dots[r] = DOT(dots[r], low, SPREAD(values));
                        dots[r] = DOT(dots[r], high, SPREAD(values + GROUP / 2));
                    }
                }
                const FLOATS scales = HALVES(codes + CODE_BYTES + 2 * lane);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    const float scale = x->row_scales[(row + r) * x->groups + group];
                    sums[r][v] = FMA(TO_FLOATS(dots[r]), TIMES(scales, SPLAT(scale)), sums[r][v]);
                    if (has_minima) {
                        const float sum = scale * (float)x->row_sums[(row + r) * x->groups + group];
                        sums[r][v] = FMA(HALVES(codes + CODE_BYTES + SCALE_BYTES + 2 * lane), SPLAT(sum), sums[r][v]);
                    }
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                WRITE(out + r * PANEL + first + v * LANES, sums[r][v]);
    }
}

#define CASE(count)                                                                                                    \
    case count:                                                                                                        \
        if (job->linear->has_minima)                                                                                   \
            PASTE(TILE, _rows)(job, row, count, panel, steps, 1, sums);                                                \
        else                                                                                                           \
            PASTE(TILE, _rows)(job, row, count, panel, steps, 0, sums);                                                \
        break

TARGET static void TILE(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                        void *sums) {
    (void)step; /* all groups are taken at once */
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
    }
}

#undef CASE
#undef TILE
#undef TARGET
#undef VECTOR
#undef FLOATS
#undef LANES
#undef SPAN
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
#undef WRITE
