/* The small operations of a layer for any processor. */
#define TARGET
#define OPS baton_layer_scalar
#include "simd_scalar.h"

#include "layer_rows.h"
