/* Whether matrix tiles may be used; see linear.h. */
#include "linear.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

int baton_has_amx(void) {
    enum { UNKNOWN, NO, YES };
    static int known;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (found == UNKNOWN) {
        int able = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                   __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("avx512bf16");
        found = able && !syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? YES : NO;
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == YES;
}
#else
int baton_has_amx(void) { return 0; }
#endif
