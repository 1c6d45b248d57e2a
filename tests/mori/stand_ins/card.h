/*
 * The network card of the stand-in for libibverbs: what it keeps, and what verbs.c asks of it (card.c).
 *
 * Every process keeps a table of its memory regions and queue pairs in a memfd. The address of a port (its GID) says
 * which process and descriptor that is, so a queue pair can look its peer up when it is connected.
 */

#ifndef KVFERRY_STAND_IN_CARD_H
#define KVFERRY_STAND_IN_CARD_H

#include "infiniband/verbs.h"

#define REGIONS 4096
#define PAIRS 4096
#define MAX_SGE 4

/* What other processes may know of this one. */
struct table {
  char magic[8];
  struct {
    uint32_t key, access; /* key 0: free */
    uint64_t address, length;
  } regions[REGIONS];
  uint32_t pairs[PAIRS]; /* state of each queue pair; IBV_QPS_RESET: there is none */
};

/* In the GID. */
struct address {
  uint8_t prefix[4];
  uint32_t pid, started, fd;
};

struct request {
  struct ibv_send_wr wr;
  struct ibv_sge sges[MAX_SGE];
};

struct cq {
  struct ibv_cq base;
  struct ibv_wc *ring;
  unsigned size, first, count;
  int armed;
};

struct qp {
  struct ibv_qp base;
  struct qp *next;
  struct request *ring;
  unsigned size, first, count;
  uint32_t peer_pair;
  struct address peer;
  struct table *peer_table;
};

struct card {
  pthread_mutex_t lock; /* of all of this */
  pthread_cond_t posted;
  struct table *table;
  struct address self;
  struct qp *pairs;
  uint32_t next_key;
  int running, held, fail_at, fail_status, live_regions, live_pairs;
  long long requests;
};

extern struct card card;

/* Makes this process's table and starts the device, once. 0, or -1. */
int card_start(void);

/* The table of the process at that address; null when it is gone. It is mapped, unless it is this process's own. */
struct table *card_table_of(const struct address *peer);

#endif
