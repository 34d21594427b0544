/* What the linear layers on matrix tiles (AMX) share. Included on x86-64 with Linux only.

   Weights are packed in panels of 32 outputs, two tiles of 16 outputs wide. Of a tile of weights a row holds four bytes of
   inputs of each output, so a tile has 64 bytes of inputs, as a row of a tile of x has. A thread takes a panel times a
   block of rows at a time, and asks for its next panel meanwhile. */
#ifndef BATON_AMX_H
#define BATON_AMX_H

#include "linear.h"

#include <immintrin.h>

#define TARGET_AMX                                                                                                     \
    __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prfchw")))

enum {
    TILE_ROWS = 16, TILE_ROW = 64, TILE_BYTES = TILE_ROWS * TILE_ROW,
    WIDTH = 32,             /* outputs of a panel */
    STEP = 2 * TILE_BYTES,  /* bytes of a panel that meet one tile of x */
    LINE = 64
};

/* Some rows times a panel, to `out`. `next`: the panel that this thread takes afterwards, or NULL. */
typedef void part_function(const struct job *job, int64_t first_row, int64_t rows, int64_t panel, const char *next);

/* Run all parts of a job, of which `linear`, `x`, `rows`, `row_bytes`, `steps` and `out` are set. */
void baton_run_amx(struct job *job, part_function *part);

/* Tiles 0 to 3 are sums, two above two; 4 and 5 rows of x, 6 and 7 weights. The upper ones of `rows` have up to 16. */
TARGET_AMX INLINE void configure_tiles(int64_t rows) {
    const uint8_t upper = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS);
    const uint8_t lower = (uint8_t)(rows > TILE_ROWS ? rows - TILE_ROWS : 1); /* there is no tile without rows */
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < 8; tile++)
        tiles.row_bytes[tile] = TILE_ROW;
    __asm__ volatile("" : : "r"(&tiles) : "memory"); /* of the instruction GCC believes that it reads eight bytes only */
    _tile_loadconfig(&tiles);
}

/* What is asked for early: at each step so many lines from `at` on, where after `end` comes `next`, and the lines of so
   many rows of the output. */
struct early {
    const char *at, *end, *next;
    int64_t lines, rows, outputs;
    const uint16_t *out;
};

/* For so many walks over a panel, of `bytes` at each step. One walk is one stream, of which what comes soon is asked for;
   more spread the next panel. */
INLINE struct early plan_early(const struct job *job, const char *weights, const char *next, int64_t walks, int64_t bytes) {
    enum { AHEAD = 2 * STEP };
    const int64_t all = job->steps * STEP, lines = bytes / LINE;
    struct early early = {.at = next, .end = next, .next = next, .lines = next ? (lines + walks - 1) / walks : 0};
    if (walks == 1)
        early = (struct early){.at = weights + (AHEAD < all ? AHEAD : all), .end = weights + all,
                               .next = next ? next : weights, .lines = lines};
    early.outputs = job->linear->outputs;
    return early;
}

TARGET_AMX INLINE void ask(struct early *early) {
    if (early->at == early->end)
        early->at = early->next;
    for (int64_t i = 0; i < early->lines; i++)
        _mm_prefetch(early->at + i * LINE, _MM_HINT_T1);
    early->at += early->lines * LINE;
    for (int64_t i = 0; i < early->rows; i++, early->out += early->outputs)
        __builtin_prefetch(early->out, 1);
}

/* Sums [rows, 32] plus bias become bfloat16; `width` of the outputs exist. */
TARGET_AMX INLINE void finish_tiles(const float *sums, const float *bias, int64_t rows, int64_t width, uint16_t *out,
                                    int64_t outputs) {
    const __m512 low = _mm512_loadu_ps(bias), high = _mm512_loadu_ps(bias + 16);
    const __mmask32 mask = (__mmask32)(0xffffffffu >> (WIDTH - width));
    for (; rows > 0; rows--, sums += WIDTH, out += outputs) {
        __m512bh both = _mm512_cvtne2ps_pbh(_mm512_add_ps(_mm512_loadu_ps(sums + 16), high),
                                            _mm512_add_ps(_mm512_loadu_ps(sums), low));
        _mm512_mask_storeu_epi16(out, mask, (__m512i)both);
    }
}

#endif
