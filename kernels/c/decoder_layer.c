/* The layers of a decoder in one call, made of the functions that Python calls one by one elsewhere (engine/model.py). */
#include "decoder_layer.h"
#include "layer.h"
#include "parallel.h"

enum { ALIGN = 64, NUMBER = 2 }; /* bytes */

/* What lives from one part of a layer to the next. */
struct buffers {
    char *heads;    /* [T, query_heads + 2 * kv_heads, head_dim] */
    char *attended; /* [T, query_heads, head_dim] */
    char *part;     /* [T, hidden]: what attention or MLP adds */
    char *gate_up;  /* [slab, 2 * mlp] */
    char *gated;    /* [slab, mlp] */
};

struct run {
    const struct decoder_step *step;
    struct buffers buffers;
    int64_t first, last;
    int finish, failed;
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns the bytes that are taken. */
static int64_t carve(const struct decoder *d, int64_t tokens, char *scratch, struct buffers *to) {
    const int64_t slab = smaller(tokens, d->slab), queries = d->query_heads * d->head_dim;
    const struct {
        char **buffer;
        int64_t numbers;
    } parts[] = {
        {&to->heads, tokens * (queries + 2 * d->kv_heads * d->head_dim)},
        {&to->attended, tokens * queries},
        {&to->part, tokens * d->hidden},
        {&to->gate_up, slab * 2 * d->mlp},
        {&to->gated, slab * d->mlp},
    };
    int64_t at = 0;
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        *parts[i].buffer = scratch + at;
        at += (parts[i].numbers * NUMBER + ALIGN - 1) / ALIGN * ALIGN;
    }
    return at;
}

EXPORT int64_t baton_decoder_scratch(const struct decoder *decoder, int64_t tokens) {
    struct buffers buffers;
    return carve(decoder, tokens, NULL, &buffers);
}

static void multiply(struct run *run, const struct product *p, const char *x, int64_t rows, char *out) {
    const uint16_t *from = (const uint16_t *)(const void *)x;
    uint16_t *to = (uint16_t *)(void *)out;
    int failed = 0;
    switch ((enum linear_kind)p->kind) {
    case LINEAR_BF16: failed = baton_bf16_linear(p->linear, x, rows, to); break;
    case LINEAR_INT8: failed = baton_int8_linear(p->linear, from, rows, to); break;
    case LINEAR_INT4: failed = baton_int4_linear(p->linear, from, rows, to); break;
    }
    run->failed |= failed;
}

/* `normed` becomes the norm of hidden + part, which hidden becomes. */
static void add_norm(const struct decoder_step *s, const char *part, const char *weight, int64_t rows) {
    baton_norm(s->hidden, part, weight, s->normed, rows, s->decoder->hidden, BFLOAT16, s->decoder->eps, (int)s->threads,
               (int)s->level);
}

/* Queries of all tokens; their keys and values go into the pool. */
static void project(struct run *run, int64_t index) {
    const struct decoder_step *s = run->step;
    const struct decoder *d = s->decoder;
    const struct decoder_layer *layer = d->layers + index;
    char *heads = run->buffers.heads, *keys = s->pool + index * s->layer_bytes;
    multiply(run, &layer->qkv, s->normed, s->tokens, heads);
    if (layer->query_norm)
        baton_norm_heads(heads, layer->query_norm, layer->key_norm, s->tokens, d->query_heads, d->kv_heads, d->head_dim,
                         BFLOAT16, d->eps, (int)s->threads, (int)s->level);
    baton_rotate(heads, s->cos, s->sin, s->slots, keys, keys + s->value_bytes, s->tokens, d->query_heads, d->kv_heads,
                 d->head_dim, s->attention->block_size, BFLOAT16, s->attention->pool_dtype, (int)s->threads, (int)s->level);
}

static void attend(const struct run *run, int64_t index) {
    const struct decoder_step *s = run->step;
    struct attention *a = s->attention;
    a->query = run->buffers.heads;
    a->keys = s->pool + index * s->layer_bytes;
    a->values = a->keys + s->value_bytes;
    a->out = run->buffers.attended;
    baton_attend(a, (int)s->level);
}

/* Rows [0, R) become the picked ones, which never lie before them. */
static void pick(const struct decoder_step *s, char *rows, int64_t row_bytes) {
    for (int64_t to = 0; to < s->picked_count; to++)
        if (s->picked[to] != to)
            memcpy(rows + to * row_bytes, rows + s->picked[to] * row_bytes, (size_t)row_bytes);
}

/* The layer after its projection, and the norm that the next one begins with. */
static void transform(struct run *run, int64_t index) {
    const struct decoder_step *s = run->step;
    const struct decoder *d = s->decoder;
    const struct decoder_layer *layer = d->layers + index;
    const struct buffers *b = &run->buffers;
    int64_t rows = s->tokens, row = d->hidden * NUMBER;
    attend(run, index);
    if (index + 1 == d->layer_count) { /* from here on only what is asked for */
        rows = s->picked_count;
        pick(s, s->hidden, row);
        pick(s, b->attended, d->query_heads * d->head_dim * NUMBER);
    }
    multiply(run, &layer->output, b->attended, rows, b->part);
    add_norm(s, b->part, layer->mlp_norm, rows);
    for (int64_t first = 0; first < rows; first += d->slab) {
        int64_t count = smaller(rows - first, d->slab);
        multiply(run, &layer->gate_up, s->normed + first * row, count, b->gate_up);
        baton_gate(b->gate_up, b->gated, count, d->mlp, BFLOAT16, (int)s->threads, (int)s->level);
        multiply(run, &layer->down, b->gated, count, b->part + first * row);
    }
    add_norm(s, b->part, index + 1 == d->layer_count ? d->final_norm : layer[1].attention_norm, rows);
}

static void run_layers(void *data) {
    struct run *run = data;
    const struct decoder_step *s = run->step;
    if (run->first == 0)
        add_norm(s, NULL, s->decoder->layers->attention_norm, s->tokens);
    for (int64_t index = run->first; index < run->last && !run->failed; index++) {
        if (index > 0)
            transform(run, index - 1);
        project(run, index);
    }
    if (run->finish && !run->failed)
        transform(run, s->decoder->layer_count - 1);
}

/* Go on until keys and values of layers [first, last) are in the pool; after the last one, with `finish`, until `normed` has
   the rows that were picked. Layers are run in order, the same step going on. Returns -1 where memory is lacking. */
EXPORT int baton_run_layers(const struct decoder_step *step, int64_t first, int64_t last, int finish) {
    struct run run = {.step = step, .first = first, .last = last, .finish = finish};
    carve(step->decoder, step->tokens, step->scratch, &run.buffers);
    baton_lead(run_layers, &run, step->threads);
    return run.failed;
}
