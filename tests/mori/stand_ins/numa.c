/* Stands in for libnuma.so.1 where it is not installed: a machine without NUMA. */

#include <stddef.h>

int numa_available(void) { return -1; }
int numa_max_node(void) { return 0; }
long long numa_node_size64(int node, long long *free_bytes) { return -1; }
long mbind(void *start, unsigned long length, int mode, const unsigned long *mask, unsigned long bits, unsigned flags) {
  return 0;
}
void *numa_bitmask_alloc(unsigned bits) { return NULL; }
void numa_bitmask_free(void *mask) {}
void *numa_bitmask_setbit(void *mask, unsigned bit) { return mask; }
