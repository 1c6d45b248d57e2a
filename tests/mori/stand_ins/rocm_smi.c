/* Stands in for librocm_smi64.so.1: the two devices of hip.c. MoRI ends the process when there is no GPU at all. */

#include <stdint.h>

int rsmi_init(uint64_t flags) { return 0; }
int rsmi_shut_down(void) { return 0; }

int rsmi_num_monitor_devices(uint32_t *count) {
  *count = 2;
  return 0;
}

/* domain << 32 | bus << 8 | device << 3 | function */
int rsmi_dev_pci_id_get(uint32_t device, uint64_t *id) {
  *id = (uint64_t)(0xc1 + device) << 8;
  return 0;
}

int rsmi_is_P2P_accessible(uint32_t from, uint32_t to, _Bool *accessible) {
  *accessible = 1;
  return 0;
}

int rsmi_topo_get_link_type(uint32_t from, uint32_t to, uint64_t *hops, int *type) {
  *hops = 1;
  *type = 2; /* XGMI */
  return 0;
}

int rsmi_topo_get_link_weight(uint32_t from, uint32_t to, uint64_t *weight) {
  *weight = 15;
  return 0;
}

int rsmi_status_string(int status, const char **text) {
  *text = "stand-in";
  return 0;
}
