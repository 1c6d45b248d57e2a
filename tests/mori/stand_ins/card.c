/*
 * The network card: one thread that carries out what is posted. It checks the local span and the remote key, then
 * copies (process_vm_readv and process_vm_writev for another process). The peer's CPU has no part in it.
 *
 * As on real hardware, a failure stops its queue pair for good: what is posted behind it, then or later, is flushed.
 * A peer that is gone, or whose queue pair is, does not answer (retry exceeded); a wrong key or span is refused by it,
 * which stops its queue pair too.
 */

#define _GNU_SOURCE
#include "card.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

struct card card = {.lock = PTHREAD_MUTEX_INITIALIZER, .posted = PTHREAD_COND_INITIALIZER, .next_key = 1};

/* ---- what the tests turn */

/* While on, the device does nothing: what is posted stays in its queue. */
void stand_in_verbs_hold(int on) {
  pthread_mutex_lock(&card.lock);
  card.held = on;
  pthread_cond_broadcast(&card.posted);
  pthread_mutex_unlock(&card.lock);
}

/* The n-th request that is carried out from now on ends with this status; 0: none. */
void stand_in_verbs_fail(int n, int status) {
  card.fail_at = n;
  card.fail_status = status;
}

int stand_in_verbs_regions(void) { return card.live_regions; }
int stand_in_verbs_pairs(void) { return card.live_pairs; }

/* Requests that were posted so far. */
long long stand_in_verbs_requests(void) { return card.requests; }

/* ---- this process, and others */

