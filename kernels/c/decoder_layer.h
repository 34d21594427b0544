/* A decoder's layers as kernels/decoder_layer.py describes them: the same fields in the same order. All numbers but those of
   the pool are bfloat16. */
#ifndef BATON_DECODER_LAYER_H
#define BATON_DECODER_LAYER_H
#include "attention.h"
#include "linear.h"

enum linear_kind { LINEAR_BF16, LINEAR_INT8, LINEAR_INT4 };

struct product {
    const struct linear *linear;
    int64_t kind;
};

struct decoder_layer {
    const char *attention_norm, *mlp_norm;  /* [hidden] */
    const char *query_norm, *key_norm;      /* [head_dim], or NULL */
    struct product qkv, output, gate_up, down;
};

struct decoder {
    const struct decoder_layer *layers;
    const char *final_norm; /* [hidden] */
    int64_t layer_count, hidden, query_heads, kv_heads, head_dim, mlp;
    int64_t slab; /* rows of the MLP at a time */
    float eps;
};

/* One step of T tokens, of which R rows are asked for. */
struct decoder_step {
    const struct decoder *decoder;
    struct attention *attention; /* planned for the step; where query, pools and result are is set here */
    const char *cos, *sin;       /* [T, head_dim / 2] */
    const int64_t *slots;        /* [T]: block * block_size + offset */
    char *pool;                  /* keys of the first layer */
    int64_t layer_bytes, value_bytes; /* from a layer to the next, from its keys to its values */
    const int64_t *picked; /* [R]: rows, ascending */
    int64_t tokens, picked_count;
    char *hidden; /* [T, hidden]: the embeddings; changed */
    char *normed; /* [T, hidden]; at the end the R rows picked, under the final norm */
    char *scratch; /* of baton_decoder_scratch(decoder, T) bytes */
    int64_t threads, level; /* level: of attention and of what is between the products, at most */
};

#endif
