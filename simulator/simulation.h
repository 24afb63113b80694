// Simulates one refit of a plan: how long each message takes, and why.
//
// The model is of flows. Every rank does the work of its program in the
// executor's order and waits for what the executor waits for
// (plan/schedule/steps.h). A message is a flow from
// its sender's link to its receiver's. All flows share the links max-min
// fairly. The rest costs fixed times and rates (simulator/costs.h).
// docs/simulator.md tells what is left out.
#ifndef REFIT_SIMULATOR_SIMULATION_H_
#define REFIT_SIMULATOR_SIMULATION_H_

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "simulator/costs.h"
#include "simulator/equal_ranks.h"
#include "simulator/flow_network.h"

namespace refit::simulator {

// Whose executor is simulated.
enum class Executor {
  // On GPUs: packing, exchange and unpacking have streams of their own, and
  // direct rounds store into mapped tensors.
  kGpu,
  // Over UCX and TCP on CPUs: one thread does everything in order, direct
  // rounds are sent in parts, and of two ranks that send to each other one
  // waits.
  kCpu,
};
// "gpu", "cpu".
const char* ExecutorText(Executor executor);

struct Options {
  Executor executor = Executor::kGpu;
  // Per rank and direction.
  double peer_bytes_per_second = kPeerBytesPerSecond;
  double network_bytes_per_second = kNetworkBytesPerSecond;
  double local_bytes_per_second = kLocalBytesPerSecond;
  // Before the bytes of a round: of a direct one, of a staged one between
  // hosts, and of a staged one inside a host, there also for each of the rank's
  // messages in the direction that has more; for one that quantizes, the last.
  double direct_round_seconds = kDirectRoundSeconds;
  double network_round_seconds = kNetworkRoundSeconds;
  double broadcast_hop_seconds = kBroadcastHopSeconds;
  double peer_round_seconds = kPeerRoundSeconds;
  double peer_message_seconds = kPeerMessageSeconds;
  double quantized_message_seconds = kQuantizedMessageSeconds;  // if it does
  // Of each of a rank that relays, and that is dealt out beside messages
  // between hosts.
  double dealt_message_seconds = kDealtMessageSeconds;
  // Of packing and of unpacking, by payload.
  double copy_bytes_per_second = kLocalBytesPerSecond;
  double quantized_elements_per_second = kQuantizedElementsPerSecond;
  // Of one GPU, by the copies of direct rounds.
  double fused_elements_per_second = kFusedElementsPerSecond;

  // What if. Factors are at least 1: how many times slower.
  std::map<int32_t, double> slow_ranks;  // links, copies and start-ups
  std::map<int32_t, double> slow_nics;
  // Ranks that use the NIC of the next rank of their host.
  std::set<int32_t> dead_nics;
  // The NICs of a leaf together are so much faster than the leaf's way to the
  // other leaves. A plan that says nothing of leaves has one for each host.
  // Without a value it is as the plan says, and else that way has no limit of
  // its own.
  std::optional<double> oversubscription;

  // The refit sends only what changed since the last one, this share of all
  // elements, scattered evenly. None: it is dense.
  std::optional<double> change_rate;

  // The links have the speeds that the plan was compiled for, so that its lower
  // bound and its prediction are of the same links.
  bool has_plan_speeds = false;

  // Records when the rates of all links change, for a trace. Those of the
  // binding link are recorded always.
  bool record_rates = false;

  // Of ranks that do the same at the same time, one is simulated: the graph has
  // the tasks and messages of that one alone (simulator/all_ranks.h has those
  // of the others). All else is as without this.
  bool folds_equal_ranks = false;
};

// Gives the links the speeds that the plan says, if it does.
void UseSpeedsOf(const PlanFile& plan, Options& options);

// The options whose costs and speeds are those of the executor's device.
Options OptionsOf(Executor executor);

enum class LinkKind : uint8_t {
  kLocal,
  kPeerEgress,
  kPeerIngress,
  kNetworkEgress,
  kNetworkIngress,
  // What a slow rank puts into its NIC, and takes out of it.
  kSlowEgress,
  kSlowIngress,
  kHostUplink,
  kHostDownlink,
  kLeafUplink,
  kLeafDownlink,
};
// "peer egress" …
const char* LinkKindText(LinkKind kind);
// Whether such a link joins a host or a leaf with the spine. The others belong
// to a rank.
bool IsOfSwitch(LinkKind kind);
// "host 3", "leaf 2", "rank 26": whose the link is.
struct Link;
std::string LinkOwnerText(const Link& link);

struct Link {
  LinkKind kind = LinkKind::kLocal;
  // The host or leaf of an uplink or downlink. Else the lowest rank that uses
  // it so: of two that share a GPU, the destination receives.
  uint32_t owner = 0;
  double bytes_per_second = 0;
  uint64_t bytes = 0;  // of all messages

