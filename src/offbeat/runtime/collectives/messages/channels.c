/* Point-to-point messages between the processes of one host, through rings in shared memory.
 *
 * Each ordered pair of ranks has a channel: a ring of slots that the sender fills and the receiver empties, in order. A
 * message longer than a slot goes in pieces, on which both work at once. A receiver matches messages by source and tag; one that nobody waits for yet is set aside. Whoever waits makes
 * progress on everything this process has begun, so that two ranks may send to each other before either receives.
 * channels.py lays the memory out, keeps tensors alive, and checks for dead peers when a wait returns LATE.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../streaming.h"
#include "../waiting.h"

#define VERSION 2
enum { LINE = 64, MOST_PER_VISIT = 64, LONG = 8 << 20 };
enum { DONE, LATE, WRONG_SIZE };        /* what a wait returns */
enum { QUEUED, POSTED, OVER, MISFIT }; /* states of an operation */

typedef struct {
    int64_t more, tag;    /* whether it continues the message of the slot before */
    uint64_t whole, here; /* bytes of the message, and in this slot */
    int64_t mark;         /* a word from the sender */
    char pad[LINE - 40];
    char data[];
} slot_t;

/* A channel's memory: slots filled and emptied so far, each written by one side, in a cache line of its own. */
typedef struct {
    _Atomic uint64_t head;
    _Atomic int64_t full; /* whether the sender has more and found no room */
    char pad0[LINE - 16];
    _Atomic uint64_t tail;
    char pad1[LINE - 8];
} channel_t;

/* How others wake a process: one semaphore for those who wait in it, one for its background thread. */
typedef struct {
    sem_t waiting, helping;
    _Atomic int64_t sleepers;
    char pad[LINE];
} bell_t;

typedef struct op {
    struct op *next;
    int64_t sends, peer, tag, mark, state;
    char *address;
    uint64_t bytes, moved;
    int64_t source; /* of a finished receive */
    uint64_t arrived; /* bytes of the message that came */
} op_t;

/* A message that arrived before anybody wanted it. */
typedef struct stray {
    struct stray *next;
    int64_t tag, mark;
    uint64_t bytes, moved;
    char data[];
} stray_t;

_Static_assert(sizeof(bell_t) <= 256 && sizeof(channel_t) == 128 && sizeof(slot_t) == 64, "as in channels.py");

typedef struct {
    op_t *queue, **queue_end; /* sends that found no room */
    stray_t *strays, **strays_end;
    op_t *stream;        /* receive that pieces go to, */
    stray_t *aside;      /* or the stray they go to */
} peer_t;

typedef struct {
    int64_t rank, ranks, slots, inline_bytes, slot_bytes, channel_bytes, closing;
    int64_t tries, yields, starved, naps, sleepy;
    char *channels;
    bell_t *bells;
    pthread_mutex_t lock;
    op_t *posted, **posted_end;
    peer_t peers[];
} mail_t;

int64_t offbeat_mail_version(void) { return VERSION; }

static channel_t *channel(mail_t *mail, int64_t from, int64_t to) {
    return (channel_t *)(mail->channels + (from * mail->ranks + to) * mail->channel_bytes);
}

static slot_t *slot_at(mail_t *mail, channel_t *way, uint64_t number) {
    return (slot_t *)((char *)(way + 1) + (number % (uint64_t)mail->slots) * mail->slot_bytes);
}

/* Wake those who wait in another process. What they wait for was stored before. */
static void ring(mail_t *mail, int64_t peer) {
    bell_t *bell = mail->bells + peer;
    atomic_thread_fence(memory_order_seq_cst);
    for (int64_t i = atomic_load_explicit(&bell->sleepers, memory_order_relaxed); i > 0; i--) sem_post(&bell->waiting);
}

/* -- sending ----------------------------------------------------------------------------------------------------- */

/* Fill slots with as much of a send as there is room for. Whether all of it is on its way. */
static int publish(mail_t *mail, op_t *op) {
    channel_t *way = channel(mail, mail->rank, op->peer);
    uint64_t head = atomic_load_explicit(&way->head, memory_order_relaxed);
    int begun = 0;
    for (;;) {
        if (head - atomic_load_explicit(&way->tail, memory_order_acquire) >= (uint64_t)mail->slots) break;
        slot_t *slot = slot_at(mail, way, head);
        uint64_t left = op->bytes - op->moved;
        slot->more = begun || op->moved, slot->tag = op->tag, slot->mark = op->mark, slot->whole = op->bytes;
        slot->here = left < (uint64_t)mail->inline_bytes ? left : (uint64_t)mail->inline_bytes;
        memcpy(slot->data, op->address + op->moved, slot->here);
        op->moved += slot->here;
        atomic_store_explicit(&way->head, ++head, memory_order_release);
        begun = 1;
        if (op->moved == op->bytes) {
            op->state = OVER;
            break;
        }
        ring(mail, op->peer);
    }
    if (begun) ring(mail, op->peer);
    return op->state == OVER;
}

