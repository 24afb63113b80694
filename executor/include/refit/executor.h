// Executor: one rank's replay of a plan.
//
//   Load -> Connect -> Bind -> Run, Wait, as often as wanted -> Close
//
// Connect and the first Bind are collective: all ranks of the plan call them,
// and none returns success before all have passed. Run and Wait are collective
// too. So is every Bind of a plan with direct rounds, because its ranks need to
// know where each other's tensors are.
#ifndef REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_
#define REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/state_digest.h"
#include "refit/transport.h"

namespace refit {

// A contiguous tensor of this worker, named as its framework names it.
struct BoundTensor {
  std::string name;
  void* data = nullptr;  // may be null when the tensor has no elements
  uint64_t size_bytes = 0;
  DType dtype = DType::kUnspecified;
  std::vector<uint64_t> shape;
  // Of a plan whose workers mark what changed (options.delta, "bitmap"), on a
  // source rank; a bitmap anywhere else refuses the Bind. Bit i % 32 of 32-bit
  // word i / 32 says that element i changed since the last refit that
  // succeeded: (elements + 31) / 32 words in memory of the device. The caller
  // owns them and keeps them in place until the next Bind or Close. It sets
  // bits in work that comes before the Run on its stream, and none between a
  // Run and the end of its Wait. Each refit clears all words behind its rounds;
  // if it fails, the next one is dense, so no bit is missed. A worker that only
  // sets bits thus loses none to a refit that it left out. Null: the tensor is
  // sent whole each time. Device::CastAndMark sets bits.
  uint32_t* changes = nullptr;
};

// What is done after each refit, before the worker serves, to a tensor that the
// refit wrote in the source's form: `name` says what, docs/plan-format.md lists
// them.
struct TensorPostHook {
  std::string tensor;
  std::string name;    // "negative-exp"
  std::string detail;  // one sentence
  // Whether Run enqueues it behind the last round; else the caller performs it.
  bool by_executor = false;
  // Executor::refits after the refit that it was last performed for; 0: it was
  // not, or the caller performs it after Wait.
  uint64_t refit = 0;

  friend bool operator==(const TensorPostHook&,
                         const TensorPostHook&) = default;
};

// A post-hook that the caller performs.
struct PostHookPerformer {
  std::string name;
  // Called by Wait, on its thread, for each tensor that has the hook, once the
  // refit has written all tensors. It must finish or enqueue on a stream that
  // the worker's own work follows. An error fails the refit on all ranks. Null:
  // the caller performs the hook after Wait, before it serves.
  std::function<absl::Status(const TensorPostHook&, const BoundTensor&)>
      perform;
};

enum class ExecutorState : uint8_t {
  kLoaded,
  kConnected,
  kBound,    // ready to run; the last refit, if any, succeeded
  kRunning,  // a refit was enqueued, Wait tells how it ended
  kTorn,     // the last refit failed: do not serve until a later one succeeds
  kClosed,
};

std::string_view ExecutorStateName(ExecutorState state);

struct ExecutorOptions {
  int32_t rank = 0;                // global
  Device* device = nullptr;        // must outlive the executor
  Transport* transport = nullptr;  // of `rank`; must outlive the executor

  // On a GPU a rank whose rounds are all direct records them at Bind, and Run
  // launches them as one CUDA graph. After a Connect the next Run records them
  // anew. false: they are enqueued one by one each time. Not by ranks that
  // share their GPU in direct rounds, not while the rounds are timed, and not
  // in a plan with options.delta. Ranks may differ.
  bool graph = true;
  // Measures every round: Executor::rounds.
  bool time_rounds = false;
  // Whether the tensors hold old and new weights mixed, as after a refit of
  // another plan that failed: then the state is kTorn after Bind.
  bool torn = false;
  // On a GPU, Run asks the driver whether the tensors' memory was freed since
  // Bind, with one question per allocation.
  bool watch_memory = true;
};

enum class NoticeKind : uint8_t {
  kHosts = 1,  // ranks run on other hosts than the plan says; of Connect
  // Pairs of ranks in which not the end moves the bytes that the plan means;
  // of Bind.
  kPull = 2,
  kUnwatched = 3,  // a free of tensors' memory would not be noticed; of Bind
  // The rounds could not be recorded as a graph; of Bind and Run.
  kNotRecorded = 4,
  // Params that RunOptions::check does not compare, because destinations make
  // them by quantizing what arrives; of Wait.
  kNotCompared = 5,
  kNotDelta = 6,  // what each refit sends whole, in a plan with deltas; of Bind
};

// What a rank does otherwise than its user may expect. Nothing has failed.
struct Notice {
  NoticeKind kind = NoticeKind::kHosts;
  std::string text;  // a sentence, with the reason

