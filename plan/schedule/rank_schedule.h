// What one rank does in a refit, round by round, before its tensors are known.
#ifndef REFIT_PLAN_SCHEDULE_RANK_SCHEDULE_H_
#define REFIT_PLAN_SCHEDULE_RANK_SCHEDULE_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "plan/plan_file.h"
#include "plan/schedule/operation.h"

namespace refit {

// How the messages of direct rounds travel.
enum class DirectRounds {
  kStored,  // one end of each pair of ranks uses the other's tensors
  kSent,    // in parts, like those of staged rounds
};

// What an operation sends or receives: bytes of a message of the rank.
struct MessagePart {
  uint32_t message = 0;     // position in the rank's messages
  uint64_t begin_byte = 0;  // of the message
  uint64_t staging_offset = 0;
};

// A round in which the rank takes part, or a part of one whose messages are
// sent in parts. Batches are numbers of copy batches.
struct RoundWork {
  uint32_t index = 0;
  fb::Route route = fb::Route::kUnspecified;
  // As the rank does it: staged also for a part of a direct round.
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
  bool is_part = false;
  // Whether it is a staged round of the plan.
  bool IsStagedRound() const {
    return mechanism == fb::Mechanism::kStaged && !is_part;
  }
  // Its range of operations() and of parts().
  uint32_t operations_begin = 0;
  uint32_t operations_count = 0;
  // Staged: before and after the exchange. None of what is dealt out: it stays
  // in staging, where it came.
  std::optional<size_t> pack_batch;
  std::optional<size_t> unpack_batch;
  // Direct: all that this rank moves, should it be the one to move anything.
  std::optional<size_t> move_batch;
  // Direct: the peers of each kind, ascending and distinct.
  std::vector<int32_t> receivers;
  std::vector<int32_t> senders;
  // Of a destination rank that sends here: the last earlier work that unpacks,
  // on a stream of its own, what this one may read.
  std::optional<size_t> relays;
  // Staged: it may read what peers stored in earlier rounds.
  bool relays_stored = false;
  // Staged: the last earlier staged work whose staging this one may overwrite,
  // and the last one up to it that unpacks.
  std::optional<size_t> reuses;
  std::optional<size_t> reuses_unpacked;
  // The last of the quantize works that must be done before this one.
  std::optional<size_t> quantized;
};

// What a rank quantizes in one window of its scratch. Launches are done in
// order.
struct QuantizeLaunch {
  size_t batch = 0;
  std::vector<uint32_t> operations;  // positions in RankProgram.quantizes
  size_t after = 0;  // how many of the rank's rounds come before it; ascending
  bool beside_rounds = false;  // others go on meanwhile
};

class RankSchedule {
 public:
  // Messages that are sent in parts are cut after every `part_bytes`, a
  // multiple of every element's size. The default still lies in a core's cache
  // when it is unpacked.
  static constexpr uint64_t kPartBytes = 1 << 20;
  RankSchedule(const PlanFile& plan, int32_t rank,
               DirectRounds direct = DirectRounds::kStored,
               uint64_t part_bytes = kPartBytes);

  const std::vector<RoundWork>& rounds() const { return rounds_; }
  // One for each part of a message of the rank; `data` is not set. Messages
  // that are stored have one too, which is never issued.
  const std::vector<Operation>& operations() const { return operations_; }
  const std::vector<MessagePart>& parts() const { return parts_; }
  // How each operation travels: rounds between hosts may deal out inside them.
  fb::Route RouteOf(uint32_t operation) const { return routes_[operation]; }
  // What the parts above need.
  uint64_t staging_bytes() const { return staging_bytes_; }
  bool QuantizesBesideRounds() const;
  const std::vector<QuantizeLaunch>& quantizes() const { return quantizes_; }
  static constexpr size_t kFillBatch = 0;  // zeroes the padding
  static constexpr size_t kHookBatch = 1;  // the executor's own post-hooks
  size_t batches() const { return batches_; }
  // Whether the rank packs in staged rounds what it just unpacked.
  bool RelaysInStages() const;
  // Sorted and distinct.
  std::vector<Edge> Edges() const;
  // Whether the rank has anything to pack in staged rounds.
  bool Packs() const { return packs_; }
  // Whether the rank has staged rounds.
  bool Stages() const;
  // Whether it has direct rounds with a rank of its GPU.
  bool SharesGpu() const;
  // Whether its rounds are better launched as one graph. Ranks that share a GPU
  // wait for each other in other ways than a graph can.
  bool GainsFromGraph() const { return !SharesGpu(); }
  // The peers of all direct rounds, ascending and distinct.
  std::vector<int32_t> DirectReceivers() const;
  std::vector<int32_t> DirectSenders() const;

 private:
  RoundWork& AddWork(const fb::Round& round, uint32_t index);
  using PeerOfMessage = absl::FunctionRef<int32_t(const fb::Message&)>;
  void AddOperation(const fb::Body& body, const fb::Message& message,
                    int32_t peer, const MessagePart& part, uint64_t size_bytes);
  void AddParts(const fb::Body& body, const MessageVector& messages,
                const PeerOfMessage& peer_of, uint32_t begin, uint32_t end,
                const fb::Round& round, uint64_t staging_begin,
                uint64_t part_bytes);
  void AddRelays(const PlanFile& plan, int32_t rank);
  void AddQuantizes(const PlanFile& plan, int32_t rank);
  // How many rounds of the rank come before round `index` of the plan.
  size_t WorksBefore(uint32_t index) const;

  std::vector<RoundWork> rounds_;
  std::vector<QuantizeLaunch> quantizes_;
  std::vector<Operation> operations_;
  std::vector<MessagePart> parts_;
  std::vector<fb::Route> routes_;  // by operation
  uint64_t staging_bytes_ = 0;
  bool packs_ = false;
  size_t batches_ = kHookBatch + 1;
};

// Whether any rank of the plan moves bytes directly.
bool HasDirectRounds(const PlanFile& plan);

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_RANK_SCHEDULE_H_
