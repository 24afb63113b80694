/* The executor in C: what a worker needs to replay a plan, with a stable ABI.
 *
 *   plan, device, rendezvous -> executor -> connect -> bind
 *     -> run, wait, as often as wanted -> close
 *
 * It is C99 and C++. examples/worker.c is a whole worker; docs/operations.md
 * says how to deploy one and what to do about each error.
 *
 * Errors. A function that can fail returns a status. NULL is success; anything
 * else is an error that the caller owns and frees with refit_status_free. On an
 * error the function sets its result to NULL. A null pointer where none is
 * allowed is REFIT_INVALID_ARGUMENT; functions that return no status require
 * theirs. A call that is refused for its arguments or for the executor's state
 * changes nothing. The other ranks do not learn of it: they wait for this rank
 * until the deadline. No C++ exception leaves the library.
 *
 * Ownership. The caller owns every object that a function makes, and frees it
 * with the function of its name; NULL may be freed. An executor keeps alive
 * what it was made of, so objects may be freed in any order. The library reads
 * strings and arrays during the call and does not keep them.
 *
 * Structs. The first field is the struct's size as the caller was compiled.
 * Fields that the caller does not know count as zero, and zero means the
 * default:
 *
 *   refit_run_options options = {sizeof(options)};
 *
 * A field that this library does not know must be zero, or the call fails with
 * REFIT_INVALID_ARGUMENT. New fields are added at the end.
 *
 * Threads. Plans, devices, rendezvous, fabrics and statuses may be used by many
 * threads at once, an executor by one at a time (but see
 * refit_executor_interrupt). To free an object is a use.
 *
 * Times are milliseconds. A timeout of 0 means ten minutes; INT64_MAX means
 * none; a negative one is REFIT_INVALID_ARGUMENT.
 */
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_H_

#include <stddef.h>
#include <stdint.h>

#include "refit_reports.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The library's version, "0.1.0". Valid for ever. */
const char* refit_version(void);

/* Log */

typedef int32_t refit_log_level;
enum {
  REFIT_LOG_INFO = 1,    /* of UCX, where UCX_LOG_LEVEL asks for it */
  REFIT_LOG_WARNING = 2, /* a long wait; a meeting that anybody may join */
  REFIT_LOG_ERROR = 3    /* of UCX */
};

/* Gets what the library says besides statuses and notices, such as "connect:
 * waiting for ranks 3, 5 (10 s)". `line` has no end of line, and is valid
 * during the call only. Any thread may call it, also one of the library's own,
 * but one at a time. The library may hold locks meanwhile, so the function must
 * not call the library, nor wait for a thread that does, nor throw. */
typedef void (*refit_log_function)(refit_log_level level, const char* line,
                                   void* context);

/* Sets the function for all of the process. NULL, the default: lines go to the
 * standard error, each behind "refit: ". When this returns, the function before
 * is neither running nor called again, so its context may be freed. Not for use
 * in a log function. */
void refit_set_log_function(refit_log_function function, void* context);

/* Status */

/* Numbered as gRPC's and Abseil's codes. A later library may return others. */
typedef int32_t refit_code;
enum {
  REFIT_OK = 0,
  REFIT_CANCELLED = 1, /* by refit_executor_interrupt */
  REFIT_UNKNOWN = 2,
  REFIT_INVALID_ARGUMENT = 3,
  REFIT_DEADLINE_EXCEEDED = 4,
  REFIT_NOT_FOUND = 5,
  REFIT_ALREADY_EXISTS = 6,
  REFIT_PERMISSION_DENIED = 7,
  REFIT_RESOURCE_EXHAUSTED = 8,
  REFIT_FAILED_PRECONDITION = 9,
  REFIT_ABORTED = 10, /* by another rank, whose own error says why */
  REFIT_UNIMPLEMENTED = 12,
  REFIT_INTERNAL = 13,
  REFIT_UNAVAILABLE = 14,
  REFIT_DATA_LOSS = 15 /* the destination does not hold what the source does */
};