  friend bool operator==(const Notice&, const Notice&) = default;
};

struct RunOptions {
  // For the whole refit.
  std::chrono::nanoseconds timeout = std::chrono::minutes(10);
  // Where the tensors are now, one for each tensor of Bind, in its order; none:
  // not checked. A tensor that moved since Bind fails the refit before any byte
  // moves. Another number of addresses is kInvalidArgument, which leaves the
  // state as it was and which the other ranks do not hear of.
  std::optional<absl::Span<const void* const>> addresses = std::nullopt;
  // Wait compares digests of what all ranks hold after the refit, before
  // post-hooks, and fails on all of them if a destination rank does not hold
  // what the source holds: kDataLoss, naming params and ranks. It costs one
  // read of the tensors, and two exchanges over the control plane. What a
  // destination quantizes is compared as it arrives; a notice says so. The same
  // on all ranks, else all fail with kFailedPrecondition, naming two ranks that
  // differ; not while `stream` is captured. Such a Run returns after all
  // ranks have called it. The first one after a Bind prepares the digests, and
  // allocates for them.
  // A delta refit is checked if its plan says so, too.
  bool check = false;
  // This refit is dense if one rank, whichever, asks for it. Ask whenever
  // something else than a refit wrote a destination's tensors. Refits of plans
  // without deltas are dense anyway.
  bool dense = false;
  // Most multiprocessors of this rank's GPU that direct rounds between GPUs
  // use, so that others can work beside the refit; 0: the plan's
  // options.direct_multiprocessors, which is all unless the job bounds it.
  // Ranks may differ in it. docs/benchmarks.md has the speeds. A rank that
  // launches a recorded graph records it anew when the number changes.
  uint32_t direct_multiprocessors = 0;
};

// How a refit of a plan with deltas (options.delta) went. The versions are
// those of all ranks, the rest is of this one: what it sent in staged rounds,
// because direct rounds always move everything. docs/delta.md says when a delta
// pays.
struct DeltaReport {
  bool is_delta = false;
  std::string why_dense;      // a clause; "" if is_delta
  uint64_t base_version = 0;  // of a delta: what it changed
  uint64_t version = 0;       // what all ranks hold now
  // Elements that this rank sends in staged rounds and a delta may leave out,
  // once for each receiver: none on a destination. A delta counts those of them
  // that had changed, a dense refit does not.
  uint64_t elements = 0;
  uint64_t changed_elements = 0;
  // Of a delta: this rank's messages had room for one changed element of this
  // many; 1: they were sent whole. Of a dense refit: 0.
  uint32_t rung = 0;
  uint64_t stored_bytes = 0;  // sent in staged rounds
  uint64_t dense_bytes = 0;   // what a dense refit sends in them
  // From the first round to the end of the last, with waits for others. With
  // what was counted before, to choose a rung.
  double move_seconds = 0;
  double keep_seconds = 0;  // behind the rounds, for the next refit
  // What the refit's parts took, each on its stream and added up by kind. Parts
  // overlap, so that the sums may exceed move_seconds.
  double find_seconds = 0;    // of a delta: what changed, for staged rounds
  double encode_seconds = 0;  // staged messages; those that are whole: to pack
  // On the wire, with waits for others, and what this rank moves in direct
  // rounds.
  double wire_seconds = 0;
  double apply_seconds = 0;  // to store what staged rounds received
  // Digests, and their comparison with waits for others; 0: not checked.
  double check_seconds = 0;
  // Agreeing with the other ranks, with waits for them: before the rounds on
  // the version, the rung and that all can check, behind them on the end.
  double agree_seconds = 0;
  // From the call of Run to the end of Wait, with what the caller did between.
  double total_seconds = 0;

