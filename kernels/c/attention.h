/* What the variants of the paged attention share. */
#ifndef BATON_ATTENTION_H
#define BATON_ATTENTION_H
#include "numbers.h"

enum { TILE = 64 };            /* keys that are weighed together, from absolute position 0 */
enum { SCRATCH_ALIGN = 64 };

/* One step's attention over one layer; kernels/paged_attention.py has the same fields in the same order. */
struct attention {
    const char *query; /* [tokens, query_heads, head_dim], tokens query_stride numbers apart */
    const char *keys, *values; /* [blocks, kv_heads, block_size, head_dim]; a scale behind each row of codes */
    char *out; /* [tokens, query_heads * head_dim] */
    const int64_t *tables; /* the blocks of all sequences, one after the other */
    const int64_t *table_starts; /* [sequences + 1] into tables */
    const int64_t *cu_seqlens; /* [sequences + 1]: the first token of each sequence */
    const int64_t *context_lens; /* [sequences], the new tokens included */
    char *scratch; /* [threads, scratch_bytes] */
    int64_t scratch_bytes;
    int64_t sequences, query_heads, kv_heads, block_size, head_dim, query_stride;
    int64_t query_dtype, pool_dtype, threads;
    float scale; /* of the scores, for powers of two */
};

/* Some query tokens of one sequence under some of its KV heads. */
struct item {
    int64_t sequence, first_head, heads, first_token, tokens;
};

/* `next`: what this thread attends to afterwards, or the same again; its first keys are fetched early. */
typedef void attend_item(const struct attention *a, const struct item *item, const struct item *next, char *scratch);
attend_item baton_attend_scalar, baton_attend_avx2, baton_attend_avx512, baton_attend_avx512_bf16, baton_attend_amx;

void baton_attend(const struct attention *a, int level);

#endif
