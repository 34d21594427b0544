/* The groups of an int8 layer one after the other, once for each instruction set. Included with these defined:

   TILE, TARGET              the function is TILE_rows; its target attribute
   VECTOR, FLOATS, LANES     integer and float vectors, and outputs of one
   SPAN, ROWS                vectors side by side and most rows, whose sums of a group stay in registers
   LOAD(p), SPREAD(p)        codes of LANES outputs; one step of x in every lane
   DOT(sums, weights, x), TO_FLOATS(v), SPLAT_INT(i)                    integers
   FMA(a, b, c), TIMES(a, b), SPLAT(f), ZERO(), READ(p), WRITE(p, v)    floats */

TARGET INLINE void PASTE(TILE, _rows)(const struct job *job, int64_t row, const int rows, int64_t step, int64_t steps,
                                      const char *panel, struct ahead ahead, float *out) {
    (void)step, (void)steps; /* all of them are taken at once */
    for (int first = 0; first < PANEL; first += LANES * SPAN) {
        const float *scales = scales_of(job, panel) + first;
        const char *codes = panel + first * STEP_BYTES, *x = job->x + row * job->row_bytes;
        const char *ask = ahead.at + first * STEP_BYTES;
        float *total = out + first;
        for (int64_t group = 0; group < job->groups; group++, scales += PANEL) {
            VECTOR sums[ROWS][SPAN];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const VECTOR less = SPLAT_INT(-EXCESS * job->row_sums[(row + r) * job->groups + group]);
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++)
                    sums[r][v] = less;
            }
            for (int left = steps_of(job, group); left > 0; left--, x += STEP_BYTES, codes += PANEL * STEP_BYTES) {
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++)
                    __builtin_prefetch(ask + v * LANES * STEP_BYTES);
                ask += ahead.pace;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                    for (int v = 0; v < SPAN; v++)
                        sums[r][v] = DOT(sums[r][v], LOAD(codes + v * LANES * STEP_BYTES), SPREAD(x + r * job->row_bytes));
            }
            /* Says that the sums are in registers here; without it GCC copies them to memory in every step. */
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++)
                    __asm__("" : "+v"(sums[r][v]));
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const FLOATS scale = SPLAT(job->row_scales[(row + r) * job->groups + group]);
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++) {
                    float *sum = total + r * PANEL + v * LANES;
                    const FLOATS both = TIMES(READ(scales + v * LANES), scale);
                    WRITE(sum, FMA(TO_FLOATS(sums[r][v]), both, group ? READ(sum) : ZERO()));
                }
            }
        }
    }
}

#undef TILE
#undef TARGET
#undef VECTOR
#undef FLOATS
#undef LANES
#undef SPAN
#undef ROWS
#undef LOAD
#undef SPREAD
#undef DOT
#undef SPLAT_INT
#undef SPLAT
#undef TO_FLOATS
#undef FMA
#undef TIMES
#undef ZERO
#undef READ
#undef WRITE