  // Nullopt: it was not counted.
  std::optional<double> change_rate() const {
    if (!is_delta || elements == 0) return std::nullopt;
    return static_cast<double>(changed_elements) /
           static_cast<double>(elements);
  }
};

struct DigestOptions {
  // What several of these ranks hold is counted by the lowest of them, so that
  // their digests add up to that of one copy: a side's, or an engine's. This
  // rank is one of them. Empty: this rank alone, which counts all it holds.
  absl::Span<const int32_t> among;
};

// Bytes of messages, including the alignment gaps of staged ones.
struct Traffic {
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
};

// What this rank did in the last Run.
struct RunCounters {
  uint64_t rounds = 0;
  uint64_t messages_sent = 0;
  uint64_t messages_received = 0;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  uint64_t graph_launches = 0;  // 1 if the rounds were launched as a graph
  // Times of the calling thread. On a GPU it only enqueues.
  double pack_seconds = 0;
  double wire_seconds = 0;
  double unpack_seconds = 0;
  // Memory that the executor holds for what is quantized.
  uint64_t scratch_bytes = 0;
  // Elements that this rank quantized without scratch: a source straight into
  // its peers' tensors, a destination straight from them.
  uint64_t fused_elements = 0;
  // The bytes above, by how they travelled.
  std::array<std::array<Traffic, static_cast<size_t>(fb::Mechanism::MAX) + 1>,
             static_cast<size_t>(fb::Route::MAX) + 1>
      traffic = {};

  Traffic& by(fb::Route route, fb::Mechanism mechanism) {
    return traffic[static_cast<size_t>(route)][static_cast<size_t>(mechanism)];
  }
  const Traffic& by(fb::Route route, fb::Mechanism mechanism) const {
    return traffic[static_cast<size_t>(route)][static_cast<size_t>(mechanism)];
  }
  // Sums over ranks.
  RunCounters& operator+=(const RunCounters& other);
};

// From when to when something was done, in seconds of the host's steady clock;
// both 0: it was not. Of a GPU: as if Run's stream had nothing to do before.
struct TimeSpan {
  double begin = 0;
  double end = 0;
};

// What a rank did in one round of the last Run.
struct RoundMeasurement {
  uint32_t round = 0;
  fb::Route route = fb::Route::kUnspecified;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
  uint64_t bytes_sent = 0;
  uint64_t bytes_received = 0;
  // From the start of packing to the end of unpacking, with waits for others.
  // Rounds overlap. 0 for a direct round in which peers move this rank's bytes
  // without signalling completion.
  double seconds = 0;
  // The three parts of a staged round; a direct one has only `move`, and none
  // where `seconds` is 0.
  TimeSpan pack;
  TimeSpan move;
  TimeSpan unpack;
};

class RankSchedule;
class RefitEnqueuer;
class RefitVersions;
struct BoundRank;  // what Bind took, and what was mapped for it
struct BoundRounds;

// Thread-compatible.
class Executor {
 public:
  // `plan` must outlive the executor. Errors: kInvalidArgument, a null device
  // or transport, or `options.rank` is not a rank of `plan` and the transport.
  static absl::StatusOr<std::unique_ptr<Executor>> Load(
      const PlanFile& plan, const ExecutorOptions& options);
  ~Executor();

  // Allocates the staging arena and scratch, and shakes hands with all ranks on
  // the plan. Call it again after a failed refit, but not while running: it
  // repairs the transport and keeps what is bound. A rank that was not called
  // for a refit learns its result from its next collective call, which fails;
  // Connect goes on to where the others are, and leaves it torn.
  absl::Status Connect(std::chrono::nanoseconds timeout);

