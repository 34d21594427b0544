/* The paged attention with AVX2. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define ATTEND baton_attend_avx2
#define PAIRS 0
#include "simd_avx2.h"

#include "attention_tile.h"
#endif
