/* How a tile of keys and values is found in the pages and laid out for attention_tile.h, and units (see there). */
#include "attention.h"
#include "rows.h"
#include <math.h>
#include <string.h>

typedef int32_t unit;

enum { WEIGHTS = PAIRS ? TILE / 2 : TILE };

/* Where a tile's keys lie, in bytes into the pool for head 0. */
struct places {
    int64_t count; /* keys before the end of the sequence, at least one; behind them its last key stands again */
    int64_t offset[TILE];
};

INLINE int64_t whole(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

#if PAIRS
/* The first `left` of 32 numbers. */
INLINE __mmask32 words(int64_t left) { return left < 2 * LANES ? (__mmask32)((1u << left) - 1) : 0xffffffff; }

/* Pairs of codes, one in the low byte of each word, as bfloat16, which holds every code. */
INLINE __m512i from_int8(__m512i codes) {
    __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(codes, 24), 24);
    __m512i high = _mm512_srai_epi32(_mm512_slli_epi32(codes, 8), 24);
    __m512i even = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(low)), 16);
    return _mm512_mask_mov_epi16(even, 0xaaaaaaaa, _mm512_castps_si512(_mm512_cvtepi32_ps(high)));
}

/* Another bias moves e4m3's exponent; its subnormal numbers m * 2^-9 stand in a table. */
INLINE __m512i from_fp8(__m512i codes) {
    const __m512i subnormal = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i size = _mm512_and_si512(codes, _mm512_set1_epi16(0x7f));
    __m512i number = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    __mmask32 low = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    number = _mm512_mask_permutexvar_epi16(number, low, size, subnormal);
    return _mm512_or_si512(number, _mm512_slli_epi16(_mm512_andnot_si512(_mm512_set1_epi16(0x7f), codes), 8));
}

INLINE __m512i from_codes(__m512i codes, const int64_t dtype) { return dtype == INT8 ? from_int8(codes) : from_fp8(codes); }

/* Numbers `which` of the 32 at `p`, as bfloat16; zeros for the others. */
INLINE __m512i load_words(const char *p, __mmask32 which, const int64_t dtype) {
    if (dtype == BFLOAT16)
        return _mm512_maskz_loadu_epi16(which, p);
    return from_codes(_mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(which, p)), dtype);
}
#endif

/* The LANES units of a row from unit `at` on; zeros behind its `dim` numbers. */
INLINE vec load_units(const char *row, int64_t at, int64_t dim, const int64_t dtype) {
#if PAIRS
    return _mm512_castsi512_ps(load_words(row + 2 * at * width(dtype), words(dim - 2 * at), dtype));
#else
    return take(row + at * width(dtype), dim - at, dtype);
#endif
}

INLINE void load_row(unit *to, const char *row, int64_t units, int64_t dim, const int64_t dtype) {
    for (int64_t at = 0; at < units; at += LANES)
        v_store(to + at, load_units(row, at, dim, dtype));
}

/* What is asked for early of the next tile under a head: line by line beside other work, since many requests at once would
   block what follows them. */
struct ahead {
    const char *keys, *values;
    const int64_t *offset, *end; /* of the rows that were not asked for yet */
    int64_t at, row;             /* bytes */
};

INLINE void ask(struct ahead *w) {
    if (w->offset == w->end)
        return;
    __builtin_prefetch(w->keys + *w->offset + w->at, 0, 2);
    __builtin_prefetch(w->values + *w->offset + w->at, 0, 2);
    w->at += 64;
    if (w->at >= w->row) {
        w->at = 0;
        w->offset++;
    }
}

#if PAIRS
/* Keys of codes as columns: rows become columns four codes at a time, and these then two units. */
INLINE void load_coded_keys(const struct attention *a, const struct places *here, struct ahead *next, const char *pool,
                            int64_t units, unit *to, const int64_t dtype) {
    const __m512i low = _mm512_set4_epi32(0x800d800c, 0x80098008, 0x80058004, 0x80018000);
    const __m512i high = _mm512_add_epi8(low, _mm512_set1_epi16(2));
    for (int64_t key = 0; key < TILE; key += LANES)
        for (int64_t at = 0; 2 * at < units; at += LANES) {
            int64_t left = a->head_dim - 4 * at;
            __mmask64 which = left < 4 * LANES ? (1ull << left) - 1 : ~0ull;
            vec rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = (vec)_mm512_maskz_loadu_epi8(which, pool + here->offset[key + i] + 4 * at);
            for (int64_t i = 0; i < LANES; i += 4)
                ask(next);
            v_transpose(rows);
            for (int64_t i = 0; i < LANES && 2 * (at + i) < units; i++) {
                unit *column = to + 2 * (at + i) * TILE + key;
                v_store(column, (vec)from_codes(_mm512_shuffle_epi8((__m512i)rows[i], low), dtype));
                v_store(column + TILE, (vec)from_codes(_mm512_shuffle_epi8((__m512i)rows[i], high), dtype));
            }
        }
}
#endif

