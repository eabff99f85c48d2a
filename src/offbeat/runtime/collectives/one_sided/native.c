/* Runs compiled one-sided schedules: copies, sums and signals, without the interpreter in between.
 *
 * Everything here can be done by interpret.py as well, more slowly; native.py says when this is used. It knows nothing
 * of schedules: it runs a list of steps, and returns early when a rank is late, so that the caller can check whether
 * that rank is still alive, and continue.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "../streaming.h"
#include "../waiting.h"

#define VERSION 7

/* x86 has several vector widths; the widest available one is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define WIDE
#endif

enum { POST, TAKE, COPY, ADD, SCALE, BLEND, DIVIDE, SPREAD, STREAM, WEIGH, TERM };
enum { FLOAT32, FLOAT64, INT32, INT64 };
enum { DONE, LATE, DIFFERENT, UNKNOWN };

/* A place has the number of a base in its upper 16 bits, and an offset in bytes in the others. */
typedef struct {
    int64_t op, kind, out, a, b, count;
    double number; /* a divisor or a weight */
} step_t;

/* One rank's view of its arena: the board, signals to and from each of the others, and how it waits. */
typedef struct {
    int64_t rank, ranks;
    int64_t *counts; /* operations, single stages, and slots of the ring so far */
    volatile int64_t *board;
    sem_t **posts, **takes;
    int64_t tries, yields, starved, fewest_naps, most_naps, slice;
    int64_t sleepy, naps;
    volatile int64_t *cores; /* of each rank, as last seen, counted from 1; 0: not seen yet */
    int64_t settled;         /* when this rank last looked for a less loaded one */
} arena_t;

/* An operation and its progress: the next step, and how many of the others have signalled in it. */
typedef struct {
    arena_t *arena;
    const step_t *steps;
    int64_t count;
    char **bases;
    int64_t mark;
    double weight; /* of this rank's numbers */
    int64_t at, taken, checked;
    volatile int64_t *marks;
} task_t;

/* An operation for each of the slots at which it may start; the arena's counter says which is next. */
typedef struct {
    arena_t *arena;
    int64_t counter, turns, advance, turn;
    task_t **tasks;
} turns_t;

static const int64_t SIZES[] = {4, 8, 4, 8};

int64_t offbeat_version(void) { return VERSION; }

/* Publish the core that this rank is on. */
static void appear(arena_t *arena) {
    int64_t core = sched_getcpu() + 1;
    if (arena->cores[arena->rank] != core) arena->cores[arena->rank] = core;
}

/* Move to another core if that has two ranks fewer than this one. Waiting ranks look busy to the scheduler, which would
 * leave three of four on one of two cores. Of the ranks on a core the last one moves; its affinity stays as it was. */
static void settle(arena_t *arena, int64_t moment) {
    enum { OFTEN = 1000000 }; /* nanoseconds */
    cpu_set_t allowed, there;
    int64_t mine = arena->cores[arena->rank], beside = 0, best = -1, fewest = 0;
    if (moment - arena->settled < OFTEN) return;
    for (int64_t rank = 0; rank < arena->ranks; rank++) beside += arena->cores[rank] == mine;
    for (int64_t rank = arena->rank + 1; rank < arena->ranks; rank++)
        if (arena->cores[rank] == mine) return;
    if (beside < 2) return;
    arena->settled = moment;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int64_t core = 0; core < CPU_SETSIZE; core++) {
        int64_t ranks = 0;
        if (!CPU_ISSET(core, &allowed)) continue;
        for (int64_t rank = 0; rank < arena->ranks; rank++) ranks += arena->cores[rank] == core + 1;
        if (best < 0 || ranks < fewest) best = core, fewest = ranks;
    }
    if (best < 0 || beside - fewest < 2) return;
    CPU_ZERO(&there);
    CPU_SET(best, &there);
    if (sched_setaffinity(0, sizeof there, &there) != 0) return;
    appear(arena);
    sched_setaffinity(0, sizeof allowed, &allowed);
}