  // Takes this rank's tensors, checks each against the plan and prepares all
  // copies. It refuses missing, unexpected and duplicate names, a wrong dtype,
  // shape or size, null pointers and overlapping memory: all problems in one
  // message. A tensor that the plan skips as a whole may be left out.
  //
  // Bind again whenever tensors move. If the plan has direct rounds, all ranks
  // must do so together; else it is local to the rank. A refused Bind leaves
  // the earlier one in place.
  //
  // In direct rounds senders store into their receivers' tensors. If a sender
  // cannot map its receiver's memory, the receiver reads the sender's. Bind is
  // refused if that cannot be mapped either.
  //
  // `hooks` names the post-hooks that the caller performs. The executor
  // performs arithmetic ones that are not named; any other that is not named is
  // one more problem, and so is a name that is no post-hook. Names of
  // post-hooks that this rank, or this plan, does not have are passed over.
  absl::Status Bind(absl::Span<const BoundTensor> tensors,
                    std::chrono::nanoseconds timeout = std::chrono::minutes(10),
                    std::vector<PostHookPerformer> hooks = {});

  // For the executor that takes this one's place in the process; null before
  // Bind. What peers map stays mapped while it lives.
  std::shared_ptr<const BoundRank> bound() const { return bound_; }
  // The Bind above, of the tensors and hooks that `earlier` has from an
  // executor of the same device. What peers show and map for both plans stays
  // as it is, unless a free of that memory would not be noticed. Refused where
  // memory of a tensor was freed since.
  absl::Status Bind(const BoundRank& earlier, std::chrono::nanoseconds timeout);

  // The ranks whose tensors this one reads in direct rounds, ascending: since
  // the plan pulls, or since they cannot map its tensors. Valid after Bind.
  std::vector<int32_t> pulls_from() const;

  // What is done with the tensors that Bind takes, in the plan's order; to one
  // tensor in this order. Empty where the sides' values do not differ. Before
  // Bind as if the caller performed none.
  const std::vector<TensorPostHook>& post_hooks() const { return post_hooks_; }
  // How many refits succeeded, with the post-hooks that Run and Wait perform. A
  // graph of the caller's counts once, when it is captured.
  uint64_t refits() const { return refits_; }

  // While `stream` is captured, the refit becomes part of the graph. Replay the
  // graph on all ranks alike and wait for it yourself: no deadline holds.
  // Destroy the graph before Connect, which fails at its deadline while the
  // graph exists, and before the transport.
  //
  // A refit starts after the one before it, even if that is on another stream
  // and nobody waited for it. A captured refit knows only what its graph
  // holds.
  //
  // When a call fails, or Close returns, peers have stopped using this rank's
  // tensors, or the message names those that have not. Nobody knows of replays
  // of a caller's graph: keep the tensors until all ranks' have ended.
  //
  // Enqueues one refit on `stream` and returns, without waiting for a device,
  // but where it counts what changed.
  // It allocates nothing, but for the first checked refit after a Bind. In a
  // plan with options.delta, and with RunOptions::check, it returns after all
  // ranks have called it, because they agree first: so one thread cannot run
  // several ranks, which would wait until the deadline. Before a delta refit
  // Run counts what changed of what this rank sends in staged rounds: it waits
  // for that, and so for what `stream` was given before. The timeout starts
  // here. An
  // error fails the refit on all ranks and leaves kTorn; what was enqueued has
  // ended then. Run may be called again, after Connect if the transport asks
  // for it.
  absl::Status Run(Stream stream, const RunOptions& options);

  // Returns when the refits enqueued so far are over on all ranks and the
  // callers' functions have performed all ranks' post-hooks, once for all of
  // them: the weights are in place. An error leaves kTorn. If a post-hook
  // fails, or is not done before the deadline, the refit fails on all ranks.
  absl::Status Wait();

  // What this rank's tensors hold of each param, in the plan's order, once the
  // work before it on `stream` is done; waits for that. Not collective. Params
  // that the plan does not move, and tensors that have post-hooks, whose values
  // are not the source's, are left out. It allocates, so call it while no other
  // rank on the same device is in a refit. Errors: kFailedPrecondition, not
  // bound, or running, or `stream` is captured; kInvalidArgument,
  // `options.among` without this rank or with what is no rank.
  absl::StatusOr<std::vector<ParamDigest>> Digest(
      Stream stream = nullptr, const DigestOptions& options = {});

