/* The inner loop of a linear layer, once for each instruction set. Included with these defined:

   TILE      the function is TILE_rows                 VECTOR, ELEMENT  the sums, and one of them
   TARGET    its target attribute                      LANES, SPAN      outputs of a vector, vectors side by side
   ROWS      most rows, all sums staying in registers  START(p)         sums to begin with, where p has the earlier ones
   LOAD(p), SPREAD(p)  weights of LANES outputs; one step of x in every lane
   DOT(sums, weights, x), WRITE(p, sums) */

TARGET INLINE void PASTE(TILE, _rows)(const struct job *job, int64_t row, const int rows, int64_t step, int64_t steps,
                                      const char *panel, const struct ahead ahead, ELEMENT *out) {
    for (int first = 0; first < PANEL; first += LANES * SPAN) {
        VECTOR sums[ROWS][SPAN];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                sums[r][v] = START(out + r * PANEL + first + v * LANES);
        const char *x = job->x + row * job->row_bytes + step * STEP_BYTES;
        const char *weights = panel + first * STEP_BYTES, *ask = ahead.at + first * STEP_BYTES;
        for (int64_t left = steps; left > 0; left--, x += STEP_BYTES, weights += PANEL * STEP_BYTES, ask += ahead.pace) {
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                __builtin_prefetch(ask + v * LANES * STEP_BYTES);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
                for (int v = 0; v < SPAN; v++)
                    sums[r][v] = DOT(sums[r][v], LOAD(weights + v * LANES * STEP_BYTES), SPREAD(x + r * job->row_bytes));
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int v = 0; v < SPAN; v++)
                WRITE(out + r * PANEL + first + v * LANES, sums[r][v]);
    }
}

#undef TILE
#undef TARGET
#undef VECTOR
#undef ELEMENT
#undef LANES
#undef SPAN
#undef ROWS
#undef START
#undef LOAD
#undef SPREAD
#undef DOT
#undef WRITE
