/* The inner loop of a 4-bit layer, once for each instruction set. Included with these defined:

   TILE, TARGET              the function is TILE_rows; its target attribute
   VECTOR, FLOATS, LANES     integer and float vectors, and outputs of one
   ROWS                      most rows, whose sums of a group stay in registers
   LOAD(p), SPREAD(p), SPLAT_INT(i), SPLAT(f)  codes, one step of x, one number in every lane
   LOW(v), HIGH(v), DOT(sums, weights, x)      lower and upper halves of the bytes; products
   HALVES(p), TO_FLOATS(v), FMA(a, b, c), TIMES(a, b), ZERO(), READ(p), WRITE(p, v) */

TARGET INLINE void PASTE(TILE, _group)(const struct job *job, int64_t row, const int rows, int64_t group, int lane,
                                       const char *codes, const int has_minima, float *out) {
    VECTOR dots[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
        dots[r] = SPLAT_INT(has_minima ? 0 : -ZERO_CODE * job->row_sums[(row + r) * job->groups + group]);
#pragma GCC unroll 4
    for (int step = 0; step < 4; step++) {
        const VECTOR both = LOAD(codes + step * PANEL * STEP_BYTES + lane * STEP_BYTES);
        __builtin_prefetch(codes + AHEAD + step * PANEL * STEP_BYTES + lane * STEP_BYTES);
        const VECTOR low = LOW(both), high = HIGH(both);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const char *values = job->x + (row + r) * job->row_bytes + group * GROUP + step * STEP_BYTES;
            dots[r] = DOT(dots[r], low, SPREAD(values));
            dots[r] = DOT(dots[r], high, SPREAD(values + GROUP / 2));
        }
    }
    const FLOATS scales = HALVES(codes + CODE_BYTES + 2 * lane);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
        const float scale = job->row_scales[(row + r) * job->groups + group];
        float *total = out + r * PANEL + lane;
        FLOATS sum = FMA(TO_FLOATS(dots[r]), TIMES(scales, SPLAT(scale)), group ? READ(total) : ZERO());
        if (has_minima) {
            const float least = scale * (float)job->row_sums[(row + r) * job->groups + group];
            sum = FMA(HALVES(codes + CODE_BYTES + SCALE_BYTES + 2 * lane), SPLAT(least), sum);
        }
        WRITE(total, sum);
    }
}

TARGET INLINE void PASTE(TILE, _rows)(const struct job *job, int64_t row, const int rows, int64_t step, int64_t steps,
                                      const char *panel, float *out) {
    (void)step; /* all groups are taken at once */
    for (int64_t group = 0; group < steps; group++, panel += job->step_bytes)
        for (int lane = 0; lane < PANEL; lane += LANES) {
            if (job->linear->has_minima)
                PASTE(TILE, _group)(job, row, rows, group, lane, panel, 1, out);
            else
                PASTE(TILE, _group)(job, row, rows, group, lane, panel, 0, out);
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
