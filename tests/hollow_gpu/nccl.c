// NCCL by files in /dev/shm: what is sent is written there at once, what is received is waited for. Sizes are compared.
#define _GNU_SOURCE
#include <nccl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

struct ncclComm { char name[64]; int rank, ranks, splits; volatile int aborted; long *sent, *got; };
typedef struct { ncclComm_t comm; int peer; void *data; size_t bytes; } Message;
static __thread Message waiting[4096], left[4096];  // `bytes` of what has left is its number
static __thread int count, leaving, depth;

static const char *folder(void) {
    const char *f = getenv("HOLLOW_MESSAGES");
    return f ? f : "/dev/shm";
}
static void path(char *to, ncclComm_t c, int from, int into, long n) {
    snprintf(to, 256, "%s/%s_%d_%d_%ld", folder(), c->name, from, into, n);
}
static void note(const char *what, ncclComm_t c, int peer, size_t bytes) {
    const char *log = getenv("HOLLOW_NCCL");
    if (!log) return;
    FILE *f = fopen(log, "a");
    fprintf(f, "%s %s %d %d %zu\n", c->name, what, c->rank, peer, bytes);
    fclose(f);
}

static void give(ncclComm_t c, int peer, const void *data, size_t bytes) {
    char to[256], draft[280];
    path(to, c, c->rank, peer, c->sent[peer]++);
    snprintf(draft, sizeof draft, "%s.%d", to, getpid());
    FILE *f = fopen(draft, "w");
    if (!f) { mkdir(folder(), 0777); f = fopen(draft, "w"); }
    if (!f || fwrite(data, 1, bytes, f) != bytes) { perror("hollow NCCL"); abort(); }
    fclose(f);
    rename(draft, to);
}

static ncclResult_t take(ncclComm_t c, int peer, void *data, size_t bytes) {
    char from[256];
    struct stat st;
    path(from, c, peer, c->rank, c->got[peer]++);
    for (int i = 0; stat(from, &st); i++) {
        if (c->aborted) return ncclInternalError;
        usleep(i < 200 ? 20 : 500);
    }
    if ((size_t)st.st_size != bytes) {
        fprintf(stderr, "hollow NCCL: rank %d sent rank %d %zu bytes, who expects %zu (%s)\n", peer, c->rank, (size_t)st.st_size, bytes, c->name);
        abort();
    }
    FILE *f = fopen(from, "r");
    if (fread(data, 1, bytes, f) != bytes) abort();
    fclose(f);
    unlink(from);
    return ncclSuccess;
}

// ---- communicators
static ncclResult_t make(ncclComm_t *to, const char *name, int rank, int ranks) {
    ncclComm_t c = calloc(1, sizeof *c);
    snprintf(c->name, sizeof c->name, "%s", name);
    c->rank = rank, c->ranks = ranks;
    c->sent = calloc(ranks, sizeof(long)), c->got = calloc(ranks, sizeof(long));
    *to = c;
    return ncclSuccess;
}
ncclResult_t ncclGetVersion(int *v) { *v = NCCL_VERSION_CODE; return ncclSuccess; }
ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { memset(id, 0, sizeof *id); return getrandom(id, 16, 0) == 16 ? ncclSuccess : ncclSystemError; }
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId id, int rank, ncclConfig_t *config) {
    (void)config;
    char name[33];
    for (int i = 0; i < 16; i++) sprintf(name + 2 * i, "%02x", (unsigned char)id.internal[i]);
    ncclResult_t made = make(c, name, rank, n);
    for (int r = 0; r < n; r++) if (r != rank) give(*c, r, "", 0);  // all must come
    for (int r = 0; r < n; r++) if (r != rank) take(*c, r, name, 0);
    return made;
}
ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(c, n, id, rank, NULL); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int rank, int ids, ncclUniqueId *id, ncclConfig_t *config) { (void)ids; return ncclCommInitRankConfig(c, n, *id, rank, config); }
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *to, ncclConfig_t *config) {
    (void)config;
    int own[2] = {color, key}, others[2], rank = 0, ranks = 0;
    for (int r = 0; r < c->ranks; r++) if (r != c->rank) give(c, r, own, sizeof own);
    for (int r = 0; r < c->ranks; r++) {
        memcpy(others, own, sizeof own);
        if (r != c->rank) take(c, r, others, sizeof others);
        if (others[0] != color) continue;
        ranks++;
        rank += others[1] < key || (others[1] == key && r < c->rank);
    }
    int split = c->splits++;
    if (color < 0) { *to = NULL; return ncclSuccess; }
    char name[64];
    snprintf(name, sizeof name, "%.40s.%d.%d", c->name, split, color);
    return make(to, name, rank, ranks);
}
ncclResult_t ncclCommAbort(ncclComm_t c) { if (c) c->aborted = 1; return ncclSuccess; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) { (void)c; *e = ncclSuccess; return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = c->ranks; return ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *r) { *r = c->rank; return ncclSuccess; }
const char *ncclGetErrorString(ncclResult_t e) { return e ? "a hollow NCCL's error" : "no error"; }
const char *ncclGetLastError(ncclComm_t c) { (void)c; return ""; }
ncclResult_t ncclMemAlloc(void **p, size_t n) { *p = malloc(n); return ncclSuccess; }
ncclResult_t ncclMemFree(void *p) { free(p); return ncclSuccess; }