typedef struct refit_status refit_status;

/* REFIT_OK for NULL. */
refit_code refit_status_code(const refit_status* status);

/* What happened, where and to whom, for a log: one sentence, or one line for
 * each problem. "" for NULL. Valid as long as the status. */
const char* refit_status_message(const refit_status* status);

void refit_status_free(refit_status* status);

/* Tensors */

/* A contiguous tensor of a worker, named as its framework names it. */
typedef struct refit_tensor {
  size_t struct_size;
  const char* name;
  void* data; /* may be NULL when the tensor has no elements */
  uint64_t size_bytes;
  const uint64_t* shape; /* `dimensions` extents; may be NULL for a scalar */
  size_t dimensions;
  refit_dtype dtype;
  int32_t reserved; /* must be 0 */
} refit_tensor;

/* Plan */

/* A plan file that was opened and checked. Immutable. */
typedef struct refit_plan refit_plan;

/* Maps the file read-only; it must not change while the plan is in use. Errors:
 * REFIT_NOT_FOUND, REFIT_PERMISSION_DENIED or REFIT_UNAVAILABLE (it cannot be
 * read), REFIT_FAILED_PRECONDITION (made for a newer Refit),
 * REFIT_INVALID_ARGUMENT (not a plan, or damaged). */
refit_status* refit_plan_open(const char* path, refit_plan** plan);

void refit_plan_free(refit_plan* plan);

/* Ranks 0 .. source_ranks-1 are the source, the others up to world_size-1 the
 * destination. */
int32_t refit_plan_world_size(const refit_plan* plan);
int32_t refit_plan_source_ranks(const refit_plan* plan);

/* 32 hex digits that all ranks must have in common, as refit-dump prints them.
 * Valid as long as the plan. */
const char* refit_plan_digest(const refit_plan* plan);

/* Device memory that an executor of `rank` allocates for staging, in bytes.
 * With UCX, direct rounds need at most 1 MiB more for each of their messages.
 * Error: REFIT_INVALID_ARGUMENT, no such rank. */
refit_status* refit_plan_staging_bytes(const refit_plan* plan, int32_t rank,
                                       uint64_t* staging_bytes);

/* Calls `visit` with each tensor that `rank` binds, in plan order, its data
 * NULL. A tensor is valid during its call only; `visit` must not throw. Error:
 * REFIT_INVALID_ARGUMENT, no such rank. */
typedef void (*refit_tensor_visitor)(const refit_tensor* tensor, void* context);
refit_status* refit_plan_visit_tensors(const refit_plan* plan, int32_t rank,
                                       refit_tensor_visitor visit,
                                       void* context);

/* Device */

/* Where a rank's tensors are. One device may serve several ranks. */
typedef struct refit_device refit_device;

/* The CPU. Work is done on the calling thread, streams are ignored. */
refit_status* refit_device_create_host(refit_device** device);

/* The GPU of number `ordinal`, as CUDA counts. Its streams are cudaStream_t;
 * NULL is the legacy default stream. Errors: REFIT_NOT_FOUND, no such device or
 * no driver; REFIT_UNIMPLEMENTED, a library that was built without CUDA. */
refit_status* refit_device_create_cuda(int32_t ordinal, refit_device** device);

void refit_device_free(refit_device* device);

/* Where ranks meet */

/* Where rank 0, or a host of the meeting, listens, and the others connect. */
typedef struct refit_rendezvous refit_rendezvous;

/* A meeting for whoever starts the ranks to hand out, as NCCL's unique ids are:
 * the process that is to be rank 0 makes the id, every rank makes a rendezvous
 * of it. Rank 0's process listens from then on, at any free port. Others reach
 * it at the name or address in REFIT_HOST, or else at the first address of a
 * network interface that is up and that NCCL_SOCKET_IFNAME allows. An id serves
 * one meeting at a time, and is the secret that lets ranks in: hand it out on a
 * way that only they read. Errors: REFIT_UNAVAILABLE, no port;
 * REFIT_INVALID_ARGUMENT, REFIT_HOST is too long, or no interface is allowed.
 */
