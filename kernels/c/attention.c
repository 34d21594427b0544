/* Causal attention over paged keys and values; called from kernels/paged_attention.py without the GIL. */
#include "attention.h"
#include "give_way.h"
#include "linear.h"
#include "parallel.h"
#include <stddef.h>

enum { SLAB_ROWS = 192 }; /* of a KV head in prefill: sums that stay in the second cache, tiles loaded once for them */

struct work {
    const struct attention *attention;
    attend_item *attend;
    int64_t next_item, next_thread;
};

static attend_item *choose(const struct attention *a, int level) {
#if defined(__x86_64__)
    int pairs = a->query_dtype == BFLOAT16 && (a->pool_dtype == BFLOAT16 || is_coded(a->pool_dtype));
    __builtin_cpu_init();
#if defined(__linux__)
    if (level >= 4 && pairs && baton_has_amx())
        return baton_attend_amx;
#endif
    if (level >= 3 && pairs && __builtin_cpu_supports("avx512bf16"))
        return baton_attend_avx512_bf16;
    if (level >= 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return baton_attend_avx512;
    if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return baton_attend_avx2;
#else
    (void)a, (void)level;
#endif
    return baton_attend_scalar;
}

static int64_t slab_tokens(const struct attention *a) {
    int64_t tokens = SLAB_ROWS * a->kv_heads / a->query_heads;
    return tokens > 8 ? tokens : 8;
}

/* A sequence with one new token is one item, all heads together, so that a block is read in one go; with too few of them
   for all threads, and where keys are used by many tokens, each head is an item. */
static struct item first_item(const struct attention *a, int64_t sequence) {
    int64_t tokens = a->cu_seqlens[sequence + 1] - a->cu_seqlens[sequence], most = slab_tokens(a);
    int together = tokens == 1 && (a->threads == 1 || a->sequences >= 2 * a->threads);
    return (struct item){sequence, 0, together ? a->kv_heads : 1, a->cu_seqlens[sequence], tokens < most ? tokens : most};
}

/* Item `index` of the step, or 0 behind the last one. */
static int find_item(const struct attention *a, int64_t index, struct item *to) {
    for (int64_t s = 0; s < a->sequences; s++) {
        struct item first = first_item(a, s);
        int64_t end = a->cu_seqlens[s + 1], parts = a->kv_heads / first.heads;
        int64_t slabs = (end - first.first_token + first.tokens - 1) / (first.tokens ? first.tokens : 1);
        if (index < slabs * parts) {
            *to = first;
            to->first_head = index % parts * first.heads;
            to->first_token += (slabs - 1 - index / parts) * first.tokens; /* the longest first */
            if (to->tokens > end - to->first_token)
                to->tokens = end - to->first_token;
            return 1;
        }
        index -= slabs * parts;
    }
    return 0;
}

static int take_item(struct work *work, struct item *to) {
    return find_item(work->attention, __atomic_fetch_add(&work->next_item, 1, __ATOMIC_RELAXED), to);
}

static void run_items(void *data) {
    struct work *work = data;
    const struct attention *a = work->attention;
    char *scratch = a->scratch + __atomic_fetch_add(&work->next_thread, 1, __ATOMIC_RELAXED) * a->scratch_bytes;
    struct item item, next;
    int more = take_item(work, &item);
    while (more) {
        next = item;
        more = take_item(work, &next);
        work->attend(a, &item, &next, scratch);
        item = next;
        baton_give_way();
    }
}

/* `level`: at most 0 scalar, 1 AVX2, 2 AVX-512, 3 AVX-512 with bfloat16, 4 matrix tiles; the best that the processor
   has up to there. */
EXPORT void baton_attend(const struct attention *a, int level) {
    struct work work = {a, choose(a, level), 0, 0};
    baton_parallel(run_items, &work, a->threads, a->threads);
}

/* Bytes that each thread needs at `scratch`. */
EXPORT int64_t baton_attention_scratch(const struct attention *a) {
    int64_t share = a->query_heads / a->kv_heads, dim = (a->head_dim + 15) / 16 * 16;
    int64_t slab = slab_tokens(a) * share, rows = slab > a->query_heads ? slab : a->query_heads;
    int64_t tile = 4 * TILE * (2 * dim + 2 * 16 + 2), row = 4 * (2 * dim + 16 + 1);
    return (tile + rows * row + 9 * SCRATCH_ALIGN + 4095) / 4096 * 4096;
}