static void flush(mail_t *mail, int64_t to) {
    peer_t *peer = mail->peers + to;
    while (peer->queue && publish(mail, peer->queue)) {
        op_t *sent = peer->queue;
        if (!(peer->queue = sent->next)) peer->queue_end = &peer->queue;
        sent->next = NULL;
    }
    if (!peer->queue) atomic_store_explicit(&channel(mail, mail->rank, to)->full, 0, memory_order_relaxed);
}

/* -- receiving --------------------------------------------------------------------------------------------------- */

static void finish(op_t *op, int64_t source, uint64_t bytes) {
    op->source = source, op->arrived = bytes;
    op->state = bytes == op->bytes ? OVER : MISFIT;
}

/* The first posted receive for a message; it is no longer posted then. */
static op_t *wanted(mail_t *mail, int64_t from, int64_t tag) {
    for (op_t **at = &mail->posted; *at; at = &(*at)->next) {
        op_t *op = *at;
        if ((op->peer != from && op->peer >= 0) || op->tag != tag) continue;
        if (!(*at = op->next)) mail->posted_end = at;
        op->next = NULL;
        return op;
    }
    return NULL;
}

static stray_t *set_aside(peer_t *peer, slot_t *slot) {
    stray_t *stray = malloc(sizeof *stray + slot->whole);
    if (!stray) return NULL;
    *stray = (stray_t){NULL, slot->tag, slot->mark, slot->whole, 0};
    *peer->strays_end = stray, peer->strays_end = &stray->next;
    return stray;
}

/* Put a slot's data where it belongs. Whether the slot is free again. */
static int consume(mail_t *mail, int64_t from, slot_t *slot) {
    peer_t *peer = mail->peers + from;
    if (!slot->more) {
        op_t *op = wanted(mail, from, slot->tag);
        peer->stream = op;
        peer->aside = NULL;
        if (!op && !(peer->aside = set_aside(peer, slot))) return 0;
        if (op) op->moved = 0, op->mark = slot->mark;
    }
    op_t *op = peer->stream;
    if (op) {
        uint64_t room = op->bytes > op->moved ? op->bytes - op->moved : 0;
        uint64_t fits = slot->here < room ? slot->here : room;
        if (slot->whole >= LONG) stream_copy(op->address + op->moved, slot->data, fits);
        else memcpy(op->address + op->moved, slot->data, fits);
        op->moved += slot->here;
        if (op->moved == slot->whole) finish(op, from, slot->whole), peer->stream = NULL;
    } else if (peer->aside) {
        memcpy(peer->aside->data + peer->aside->moved, slot->data, slot->here);
        peer->aside->moved += slot->here;
        if (peer->aside->moved == slot->whole) peer->aside = NULL;
    }
    return 1;
}

/* A message that was set aside for this receive, or none. A stray that is still arriving is taken over. */
static int from_strays(mail_t *mail, op_t *op, int64_t from) {
    peer_t *peer = mail->peers + from;
    for (stray_t **at = &peer->strays; *at; at = &(*at)->next) {
        stray_t *stray = *at;
        if (stray->tag != op->tag) continue;
        if (!(*at = stray->next)) peer->strays_end = at;
        memcpy(op->address, stray->data, stray->moved < op->bytes ? stray->moved : op->bytes);
        op->moved = stray->moved, op->mark = stray->mark;
        if (stray == peer->aside) peer->aside = NULL, peer->stream = op;
        else finish(op, from, stray->bytes);
        free(stray);
        return 1;
    }
    return 0;
}

static void match_strays(mail_t *mail) {
    for (op_t **at = &mail->posted; *at;) {
        op_t *op = *at, *next = op->next;
        int64_t first = op->peer < 0 ? 0 : op->peer, last = op->peer < 0 ? mail->ranks - 1 : op->peer;
        int64_t from = first;
        while (from <= last && !(mail->peers[from].strays && from_strays(mail, op, from))) from++;
        if (from > last) {
            at = &op->next;
            continue;
        }
        if (!(*at = next)) mail->posted_end = at;
        op->next = NULL;
    }
}