/* Keys as columns; those behind the end of the sequence are masked later. */
INLINE void load_keys(const struct attention *a, const struct places *here, struct ahead *next, const char *pool,
                      int64_t units, unit *to, const int64_t dtype) {
#if PAIRS
    if (is_coded(dtype)) {
        load_coded_keys(a, here, next, pool, units, to, dtype);
        return;
    }
#endif
    for (int64_t key = 0; key < TILE; key += LANES)
        for (int64_t at = 0; at < units; at += LANES) {
            vec rows[LANES];
            for (int64_t i = 0; i < LANES; i++)
                rows[i] = load_units(pool + here->offset[key + i], at, a->head_dim, dtype);
            for (int64_t i = 0; i < LANES; i += 4)
                ask(next);
            v_transpose(rows);
            for (int64_t i = 0; i < LANES; i++)
                v_store(to + (at + i) * TILE + key, rows[i]);
        }
}

#if PAIRS
/* Values in pairs: the same dimension of two keys; zeros behind the end: what is left there must not reach a product. */
INLINE void load_values(const struct attention *a, const struct places *here, struct ahead *next, const char *pool,
                        int64_t padded, unit *to, const int64_t dtype) {
    const __m512i low = _mm512_set_epi32(0x002f000f, 0x002e000e, 0x002d000d, 0x002c000c, 0x002b000b, 0x002a000a, 0x00290009,
                                         0x00280008, 0x00270007, 0x00260006, 0x00250005, 0x00240004, 0x00230003, 0x00220002,
                                         0x00210001, 0x00200000);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    for (int64_t key = 0; key < TILE; key += 2) {
        const char *first = pool + here->offset[key], *second = pool + here->offset[key + 1];
        for (int64_t at = 0; at < padded; at += 2 * LANES) {
            __mmask32 row = words(a->head_dim - at);
            __m512i even = load_words(first + at * width(dtype), key < here->count ? row : 0, dtype);
            __m512i odd = load_words(second + at * width(dtype), key + 1 < here->count ? row : 0, dtype);
            unit *pairs = to + key / 2 * padded + at;
            _mm512_storeu_si512(pairs, _mm512_permutex2var_epi16(even, low, odd));
            if (at + LANES < padded)
                _mm512_storeu_si512(pairs + LANES, _mm512_permutex2var_epi16(even, high, odd));
            ask(next);
        }
    }
}
#else
/* Values as they are; zeros behind the end: what is left there must not reach a product. */
INLINE void load_values(const struct attention *a, const struct places *here, struct ahead *next, const char *pool,
                        int64_t padded, unit *to, const int64_t dtype) {
    for (int64_t key = 0; key < TILE; key++)
        for (int64_t at = 0; at < padded; at += LANES) {
            int inside = key < here->count;
            v_store(to + key * padded + at, inside ? load_units(pool + here->offset[key], at, a->head_dim, dtype) : v_zero());
            ask(next);
        }
}
#endif

/* Of the rows of a tile. */
INLINE void load_scales(const struct attention *a, const struct places *here, const char *pool, float *to) {
    for (int64_t key = 0; key < TILE; key++)
        memcpy(to + key, pool + here->offset[key] + a->head_dim, sizeof *to);
}

INLINE void find_places(const struct attention *a, int64_t sequence, int64_t first, struct places *to) {
    const int64_t *table = a->tables + a->table_starts[sequence];
    int64_t row = row_bytes(a->head_dim, a->pool_dtype), size = a->block_size, left = a->context_lens[sequence] - first;
    to->count = left < TILE ? left : TILE;
    for (int64_t key = 0; key < to->count;) {
        int64_t position = first + key, at = position % size;
        int64_t start = (table[position / size] * a->kv_heads * size + at) * row;
        for (; at < size && key < to->count; at++, key++, start += row)
            to->offset[key] = start;
    }
    for (int64_t key = to->count; key < TILE; key++)
        to->offset[key] = to->offset[to->count - 1];
}