  // How long its bytes take at its speed.
  double BusySeconds() const {
    return static_cast<double>(bytes) / bytes_per_second;
  }
};
// "network egress of rank 26", "uplink of host 3".
std::string LinkText(const Link& link);
// The link whose bytes take longest. Of several the first by kind, and then the
// one with the lowest owner. kNone if nothing moves.
uint32_t BindingLink(absl::Span<const Link> links);

// One message, or a part of one that is sent in parts.
struct Message {
  uint32_t round = 0;
  int32_t source = 0;
  int32_t destination = 0;
  uint64_t size_bytes = 0;
  uint32_t position = 0;  // in the source's RankProgram.messages
  LinkList links;
};

enum class TaskKind : uint8_t {
  kMessage,
  kPack,
  kStart,       // of a round: launch, rendezvous, fences
  kDealtStart,  // of what a rank deals out in it, and is dealt
  kUnpack,
  kQuantize,
  // Of a refit that sends only what changed, where a pack encodes and an unpack
  // applies.
  kFind,   // before all ranks agree on a rung
  kAgree,  // on versions, and on a rung
  kKeep,   // behind the rounds, for the next refit
  kCheck,  // of what the rank holds
  kPoint,  // takes no time; others wait for it
};
// `is_delta`: in the words of a delta's report, where packing is encoding.
const char* TaskKindText(TaskKind kind, bool is_delta = false);

inline constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// A piece of work. It begins when all that it waits for has ended.
struct Task {
  TaskKind kind = TaskKind::kPoint;
  int32_t rank = 0;    // of a message: the sender
  uint32_t round = 0;  // of the plan; kNone: of none
  double seconds = 0;  // of all but messages
  uint32_t message = kNone;
};

// Task `to` waits for task `from`.
struct Wait {
  uint32_t from = 0;
  uint32_t to = 0;
};

// What the ranks of a plan do in a refit, and in which order.
struct TaskGraph {
  std::vector<Task> tasks;
  std::vector<Wait> waits;
  std::vector<Message> messages;
  std::vector<Link> links;  // of all ranks
  EqualRanks equal_ranks;
  // By rank, and one more: the first of its tasks, and the first of the links
  // that messages of these crossed first. Tasks before those of rank 0 are of
  // all ranks.
  std::vector<uint32_t> first_tasks = {0};
  std::vector<uint32_t> first_links = {0};
  // Of a refit that sends only what changed. For one changed element of how
  // many staged messages had room; 1: they are sent whole.
  uint32_t rung = 0;
  uint64_t stored_bytes = 0;  // of staged messages
  uint64_t dense_bytes = 0;   // of the same of a dense refit
};

// Of a task, in seconds from the start of the refit.
struct Times {
  double begin = 0;
  double end = 0;
  // The task that ended last of those it waited for, or kNone: why it did not
  // begin earlier.
  uint32_t after = kNone;
};

struct RoundTimes {
  fb::Route route = fb::Route::kUnspecified;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
  uint64_t messages = 0;
  uint64_t size_bytes = 0;
  // From the first start of a rank to the last end of its work in the round.
  double begin = 0;
  double end = 0;
};

// A link's flows have this rate from now on.
struct RateChange {
  double seconds = 0;
  uint32_t link = 0;
  float share = 0;  // of the link's speed
};

struct Simulation {
  Options options;
  TaskGraph graph;
  std::vector<Times> times;  // by task
  std::vector<uint32_t>
      bottlenecks;  // by message: the link that held it longest
  std::vector<RoundTimes> rounds;
  std::vector<uint32_t> critical_path;  // tasks, in order of time; no kPoint
  std::vector<RateChange> rates;        // ascending by time
  double seconds = 0;
  // Where only what changed is sent, else 0: of a dense refit; the plan's
  // dense_every, and what its refits take on average with that many dense ones.
  double dense_seconds = 0;
  uint32_t dense_every = 0;
  double average_seconds = 0;
};

// What the ranks of `plan` do. kInvalidArgument: an option names a rank that is
// not there, or asks for a delta of a plan whose refits are dense; or two ranks
// do not agree on a message, which no proved plan has.
absl::StatusOr<TaskGraph> BuildTaskGraph(const PlanFile& plan,
                                         const Options& options);

// Deterministic: the same plan and options give the same times, bit for bit.
// kInvalidArgument: as above, or ranks wait for each other for ever.
absl::StatusOr<Simulation> Simulate(const PlanFile& plan,
                                    const Options& options);

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_SIMULATION_H_