static uint32_t start_time_of(int pid) {
  char path[64], text[1024];
  unsigned long long when = 0;
  snprintf(path, sizeof(path), "/proc/%d/stat", pid);
  FILE *file = fopen(path, "r");
  if (!file) return 0;
  size_t got = fread(text, 1, sizeof(text) - 1, file);
  fclose(file);
  text[got] = 0;
  char *at = strrchr(text, ')');
  if (!at || at[2] == 'Z') return 0;
  sscanf(at + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu", &when);
  return (uint32_t)when;
}

static struct table *map_table(int fd) {
  void *at = mmap(NULL, sizeof(struct table), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return at == MAP_FAILED ? NULL : at;
}

struct table *card_table_of(const struct address *peer) {
  if (!memcmp(peer, &card.self, sizeof(card.self))) return card.table;
  char path[64];
  snprintf(path, sizeof(path), "/proc/%u/fd/%u", peer->pid, peer->fd);
  int fd = start_time_of((int)peer->pid) == peer->started ? open(path, O_RDWR | O_CLOEXEC) : -1;
  if (fd < 0) return NULL;
  struct table *found = lseek(fd, 0, SEEK_END) == (off_t)sizeof(*found) ? map_table(fd) : NULL;
  close(fd);
  return found;
}

/* ---- the device */

static int covers(struct table *owner, uint32_t key, uint32_t access, uint64_t address, uint64_t length) {
  uint32_t i = key % REGIONS;
  return key && owner->regions[i].key == key && (owner->regions[i].access & access) == access &&
         address >= owner->regions[i].address && length <= owner->regions[i].length &&
         address - owner->regions[i].address <= owner->regions[i].length - length;
}

static int copy(struct qp *qp, uint64_t local, uint64_t remote, size_t length, int write) {
  if (qp->peer_table == card.table) {
    memcpy((void *)(write ? remote : local), (void *)(write ? local : remote), length);
    return IBV_WC_SUCCESS;
  }
  while (length) {
    struct iovec here = {(void *)local, length}, there = {(void *)remote, length};
    ssize_t moved = (write ? process_vm_writev : process_vm_readv)((int)qp->peer.pid, &here, 1, &there, 1, 0);
    /* Also when the peer is a zombie: its memory is gone. */
    if (moved <= 0) return errno == ESRCH ? IBV_WC_RETRY_EXC_ERR : IBV_WC_REM_OP_ERR;
    local += (uint64_t)moved, remote += (uint64_t)moved, length -= (size_t)moved;
  }
  return IBV_WC_SUCCESS;
}

static int carry_out(struct qp *qp, struct request *request) {
  int write = request->wr.opcode == IBV_WR_RDMA_WRITE;
  uint64_t remote = request->wr.wr.rdma.remote_addr;
  if (card.fail_at && !--card.fail_at) return card.fail_status;
  uint32_t peer_state = qp->peer_table->pairs[qp->peer_pair % PAIRS];
  if (peer_state < IBV_QPS_RTR || peer_state == IBV_QPS_ERR) return IBV_WC_RETRY_EXC_ERR;
  for (int i = 0; i < request->wr.num_sge; i++) {
    struct ibv_sge *sge = &request->sges[i];
    if (!covers(card.table, sge->lkey, write ? 0 : IBV_ACCESS_LOCAL_WRITE, sge->addr, sge->length))
      return IBV_WC_LOC_PROT_ERR;
    if (!covers(qp->peer_table, request->wr.wr.rdma.rkey, write ? IBV_ACCESS_REMOTE_WRITE : IBV_ACCESS_REMOTE_READ,
                remote, sge->length))
      return IBV_WC_REM_ACCESS_ERR;
    int status = copy(qp, sge->addr, remote, sge->length, write);
    if (status) return status;
    remote += sge->length;
  }
  return IBV_WC_SUCCESS;
}

/* The functions from here to `device` are called with the lock held. */
static void stop(struct qp *qp, int status) {
  qp->base.state = IBV_QPS_ERR;
  card.table->pairs[qp->base.qp_num % PAIRS] = IBV_QPS_ERR;
  if (status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_OP_ERR)
    qp->peer_table->pairs[qp->peer_pair % PAIRS] = IBV_QPS_ERR;
}

static void complete(struct qp *qp, const struct ibv_send_wr *wr, int status) {
  struct cq *cq = (struct cq *)qp->base.send_cq;
  if (cq->count == cq->size) return; /* overrun: the program sized its queues wrongly */
  cq->ring[(cq->first + cq->count++) % cq->size] = (struct ibv_wc){
      .wr_id = wr->wr_id,
      .status = status,
      .opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE,
      .qp_num = qp->base.qp_num,
  };
  if (cq->armed && cq->base.channel) {
    cq->armed = 0;
    eventfd_write(cq->base.channel->fd, 1);
  }
}

static struct qp *with_work(void) {
  for (struct qp *qp = card.pairs; qp && !card.held; qp = qp->next)
    if (qp->count) return qp;
  return NULL;
}

static void *device(void *unused) {
  pthread_mutex_lock(&card.lock);
  for (;;) {
    struct qp *qp = with_work();
    if (!qp) {
      pthread_cond_wait(&card.posted, &card.lock);
      continue;
    }
    /* The copy is made with the lock held too: when a queue pair or a region has been destroyed, nothing moves. */
    struct request *request = &qp->ring[qp->first];
    int status = qp->base.state == IBV_QPS_RTS ? carry_out(qp, request) : IBV_WC_WR_FLUSH_ERR;
    if (status && status != IBV_WC_WR_FLUSH_ERR) stop(qp, status);
    if (status || request->wr.send_flags & IBV_SEND_SIGNALED) complete(qp, &request->wr, status);
    qp->first = (qp->first + 1) % qp->size;
    qp->count--;
  }
  return NULL;
}

int card_start(void) {
  pthread_t thread;
  pthread_mutex_lock(&card.lock);
  if (!card.table) {
    int fd = memfd_create("stand-in-verbs", MFD_CLOEXEC);
    if (fd >= 0 && !ftruncate(fd, sizeof(struct table))) card.table = map_table(fd);
    if (card.table) {
      memcpy(card.table->magic, "standin", 8);
      card.self = (struct address){{0x20, 0x01, 'k', 'v'}, (uint32_t)getpid(), start_time_of(getpid()), (uint32_t)fd};
    }
    /* Where Yama restricts it, the peers' cards must be allowed to copy. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  }
  if (card.table && !card.running && !pthread_create(&thread, NULL, device, NULL)) {
    card.running = 1;
    pthread_detach(thread);
  }
  int started = card.running;
  pthread_mutex_unlock(&card.lock);
  return started ? 0 : -1;
}