static void drain(mail_t *mail, int64_t from) {
    channel_t *way = channel(mail, from, mail->rank);
    uint64_t tail = atomic_load_explicit(&way->tail, memory_order_relaxed);
    int was_full = 0;
    for (int i = 0; i < MOST_PER_VISIT; i++) {
        uint64_t head = atomic_load_explicit(&way->head, memory_order_acquire);
        if (head == tail) break;
        if (head - tail >= (uint64_t)mail->slots) was_full = 1;
        if (!consume(mail, from, slot_at(mail, way, tail))) break;
        atomic_store_explicit(&way->tail, ++tail, memory_order_release);
        if (was_full) ring(mail, from);
    }
    /* The rest of a long message would otherwise wait until its sender has computed what it computes. */
    bell_t *bell = mail->bells + from;
    if (was_full && atomic_load_explicit(&way->full, memory_order_relaxed) &&
        !atomic_load_explicit(&bell->sleepers, memory_order_relaxed))
        sem_post(&bell->helping);
}

/* Everything that can be done now, for all that this process has begun. The caller holds the lock. */
static void progress(mail_t *mail) {
    for (int64_t peer = 0; peer < mail->ranks; peer++) {
        if (mail->peers[peer].queue) flush(mail, peer);
        drain(mail, peer);
    }
}

/* -- calls ------------------------------------------------------------------------------------------------------- */

static int over(mail_t *mail, op_t *op) {
    pthread_mutex_lock(&mail->lock);
    if (op->state < OVER) progress(mail);
    int done = op->state >= OVER;
    pthread_mutex_unlock(&mail->lock);
    return done;
}

static int64_t outcome(op_t *op) { return op->state == OVER ? DONE : WRONG_SIZE; }

/* Begin a send. Returns 0 if it is over, otherwise the operation. */
op_t *offbeat_mail_send(mail_t *mail, int64_t to, int64_t tag, char *address, uint64_t bytes, int64_t mark) {
    op_t own = {.sends = 1, .peer = to, .tag = tag, .mark = mark, .state = QUEUED, .address = address, .bytes = bytes}, *op = NULL;
    peer_t *peer = mail->peers + to;
    pthread_mutex_lock(&mail->lock);
    if (!peer->queue) publish(mail, &own);
    if (own.state != OVER && (op = malloc(sizeof *op))) {
        *op = own;
        *peer->queue_end = op, peer->queue_end = &op->next;
        atomic_store(&channel(mail, mail->rank, to)->full, 1);
        flush(mail, to); /* The receiver may have made room without seeing this. */
    }
    pthread_mutex_unlock(&mail->lock);
    return op;
}

/* Begin a receive; `from` -1: from any rank. Returns 0 if it is over, as long as expected and unmarked; otherwise the
 * operation. */
op_t *offbeat_mail_receive(mail_t *mail, int64_t from, int64_t tag, char *address, uint64_t bytes) {
    op_t *op = calloc(1, sizeof *op);
    if (!op) return NULL;
    op->peer = from, op->tag = tag, op->state = POSTED, op->address = address, op->bytes = bytes;
    pthread_mutex_lock(&mail->lock);
    *mail->posted_end = op, mail->posted_end = &op->next;
    match_strays(mail);
    if (op->state < OVER) progress(mail);
    int done = op->state == OVER && from >= 0 && !op->mark;
    pthread_mutex_unlock(&mail->lock);
    if (done) free(op), op = NULL;
    return op;
}

