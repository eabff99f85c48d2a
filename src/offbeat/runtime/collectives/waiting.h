/* What waiting needs: a clock, and a pause between two tries. */
#ifndef OFFBEAT_WAITING_H
#define OFFBEAT_WAITING_H
#include <stdint.h>
#include <time.h>

static inline int64_t now(void) {
    struct timespec moment;
    clock_gettime(CLOCK_MONOTONIC, &moment);
    return moment.tv_sec * 1000000000LL + moment.tv_nsec;
}

static inline void rest(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#endif