enum { REFIT_UNIQUE_ID_BYTES = 128 };
refit_status* refit_unique_id_create(char id[REFIT_UNIQUE_ID_BYTES]);

/* Makes the id of a meeting that this process serves, but is no rank of: a
 * driver, for example. So whichever rank is lost, those that are left can meet
 * again, by another id. When this process ends, the ranks' next call fails.
 * Errors: as above; REFIT_INVALID_ARGUMENT, the world size;
 * REFIT_RESOURCE_EXHAUSTED, too few file descriptors. */
refit_status* refit_meeting_host(int32_t world_size,
                                 char id[REFIT_UNIQUE_ID_BYTES]);

/* Error: REFIT_INVALID_ARGUMENT, bytes that are no id of Refit. What else is
 * wrong, refit_executor_create or refit_executor_connect tells. */
refit_status* refit_rendezvous_create_unique_id(
    const char id[REFIT_UNIQUE_ID_BYTES], int32_t rank, int32_t world_size,
    refit_rendezvous** rendezvous);

/* Reads the variables of torchrun, Open MPI or SLURM; docs/operations.md lists
 * them. The secret that lets ranks in is REFIT_SECRET, or in the file that
 * REFIT_SECRET_FILE names; without one whoever reaches rank 0 is let in
 * (docs/operations.md, "Who may join"). Error: REFIT_INVALID_ARGUMENT, naming
 * the variable, what it is and what it should be. */
refit_status* refit_rendezvous_from_environment(refit_rendezvous** rendezvous);

/* This process's number on its host, from the same launchers. Errors as
 * above. */
refit_status* refit_local_rank_from_environment(int32_t* local_rank);

int32_t refit_rendezvous_rank(const refit_rendezvous* rendezvous);
int32_t refit_rendezvous_world_size(const refit_rendezvous* rendezvous);

void refit_rendezvous_free(refit_rendezvous* rendezvous);

/* Ranks that are threads of this process share a fabric instead. It carries
 * host memory only. */
typedef struct refit_local_fabric refit_local_fabric;

/* Error: REFIT_INVALID_ARGUMENT, not a number of ranks. */
refit_status* refit_local_fabric_create(int32_t world_size,
                                        refit_local_fabric** fabric);

void refit_local_fabric_free(refit_local_fabric* fabric);

/* Executor */

/* One rank's replay of a plan. */
typedef struct refit_executor refit_executor;

/* What carries messages between ranks that meet at a rendezvous. */
typedef int32_t refit_transport;
enum {
  REFIT_TRANSPORT_DEFAULT = 0, /* NCCL for a CUDA device, UCX for the host */
  REFIT_TRANSPORT_NCCL = 1,    /* memory of CUDA devices only */
  REFIT_TRANSPORT_UCX = 2      /* host memory only, which may be in other
                                * processes and on other hosts; the messages of
                                * direct rounds are sent like staged ones */
};

typedef struct refit_executor_options {
  size_t struct_size;
  const refit_plan* plan;
  refit_device* device;
  /* One of the two. */
  const refit_rendezvous* rendezvous;
  refit_local_fabric* fabric;
  int32_t rank;     /* global; the rendezvous' where there is one */
  int32_t reserved; /* must be 0 */
  /* 1: a GPU's rounds are enqueued one by one at each run. 0: bind records the
   * rounds of a rank if all are direct, and run launches them as one CUDA
   * graph. After a connect the next run records them. Not by ranks that share
   * their GPU in direct rounds. Ranks may differ. */
  int32_t without_graph;
  int32_t reserved2; /* must be 0 */
  /* 1: run does not ask a GPU's driver whether the tensors' memory was freed
   * since the bind. 0: it does, with one question per allocation. */
  int32_t without_memory_watch;
  /* The same on all ranks; REFIT_TRANSPORT_DEFAULT in a fabric. */
  refit_transport transport;
} refit_executor_options;

