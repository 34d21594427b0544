/* The small operations of a layer with AVX2. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define OPS baton_layer_avx2
#include "simd_avx2.h"

#include "layer_rows.h"
#endif
