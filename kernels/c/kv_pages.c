/* Copies between the pages of a KV pool and KV in wire order; called from kernels/kv_pages.py without the GIL. */
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__) /* every x86-64 has it */
#include <emmintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

/* Pool [layers, 2, blocks, heads, block_size rows]; a page is one head's rows of one block. */
struct pool {
    char *data;
    int64_t blocks, heads, block_size, row_bytes;
};

static char *page_of(const struct pool *pool, int64_t layer_kind, int64_t block, int64_t head) {
    int64_t page = pool->block_size * pool->row_bytes;
    return pool->data + ((layer_kind * pool->blocks + block) * pool->heads + head) * page;
}

/* Into the pool past the caches: what is written is next read steps later, and its old content is never fetched. */
static void copy_to_pool(char *there, const char *here, size_t size) {
#if defined(__SSE2__)
    if ((uintptr_t)there % 16 == 0 && size % 64 == 0) {
        for (size_t at = 0; at < size; at += 64) {
            const __m128i *from = (const __m128i *)(here + at);
            __m128i *to = (__m128i *)(there + at);
            __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b);
            _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
        }
        return;
    }
#endif
    memcpy(there, here, size);
}

/* Such writes are in no order with others until this. */
static void settle(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Tokens of one layer's keys or values; wire is [heads, tokens rows]. Blocks outermost: the pool is read in its order. */
static void copy_tokens(const struct pool *pool, const int64_t *blocks, int64_t low, int64_t tokens, int64_t layer_kind,
                        int64_t first_head, int64_t heads, char *wire, int to_pool) {
    for (int64_t done = 0, offset = low; done < tokens; blocks++, offset = 0) {
        int64_t part = pool->block_size - offset;
        if (part > tokens - done)
            part = tokens - done;
        size_t size = (size_t)(part * pool->row_bytes);
        for (int64_t head = 0; head < heads; head++) {
            char *here = page_of(pool, layer_kind, *blocks, first_head + head) + offset * pool->row_bytes;
            char *there = wire + (head * tokens + done) * pool->row_bytes;
            if (to_pool)
                copy_to_pool(here, there, size);
            else
                memcpy(there, here, size);
        }
        done += part;
    }
}

/* Move [layers, 2, heads, tokens] rows between the pool and `wire`; the first token is `low` into blocks[0].
   Returns -1 without touching anything when one of the blocks is not in the pool. */
EXPORT int baton_copy_pages(const struct pool *pool, const int64_t *blocks, int64_t block_count, int64_t low, int64_t tokens,
                            int64_t first_layer, int64_t layers, int64_t first_head, int64_t heads, char *wire,
                            int to_pool) {
    for (int64_t i = 0; i < block_count; i++)
        if (blocks[i] < 0 || blocks[i] >= pool->blocks)
            return -1;
    int64_t step = heads * tokens * pool->row_bytes;
    for (int64_t layer_kind = 2 * first_layer; layer_kind < 2 * (first_layer + layers); layer_kind++, wire += step)
        copy_tokens(pool, blocks, low, tokens, layer_kind, first_head, heads, wire, to_pool);
    if (to_pool)
        settle();
    return 0;
}