/* A cast of contiguous fp32 elements, an optimizer's master weights, that marks
 * which results differ from what was held before: a worker's weights and their
 * refit_changes in one pass. All memory is the device's and the caller's, none
 * of it overlaps. */
typedef struct refit_marking_cast {
  size_t struct_size;
  const float* from; /* aligned to 4 bytes */
  void* to;          /* aligned to 2 bytes */
  /* The bits of the tensor that `to` is a part of: that of to's element i is
   * first_element + i. Bits of what did not change stay as they are. Casts that
   * share a word may run at the same time. */
  uint32_t* changes;
  uint64_t first_element; /* of `to` in the tensor */
  uint64_t elements;
  refit_dtype to_dtype; /* REFIT_DTYPE_BF16 or REFIT_DTYPE_FP16 */
  int32_t reserved;     /* must be 0 */
} refit_marking_cast;

/* Enqueues the cast on `stream` of the device; on the host it is done when the
 * call returns. It rounds to nearest even; NaN stays a quiet NaN with its sign.
 * Bits are compared, so -0 is a change from 0. Errors: REFIT_INVALID_ARGUMENT
 * (another dtype, null pointers, alignment), REFIT_INTERNAL (the device). */
refit_status* refit_cast_and_mark(refit_device* device, void* stream,
                                  const refit_marking_cast* cast);

typedef int32_t refit_state;
enum {
  REFIT_STATE_LOADED = 0,
  REFIT_STATE_CONNECTED = 1,
  REFIT_STATE_BOUND = 2,   /* ready to run; the last refit, if any, succeeded */
  REFIT_STATE_RUNNING = 3, /* a refit was enqueued, wait tells how it ended */
  REFIT_STATE_TORN = 4,    /* the last refit failed: do not serve until a later
                            * one succeeds */
  REFIT_STATE_CLOSED = 5
};

typedef struct refit_run_options {
  size_t struct_size;
  int64_t timeout_ms; /* of the whole refit, until the end of its wait */
  /* The tensors' present addresses, in the order of the bind; NULL: unchecked.
   * A tensor that moved fails the refit before any byte moves. */
  const void* const* addresses;
  size_t address_count; /* as many as the bind took; 0 where there are none */
  /* 1: wait compares digests of what all ranks hold after the refit, before
   * post-hooks, and fails with REFIT_DATA_LOSS on all of them if a destination
   * rank does not hold what the source holds; the message names params and
   * ranks. The same on all ranks, else all fail with
   * REFIT_FAILED_PRECONDITION, and 0 while a stream is captured. The first
   * run with it after a bind prepares the digests. 0: it does not. */
  int32_t check;
  /* 1: this refit sends all, if one rank asks for it. Ask whenever something
   * else than a refit wrote a destination's tensors. 0: a plan with
   * options.delta sends what changed where it can. Other plans always send all.
   */
  int32_t dense;
  /* Most multiprocessors of this rank's GPU that direct rounds between GPUs
   * use; 0: the plan's options.direct_multiprocessors, which is all unless the
   * job bounds it. Ranks may differ in it. */
  uint32_t direct_multiprocessors;
  uint32_t reserved; /* 0 */
} refit_run_options;

/* Makes the executor of one rank. Nothing is sent or allocated on the device
 * yet. Errors: REFIT_INVALID_ARGUMENT (no such rank, another number of ranks
 * than the plan has, a fabric with a CUDA device, both ways to meet or none),
 * REFIT_ALREADY_EXISTS (the fabric gave this rank's end away before, be it to
 * an executor that is freed). */
refit_status* refit_executor_create(const refit_executor_options* options,
                                    refit_executor** executor);

/* Closes it first, if need be. */
void refit_executor_free(refit_executor* executor);