/* Whether a signal arrived within a few yields. */
static int came_soon(arena_t *arena, sem_t *signal) {
    if (arena->sleepy) {
        arena->sleepy--;
        return 0;
    }
    for (int64_t i = 0; i < arena->tries; i++) {
        if (sem_trywait(signal) == 0) return 1;
        rest();
    }
    int64_t before = now();
    settle(arena, before);
    for (int64_t i = 0; i < arena->yields; i++) {
        sched_yield();
        int there = sem_trywait(signal) == 0;
        int64_t after = now();
        if (after - before > arena->starved) {
            int64_t more = 2 * arena->naps;
            arena->naps = more < arena->fewest_naps ? arena->fewest_naps : more > arena->most_naps ? arena->most_naps : more;
            arena->sleepy = arena->naps;
            return there;
        }
        if (there) {
            arena->naps = 0;
            return 1;
        }
        before = after;
    }
    return 0;
}

static int came(arena_t *arena, sem_t *signal) {
    if (sem_trywait(signal) == 0 || came_soon(arena, signal)) return 1;
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t end = until.tv_nsec + arena->slice;
    until.tv_sec += end / 1000000000LL;
    until.tv_nsec = end % 1000000000LL;
    return sem_timedwait(signal, &until) == 0;
}

/* An iteration reads and writes its own elements only, so that a row may be added to itself. */
#define EACH _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++)
#define SUM(T, NAME)                                                                                      \
    WIDE static void add_##NAME(T *out, const T *a, const T *b, int64_t n) { EACH out[i] = a[i] + b[i]; } \
    WIDE static void both_##NAME(T *a, T *b, int64_t n) { EACH a[i] = b[i] = a[i] + b[i]; }
#define WEIGHTED(T, NAME)                                                                  \
    WIDE static void scale_##NAME(T *out, const T *a, T factor, int64_t n) {               \
        EACH out[i] = a[i] * factor;                                                       \
    }                                                                                      \
    WIDE static void blend_##NAME(T *out, const T *a, const T *b, T factor, int64_t n) {   \
        EACH out[i] = a[i] + b[i] * factor;                                                \
    }                                                                                      \
    WIDE static void divide_##NAME(T *out, T by, int64_t n) { EACH out[i] = out[i] / by; }

SUM(float, f32)
SUM(double, f64)
/* Integers wrap around on overflow, which C guarantees for unsigned ones only. */
SUM(uint32_t, i32)
SUM(uint64_t, i64)
WEIGHTED(float, f32)
WEIGHTED(double, f64)

static void add(int64_t kind, void *out, const void *a, const void *b, int64_t n) {
    switch (kind) {
        case FLOAT32: add_f32(out, a, b, n); break;
        case FLOAT64: add_f64(out, a, b, n); break;
        case INT32: add_i32(out, a, b, n); break;
        default: add_i64(out, a, b, n);
    }
}

/* Two rows both get their sum. */
static void both(int64_t kind, void *a, void *b, int64_t n) {
    switch (kind) {
        case FLOAT32: both_f32(a, b, n); break;
        case FLOAT64: both_f64(a, b, n); break;
        case INT32: both_i32(a, b, n); break;
        default: both_i64(a, b, n);
    }
}

static void scale(int64_t kind, void *out, const void *a, double factor, int64_t n) {
    if (kind == FLOAT32) scale_f32(out, a, (float)factor, n);
    else scale_f64(out, a, factor, n);
}

static void blend(int64_t kind, void *out, const void *a, const void *b, double factor, int64_t n) {
    if (kind == FLOAT32) blend_f32(out, a, b, (float)factor, n);
    else blend_f64(out, a, b, factor, n);
}

static void divide(int64_t kind, void *out, double by, int64_t n) {
    if (kind == FLOAT32) divide_f32(out, (float)by, n);
    else divide_f64(out, by, n);
}

/* Rows of several ranks, one per base, are summed in order, and all get the sum. */
static void spread(const step_t *step, char **bases) {
    enum { PIECE = 1024 }; /* Many libraries copy longer pieces by an instruction that is slow to start. */
    char sum[PIECE] __attribute__((aligned(64)));
    int64_t width = SIZES[step->kind], ranks = step->b, bytes = step->count * width;
    char **rows = bases + step->a;
    if (ranks == 2 && step->number == 0.0) {
        both(step->kind, rows[0] + step->out, rows[1] + step->out, step->count);
        return;
    }
    for (int64_t at = 0; at < bytes; at += PIECE) {
        int64_t here = bytes - at < PIECE ? bytes - at : PIECE, offset = step->out + at;
        add(step->kind, sum, rows[0] + offset, rows[1] + offset, here / width);
        for (int64_t rank = 2; rank < ranks; rank++) add(step->kind, sum, sum, rows[rank] + offset, here / width);
        if (step->number != 0.0) divide(step->kind, sum, step->number, here / width);
        for (int64_t rank = 0; rank < ranks; rank++) memcpy(rows[rank] + offset, sum, here);
    }
}

