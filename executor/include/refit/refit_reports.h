/* What an executor of refit.h tells of its refits, beside statuses. refit.h
 * includes this, and says what all structs have in common. */
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_REPORTS_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_REPORTS_H_

#include <stddef.h>
#include <stdint.h>

/* Numbered as in the plan's schema. A later plan may hold others. */
typedef int32_t refit_dtype;
enum {
  REFIT_DTYPE_BF16 = 1,
  REFIT_DTYPE_FP16 = 2,
  REFIT_DTYPE_FP32 = 3,
  REFIT_DTYPE_FP64 = 4,
  REFIT_DTYPE_INT8 = 5,
  REFIT_DTYPE_INT16 = 6,
  REFIT_DTYPE_INT32 = 7,
  REFIT_DTYPE_INT64 = 8,
  REFIT_DTYPE_UINT8 = 9,
  REFIT_DTYPE_BOOL = 10,
  REFIT_DTYPE_FP8_E4M3 = 11,
  REFIT_DTYPE_FP8_E5M2 = 12
};

/* How a refit of a plan with options.delta went. Versions are those of all
 * ranks, the rest is of one rank: what it sent in staged rounds, because direct
 * rounds always move everything. */
typedef struct refit_delta_report {
  size_t struct_size;
  int32_t is_delta; /* 1: what changed was sent. 0: all was */
  /* Of a delta: staged messages had room for one changed element of this many;
   * 1: they were sent whole. 0: all was sent. */
  uint32_t rung;
  /* Why all was sent, a clause; "" if is_delta. Valid until the executor's next
   * bind, run or free. */
  const char* why_dense;
  uint64_t base_version; /* that a delta changed */
  uint64_t version;      /* that all ranks hold now; 1 after the first refit */
  /* Elements that the rank sends in staged rounds and a delta may leave out,
   * once for each receiver: 0 on a destination. A delta counts those of them
   * that had changed; 0 of a dense refit says nothing. */
  uint64_t elements;
  uint64_t changed_elements;
  uint64_t stored_bytes; /* sent in staged rounds */
  uint64_t dense_bytes;  /* what a dense refit sends in them */
  double move_seconds;   /* of the rounds, with waits for others, and of
                            choosing a rung */
  double keep_seconds;   /* behind the rounds, for the next refit */
  /* What the refit's parts took, each on its stream and added up by kind. Parts
   * overlap, so that the sums may exceed move_seconds. */
  double find_seconds;   /* of a delta: what changed, for staged rounds */
  double encode_seconds; /* staged messages; those that are whole: to pack */
  double wire_seconds;   /* with waits for others; and what the rank moves in
                            direct rounds */
  double apply_seconds;  /* to store what staged rounds received */
  double check_seconds;  /* digests, and their comparison with waits for
                            others; 0: not checked */
  double agree_seconds; /* with the other ranks, with waits for them: before the
                           rounds on the version, the rung and that all can
                           check, behind them on the end */
  double total_seconds; /* from the call of run to the end of wait, with what
                           the caller did between */
} refit_delta_report;

/* Bytes of messages, including the alignment gaps of staged ones. */
typedef struct refit_traffic {
  uint64_t bytes_sent;
  uint64_t bytes_received;
} refit_traffic;

/* What one rank did in its last run. */
typedef struct refit_counters {
  size_t struct_size;
  uint64_t rounds;
  uint64_t messages_sent;
  uint64_t messages_received;
  uint64_t bytes_sent;
  uint64_t bytes_received;
  /* Times of the calling thread. On a GPU it only enqueues. */
  double pack_seconds;
  double wire_seconds;
  double unpack_seconds;
  /* Bytes by route (ranks that share a GPU, a host, or neither) and by
   * mechanism (through staging, or stored into the receiver's tensors). */
  refit_traffic local_staged;
  refit_traffic local_direct;
  refit_traffic peer_staged;
  refit_traffic peer_direct;
  refit_traffic network_staged;
  refit_traffic network_direct;
  /* Elements that the rank quantized without scratch, straight from the tensors
   * that hold them into those that are to. */
  uint64_t fused_elements;
} refit_counters;

/* A digest of what tensors hold, whatever their layout: a sum over elements.
 * refit/state_digest.h has the formula. */
typedef struct refit_param_digest {
  size_t struct_size;
  const char* param; /* as the checkpoint names it */
  refit_dtype dtype; /* digests of different dtypes do not compare */
  int32_t reserved;  /* 0 */
  uint64_t sum;      /* below 2^61 - 1 */
  uint64_t elements; /* how many were counted */
} refit_param_digest;

typedef int32_t refit_notice_kind;
enum {
  /* Ranks run on other hosts than the plan says. Of connect. */
  REFIT_NOTICE_HOSTS = 1,
  /* Pairs of ranks in which a receiver reads instead of being stored to, or the
   * other way round under options.direct "pull", since the end that the plan
   * means cannot map the other's tensors. Of bind. */
  REFIT_NOTICE_PULL = 2,
  /* A free of tensors' memory would not be noticed by run. Of bind. */
  REFIT_NOTICE_UNWATCHED = 3,
  /* A GPU's direct rounds are enqueued one by one, since recording them as a
   * graph failed. Of bind and run. */
  REFIT_NOTICE_NOT_RECORDED = 4,
  /* Params that the check after a refit leaves out, because destinations make
   * them by quantizing what arrives. Of wait. */
  REFIT_NOTICE_NOT_COMPARED = 5,
  /* What each refit sends whole, in a plan with options.delta. Of bind. */
  REFIT_NOTICE_NOT_DELTA = 6
};

/* What this rank does otherwise than its user may expect; nothing has failed.
 */
typedef struct refit_notice {
  size_t struct_size;
  refit_notice_kind kind; /* a later library may have others */
  int32_t reserved;       /* 0 */
  const char* text;       /* a sentence, with the reason */
} refit_notice;

#endif /* REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_REPORTS_H_ */