/* Meets the other ranks, allocates the staging arena, makes communicators, and
 * shakes hands on the plan. Collective: all ranks call it, and none succeeds
 * unless all do. While torn it repairs what a failed refit broke and keeps what
 * is bound; the state stays torn. Errors: REFIT_DEADLINE_EXCEEDED (naming a
 * rank that did not come), REFIT_UNAVAILABLE (nobody listens there; or a rank
 * is gone for good: refit_executor_replace goes on without it),
 * REFIT_ALREADY_EXISTS (two processes are one rank, both named),
 * REFIT_FAILED_PRECONDITION (another plan, version or NCCL on some rank, both
 * values named; or wrong state), REFIT_NOT_FOUND or REFIT_UNIMPLEMENTED (no
 * libnccl that serves), REFIT_RESOURCE_EXHAUSTED, REFIT_ABORTED. After a first
 * connect that failed it may be called again, on all ranks. */
refit_status* refit_executor_connect(refit_executor* executor,
                                     int64_t timeout_ms);

/* What is done after each refit, before the worker serves, to a tensor that the
 * refit wrote with the source's values: `name` says what ("negative-exp"),
 * docs/plan-format.md lists the names. */
typedef struct refit_post_hook {
  size_t struct_size;
  const char* tensor;
  const char* name;
  const char* detail; /* one sentence */
  /* 1: the executor does it, behind the last round. 0: the caller does. */
  int32_t by_executor;
  int32_t reserved; /* 0 */
  /* refit_executor_refits after the refit that it was last done for; 0: it was
   * not, or the caller does it after the wait. */
  uint64_t refit;
} refit_post_hook;

/* Does a hook to a tensor of the bind, whose address and shape are as they were
 * given there. 0 is success; any other number fails the wait and is in its
 * message. Must not throw. */
typedef int32_t (*refit_post_hook_function)(const refit_post_hook* hook,
                                            const refit_tensor* tensor,
                                            void* context);

/* A post-hook that the caller does. */
typedef struct refit_post_hook_performer {
  size_t struct_size;
  const char* name;
  /* Called by refit_executor_wait, on its thread, for each tensor that has the
   * hook, once the refit has written all tensors. NULL: the caller does the
   * hook after the wait, before it serves. */
  refit_post_hook_function perform;
  void* context;
} refit_post_hook_performer;

/* Which elements of a tensor changed, as the worker marks them: of a source
 * rank, in a plan with options.delta "bitmap". Anywhere else it refuses the
 * bind. */
typedef struct refit_changes {
  size_t struct_size;
  const char* tensor; /* one of the bind's, which has no other changes */
  /* Bit i % 32 of word i / 32 says that element i changed since the last refit
   * that succeeded: (elements + 31) / 32 words in memory of the device, apart
   * from all else that is bound. The caller owns them and keeps them in place
   * until the next bind or close. It sets bits in work that comes before a run
   * on the run's stream, and none from then to the end of the wait. Each refit
   * clears the words; the refit after one that failed sends all. */
  uint32_t* bits;
} refit_changes;

typedef struct refit_bind_options {
  size_t struct_size;
  int64_t timeout_ms; /* 0: ten minutes */
  /* The post-hooks that the caller does, an array whose elements have one
   * struct_size. A name that is no post-hook is an error;
   * one that this rank, or this plan, does not have is passed over. */
  const refit_post_hook_performer* hooks;
  size_t hook_count;
  /* An array whose elements have one struct_size. Tensors that are not named
   * are sent whole each time. */
  const refit_changes* changes;
  size_t changes_count;
} refit_bind_options;

/* Takes the rank's tensors, checks each against the plan and prepares all
 * copies. All elements of `tensors` have one struct_size. Their memory must
 * stay in place until the next bind or the end of the executor; the array need
 * not. A tensor that the plan skips as a whole may be left out. The executor
 * does the arithmetic post-hooks that the caller does not name; any other hook
 * that is not named refuses the bind.
 *
 * Bind again when tensors move. The first bind is collective. Later ones are
 * collective if the plan has direct rounds, and local to the rank if it has
 * none. A refused bind leaves the earlier one in place. Errors of a refusal:
 * REFIT_INVALID_ARGUMENT (missing, unexpected or duplicate names, wrong dtype,
 * shape or size, memory that overlaps, a bitmap of changes where the plan takes
 * none, a post-hook that nobody does: all problems in one message),
 * REFIT_FAILED_PRECONDITION (memory that cannot be shared; wrong state),
 * REFIT_ABORTED (another rank was refused), REFIT_DEADLINE_EXCEEDED. */
