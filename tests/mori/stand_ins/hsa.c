/* Stands in for libhsa-runtime64.so.1: there is no such runtime, and every call says so. */

enum { HSA_STATUS_ERROR = 0x1000 };

#define FAILS(name) \
  int name(void) { return HSA_STATUS_ERROR; }

FAILS(hsa_agent_get_info)
FAILS(hsa_amd_agent_iterate_memory_pools)
FAILS(hsa_amd_memory_lock_to_pool)
FAILS(hsa_amd_memory_pool_get_info)
FAILS(hsa_amd_portable_export_dmabuf)
FAILS(hsa_init)
FAILS(hsa_iterate_agents)
FAILS(hsa_shut_down)

int hsa_status_string(int status, const char **text) {
  *text = "there is no HSA runtime (stand-in)";
  return 0;
}
