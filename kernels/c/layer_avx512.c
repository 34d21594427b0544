/* The small operations of a layer with AVX-512. */
#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define OPS baton_layer_avx512
#include "simd_avx512.h"

#include "layer_rows.h"
#endif
