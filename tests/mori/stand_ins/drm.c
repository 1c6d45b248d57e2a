/* Stands in for libdrm.so.2 and libdrm_amdgpu.so.1 where they are not installed: there is no such device. */

#define FAILS(name) \
  int name(void) { return -1; }

FAILS(drmClose)
FAILS(drmOpenRender)
FAILS(amdgpu_device_deinitialize)
FAILS(amdgpu_device_initialize)
FAILS(amdgpu_query_gpu_info)

const char *amdgpu_get_marketing_name(void *device) { return "none"; }