// ---- numbers
static size_t size_of(ncclDataType_t t) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return sizes[t];
}
static double bf16(uint16_t v) { uint32_t b = (uint32_t)v << 16; float f; memcpy(&f, &b, 4); return f; }
static uint16_t to_bf16(float f) {
    uint32_t b;
    memcpy(&b, &f, 4);
    return f != f ? 0x7fc0 : (uint16_t)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
static double premultiplied[64];
static int custom;
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t t, ncclScalarResidence_t where, ncclComm_t c) {
    (void)where; (void)c;
    double v = t == ncclFloat64 ? *(double *)scalar : t == ncclFloat32 ? *(float *)scalar : t == ncclBfloat16 ? bf16(*(uint16_t *)scalar) : (double)*(_Float16 *)scalar;
    premultiplied[custom % 64] = v;
    *op = ncclNumOps + custom++ % 64;
    return ncclSuccess;
}
#define REDUCE(T, LOAD, STORE) \
    for (size_t i = 0; i < n; i++) { \
        double a = LOAD(((const T *)parts[0])[i]); \
        int64_t whole = (int64_t)((const T *)parts[0])[i]; \
        if (op >= ncclNumOps) a *= premultiplied[op - ncclNumOps]; \
        for (int r = 1; r < ranks; r++) { \
            double b = LOAD(((const T *)parts[r])[i]); \
            int64_t other = (int64_t)((const T *)parts[r])[i]; \
            if (op >= ncclNumOps) a += b * premultiplied[op - ncclNumOps]; \
            else switch (op) { \
                case ncclSum: case ncclAvg: a += b; whole += other; break; \
                case ncclProd: a *= b; whole *= other; break; \
                case ncclMax: a = a > b ? a : b; whole = whole > other ? whole : other; break; \
                default: a = a < b ? a : b; whole = whole < other ? whole : other; \
            } \
        } \
        if (op == ncclAvg) a /= ranks, whole /= ranks; \
        ((T *)to)[i] = t <= ncclUint64 ? (T)whole : (T)STORE(a); \
    } \
    break
#define SAME(x) (x)
static void reduce(void *to, void **parts, int ranks, size_t n, ncclDataType_t t, int op) {
    switch (t) {
    case ncclInt8: REDUCE(int8_t, SAME, SAME);
    case ncclUint8: REDUCE(uint8_t, SAME, SAME);
    case ncclInt32: REDUCE(int32_t, SAME, SAME);
    case ncclUint32: REDUCE(uint32_t, SAME, SAME);
    case ncclInt64: REDUCE(int64_t, SAME, SAME);
    case ncclUint64: REDUCE(uint64_t, SAME, SAME);
    case ncclFloat16: REDUCE(_Float16, SAME, SAME);
    case ncclFloat32: REDUCE(float, SAME, SAME);
    case ncclFloat64: REDUCE(double, SAME, SAME);
    case ncclBfloat16: REDUCE(uint16_t, bf16, to_bf16);
    default: abort();
    }
}