/* Wait for an operation, for `slice` nanoseconds at most. LATE: it is not over yet. */
int64_t offbeat_mail_wait(mail_t *mail, op_t *op, int64_t slice) {
    bell_t *bell = mail->bells + mail->rank;
    if (mail->sleepy > 0) {
        mail->sleepy--;
    } else {
        for (int64_t i = 0; i < mail->tries; i++) {
            if (over(mail, op)) return outcome(op);
            rest();
        }
        int64_t before = now();
        for (int64_t i = 0; i < mail->yields; i++) {
            sched_yield();
            if (over(mail, op)) {
                mail->naps = 0;
                return outcome(op);
            }
            int64_t after = now();
            if (after - before > mail->starved) {
                mail->naps = mail->naps ? (mail->naps < 128 ? 2 * mail->naps : 256) : 4;
                mail->sleepy = mail->naps;
                break;
            }
            before = after;
        }
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    int64_t end = until.tv_nsec + slice;
    until.tv_sec += end / 1000000000LL, until.tv_nsec = end % 1000000000LL;
    atomic_fetch_add(&bell->sleepers, 1);
    int woken = 1, done = 0;
    while (!(done = over(mail, op)) && woken) woken = sem_timedwait(&bell->waiting, &until) == 0 || errno == EINTR;
    atomic_fetch_sub(&bell->sleepers, 1);
    return done ? outcome(op) : LATE;
}

/* Whether an operation is over; makes progress. */
int64_t offbeat_mail_test(mail_t *mail, op_t *op) { return over(mail, op); }

static void remove_from(op_t **first, op_t ***end, op_t *op) {
    for (op_t **at = first; *at; at = &(*at)->next)
        if (*at == op) {
            if (!(*at = op->next)) *end = at;
            return;
        }
}

/* Forget an operation, finished or not. */
void offbeat_mail_free(mail_t *mail, op_t *op) {
    pthread_mutex_lock(&mail->lock);
    remove_from(&mail->posted, &mail->posted_end, op);
    for (int64_t i = 0; i < mail->ranks; i++) {
        peer_t *peer = mail->peers + i;
        remove_from(&peer->queue, &peer->queue_end, op);
        if (peer->stream == op) peer->stream = NULL;
    }
    pthread_mutex_unlock(&mail->lock);
    free(op);
}

/* Ask another process to make progress, although nobody may be waiting there. */
void offbeat_mail_nudge(mail_t *mail, int64_t peer) { sem_post(&mail->bells[peer].helping); }

/* For a background thread: make progress whenever somebody asks for it, until the mail is closed. */
void offbeat_mail_help(mail_t *mail) {
    bell_t *bell = mail->bells + mail->rank;
    for (;;) {
        while (sem_wait(&bell->helping) != 0) {}
        pthread_mutex_lock(&mail->lock);
        int64_t closing = mail->closing;
        if (!closing) progress(mail);
        pthread_mutex_unlock(&mail->lock);
        if (closing) return;
    }
}

void offbeat_mail_close(mail_t *mail) {
    pthread_mutex_lock(&mail->lock);
    mail->closing = 1;
    pthread_mutex_unlock(&mail->lock);
    sem_post(&mail->bells[mail->rank].helping);
}

/* -- set-up ------------------------------------------------------------------------------------------------------ */

/* Prepare the shared memory; once, by the process that made it. It is all zeros. */
void offbeat_mail_lay_out(char *memory, int64_t ranks) {
    bell_t *bells = (bell_t *)memory;
    for (int64_t rank = 0; rank < ranks; rank++) {
        sem_init(&bells[rank].waiting, 1, 0);
        sem_init(&bells[rank].helping, 1, 0);
    }
}

mail_t *offbeat_mail_open(char *memory, int64_t rank, int64_t ranks, int64_t slots, int64_t inline_bytes, int64_t tries, int64_t yields, int64_t starved) {
    mail_t *mail = calloc(1, sizeof *mail + ranks * sizeof(peer_t));
    if (!mail) return NULL;
    mail->rank = rank, mail->ranks = ranks, mail->slots = slots, mail->inline_bytes = inline_bytes;
    mail->slot_bytes = sizeof(slot_t) + inline_bytes;
    mail->channel_bytes = sizeof(channel_t) + slots * mail->slot_bytes;
    mail->tries = tries, mail->yields = yields, mail->starved = starved;
    mail->bells = (bell_t *)memory, mail->channels = memory + ranks * sizeof(bell_t);
    pthread_mutex_init(&mail->lock, NULL);
    mail->posted_end = &mail->posted;
    for (int64_t i = 0; i < ranks; i++) {
        mail->peers[i].queue_end = &mail->peers[i].queue;
        mail->peers[i].strays_end = &mail->peers[i].strays;
    }
    return mail;
}

/* The sender of a finished receive, its mark, and the bytes that came. */
int64_t offbeat_mail_source(op_t *op) { return op->source; }
int64_t offbeat_mail_mark(op_t *op) { return op->mark; }
uint64_t offbeat_mail_arrived(op_t *op) { return op->arrived; }

/* Free everything of this process; the shared memory stays. Nobody may be in a call. */
void offbeat_mail_free_all(mail_t *mail) {
    for (int64_t i = 0; i < mail->ranks; i++)
        for (stray_t *stray = mail->peers[i].strays, *next; stray; stray = next) next = stray->next, free(stray);
    pthread_mutex_destroy(&mail->lock);
    free(mail);
}
