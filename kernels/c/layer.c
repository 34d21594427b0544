/* The small operations of a layer on the best instructions that the processor has; called from Python without the GIL. */
#include "give_way.h"
#include "layer.h"
#include "parallel.h"

#define EXPORT __attribute__((visibility("default")))

enum { SLICE = 32 }; /* rows that one thread takes at a time, at most */

struct slices {
    row_work *work;
    const void *arguments;
    int64_t rows, slice, next;
};

static void run_slices(void *data) {
    struct slices *s = data;
    for (;;) {
        int64_t first = __atomic_fetch_add(&s->next, s->slice, __ATOMIC_RELAXED);
        if (first >= s->rows)
            return;
        s->work(s->arguments, first, first + s->slice < s->rows ? first + s->slice : s->rows);
        baton_give_way();
    }
}

static void run(row_work *work, const void *arguments, int64_t rows, int threads) {
    const int64_t slice = baton_slice(rows, threads, SLICE);
    struct slices slices = {work, arguments, rows, slice, 0};
    baton_parallel(run_slices, &slices, threads, (rows + slice - 1) / slice);
}

static const struct layer_ops *choose(int level) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (level >= 2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &baton_layer_avx512;
    if (level >= 1 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        return &baton_layer_avx2;
#else
    (void)level;
#endif
    return &baton_layer_scalar;
}

EXPORT void baton_norm(char *hidden, const char *part, const char *weight, char *out, int64_t rows, int64_t size,
                       int64_t dtype, float eps, int threads, int level) {
    struct norm n = {hidden, part, weight, out, size, dtype, eps};
    run(choose(level)->norm, &n, rows, threads);
}

EXPORT void baton_norm_heads(char *heads, const char *query_norm, const char *key_norm, int64_t tokens, int64_t query_heads,
                             int64_t kv_heads, int64_t head_dim, int64_t dtype, float eps, int threads, int level) {
    struct head_norm n = {heads, query_norm, key_norm, query_heads, kv_heads, head_dim, dtype, eps};
    run(choose(level)->norm_heads, &n, tokens, threads);
}

EXPORT void baton_rotate(char *heads, const char *cos, const char *sin, const int64_t *slots, char *keys, char *values,
                         int64_t tokens, int64_t query_heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
                         int64_t dtype, int64_t pool_dtype, int threads, int level) {
    struct rotation r = {heads,    cos,      sin,        slots, keys,      values, query_heads,
                         kv_heads, head_dim, block_size, dtype, pool_dtype};
    run(choose(level)->rotate, &r, tokens, threads);
}

EXPORT void baton_gate(const char *gate_up, char *out, int64_t rows, int64_t size, int64_t dtype, int threads, int level) {
    struct gate g = {gate_up, out, size, dtype};
    run(choose(level)->gate, &g, rows, threads);
}