refit_status* refit_executor_bind(refit_executor* executor,
                                  const refit_tensor* tensors, size_t count,
                                  int64_t timeout_ms);

/* The same with options, which may be NULL. */
refit_status* refit_executor_bind_with(refit_executor* executor,
                                       const refit_tensor* tensors,
                                       size_t count,
                                       const refit_bind_options* options);

typedef struct refit_replacement {
  size_t struct_size;
  const refit_plan* plan;
  /* One of the two. */
  const refit_rendezvous* rendezvous;
  refit_local_fabric* fabric;
  int32_t rank;     /* in the plan; the rendezvous' where there is one */
  int32_t reserved; /* must be 0 */
} refit_replacement;

/* Goes on with another plan, as when an engine was lost or one has come.
 * Collective over the ranks of that plan, which meet anew: those of the old
 * plan that stay call this; newcomers create, connect and bind. The executor
 * keeps its device, and the tensors and hooks of the last bind, if it is bound;
 * what its peers and it map for both plans stays mapped. The next refit of a
 * plan with options.delta is dense, and refit_executor_refits begins anew.
 * Destroy graphs that captured refits before, as before a connect.
 *
 * After an error of create's, or REFIT_FAILED_PRECONDITION while a refit is
 * under way or after close, all is as it was. After any other the executor is
 * that of the new plan and not bound, as its state tells: call this again, with
 * a plan of those that are left and a new meeting or fabric, or bind other
 * tensors. Such are connect's and bind's, and REFIT_FAILED_PRECONDITION naming
 * peers that may still use this rank's tensors: end their processes first. */
refit_status* refit_executor_replace(refit_executor* executor,
                                     const refit_replacement* replacement,
                                     int64_t timeout_ms);

/* Calls `visit` with each, in plan order: those of one tensor in the order in
 * which they are done. There are none where the two sides keep the same values.
 * Before a bind as if the caller did none. A hook is valid during its call
 * only; `visit` must not throw. */
typedef void (*refit_post_hook_visitor)(const refit_post_hook* hook,
                                        void* context);
refit_status* refit_executor_visit_post_hooks(const refit_executor* executor,
                                              refit_post_hook_visitor visit,
                                              void* context);

/* Enqueues one refit on `stream` of the device and returns; on a GPU nothing is
 * waited for but that NCCL takes the work. Collective. `options` may be NULL.
 * An error fails the refit on all ranks and leaves REFIT_STATE_TORN; run may be
 * called again, after connect if the message asks for it. Errors:
 * REFIT_FAILED_PRECONDITION (a tensor moved, a transport that needs connect, or
 * wrong state, which changes nothing), REFIT_DEADLINE_EXCEEDED, REFIT_ABORTED,
 * REFIT_UNAVAILABLE, REFIT_INTERNAL: with round, operation and peer;
 * REFIT_INVALID_ARGUMENT (another number of addresses than the bind took
 * tensors), which changes nothing.
 *
 * With options.delta in the plan, and with check, run returns after all ranks
 * have called it, because they agree first. So one thread cannot run several
 * ranks: its first run would wait until the timeout. Before a delta refit
 * it waits until `stream` has come here and what changed is counted.
 *
 * While `stream` is captured, the refit becomes part of the graph. Replay the
 * graph on all ranks alike and wait for it yourself: no timeout holds. Destroy
 * the graph before you connect again or close the executor. Nobody knows of
 * replays: keep the tensors until all ranks' have ended. */
refit_status* refit_executor_run(refit_executor* executor, void* stream,
                                 const refit_run_options* options);

