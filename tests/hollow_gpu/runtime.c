// A GPU without a GPU: torch's CUDA build runs on this stand-in for the CUDA runtime. Device memory is the host's,
// copies copy at once, kernels do nothing. What has no function here gets one that returns 0 (build.py).
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <cudnn_version.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MOST 64
static long number(const char *name, long otherwise) { const char *v = getenv(name); return v && *v ? atol(v) : otherwise; }
static int devices(void) { return (int)number("HOLLOW_GPUS", 4); }
static size_t capacity(void) { return (size_t)number("HOLLOW_BYTES", 80L << 30); }

// ---- what was allocated: device or pinned memory, by address
typedef struct Block { uintptr_t from; size_t bytes; int device; struct Block *next; } Block;  // device -1: pinned
static Block *blocks;
static size_t used[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current;
static __thread cudaError_t last;

static cudaError_t fails(cudaError_t e) { return last = e; }

static cudaError_t allocate(void **to, size_t bytes, int device) {
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    if (!rounded) rounded = 4096;
    pthread_mutex_lock(&lock);
    if (device >= 0 && used[device] + rounded > capacity()) {
        pthread_mutex_unlock(&lock);
        return fails(cudaErrorMemoryAllocation);
    }
    void *p = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    Block *b = malloc(sizeof *b);
    *b = (Block){(uintptr_t)p, rounded, device, blocks};
    blocks = b;
    if (device >= 0) used[device] += rounded;
    pthread_mutex_unlock(&lock);
    *to = p;
    return cudaSuccess;
}

static cudaError_t let_go(void *p) {
    pthread_mutex_lock(&lock);
    for (Block **at = &blocks; *at; at = &(*at)->next)
        if ((*at)->from == (uintptr_t)p) {
            Block *b = *at;
            *at = b->next;
            if (b->device >= 0) used[b->device] -= b->bytes;
            munmap(p, b->bytes);
            free(b);
            break;
        }
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

static Block *block_of(const void *p) {
    pthread_mutex_lock(&lock);
    Block *b = blocks;
    while (b && !((uintptr_t)p >= b->from && (uintptr_t)p < b->from + b->bytes)) b = b->next;
    pthread_mutex_unlock(&lock);
    return b;
}

cudaError_t cudaMalloc(void **p, size_t n) { return allocate(p, n, current); }
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { (void)s; return allocate(p, n, current); }
cudaError_t cudaFree(void *p) { return let_go(p); }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { (void)s; return let_go(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { (void)f; return allocate(p, n, -1); }
cudaError_t cudaFreeHost(void *p) { return let_go(p); }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = capacity(); *f = capacity() - used[current]; return cudaSuccess; }
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    Block *b = block_of(p);
    memset(a, 0, sizeof *a);
    a->type = !b ? cudaMemoryTypeUnregistered : b->device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = b && b->device >= 0 ? b->device : current;
    a->devicePointer = a->hostPointer = b ? (void *)p : NULL;
    return cudaSuccess;
}

// ---- copies
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { (void)k; memmove(d, s, n); return cudaSuccess; }
// Where only small tensors have values (HOLLOW_VALUES=small) device memory stays 0 but for those.
static int copies(size_t n) { const char *v = getenv("HOLLOW_VALUES"); return n <= 1 << 18 || !v || strcmp(v, "small"); }
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { (void)k; (void)st; if (copies(n)) memmove(d, s, n); return cudaSuccess; }
cudaError_t cudaMemcpyPeerAsync(void *d, int a, const void *s, int b, size_t n, cudaStream_t st) { (void)a; (void)b; (void)st; memmove(d, s, n); return cudaSuccess; }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t st) {
    (void)k; (void)st;
    for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *d, int v, size_t n) { memset(d, v, n); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *d, int v, size_t n, cudaStream_t s) { (void)s; memset(d, v, n); return cudaSuccess; }

// ---- devices
cudaError_t cudaGetDeviceCount(int *n) { *n = devices(); return *n ? cudaSuccess : fails(cudaErrorNoDevice); }
cudaError_t cudaGetDevice(int *d) { *d = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int d) { if (d < 0 || d >= devices()) return fails(cudaErrorInvalidDevice); current = d; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *a, int *b) { *a = 0; *b = -5; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *y, int a, int b) { *y = a != b; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", d + 1); return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    (void)d;
    switch (a) {
    case cudaDevAttrComputeCapabilityMajor: *v = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    default: *v = 1 << 16;
    }
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d < 0 || d >= devices()) return fails(cudaErrorInvalidDevice);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Hollow H100");
    memset(p->uuid.bytes, d + 1, sizeof p->uuid.bytes);
    p->totalGlobalMem = capacity();
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32, p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->major = 9, p->multiProcessorCount = 132, p->l2CacheSize = 50 << 20, p->unifiedAddressing = 1;
    p->memoryBusWidth = 5120, p->ECCEnabled = 1, p->pciBusID = d + 1, p->canMapHostMemory = 1, p->textureAlignment = 512;
    return cudaSuccess;
}