  // Frees everything but the plan. Idempotent. It aborts a refit that nobody
  // waited for. `leave` is called, if it is not null, after this rank's work
  // has ended and before anything is freed, because freeing may wait for the
  // device for ever.
  void Close(const std::function<void()>& leave = nullptr);

  // Of the last calls of each kind.
  const std::vector<Notice>& notices() const { return notices_; }

  ExecutorState state() const { return state_; }
  const RunCounters& counters() const { return counters_; }
  // Of the last refit that was waited for and succeeded; nullopt: there is none
  // since Bind, or refits of this plan are always dense.
  const std::optional<DeltaReport>& delta_report() const {
    return delta_report_;
  }
  // This rank's rounds of the last refit that was waited for and succeeded.
  // Empty without ExecutorOptions::time_rounds.
  const std::vector<RoundMeasurement>& rounds() const { return rounds_; }

 private:
  Executor(const PlanFile& plan, const ExecutorOptions& options);
  const fb::RankProgram& program() const;
  HandshakeRecord Record(HandshakeStage stage) const;
  absl::Status BindAfter(const BoundRank* before,
                         absl::Span<const BoundTensor> tensors,
                         std::chrono::nanoseconds timeout,
                         std::vector<PostHookPerformer> hooks);
  absl::StatusOr<BoundRounds> PrepareRounds(
      absl::Span<std::byte* const> addresses,
      absl::Span<const BoundTensor> tensors, const CopyBatch& hooks) const;
  absl::Status WatchTensors(absl::Span<const BoundTensor> tensors);
  absl::Status MapPeers(absl::Span<std::byte* const> addresses,
                        Deadline deadline);
  void TakeBound(BoundRounds rounds, std::vector<std::byte*> entries,
                 std::vector<TensorPostHook> hooks,
                 std::vector<PostHookPerformer> performers);
  void NoticeRecording();
  absl::Status WithUnmapped(const absl::Status& status) const;
  // Fills the entries of the rank's scratch.
  void PlaceScratch(std::vector<std::byte*>& addresses) const;
  absl::Status CheckTensors(const RunOptions& options) const;
  absl::StatusOr<size_t> FindRung(Stream stream, const RunOptions& options,
                                  Deadline deadline);
  absl::Status CheckCapture(bool check) const;
  absl::Status PrepareCheck(Deadline deadline);
  absl::Status CompareStates();
  absl::Status ReadMeasurements();
  absl::Status PerformHooksTogether();
  absl::Status ReportDelta();
  absl::Status PerformHooks();
  void NoteHooks();

  const PlanFile& plan_;
  const ExecutorOptions options_;
  const std::unique_ptr<const RankSchedule> schedule_;
  std::vector<TensorPostHook> post_hooks_;
  ExecutorState state_ = ExecutorState::kLoaded;
  std::vector<Notice> notices_;  // by kind
  RunCounters counters_;
  std::vector<RoundMeasurement> rounds_;
  uint64_t refits_ = 0;     // that succeeded
  uint64_t in_flight_ = 0;  // enqueued and not waited for
  Deadline deadline_;       // of the last Run
  bool checks_ = false;     // a refit in flight is checked
  // Of the last Run.
  std::chrono::steady_clock::time_point began_;
  double agree_seconds_ = 0;
  const std::unique_ptr<RefitVersions> versions_;  // null: refits are dense
  std::unique_ptr<RefitEnqueuer> enqueuer_;        // until Close
  std::optional<DeltaReport> delta_report_;

  // Since Connect.
  std::unique_ptr<DeviceMemory> staging_;
  std::unique_ptr<DeviceMemory> scratch_;
  // What the rank sent last, where the plan's refits compare with it. Its size
  // is the plan's, so that a Bind needs no second one.
  std::unique_ptr<DeviceMemory> snapshot_;

  // Since Bind.
  std::shared_ptr<BoundRank> bound_;
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_INCLUDE_REFIT_EXECUTOR_H_
