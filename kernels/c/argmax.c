/* The place of the greatest number of a row; called from kernels/argmax.py without the GIL. */
#include "numbers.h"
#include "parallel.h"

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 1024 }; /* numbers whose greatest is found before their places are looked at */

struct search {
    const char *numbers; /* [.., size] */
    const int64_t *rows; /* [count] */
    int64_t *places;     /* [count] */
    int64_t size, dtype, count, next;
    int level;
};

/* Whole numbers in the order of the floats; zeros of both signs are equal. Written without branches, for the vectors. */
INLINE int16_t order16(int16_t bits) {
    int16_t sign = bits >> 15;
    return (int16_t)((bits ^ (sign & 0x7fff)) - sign);
}
INLINE int32_t order32(int32_t bits) {
    int32_t sign = bits >> 31;
    return (bits ^ (sign & 0x7fffffff)) - sign;
}

/* The first of the greatest, or -1 where there is a NaN (magnitudes are ordered like their bits, and it is above all), or
   nothing above minus infinity. */
#define FIRST_GREATEST(name, type, order, infinity)                                                                    \
    INLINE int64_t name(const type *row, int64_t size) {                                                               \
        type greatest = order((type)((type)1 << (8 * sizeof(type) - 1) | infinity)), magnitude = 0;                    \
        int64_t block = -1;                                                                                            \
        for (int64_t first = 0; first < size; first += BLOCK) {                                                        \
            int64_t count = size - first < BLOCK ? size - first : BLOCK;                                               \
            type here = greatest;                                                                                      \
            for (int64_t i = 0; i < count; i++) {                                                                      \
                type bits = row[first + i], key = order(bits), size_of = bits & (type) ~((type)1 << (8 * sizeof(type) - 1)); \
                here = key > here ? key : here;                                                                        \
                magnitude = size_of > magnitude ? size_of : magnitude;                                                 \
            }                                                                                                          \
            if (here > greatest) {                                                                                     \
                greatest = here;                                                                                       \
                block = first;                                                                                         \
            }                                                                                                          \
        }                                                                                                              \
        if (block < 0 || magnitude > infinity)                                                                         \
            return -1;                                                                                                 \
        while (order(row[block]) != greatest)                                                                          \
            block++;                                                                                                   \
        return block;                                                                                                  \
    }
FIRST_GREATEST(first_greatest16, int16_t, order16, 0x7f80)
FIRST_GREATEST(first_greatest32, int32_t, order32, 0x7f800000)

INLINE int64_t find(const struct search *s, int64_t row) {
    const char *numbers = s->numbers + row * s->size * width(s->dtype);
    return s->dtype == FLOAT32 ? first_greatest32((const int32_t *)(const void *)numbers, s->size)
                               : first_greatest16((const int16_t *)(const void *)numbers, s->size);
}

static int64_t find_plain(const struct search *s, int64_t row) { return find(s, row); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static int64_t find_avx2(const struct search *s, int64_t row) { return find(s, row); }
#endif

static void take_rows(void *data) {
    struct search *s = data;
    for (;;) {
        int64_t at = __atomic_fetch_add(&s->next, 1, __ATOMIC_RELAXED);
        if (at >= s->count)
            return;
#if defined(__x86_64__)
        if (s->level >= 1 && __builtin_cpu_supports("avx2")) {
            s->places[at] = find_avx2(s, s->rows[at]);
            continue;
        }
#endif
        s->places[at] = find_plain(s, s->rows[at]);
    }
}

/* `level`: at most 0 scalar, 1 AVX2. */
EXPORT void baton_argmax(const char *numbers, const int64_t *rows, int64_t *places, int64_t count, int64_t size,
                         int64_t dtype, int threads, int level) {
    struct search search = {numbers, rows, places, size, dtype, count, 0, level};
    baton_parallel(take_rows, &search, threads, count);
}
