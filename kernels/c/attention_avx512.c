/* The paged attention with AVX-512. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define ATTEND baton_attend_avx512
#define PAIRS 0
#include "simd_avx512.h"

#include "attention_tile.h"
#endif
