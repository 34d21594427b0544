/* What a tile of attention_tile.h works on, and how scores become weights. */
#include "attention_load.h"

struct sizes {
    int64_t units;   /* of a row of keys, padded to whole vectors */
    int64_t padded;  /* numbers of a row of values, padded to whole vectors */
    int64_t share;   /* query heads of a KV head */
    int64_t rows;    /* of one KV head */
};

struct buffers {
    unit *query;     /* [heads * rows, units] */
    float *sums;     /* [heads * rows, padded]: weighted values */
    float *totals;   /* [heads * rows, LANES]: of the weights */
    float *highest;  /* [heads * rows]: scores */
    unit *keys;      /* [units, TILE] */
    unit *values;    /* [TILE or TILE / 2, padded] */
    float *scores;   /* [ROWS_MAX, TILE] */
    float *scales;   /* [2, TILE]: of keys and values; used where the pool has codes */
    unit *weights;   /* [ROWS_MAX, TILE or TILE / 2] */
};

#if PAIRS
INLINE void store_weights(unit *weights, const float *scores) {
    for (int64_t key = 0; key < TILE; key += 2 * LANES) {
        __m512bh pairs = _mm512_cvtne2ps_pbh(v_load(scores + key + LANES), v_load(scores + key));
        v_store(weights + key / 2, (vec)pairs);
    }
}
#else
INLINE void store_weights(unit *weights, const float *scores) { memcpy(weights, scores, 4 * TILE); }
#endif

/* Turn a row's scores of its first `seen` keys into weights; returns what earlier sums shrink by. `scales`: or NULL. */
INLINE float weigh(float *scores, int64_t seen, float scale, const float *scales, float *highest, float *totals,
                   unit *weights) {
    vec top = v_set(-INFINITY), sum = v_zero();
    for (int64_t key = 0; key < TILE; key += LANES) {
        vec s = v_mul(v_load(scores + key), v_set(scale));
        if (scales)
            s = v_mul(s, v_load(scales + key));
        if (seen < key + LANES)
            s = v_first(s, seen - key, v_set(-INFINITY));
        v_store(scores + key, s);
        top = v_max(top, s);
    }
    float now = v_highest(top), before = *highest;
    if (now < before)
        now = before;
    for (int64_t key = 0; key < TILE; key += LANES) {
        vec weight = v_exp2(v_sub(v_load(scores + key), v_set(now)));
        v_store(scores + key, scales ? v_mul(weight, v_load(scales + TILE + key)) : weight);
        sum = v_add(sum, weight);
    }
    store_weights(weights, scores);
    vec shrink = now == before ? v_set(1.0f) : v_exp2(v_set(before - now));
    v_store(totals, v_fma(v_load(totals), shrink, sum));
    *highest = now;
    return v_lowest_lane(shrink);
}
