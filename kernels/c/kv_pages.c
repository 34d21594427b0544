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

/* The pool's side of a copy, run by run: the tokens of one page. Blocks outermost: the pool is read in its order. */
struct cursor {
    const struct pool *pool;
    const int64_t *blocks;
    int64_t tokens, first_head, heads; /* of each layer's keys or values */
    int64_t low;                       /* of the first token in blocks[0] */
    int64_t layer_kind, last;          /* where it is, and where it ends */
    int64_t block, head, done, offset; /* likewise; done: tokens of the blocks before */
    char *page;                        /* the run: its place in the pool, its bytes, and its token in wire order */
    size_t size;
    int64_t token;
};

/* The next run; 0: there is none. */
static int step(struct cursor *c) {
    if (c->layer_kind == c->last)
        return 0;
    int64_t part = c->pool->block_size - c->offset, row = c->pool->row_bytes;
    if (part > c->tokens - c->done)
        part = c->tokens - c->done;
    c->page = page_of(c->pool, c->layer_kind, c->blocks[c->block], c->first_head + c->head) + c->offset * row;
    c->size = (size_t)(part * row);
    c->token = c->head * c->tokens + c->done;
    if (++c->head < c->heads)
        return 1;
    c->head = 0, c->offset = 0, c->block++, c->done += part;
    if (c->done == c->tokens)
        c->block = 0, c->done = 0, c->offset = c->low, c->layer_kind++;
    return 1;
}

/* So far in front of a copy the pool's bytes are asked for: pages are too short for the processor to foresee the next. */
enum { LINE = 64, AHEAD_BYTES = 96 * LINE };

struct ahead {
    struct cursor at;
    size_t asked; /* bytes of its run */
};

/* How many bytes of the pool may be asked for, from which on; 0: there are no more. */
static size_t askable(struct ahead *ahead, const char **from) {
    if (ahead->asked >= ahead->at.size) {
        ahead->asked = 0, ahead->at.size = 0;
        if (!step(&ahead->at))
            return 0;
    }
    *from = ahead->at.page + ahead->asked;
    return ahead->at.size - ahead->asked;
}

static void ask(const char *from, size_t size) {
    for (size_t at = 0; at < size; at += LINE)
        __builtin_prefetch(from + at);
}

/* Copy a run, and for each line of it ask for one that comes later. */
static void copy_asking(char *there, const char *here, size_t size, struct ahead *ahead) {
    const char *later = 0;
    for (size_t at = 0, part; at < size; at += part) {
        size_t known = askable(ahead, &later);
        part = known && known < size - at ? known : size - at;
        size_t done = 0;
        for (; done + LINE <= part; done += LINE) {
            if (known)
                __builtin_prefetch(later + done);
            memcpy(there + at + done, here + at + done, LINE);
        }
        memcpy(there + at + done, here + at + done, part - done);
        ahead->asked += part;
    }
}

static void gather(struct cursor *from, char *wire, int64_t step_tokens) {
    struct ahead ahead = {*from, 0};
    ahead.at.size = 0;
    const char *later = 0;
    for (size_t left = AHEAD_BYTES, part; left; left -= part, ahead.asked += part) {
        if (!(part = askable(&ahead, &later)))
            break;
        ask(later, part = part < left ? part : left);
    }
    int64_t row = from->pool->row_bytes, first = from->layer_kind, layer_kind = first;
    while (step(from)) {
        copy_asking(wire + ((layer_kind - first) * step_tokens + from->token) * row, from->page, from->size, &ahead);
        layer_kind = from->layer_kind;
    }
}

static void scatter(struct cursor *to, const char *wire, int64_t step_tokens) {
    int64_t row = to->pool->row_bytes, first = to->layer_kind, layer_kind = first;
    while (step(to)) {
        copy_to_pool(to->page, wire + ((layer_kind - first) * step_tokens + to->token) * row, to->size);
        layer_kind = to->layer_kind;
    }
    settle();
}

/* Move [layers, 2, heads, tokens] rows between the pool and `wire`; the first token is `low` into blocks[0].
   Returns -1 without touching anything when one of the blocks is not in the pool. */
EXPORT int baton_copy_pages(const struct pool *pool, const int64_t *blocks, int64_t block_count, int64_t low, int64_t tokens,
                            int64_t first_layer, int64_t layers, int64_t first_head, int64_t heads, char *wire,
                            int to_pool) {
    for (int64_t i = 0; i < block_count; i++)
        if (blocks[i] < 0 || blocks[i] >= pool->blocks)
            return -1;
    struct cursor cursor = {.pool = pool, .blocks = blocks, .tokens = tokens, .first_head = first_head, .heads = heads,
                            .low = low, .offset = low, .layer_kind = 2 * first_layer,
                            .last = 2 * (first_layer + layers)};
    if (to_pool)
        scatter(&cursor, wire, heads * tokens);
    else
        gather(&cursor, wire, heads * tokens);
    return 0;
}