/* Returns when the refits enqueued so far are over on all ranks and all ranks'
 * post-hook functions have returned, once for all of them: the new weights are
 * in place. Collective. An error leaves REFIT_STATE_TORN. Peers have stopped
 * using this rank's tensors then, or the message names those that have not. A
 * rank that was not called for a refit learns its result from its next
 * collective call, which fails; connect goes on to where the others are. Errors
 * as of run; REFIT_INTERNAL, a post-hook function of this rank failed;
 * REFIT_ABORTED, one of another rank did; REFIT_DATA_LOSS, a checked refit's
 * states differ. */
refit_status* refit_executor_wait(refit_executor* executor);

typedef struct refit_digest_options {
  size_t struct_size;
  /* What several of these ranks hold is counted by the lowest of them, so that
   * their digests add up to that of one copy. The executor's rank is one of
   * them. NULL: it alone, which counts all it holds. */
  const int32_t* among;
  size_t among_count;
} refit_digest_options;

/* Calls `visit` with the digest of each param that this rank's tensors hold, in
 * the plan's order, once the work before it on `stream` is done; waits for
 * that. Not collective. `options` may be NULL. Params that the plan does not
 * move, and tensors that have post-hooks, are left out. A digest is valid
 * during its call only; `visit` must not throw. It allocates: call it while no
 * other rank on the same device is in a refit. Errors:
 * REFIT_FAILED_PRECONDITION (not bound, or running), REFIT_INVALID_ARGUMENT. */
typedef void (*refit_param_digest_visitor)(const refit_param_digest* digest,
                                           void* context);
refit_status* refit_executor_visit_digest(refit_executor* executor,
                                          void* stream,
                                          const refit_digest_options* options,
                                          refit_param_digest_visitor visit,
                                          void* context);

/* The sum of what both digests counted: of two ranks, or of two params. */
uint64_t refit_digest_add(uint64_t sum_a, uint64_t sum_b);

/* Ends what the executor's rank waits in: its connect, bind, run or wait that
 * is under way on another thread returns REFIT_CANCELLED within about 100 ms,
 * and fails on the other ranks too. Does nothing where none is under way. May
 * be called while another thread uses the executor, and in a signal handler. */
void refit_executor_interrupt(refit_executor* executor);

/* How many refits succeeded, with the post-hooks that run and wait do. */
uint64_t refit_executor_refits(const refit_executor* executor);

refit_state refit_executor_state(const refit_executor* executor);

/* "loaded", "connected", "bound", "running", "torn", "closed"; "unknown" for
 * any other number. Valid for ever. */
const char* refit_state_name(refit_state state);

/* Fills `counters`, whose struct_size the caller sets. Error:
 * REFIT_INVALID_ARGUMENT, a struct_size that is none. */
refit_status* refit_executor_counters(const refit_executor* executor,
                                      refit_counters* counters);

/* Fills `report`, whose struct_size the caller sets, with the last refit that
 * was waited for and succeeded. Errors: REFIT_NOT_FOUND, there is none since
 * the bind or since a later run, or the plan has no deltas;
 * REFIT_INVALID_ARGUMENT, a struct_size that is none. */
refit_status* refit_executor_delta_report(const refit_executor* executor,
                                          refit_delta_report* report);

/* Calls `visit` with each notice of the last calls of its kind. A notice is
 * valid during its call only; `visit` must not throw. */
typedef void (*refit_notice_visitor)(const refit_notice* notice, void* context);
refit_status* refit_executor_visit_notices(const refit_executor* executor,
                                           refit_notice_visitor visit,
                                           void* context);

/* Frees memory on the device, communicators and connections; counters stay. A
 * refit that nobody waited for is aborted on all ranks. The state is
 * REFIT_STATE_CLOSED then. Idempotent. */
void refit_executor_close(refit_executor* executor);

#ifdef __cplusplus
}
#endif

#endif /* REFIT_EXECUTOR_INCLUDE_REFIT_REFIT_H_ */
