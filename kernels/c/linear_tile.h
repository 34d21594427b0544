/* The inner loop of a linear layer, once for each instruction set. Included with these defined:

   TILE      name of the function                      VECTOR, ELEMENT  the sums, and one of them
   TARGET    its target attribute                      LANES, SPAN      outputs of a vector, vectors side by side
   ROWS      most rows, all sums staying in registers  ZERO()           a vector of zeros
   LOAD(p), SPREAD(p)  weights of LANES outputs; one step of x in every lane
   DOT(sums, weights, x), READ(p), WRITE(p, sums) */

TARGET INLINE void PASTE(TILE, _rows)(const char *x, int64_t row_bytes, const int rows, const char *panel, int64_t steps,
                                      ELEMENT *out, int go_on) {
    VECTOR sums[ROWS][SPAN];
    for (int first = 0; first < PANEL; first += LANES * SPAN) {
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                sums[r][v] = go_on ? READ(out + r * PANEL + first + v * LANES) : ZERO();
        const char *weights = panel + first * STEP_BYTES;
        for (int64_t step = 0; step < steps; step++, weights += PANEL * STEP_BYTES) {
            __builtin_prefetch(weights + AHEAD);
#pragma GCC unroll 8
            for (int v = 1; v < SPAN; v++)
                __builtin_prefetch(weights + AHEAD + v * LANES * STEP_BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                const char *here = x + r * row_bytes + step * STEP_BYTES;
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++)
                    sums[r][v] = DOT(sums[r][v], LOAD(weights + v * LANES * STEP_BYTES), SPREAD(here));
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
        PASTE(TILE, _rows)(x, job->row_bytes, count, panel, steps, sums, step > 0);                                    \
        break

TARGET static void TILE(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                        void *sums) {
    const char *x = job->x + row * job->row_bytes + step * STEP_BYTES;
    switch (rows) {
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
#if ROWS > 4
        CASE(5);
        CASE(6);
#endif
    }
}

#undef CASE
#undef TILE
#undef TARGET
#undef VECTOR
#undef ELEMENT
#undef LANES
#undef SPAN
#undef ROWS
#undef ZERO
#undef LOAD
#undef SPREAD
#undef DOT
#undef READ
#undef WRITE
