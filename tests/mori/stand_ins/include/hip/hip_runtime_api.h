/* The part of HIP's C API that MoRI-IO uses, as far as its headers, its binding and the stand-in need it. */

#ifndef KVFERRY_STAND_IN_HIP_H
#define KVFERRY_STAND_IN_HIP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum hipError_t {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorInvalidDevice = 101,
  hipErrorMapFailed = 205,
  hipErrorFileNotFound = 301,
  hipErrorNotReady = 600,
  hipErrorPeerAccessAlreadyEnabled = 704,
  hipErrorNotSupported = 801,
  hipErrorUnknown = 999,
} hipError_t;

typedef struct hipIpcMemHandle_st {
  char reserved[64];
} hipIpcMemHandle_t;

typedef struct ihipStream_t *hipStream_t;
typedef struct ihipEvent_t *hipEvent_t;
typedef struct ihipModule_t *hipModule_t;
typedef struct ihipModuleSymbol_t *hipFunction_t;
typedef void *hipDeviceptr_t;
typedef int hipMemcpyKind;

/* As returned by hipPointerGetAttributes since ROCm 6. */
typedef struct hipPointerAttribute_t {
  int type; /* 2: device memory */
  int device;
  void *devicePointer;
  void *hostPointer;
  int isManaged;
  unsigned allocationFlags;
} hipPointerAttribute_t;

#ifdef __cplusplus
}
#endif

#endif
