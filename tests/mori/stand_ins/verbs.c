/*
 * Stands in for libibverbs: one RDMA device whose wire is the memory of the processes of this host (card.c).
 *
 * Only reliable connections, WRITE and READ: no SEND, no atomics, no shared queues.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "card.h"

#define MAX_WR 8192
#define IDLE_US 50

/* ---- the four calls that go through a context's table */

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
  struct qp *qp = (struct qp *)base;
  int error = 0;
  pthread_mutex_lock(&card.lock);
  for (; wr; wr = wr->next) {
    if (qp->count == qp->size) error = ENOMEM;
    else if (wr->num_sge > MAX_SGE || (wr->opcode != IBV_WR_RDMA_READ && wr->opcode != IBV_WR_RDMA_WRITE)) error = EINVAL;
    if (error) break;
    struct request *request = &qp->ring[(qp->first + qp->count++) % qp->size];
    request->wr = *wr;
    memcpy(request->sges, wr->sg_list, (size_t)wr->num_sge * sizeof(*wr->sg_list));
    card.requests++;
  }
  if (error && bad) *bad = wr;
  pthread_cond_signal(&card.posted);
  pthread_mutex_unlock(&card.lock);
  return error;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) { return 0; }

static int poll_cq(struct ibv_cq *base, int wanted, struct ibv_wc *out) {
  struct cq *cq = (struct cq *)base;
  int got = 0;
  pthread_mutex_lock(&card.lock);
  for (; got < wanted && cq->count; cq->count--) {
    out[got++] = cq->ring[cq->first];
    cq->first = (cq->first + 1) % cq->size;
  }
  pthread_mutex_unlock(&card.lock);
  /* MoRI polls without a pause, as suits a core of its own; here that core is shared. */
  if (!got) nanosleep(&(struct timespec){0, IDLE_US * 1000}, NULL);
  return got;
}

static int req_notify_cq(struct ibv_cq *base, int solicited_only) {
  struct cq *cq = (struct cq *)base;
  pthread_mutex_lock(&card.lock);
  cq->armed = 1;
  pthread_mutex_unlock(&card.lock);
  return 0;
}

/* ---- devices and ports */

static struct ibv_device the_device = {.node_type = 1, .name = "standin0", .dev_name = "uverbs0"};

/* MoRI wants a path that exists and names a PCI address; it lies beside this library. */
static void find_path(void) {
  Dl_info here;
  if (!dladdr(find_path, &here)) return;
  char *slash = strrchr(here.dli_fname, '/');
  snprintf(the_device.ibdev_path, sizeof(the_device.ibdev_path), "%.*s/0000:c3:00.0",
           slash ? (int)(slash - here.dli_fname) : 1, slash ? here.dli_fname : ".");
}

struct ibv_device **ibv_get_device_list(int *count) {
  find_path();
  struct ibv_device **list = calloc(2, sizeof(*list));
  list[0] = &the_device;
  if (count) *count = 1;
  return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }

struct ibv_context *ibv_open_device(struct ibv_device *device_) {
  if (card_start()) return NULL;
  struct ibv_context *context = calloc(1, sizeof(*context));
  context->device = device_;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->async_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  context->num_comp_vectors = 1;
  return context;
}

int ibv_close_device(struct ibv_context *context) {
  close(context->async_fd);
  free(context);
  return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *out) {
  const char *wr = getenv("STAND_IN_VERBS_MAX_WR");
  *out = (struct ibv_device_attr){
      .max_mr_size = UINT64_MAX, .page_size_cap = 4096, .max_qp = PAIRS, .max_qp_wr = wr ? atoi(wr) : MAX_WR,
      .max_sge = MAX_SGE, .max_sge_rd = MAX_SGE, .max_cq = PAIRS, .max_cqe = 1 << 20, .max_mr = REGIONS, .max_pd = PAIRS,
      .max_qp_rd_atom = 16, .max_qp_init_rd_atom = 16, .phys_port_cnt = 1,
  };
  return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *out) {
  *out = (struct ibv_port_attr){
      .state = IBV_PORT_ACTIVE, .max_mtu = IBV_MTU_4096, .active_mtu = IBV_MTU_4096, .gid_tbl_len = 1,
      .max_msg_sz = 1u << 31, .pkey_tbl_len = 1, .phys_state = 5, .link_layer = IBV_LINK_LAYER_ETHERNET,
  };
  return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *out) {
  if (index) return -1;
  memcpy(out, &card.self, sizeof(card.self));
  return 0;
}

int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *out,
                      uint32_t flags, size_t size) {
  if (index) return ENODATA;
  *out = (struct ibv_gid_entry){.port_num = port, .gid_type = IBV_GID_TYPE_ROCE_V2};
  return ibv_query_gid(context, (uint8_t)port, 0, &out->gid);
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event) {
  errno = EAGAIN; /* nothing ever happens to the device or its port */
  return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) {}

