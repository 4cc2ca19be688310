// Lists what a CUDA program runs on the GPU, one line each in $GPU_TRACE:
//     start_ns end_ns stream kind size name
// kind K is a kernel (size 1: inside a CUDA graph), C1 a copy to the device, C2 from it, C8 within it (size in bytes), M a fill.
// The driver loads it: CUDA_INJECTION64_PATH=libtrace.so GPU_TRACE=FILE program. Needs libcupti.so.13 on the library path.
//     cc -O2 -shared -fPIC -I"$CUDA/include" trace.c -o libtrace.so -ldl
#include <cupti.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static FILE * out;
static CUptiResult (*next_record)(uint8_t *, size_t, CUpti_Activity **);
static CUptiResult (*flush_all)(uint32_t);

static void CUPTIAPI give(uint8_t ** buf, size_t * size, size_t * n) { *size = 8 << 20; *buf = aligned_alloc(64, *size); *n = 0; }

static void CUPTIAPI take(CUcontext ctx, uint32_t stream, uint8_t * buf, size_t size, size_t valid) {
    (void) ctx; (void) stream; (void) size;
    CUpti_Activity * r = NULL;
    while (next_record(buf, valid, &r) == CUPTI_SUCCESS) {
        if (r->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || r->kind == CUPTI_ACTIVITY_KIND_KERNEL) {
            CUpti_ActivityKernel10 * k = (CUpti_ActivityKernel10 *) r;
            fprintf(out, "%llu %llu %u K %u %s\n", (unsigned long long) k->start, (unsigned long long) k->end, k->streamId, k->graphNodeId != 0, k->name);
        } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMCPY) {
            CUpti_ActivityMemcpy6 * m = (CUpti_ActivityMemcpy6 *) r;
            fprintf(out, "%llu %llu %u C%d %llu memcpy\n", (unsigned long long) m->start, (unsigned long long) m->end, m->streamId, m->copyKind, (unsigned long long) m->bytes);
        } else if (r->kind == CUPTI_ACTIVITY_KIND_MEMSET) {
            CUpti_ActivityMemset4 * m = (CUpti_ActivityMemset4 *) r;
            fprintf(out, "%llu %llu %u M %llu memset\n", (unsigned long long) m->start, (unsigned long long) m->end, m->streamId, (unsigned long long) m->bytes);
        }
    }
    free(buf);
}

static void finish(void) { flush_all(1); fclose(out); }

int InitializeInjection(void) {
    void * lib = dlopen("libcupti.so.13", RTLD_NOW);
    const char * path = getenv("GPU_TRACE");
    if (!lib || !path || !(out = fopen(path, "w"))) { fprintf(stderr, "gpu trace: no libcupti.so.13 or no GPU_TRACE: %s\n", lib ? "" : dlerror()); return 0; }
    CUptiResult (*enable)(CUpti_ActivityKind) = (void *) dlsym(lib, "cuptiActivityEnable");
    CUptiResult (*callbacks)(CUpti_BuffersCallbackRequestFunc, CUpti_BuffersCallbackCompleteFunc) = (void *) dlsym(lib, "cuptiActivityRegisterCallbacks");
    next_record = (void *) dlsym(lib, "cuptiActivityGetNextRecord");
    flush_all   = (void *) dlsym(lib, "cuptiActivityFlushAll");
    callbacks(give, take);
    enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    enable(CUPTI_ACTIVITY_KIND_MEMCPY);
    enable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(finish);
    fprintf(stderr, "gpu trace: on\n");
    return 1;
}