// ---- streams and events: all is done when the call returns
static cudaError_t stream(cudaStream_t *s) { *s = malloc(64); return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return stream(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { (void)f; return stream(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { (void)f; cudaError_t e = stream(s); *(int *)*s = p; return e; }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = (uintptr_t)s > 16 ? *(int *)s : 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *w) { (void)s; *w = cudaStreamCaptureStatusNone; return cudaSuccess; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *w, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **n, const cudaGraphEdgeData **e, size_t *c) {
    (void)s; (void)g; (void)n; (void)e; (void)c;
    *w = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { *m = cudaStreamCaptureModeRelaxed; return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *data, unsigned flags) { (void)flags; f(s, cudaSuccess, data); return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *data) { (void)s; f(data); return cudaSuccess; }
typedef struct { struct timespec at; } Event;
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { (void)f; *e = (cudaEvent_t)calloc(1, sizeof(Event)); return cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { (void)s; clock_gettime(CLOCK_MONOTONIC, &((Event *)e)->at); return cudaSuccess; }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { (void)f; return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) {
    struct timespec x = ((Event *)a)->at, y = ((Event *)b)->at;
    *ms = (y.tv_sec - x.tv_sec) * 1e3f + (y.tv_nsec - x.tv_nsec) / 1e6f;
    return cudaSuccess;
}

// ---- kernels
static void *nothing[8];
void **__cudaRegisterFatBinary(void *image) { (void)image; return nothing; }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) { (void)g; (void)b; (void)m; (void)s; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { *g = *b = (dim3){1, 1, 1}; *m = 0; *(void **)s = NULL; return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    (void)f;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024, a->numRegs = 32, a->binaryVersion = a->ptxVersion = 90, a->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned g) { (void)f; (void)b; (void)m; (void)g; *n = 2; return cudaSuccess; }

// ---- the driver
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuInit(unsigned f) { (void)f; return 0; }
int cuDeviceGetCount(int *n) { *n = devices(); return 0; }
int cuCtxGetCurrent(void **c) { *c = nothing; return 0; }
static int none(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned v, unsigned long long flags, enum cudaDriverEntryPointQueryResult *r) {
    (void)name; (void)v; (void)flags;
    *f = (void *)none;
    if (r) *r = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

// ---- errors
cudaError_t cudaGetLastError(void) { cudaError_t e = last; last = cudaSuccess; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : "a hollow GPU's error"; }
const char *cudaGetErrorName(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorUnknown"; }

// ---- libraries; of their handles torch keeps workspaces
size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
int cudnnGetProperty(int what, int *v) { *v = what == 0 ? CUDNN_MAJOR : what == 1 ? CUDNN_MINOR : 0; return 0; }
size_t cudnnGetCudartVersion(void) { return 13000; }
const char *cudnnGetErrorString(int e) { (void)e; return "a hollow cuDNN's error"; }
int nvrtcVersion(int *a, int *b) { *a = 13, *b = 0; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *lt, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *found, int *count) {
    (void)lt; (void)d; (void)a; (void)b; (void)c; (void)e; (void)p; (void)n; (void)found;
    *count = 1;
    return 0;
}
#define HANDLE(name) int name(void **h) { *h = malloc(8); return 0; }
HANDLE(cublasCreate_v2)
HANDLE(cublasLtCreate)
HANDLE(cudnnCreate)
HANDLE(cusolverDnCreate)
HANDLE(cusparseCreate)
