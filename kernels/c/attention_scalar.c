/* The paged attention for any processor. */
#define TARGET
#define ATTEND baton_attend_scalar
#define PAIRS 0
#include "simd_scalar.h"

#include "attention_tile.h"
