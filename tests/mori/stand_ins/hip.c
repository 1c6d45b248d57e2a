/*
 * Stands in for libamdhip64.so.7: two devices whose memory is shared memory of this host.
 *
 * hipMalloc gives a span of a memfd; an IPC handle says which descriptor of which process that is. Copies wait in the
 * queue of their stream until it runs: at once, or while `stand_in_hip_hold(1)` is in force not at all. A copy is
 * checked against the spans that are known here, as a device would fault on any other.
 */

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hip/hip_runtime_api.h"

#define DEVICES 2

/* Device memory that is mapped here: this process's own (fd >= 0), or opened from a handle. */
struct span {
  struct span *next;
  char *base;
  size_t length;
  int fd, device;
};

struct handle {
  char magic[8];
  int pid, fd, device;
  unsigned long long start_time, inode, length;
};

/* A copy, or, where event is set, the mark that all before it is done. */
struct work {
  struct work *next;
  void *to;
  const void *from;
  size_t length;
  struct ihipEvent_t *event;
};

struct ihipStream_t {
  struct work *first, **last;
};

struct ihipEvent_t {
  struct ihipStream_t *stream;
  int pending;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct span *spans;
static int held, fail_at, imported;
static long long copies;
static __thread int current;

/* ---- what the tests turn */

void stand_in_hip_hold(int on) { held = on; }

/* The n-th copy from now on is refused; 0: none. */
void stand_in_hip_fail_copy(int n) { fail_at = n; }

/* Copies asked for so far. */
long long stand_in_hip_copies(void) { return copies; }

/* Spans of other processes that are mapped here. */
int stand_in_hip_imported(void) { return imported; }

/* ---- memory */

static unsigned long long start_time_of(int pid) {
  char path[64], text[1024];
  unsigned long long when = 0;
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t got = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  text[got] = 0;
  char *at = strrchr(text, ')');
  if (at) sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &when);
  return when;
}

/* The span that holds all of these bytes. */
static struct span *find(const void *pointer, size_t length) {
  for (struct span *span = spans; span; span = span->next) {
    size_t into = (size_t)((const char *)pointer - span->base);
    if ((const char *)pointer >= span->base && into <= span->length && length <= span->length - into) return span;
  }
  return NULL;
}

static struct span *map(int fd, size_t length, int device, int own) {
  void *base = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return NULL;
  struct span *span = malloc(sizeof(*span));
  pthread_mutex_lock(&lock);
  *span = (struct span){spans, base, length, own ? fd : -1, device};
  spans = span;
  imported += !own;
  pthread_mutex_unlock(&lock);
  return span;
}

static hipError_t unmap(void *base, int own) {
  pthread_mutex_lock(&lock);
  for (struct span **at = &spans; *at; at = &(*at)->next) {
    struct span *span = *at;
    if (span->base != base || (span->fd >= 0) != own) continue;
    *at = span->next;
    imported -= !own;
    munmap(span->base, span->length);
    if (own) close(span->fd);
    free(span);
    pthread_mutex_unlock(&lock);
    return hipSuccess;
  }
  pthread_mutex_unlock(&lock);
  return hipErrorInvalidValue;
}

hipError_t hipMalloc(void **pointer, size_t length) {
  int fd = memfd_create("stand-in-hip", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)length)) return hipErrorOutOfMemory;
  struct span *span = map(fd, length, current, 1);
  if (!span) return hipErrorOutOfMemory;
  *pointer = span->base;
  return hipSuccess;
}

hipError_t hipExtMallocWithFlags(void **pointer, size_t length, unsigned flags) { return hipMalloc(pointer, length); }
hipError_t hipFree(void *pointer) { return pointer ? unmap(pointer, 1) : hipSuccess; }

hipError_t hipMemGetAddressRange(hipDeviceptr_t *base, size_t *length, hipDeviceptr_t pointer) {
  pthread_mutex_lock(&lock);
  struct span *span = find(pointer, 1);
  if (span && base) *base = span->base;
  if (span && length) *length = span->length;
  pthread_mutex_unlock(&lock);
  return span ? hipSuccess : hipErrorInvalidValue;
}

hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *pointer) {
  pthread_mutex_lock(&lock);
  struct span *span = find(pointer, 1);
  if (span) *attributes = (hipPointerAttribute_t){2, span->device, (void *)pointer, NULL, 0, 0};
  pthread_mutex_unlock(&lock);
  return span ? hipSuccess : hipErrorInvalidValue;
}

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t *out, void *pointer) {
  struct handle handle = {.magic = "standin", .pid = getpid(), .start_time = start_time_of(getpid())};
  struct stat file;
  pthread_mutex_lock(&lock);
  struct span *span = find(pointer, 1);
  if (span) handle.fd = span->fd, handle.device = span->device, handle.length = span->length;
  pthread_mutex_unlock(&lock);
  if (!span || handle.fd < 0 || fstat(handle.fd, &file)) return hipErrorInvalidValue;
  handle.inode = file.st_ino;
  memset(out, 0, sizeof(*out));
  memcpy(out, &handle, sizeof(handle));
  return hipSuccess;
}

hipError_t hipIpcOpenMemHandle(void **pointer, hipIpcMemHandle_t in, unsigned flags) {
  struct handle handle;
  struct stat file;
  char path[64];
  memcpy(&handle, &in, sizeof(handle));
  if (memcmp(handle.magic, "standin", 8) || start_time_of(handle.pid) != handle.start_time) return hipErrorMapFailed;
  snprintf(path, sizeof(path), "/proc/%d/fd/%d", handle.pid, handle.fd);
  int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return hipErrorMapFailed;
  int same = !fstat(fd, &file) && file.st_ino == handle.inode && (size_t)file.st_size == handle.length;
  struct span *span = same ? map(fd, handle.length, handle.device, 0) : NULL;
  close(fd);
  if (!span) return hipErrorMapFailed;
  *pointer = span->base;
  return hipSuccess;
}

hipError_t hipIpcCloseMemHandle(void *pointer) { return unmap(pointer, 0); }

/* ---- copies, streams and events */

/* Called with the lock held. */
static void run(struct ihipStream_t *stream) {
  while (stream->first && !held) {
    struct work *work = stream->first;
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    if (work->event) work->event->pending--;
    /* What has been freed meanwhile is left alone; a device would fault. */
    else if (find(work->to, work->length) && find(work->from, work->length)) memcpy(work->to, work->from, work->length);
    free(work);
  }
}

/* Called with the lock held. */
static void queue(struct ihipStream_t *stream, struct work work) {
  struct work *item = malloc(sizeof(*item));
  *item = work;
  item->next = NULL;
  *stream->last = item;
  stream->last = &item->next;
}

hipError_t hipMemcpyAsync(void *to, const void *from, size_t length, hipMemcpyKind kind, hipStream_t stream) {
  pthread_mutex_lock(&lock);
  copies++;
  hipError_t error = hipSuccess;
  if (fail_at && !--fail_at) error = hipErrorUnknown;
  else if (!find(to, length) || !find(from, length)) error = hipErrorInvalidValue;
  else queue(stream, (struct work){.to = to, .from = from, .length = length});
  run(stream);
  pthread_mutex_unlock(&lock);
  return error;
}

hipError_t hipMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t length,
                              hipStream_t stream) {
  return hipMemcpyAsync(to, from, length, 0, stream);
}

hipError_t hipMemcpy(void *to, const void *from, size_t length, hipMemcpyKind kind) {
  memcpy(to, from, length);
  return hipSuccess;
}

hipError_t hipMemset(void *to, int value, size_t length) {
  memset(to, value, length);
  return hipSuccess;
}

hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned flags) {
  *stream = calloc(1, sizeof(**stream));
  (*stream)->last = &(*stream)->first;
  return hipSuccess;
}

/* As HIP says: what is queued is still carried out. The tests hold streams for a moment only, so it is let go here. */
hipError_t hipStreamDestroy(hipStream_t stream) {
  pthread_mutex_lock(&lock);
  int was = held;
  held = 0;
  run(stream);
  held = was;
  pthread_mutex_unlock(&lock);
  free(stream);
  return hipSuccess;
}