/* ---- memory */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context) {
  struct ibv_pd *pd = calloc(1, sizeof(*pd));
  pd->context = context;
  return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd) {
  free(pd);
  return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned access) {
  struct ibv_mr *mr = NULL;
  pthread_mutex_lock(&card.lock);
  for (int tries = 0; tries < REGIONS && !mr; tries++) {
    uint32_t key = card.next_key++, i = key % REGIONS;
    if (!key || card.table->regions[i].key) continue;
    mr = calloc(1, sizeof(*mr));
    *mr = (struct ibv_mr){pd->context, pd, address, length, key, key, key};
    card.table->regions[i].access = access;
    card.table->regions[i].address = iova;
    card.table->regions[i].length = length;
    card.table->regions[i].key = key;
    card.live_regions++;
  }
  pthread_mutex_unlock(&card.lock);
  if (!mr) errno = ENOMEM;
  return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access) {
  return ibv_reg_mr_iova2(pd, address, length, (uint64_t)address, (unsigned)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  errno = EOPNOTSUPP;
  return NULL;
}

int ibv_dereg_mr(struct ibv_mr *mr) {
  pthread_mutex_lock(&card.lock);
  card.table->regions[mr->rkey % REGIONS].key = 0;
  card.live_regions--;
  pthread_mutex_unlock(&card.lock);
  free(mr);
  return 0;
}

/* ---- queues */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context) {
  struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));
  channel->context = context;
  channel->fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel) {
  close(channel->fd);
  free(channel);
  return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int size, void *cq_context, struct ibv_comp_channel *channel,
                             int vector) {
  struct cq *cq = calloc(1, sizeof(*cq));
  cq->base.context = context;
  cq->base.channel = channel;
  cq->base.cq_context = cq_context;
  cq->base.cqe = size;
  cq->size = (unsigned)size;
  cq->ring = calloc(cq->size, sizeof(*cq->ring));
  return &cq->base;
}

int ibv_destroy_cq(struct ibv_cq *base) {
  free(((struct cq *)base)->ring);
  free(base);
  return 0;
}

/* One event, one queue: MoRI gives each queue a channel of its own, and asks it which queue that is. */
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context) {
  eventfd_t count;
  int error = eventfd_read(channel->fd, &count);
  pthread_mutex_lock(&card.lock);
  *cq = NULL;
  for (struct qp *qp = card.pairs; qp && !error; qp = qp->next)
    if (qp->base.send_cq->channel == channel) *cq = qp->base.send_cq;
  pthread_mutex_unlock(&card.lock);
  if (!*cq) return -1;
  *cq_context = (*cq)->cq_context;
  return 0;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
  struct qp *qp = calloc(1, sizeof(*qp));
  qp->base.context = pd->context;
  qp->base.pd = pd;
  qp->base.send_cq = init->send_cq;
  qp->base.recv_cq = init->recv_cq;
  qp->size = init->cap.max_send_wr ? init->cap.max_send_wr : 1;
  qp->ring = calloc(qp->size, sizeof(*qp->ring));
  pthread_mutex_lock(&card.lock);
  for (uint32_t i = 1; i < PAIRS && !qp->base.qp_num; i++)
    if (card.table->pairs[i] == IBV_QPS_RESET) qp->base.qp_num = i;
  if (qp->base.qp_num) {
    card.table->pairs[qp->base.qp_num] = qp->base.state = IBV_QPS_INIT;
    qp->next = card.pairs;
    card.pairs = qp;
    card.live_pairs++;
  }
  pthread_mutex_unlock(&card.lock);
  if (qp->base.qp_num) return &qp->base;
  free(qp->ring);
  free(qp);
  errno = ENOMEM;
  return NULL;
}

int ibv_modify_qp(struct ibv_qp *base, struct ibv_qp_attr *attr, int mask) {
  struct qp *qp = (struct qp *)base;
  int error = 0;
  pthread_mutex_lock(&card.lock);
  if (mask & IBV_QP_DEST_QPN) {
    qp->peer_pair = attr->dest_qp_num;
    memcpy(&qp->peer, attr->ah_attr.grh.dgid.raw, sizeof(qp->peer));
    qp->peer_table = card_table_of(&qp->peer);
    if (!qp->peer_table) error = ETIMEDOUT;
  }
  if (!error && mask & IBV_QP_STATE) card.table->pairs[base->qp_num] = base->state = attr->qp_state;
  pthread_cond_signal(&card.posted);
  pthread_mutex_unlock(&card.lock);
  return error;
}

int ibv_destroy_qp(struct ibv_qp *base) {
  struct qp *qp = (struct qp *)base;
  pthread_mutex_lock(&card.lock);
  for (struct qp **at = &card.pairs; *at; at = &(*at)->next)
    if (*at == qp) {
      *at = qp->next;
      break;
    }
  card.table->pairs[base->qp_num] = IBV_QPS_RESET;
  card.live_pairs--;
  pthread_mutex_unlock(&card.lock);
  if (qp->peer_table && qp->peer_table != card.table) munmap(qp->peer_table, sizeof(struct table));
  free(qp->ring);
  free(qp);
  return 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init) {
  errno = EOPNOTSUPP;
  return NULL;
}

int ibv_destroy_srq(struct ibv_srq *srq) { return EOPNOTSUPP; }

const char *ibv_wc_status_str(enum ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return "success";
    case IBV_WC_LOC_PROT_ERR: return "local protection error";
    case IBV_WC_WR_FLUSH_ERR: return "Work Request Flushed Error";
    case IBV_WC_REM_ACCESS_ERR: return "remote access error";
    case IBV_WC_REM_OP_ERR: return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR: return "transport retry counter exceeded";
    default: return "error";
  }
}
