/* Copies between the pages of a KV pool and KV in wire order; called from kernels/kv_pages.py without the GIL. */
#include <stdint.h>
#include <string.h>

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
                memcpy(here, there, size);
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
    return 0;
}