// Whether what was sent before has been taken; with HOLLOW_MEETING=1 a send waits for that, as one larger than NCCL's
// buffers does, so that ranks that send each other in another order hang.
static ncclResult_t met(ncclComm_t c, int peer, long n) {
    char to[256];
    struct stat st;
    path(to, c, c->rank, peer, n);
    while (getenv("HOLLOW_MEETING") && !stat(to, &st)) {
        if (c->aborted) return ncclInternalError;
        usleep(50);
    }
    return ncclSuccess;
}

// ---- calls; in a group messages wait until it ends
ncclResult_t ncclGroupStart(void) { depth++; return ncclSuccess; }
ncclResult_t ncclGroupEnd(void) {
    if (--depth) return ncclSuccess;
    ncclResult_t all = ncclSuccess;
    for (int i = 0; i < count; i++) {
        ncclResult_t r = take(waiting[i].comm, waiting[i].peer, waiting[i].data, waiting[i].bytes);
        if (r) all = r;
    }
    for (int i = 0; i < leaving; i++) met(left[i].comm, left[i].peer, left[i].bytes);
    count = leaving = 0;
    return all;
}
ncclResult_t ncclSend(const void *p, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    (void)s;
    note("send", c, peer, n * size_of(t));
    give(c, peer, p, n * size_of(t));
    if (!depth) return met(c, peer, c->sent[peer] - 1);
    left[leaving++] = (Message){c, peer, NULL, c->sent[peer] - 1};
    return ncclSuccess;
}
ncclResult_t ncclRecv(void *p, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t s) {
    (void)s;
    note("recv", c, peer, n * size_of(t));
    if (!depth) return take(c, peer, p, n * size_of(t));
    waiting[count++] = (Message){c, peer, p, n * size_of(t)};
    return ncclSuccess;
}

// every rank's `bytes` at `p`, one after the other; the caller frees them
static char *everyones(ncclComm_t c, const void *p, size_t bytes) {
    char *all = malloc(bytes * c->ranks + 1);
    for (int r = 0; r < c->ranks; r++) if (r != c->rank) give(c, r, p, bytes);
    for (int r = 0; r < c->ranks; r++)
        if (r == c->rank) memcpy(all + r * bytes, p, bytes);
        else if (take(c, r, all + r * bytes, bytes)) break;
    return all;
}
ncclResult_t ncclAllGather(const void *p, void *to, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t s) {
    (void)s;
    size_t bytes = n * size_of(t);
    note("all_gather", c, -1, bytes);
    char *all = everyones(c, p, bytes);
    memcpy(to, all, bytes * c->ranks);
    free(all);
    return c->aborted ? ncclInternalError : ncclSuccess;
}
static ncclResult_t reduced(const char *what, const void *p, void *to, size_t n, size_t from, size_t keep, ncclDataType_t t, int op, ncclComm_t c) {
    size_t bytes = n * size_of(t);
    note(what, c, op, bytes);
    char *all = everyones(c, p, bytes);
    void *parts[1024];
    for (int r = 0; r < c->ranks; r++) parts[r] = all + r * bytes + from * size_of(t);
    if (to) reduce(to, parts, c->ranks, keep, t, op);
    free(all);
    return c->aborted ? ncclInternalError : ncclSuccess;
}
ncclResult_t ncclAllReduce(const void *p, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) { (void)s; return reduced("all_reduce", p, to, n, 0, n, t, op, c); }
ncclResult_t ncclReduce(const void *p, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) { (void)s; return reduced("reduce", p, c->rank == root ? to : NULL, n, 0, n, t, op, c); }
ncclResult_t ncclReduceScatter(const void *p, void *to, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) { (void)s; return reduced("reduce_scatter", p, to, n * c->ranks, n * c->rank, n, t, op, c); }
ncclResult_t ncclBroadcast(const void *p, void *to, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) {
    (void)s;
    note("broadcast", c, root, n * size_of(t));
    if (c->rank != root) return take(c, root, to, n * size_of(t));
    for (int r = 0; r < c->ranks; r++) if (r != root) give(c, r, p, n * size_of(t));
    memmove(to, p, n * size_of(t));
    return ncclSuccess;
}
ncclResult_t ncclBcast(void *p, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t s) { return ncclBroadcast(p, p, n, t, root, c, s); }
