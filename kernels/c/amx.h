/* Matrix tiles (AMX) of a thread: leave to use them, and their shapes. Included on x86-64 with Linux only. */
#ifndef BATON_AMX_H
#define BATON_AMX_H

#include <immintrin.h>
#include <stdint.h>

#define TARGET_AMX                                                                                                     \
    __attribute__((target("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,prfchw")))

enum { TILE_ROWS = 16, ROW_BYTES = 64, TILE_BYTES = TILE_ROWS * ROW_BYTES };

/* Tiles 0 to 3 are sums, two above two; 4 and 5 rows of x, 6 and 7 weights. The upper ones of `rows` have up to 16. */
TARGET_AMX static inline void configure_tiles(int64_t rows) {
    const uint8_t upper = (uint8_t)(rows < TILE_ROWS ? rows : TILE_ROWS);
    const uint8_t lower = (uint8_t)(rows > TILE_ROWS ? rows - TILE_ROWS : 1); /* there is no tile without rows */
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } tiles = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < 8; tile++)
        tiles.row_bytes[tile] = ROW_BYTES;
    _tile_loadconfig(&tiles);
}

#endif
