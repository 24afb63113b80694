// What one rank does in a refit, and how long it takes beside bytes on links.
#ifndef REFIT_SIMULATOR_RANK_WORK_H_
#define REFIT_SIMULATOR_RANK_WORK_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "plan/schedule/delta_sizes.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/rank_schedule.h"
#include "plan/schedule/tensor_table.h"
#include "simulator/delta_costs.h"
#include "simulator/simulation.h"

namespace refit::simulator {

RankSchedule ScheduleOf(const PlanFile& plan, Executor executor, int32_t rank);

// Of a refit that sends only what changed.
struct DeltaRefit {
  const fb::Delta* plan = nullptr;  // null: it is dense
  size_t rung = 0;                  // as its position in the plan's
  StagedDeltaCosts costs;
};

// What a destination reads of a source behind the rounds, and not before.
struct Pull {
  uint64_t bytes = 0;
  size_t work = 0;        // the last one that the plan has it in
  uint32_t position = 0;  // of that one's message
};

// By destination: the slots of its scratch that it need not use.
using PulledSlotsOfRanks = std::map<int32_t, std::set<uint32_t>>;

struct RankWork {
  // The references must outlive it. `pulled_slots`: those of ranks that were
  // looked at before; null where no rank reads behind the rounds.
  RankWork(const PlanFile& plan, const Options& options,
           const DeltaRefit& delta, int32_t number,
           PulledSlotsOfRanks* pulled_slots);

  // The last work in which the plan has any of the pulls.
  const RoundWork& LastPull() const;

  // What is sent of an operation.
  uint64_t SizeBytes(size_t operation) const;
  // Whether all that the operation sends is read behind the rounds instead.
  bool IsEmptied(size_t operation) const;

  // Of packing or unpacking, or of encoding or applying what is coded.
  double CopySeconds(const RoundWork& work, fb::MessageKind kind) const;
  // Before the round's messages of the route.
  double StartSeconds(const RoundWork& work, fb::Route route) const;
  // Of quantization that the round's copies do, beside their bytes on links.
  double FusedSeconds(const RoundWork& work) const;
  // Of what is read behind the rounds.
  double PulledSeconds() const {
    return pulled_elements_ / options_.fused_elements_per_second;
  }

  // Of a delta refit: before all ranks agree, and behind the rounds.
  double FindSeconds() const { return CodedSendBytes() * delta_.costs.find; }
  double KeepSeconds() const;
  double CheckSeconds() const;

  const int32_t rank;
  const RankSchedule schedule;
  DirectPairs peers;
  std::map<int32_t, Pull> pulls;     // by peer: the sum
  std::optional<DeltaSizes> deltas;  // of a delta refit
  // By launch, but for what is fused or pulled.
  std::vector<double> quantized_elements;

 private:
  const fb::RankProgram& program() const {
    return *body_.programs()->Get(static_cast<uint32_t>(rank));
  }
  uint32_t MessageOf(size_t operation) const {
    return schedule.parts()[operation].message;
  }
  void PlanFused();
  void PlanPulls(PulledSlotsOfRanks& pulled_slots);
  uint64_t PulledBytes(size_t operation) const;
  void PlanQuantized();
  // Whether the rank encodes or decodes the operation.
  bool IsCoded(size_t operation) const {
    return deltas.has_value() && deltas->IsCoded(operation) &&
           !deltas->IsWhole(operation, delta_.rung);
  }
  double CodedSendBytes() const;

  const PlanFile& plan_;
  const fb::Body& body_;
  const Options& options_;
  const DeltaRefit& delta_;
  const TensorTable tensors_;
  const std::vector<bool> is_dealt_;  // by message of the program
  // By operation: it is a part of the rounds that store what it makes.
  std::vector<bool> is_fused_;
  // Slots of scratch whose values are made by such operations alone.
  std::set<uint32_t> fused_slots_;
  // By operation of the schedule: what is read behind the rounds instead. Empty
  // where nothing is.
  std::vector<uint64_t> pulled_bytes_;
  double pulled_elements_ = 0;  // that are quantized then
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_RANK_WORK_H_
