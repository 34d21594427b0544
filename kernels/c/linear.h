/* What the linear layers share: how a weight is packed, who computes which part of it, and on how many threads.

   A weight [outputs, inputs] is packed in panels of 64 outputs, the last one filled up with zeros. A panel holds the
   inputs in steps of four bytes (two bfloat16 or four int8), and of each step the 64 outputs side by side. So it is read
   as one stream, whatever the number of rows, and an output's products are summed from the first input to the last. */
#ifndef BATON_LINEAR_H
#define BATON_LINEAR_H

#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { PANEL = 64, BLOCK_ROWS = 96, STEP_BYTES = 4 };

/* What the processor may be asked for; each level has all of those before it. LEVEL_DOT: AVX-512 with the products at
   hand, of bfloat16 or of bytes; the one before it is plain AVX-512, or for bytes AVX2 with VNNI. LEVEL_AMX: matrix
   tiles, whose packing is their own. */
enum level { LEVEL_PLAIN, LEVEL_AVX2, LEVEL_AVX512, LEVEL_DOT, LEVEL_AMX, LEVEL_AVX_VNNI = LEVEL_AVX512 };

struct linear {
    const char *packed;
    const float *scales; /* of an int8 weight: [panels, groups, 64] */
    const float *bias;   /* NULL: none */
    int64_t outputs, inputs;
    int64_t level, threads;
    int64_t has_minima; /* of a 4-bit weight */
};

struct job;

/* What is asked for early: the lines of a step's weights from `at` on, `pace` bytes further at each step. */
struct ahead {
    const char *at;
    int64_t pace;
};

/* Sum rows [row, row + rows) of x times a panel's steps [step, step + steps), which begin at `panel`, into
   sums [rows, 64]; onto what is there unless it is the first step. */
typedef void tile_function(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps, const char *panel,
                           struct ahead ahead, float *sums);
typedef void finish_function(const struct job *job, const float *sums, int64_t first_row, int64_t rows, int64_t panel);

/* One call: rows of x, in the format of the panels, become rows of bfloat16. */
struct job {
    const struct linear *linear;
    tile_function *tile;
    finish_function *finish; /* of the sums of all steps: to `out` */
    const char *x;
    int64_t rows, row_bytes;
    int64_t steps, step_bytes; /* of a panel: all, bytes of one */
    int64_t block_steps, small_steps; /* that are taken at a time, at most; the latter where walks are few */
    int tile_rows;
    const float *row_scales; /* of x and of its codes, where x is quantised: [rows, groups] */
    const int32_t *row_sums;
    int64_t groups;
    uint16_t *out;
    int64_t next; /* of the parts that nobody has taken yet */
};

#define JOIN(a, b) a##b
#define PASTE(a, b) JOIN(a, b)

/* A tile_function that calls NAME_rows with a constant number of rows, so that its sums can be in registers. */
#define ROWS_CASE(name, count)                                                                                         \
    case count:                                                                                                        \
        PASTE(name, _rows)(job, row, count, step, steps, panel, ahead, sums);                                                 \
        break;
#define FOUR_ROWS(name) ROWS_CASE(name, 1) ROWS_CASE(name, 2) ROWS_CASE(name, 3) ROWS_CASE(name, 4)
#define SIX_ROWS(name) FOUR_ROWS(name) ROWS_CASE(name, 5) ROWS_CASE(name, 6)
#define TILE_FUNCTION(target, name, cases)                                                                             \
    target static void name(const struct job *job, int64_t row, int rows, int64_t step, int64_t steps,                 \
                            const char *panel, struct ahead ahead, float *sums) {                                      \
        switch (rows) { cases(name) }                                                                                  \
    }

/* x [rows, inputs] -> out [rows, outputs], both bfloat16. Not 0: there was no memory. */
int baton_bf16_linear(const struct linear *linear, const char *x, int64_t rows, uint16_t *out);
int baton_int8_linear(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out);
int baton_int4_linear(const struct linear *linear, const uint16_t *x, int64_t rows, uint16_t *out);

void baton_run_linear(struct job *job);
finish_function *baton_finish_floats(int wide);

/* Whether matrix tiles may be used; asks the kernel for that when it is first called. */
int baton_has_amx(void);
int baton_bf16_amx(const struct linear *linear, const char *x, int64_t rows, uint16_t *out); 
INLINE float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* To nearest, ties to even; a NaN stays one. */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

#endif
