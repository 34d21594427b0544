/* The paged attention with pairs of bfloat16 numbers in each lane. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define ATTEND baton_attend_avx512_bf16
#define PAIRS 1
#include "simd_avx512.h"

#include "attention_tile.h"
#endif