hipError_t hipEventCreateWithFlags(hipEvent_t *event, unsigned flags) {
  *event = calloc(1, sizeof(**event));
  return hipSuccess;
}

hipError_t hipEventDestroy(hipEvent_t event) {
  free(event);
  return hipSuccess;
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  pthread_mutex_lock(&lock);
  event->stream = stream;
  event->pending++;
  queue(stream, (struct work){.event = event});
  run(stream);
  pthread_mutex_unlock(&lock);
  return hipSuccess;
}

hipError_t hipEventQuery(hipEvent_t event) {
  pthread_mutex_lock(&lock);
  if (event->pending) run(event->stream);
  int pending = event->pending;
  pthread_mutex_unlock(&lock);
  return pending ? hipErrorNotReady : hipSuccess;
}

hipError_t hipEventSynchronize(hipEvent_t event) {
  while (hipEventQuery(event) == hipErrorNotReady) usleep(100);
  return hipSuccess;
}

hipError_t hipDeviceSynchronize(void) { return hipSuccess; }

/* ---- devices */

hipError_t hipGetDeviceCount(int *count) {
  *count = DEVICES;
  return hipSuccess;
}

hipError_t hipGetDevice(int *device) {
  *device = current;
  return hipSuccess;
}

hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= DEVICES) return hipErrorInvalidDevice;
  current = device;
  return hipSuccess;
}

hipError_t hipDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device >= 0 && peer >= 0 && device < DEVICES && peer < DEVICES;
  return hipSuccess;
}

hipError_t hipDeviceEnablePeerAccess(int peer, unsigned flags) { return hipSuccess; }

hipError_t hipDeviceGetPCIBusId(char *text, int length, int device) {
  if (device < 0 || device >= DEVICES) return hipErrorInvalidDevice;
  snprintf(text, (size_t)length, "0000:%02x:00.0", 0xc1 + device);
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int *value, int attribute, int device) {
  *value = 0;
  return hipSuccess;
}

hipError_t hipRuntimeGetVersion(int *version) {
  *version = 70051831;
  return hipSuccess;
}

hipError_t hipGetLastError(void) { return hipSuccess; }

const char *hipGetErrorString(hipError_t error) {
  switch (error) {
    case hipSuccess: return "no error";
    case hipErrorInvalidValue: return "invalid argument";
    case hipErrorOutOfMemory: return "out of memory";
    case hipErrorInvalidDevice: return "invalid device ordinal";
    case hipErrorMapFailed: return "mapping failed";
    case hipErrorNotReady: return "device not ready";
    case hipErrorNotSupported: return "operation not supported";
    default: return "unknown error (stand-in)";
  }
}

/* ---- what this device does not have: kernels (MoRI falls back to copies), virtual memory, pinned host memory */

hipError_t hipModuleLoad(hipModule_t *module, const char *path) { return hipErrorFileNotFound; }

#define NOT_SUPPORTED(name) \
  hipError_t name(void) { return hipErrorNotSupported; }

NOT_SUPPORTED(hipModuleGetFunction)
NOT_SUPPORTED(hipModuleLaunchKernel)
NOT_SUPPORTED(hipModuleUnload)
NOT_SUPPORTED(hipHostGetDevicePointer)
NOT_SUPPORTED(hipHostRegister)
NOT_SUPPORTED(hipHostUnregister)
NOT_SUPPORTED(hipMemAddressFree)
NOT_SUPPORTED(hipMemAddressReserve)
NOT_SUPPORTED(hipMemCreate)
NOT_SUPPORTED(hipMemExportToShareableHandle)
NOT_SUPPORTED(hipMemGetAllocationGranularity)
NOT_SUPPORTED(hipMemGetHandleForAddressRange)
NOT_SUPPORTED(hipMemImportFromShareableHandle)
NOT_SUPPORTED(hipMemMap)
NOT_SUPPORTED(hipMemRelease)
NOT_SUPPORTED(hipMemRetainAllocationHandle)
NOT_SUPPORTED(hipMemSetAccess)
NOT_SUPPORTED(hipMemUnmap)
