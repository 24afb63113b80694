// A stand-in for libnccl in tests: ranks are threads of one process, memory is
// host memory, streams are ignored. libfake_nccl.so exports the functions of
// executor/transport/nccl_api.h and those below, which steer and inspect it.
//
// Where NCCL is lenient, undefined or merely slow, the fake says no. The model:
//
// - Work. A group runs when the calls of any rank find that it can; the fake
//   has no threads. Communicators are non-blocking (one that is not can only be
//   made and aborted): ncclGroupEnd returns at once, with ncclInProgress, and a
//   communicator takes no other call before ncclCommGetAsyncError has told its
//   owner that the last one is done.
// - Connect. Before its first kernel a group connects every (communicator,
//   sender, receiver) that was never used: both ends must be in a group with an
//   operation between them.
// - Kernels. The operations of a group are taken in rounds, as NCCL does: round
//   r takes the next send to rank+r and the next receive from rank-r, and after
//   the last round comes round 0 again. What a round takes goes into one
//   kernel. When it does not fit the budget, the kernel is closed and the next
//   one starts at round 0, as in NCCL 2.28. Kernel k+1 of a rank starts when
//   kernel k is done, and nothing is buffered: a message moves when both ends
//   are in running kernels.
// - Matching. The k-th send from a to b meets the k-th receive at b from a.
// - Failure. A rank whose operation fails loses its group and can only abort
//   the communicator. Its peers wait for ever, or get ncclRemoteError when
//   their work needs a rank that failed, aborted or was killed.
// - Encryption. The key is one for the process, and must be there before the
//   first unique id. Another one after that is refused.
//
// `rank` below is the rank of a worker: what fake_nccl_set_rank said on the
// thread that made a communicator, else the rank in that communicator.
// Communicators made with the same such rank, or without one by the same
// thread, are one worker's, which may use one of them at a time. An
// `operation` is counted from 0, in issue order, over what the worker issues
// after the call, on all communicators.
#ifndef REFIT_TESTS_EXECUTOR_FAKE_NCCL_FAKE_NCCL_H_
#define REFIT_TESTS_EXECUTOR_FAKE_NCCL_FAKE_NCCL_H_

#include <stddef.h>
#include <stdint.h>

extern "C" {

// Forgets all communicators, counts, faults and settings. Call it between tests
// when no thread is inside the fake.
void fake_nccl_reset();

// Ends every call that blocks, and every later one that would, with
// ncclSystemError: so that threads of a hang or a killed rank can be joined.
void fake_nccl_release();

// The worker that the calling thread is, for the communicators it makes.
void fake_nccl_set_rank(int rank);

// ---- Settings, for all ranks.

void fake_nccl_set_version(int version);                 // 22809
void fake_nccl_set_budget(size_t operations);            // per kernel; 2048
void fake_nccl_set_connect_delay(int64_t microseconds);  // per edge; 0
// How long a captured group is in progress. To abort the communicator meanwhile
// is a violation. 0
void fake_nccl_set_capture_delay(int64_t microseconds);
// Whether peers of a rank that is gone get ncclRemoteError; they hang else.
void fake_nccl_set_remote_errors(bool on);

// ---- Faults of one rank.

// What ncclGetVersion says on its threads, fake_nccl_set_rank having been
// called.
void fake_nccl_set_rank_version(int rank, int version);
void fake_nccl_delay(int rank, int64_t microseconds);  // of each operation
// The operation fails: `result` is the rank's asynchronous error.
void fake_nccl_fail_at(int rank, uint64_t operation, int result);
void fake_nccl_hang_at(int rank, uint64_t operation);
// Flips a byte, counted in the message, on its way.
void fake_nccl_corrupt_at(int rank, uint64_t operation, size_t byte);
// ncclCommAbort of the rank's communicators does not return.
void fake_nccl_hang_abort(int rank);
// The rank's calls block from here on; none of its operations is done.
void fake_nccl_kill(int rank);

// ---- Graphs.

// Whether the calling thread's groups are taken down from now on, as on a
// capturing stream, instead of run.
void fake_nccl_set_captures(bool on);

// ---- What was seen since the reset.

// Whether groups wait for each other, or for a rank that is gone, such that no
// call of an unharmed idle rank can end it. A rank that has not come yet may
// still come: waiting for it is no deadlock.
bool fake_nccl_is_deadlocked();
int fake_nccl_live_communicators();  // not aborted
uint64_t fake_nccl_lazy_connects();  // edges connected
uint64_t fake_nccl_cut_groups();     // groups that took several kernels
uint64_t fake_nccl_messages();       // matched and moved
uint64_t fake_nccl_largest_group();  // most operations in one group
// Messages of which the two ends stood in different groups. Only the groups of
// the two ranks with each other count: others may leave them out.
uint64_t fake_nccl_group_mismatches();
// Communicators of the calling thread's worker of which it does not know that
// the last call is done: nothing may be enqueued behind that yet.
int fake_nccl_unawaited();
// Two communicators of one rank in use at a time; a thread that ended inside a
// group; an abort while a group is captured.
uint64_t fake_nccl_violations();
// The first violation or group mismatch in words, "" if there is none. Valid
// until the thread's next call of this function.
const char* fake_nccl_first_violation();
// The key that ncclSetEncryption was given, "" if none. Valid until the
// thread's next call of this function or the one before.
const char* fake_nccl_key();

}  // extern "C"

#endif  // REFIT_TESTS_EXECUTOR_FAKE_NCCL_FAKE_NCCL_H_
