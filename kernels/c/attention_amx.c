/* The paged attention with products of bfloat16 on matrix tiles. */
#if defined(__x86_64__) && defined(__linux__)
#define TARGET __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define ATTEND baton_attend_amx
#define PAIRS 1
#define MATRIX_TILES
#include "simd_avx512.h"
#undef ROWS_MAX
#define ROWS_MAX 16

#include "attention_tile.h"
#endif