#define PLACE(x) (bases[(x) >> 48] + ((x) & 0xffffffffffffLL))

/* A row times a weight, plus other rows times theirs, which the following steps have; piece by piece in the nearest
 * cache, so that every row is read once. */
static void weigh(const step_t *step, char **bases) {
    enum { PIECE = 8192 };
    int64_t width = SIZES[step->kind], bytes = step->count * width;
    for (int64_t at = 0; at < bytes; at += PIECE) {
        int64_t count = (bytes - at < PIECE ? bytes - at : PIECE) / width;
        char *out = PLACE(step->out) + at;
        scale(step->kind, out, PLACE(step->a) + at, step->number, count);
        for (int64_t term = 1; term <= step->b; term++)
            blend(step->kind, out, out, PLACE(step[term].a) + at, step[term].number, count);
    }
}

static int all_came(arena_t *arena, task_t *task) {
    for (; task->taken < arena->ranks - 1; task->taken++)
        if (!came(arena, arena->takes[task->taken])) return 0;
    task->taken = 0;
    return 1;
}

/* Whether all ranks came with the same operation. */
static int alike(task_t *task) {
    task->checked = 1;
    for (int64_t rank = 0; rank < task->arena->ranks; rank++)
        if (task->marks[2 * rank + 1] != task->mark) return 0;
    return 1;
}

/* Run the remaining steps. LATE: the peer of number `task->taken` has not signalled; call again to continue. */
int64_t offbeat_go_on(task_t *task) {
    char **bases = task->bases;
    for (; task->at < task->count; task->at++) {
        const step_t *step = task->steps + task->at;
        switch (step->op) {
            case POST:
                for (int64_t other = 0; other < task->arena->ranks - 1; other++) sem_post(task->arena->posts[other]);
                break;
            case TAKE:
                if (!all_came(task->arena, task)) return LATE;
                if (!task->checked && !alike(task)) return DIFFERENT;
                break;
            case COPY: memcpy(PLACE(step->out), PLACE(step->a), step->count); break;
            case ADD: add(step->kind, PLACE(step->out), PLACE(step->a), PLACE(step->b), step->count); break;
            case SCALE: scale(step->kind, PLACE(step->out), PLACE(step->a), task->weight, step->count); break;
            case BLEND:
                blend(step->kind, PLACE(step->out), PLACE(step->a), PLACE(step->b), task->weight, step->count);
                break;
            case DIVIDE: divide(step->kind, PLACE(step->out), step->number, step->count); break;
            case STREAM: stream_copy(PLACE(step->out), PLACE(step->a), step->count); break;
            case WEIGH:
                weigh(step, bases);
                task->at += step->b;
                break;
            default: spread(step, bases);
        }
    }
    return DONE;
}

/* Start the arena's next operation, with its first bases at these addresses. UNKNOWN: it was not compiled for the next
 * slot, and nothing is done. */
int64_t offbeat_start(turns_t *turns, char *const *addresses, int64_t given) {
    arena_t *arena = turns->arena;
    int64_t *count = arena->counts + turns->counter;
    task_t *task = turns->tasks[turns->turn = *count % turns->turns];
    if (!task) return UNKNOWN;
    *count += turns->advance;
    int64_t calls = ++arena->counts[0];
    appear(arena);
    for (int64_t i = 0; i < given; i++) task->bases[i] = addresses[i];
    task->marks = arena->board + (calls & 1) * arena->ranks * 2;
    task->marks[2 * arena->rank + 1] = task->mark;
    task->marks[2 * arena->rank] = calls;
    task->at = task->taken = task->checked = 0;
    return offbeat_go_on(task);
}
