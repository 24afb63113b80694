#include "tests/executor/refit_order.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "plan/dtype.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"
#include "plan/schedule/copy_batches.h"
#include "plan/schedule/direct_ends.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/round_copies.h"
#include "plan/schedule/steps.h"
#include "plan/schedule/tensor_table.h"
#include "plan/scratch_windows.h"

namespace refit {
namespace {

// Tensors of so few bytes that they do not reach into each other.
std::byte* AddressOf(int32_t rank, uint64_t entry) {
  return reinterpret_cast<std::byte*>((static_cast<uint64_t>(rank + 1) << 48) |
                                      (entry << 24));
}
std::byte* StagingOf(int32_t rank) { return AddressOf(rank, 1 << 23); }

std::byte* ScratchOf(int32_t rank) { return AddressOf(rank, 1 << 22); }

std::vector<std::byte*> TensorsOf(const PlanFile& plan, int32_t rank) {
  const TensorTable table(plan, rank);
  std::vector<std::byte*> tensors;
  for (uint64_t i = 0; i < table.begin(table.workers_stacks()); ++i) {
    tensors.push_back(AddressOf(rank, i));
  }
  size_t slot = table.workers_stacks();
  for (const ScratchRange& range :
       ScratchRanges(plan.body(), *plan.body().programs()->Get(rank))) {
    const uint64_t count = table.begin(slot + 1) - table.begin(slot);
    for (uint64_t i = 0; i < count; ++i) {
      tensors.push_back(ScratchOf(rank) + range.begin_byte +
                        (range.end_byte - range.begin_byte) / count * i);
    }
    ++slot;
  }
  return tensors;
}

}  // namespace

class RefitOrder::Lister {
 public:
  Lister(const PlanFile& plan, const RefitOrderOptions& options,
         RefitOrder& order)
      : plan_(plan), options_(options), order_(order) {}

  void List() {
    for (int32_t rank = 0; rank < plan_.world_size(); ++rank) ListRank(rank);
    JoinExchanges();
    JoinFences(granted_, await_grants_);
    JoinFences(finished_, await_finishes_);
    std::sort(
        order_.accesses_.begin(), order_.accesses_.end(),
        [](const Access& a, const Access& b) { return a.begin < b.begin; });
  }

 private:
  struct Exchange {
    uint32_t step = 0;
    std::vector<Operation> operations;
  };
  // Calls of the fence between two ranks in one direction, in order.
  using Calls = std::map<std::pair<int32_t, int32_t>, std::vector<uint32_t>>;

  DirectPairs PairsOf(int32_t rank, const RankSchedule& schedule) {
    DirectPairs peers = PlannedPairs(plan_, schedule);
    if (options_.movers == proof::Movers::kSenders) peers = {};
    if (options_.movers == proof::Movers::kReceivers) {
      for (const int32_t sender : schedule.DirectSenders()) {
        peers.pulled_from.insert(sender);
      }
      for (const int32_t receiver : schedule.DirectReceivers()) {
        peers.pulled_by.insert(receiver);
      }
    }
    if (!options_.fuses) return peers;
    std::vector<int32_t> readers = schedule.DirectReceivers();
    readers.push_back(rank);
    for (const int32_t reader : readers) {
      std::set<uint32_t> slots = PlannedPulledSlots(plan_, reader);
      if (slots.empty()) continue;
      peers.pulled_slots[reader] = std::move(slots);
      if (reader != rank) continue;
      for (const int32_t sender : schedule.DirectSenders()) {
        peers.readable.insert(sender);
      }
    }
    return peers;
  }

  void ListRank(int32_t rank) {
    const RankSchedule schedule(plan_, rank, options_.direct);
    const DirectPairs peers = PairsOf(rank, schedule);
    std::map<int32_t, std::vector<std::byte*>> of_peers;
    PeerAddresses addresses;
    for (const Edge& edge : schedule.Edges()) {
      of_peers[edge.peer] = TensorsOf(plan_, edge.peer);
      addresses[edge.peer] = of_peers[edge.peer];
    }
    const absl::StatusOr<RoundCopies> copies = BuildRoundCopies(
        plan_, rank, schedule, TensorsOf(plan_, rank), StagingOf(rank), peers,
        addresses, /*joins_rounds=*/false);
    const std::vector<DirectEnds> ends =
        ListDirectEnds(plan_, rank, schedule, peers, options_.fuses);
    StepChoices choices = {.moves_beside = true};
    const BatchChoice* batches = nullptr;
    if (options_.fuses) {
      batches = &copies->fused.fused;
      choices.is_idle = batches->is_idle;
      choices.read_sources = copies->fused.read_sources;
      choices.readers = copies->fused.readers;
    }
    const auto batch_of = [&](size_t batch) {
      return batches == nullptr || batches->batches.empty()
                 ? batch
                 : batches->batches[batch];
    };
    const auto first = static_cast<uint32_t>(order_.names_.size());
    std::map<Lane, uint32_t> last;
    std::vector<Step> steps = ListSteps(schedule, ends, choices);
    if (options_.edit) options_.edit(rank, steps);
    for (const Step& step : steps) {
      const auto number = static_cast<uint32_t>(order_.names_.size());
      order_.names_.push_back(
          absl::StrCat("rank ", rank, " ", StepKindName(step.kind), " (step ",
                       number - first, ", round ", step.round, ")"));
      order_.kinds_.push_back(StepKindName(step.kind));
      order_.arrows_.push_back({.from = 2 * number, .to = 2 * number + 1});
      if (const auto found = last.find(step.lane); found != last.end()) {
        order_.arrows_.push_back(
            {.from = 2 * found->second + 1, .to = 2 * number});
      }
      last[step.lane] = number;
      for (uint32_t i = 0; i < step.after.size(); ++i) {
        order_.waits_.push_back(
            {.from = 2 * (first + step.after[i]) + 1, .to = 2 * number});
        order_.wait_entries_.push_back(
            {.rank = rank, .step = number - first, .entry = i});
      }
      for (const int32_t peer : step.peers) {
        const std::pair mine(rank, peer), theirs(peer, rank);
        if (step.kind == StepKind::kGrant) granted_[mine].push_back(number);
        if (step.kind == StepKind::kFinish) finished_[mine].push_back(number);
        if (step.kind == StepKind::kAwaitGrants) {
          await_grants_[theirs].push_back(number);
        }
        if (step.kind == StepKind::kAwaitFinishes) {
          await_finishes_[theirs].push_back(number);
        }
      }
      const RoundWork* const work =
          step.round == kNoRound ? nullptr : &schedule.rounds()[step.round];
      std::optional<size_t> batch;
      switch (step.kind) {
        case StepKind::kZero:
        case StepKind::kHooks:
          order_.accesses_.push_back(
              {.begin = reinterpret_cast<uint64_t>(AddressOf(rank, 0)),
               .end = reinterpret_cast<uint64_t>(AddressOf(rank + 1, 0)),
               .step = number,
               .writes = true});
          break;
        case StepKind::kQuantize:
          batch = batch_of(schedule.quantizes()[*step.number].batch);
          break;
        case StepKind::kPack:
          batch = work->pack_batch;
          break;
        case StepKind::kUnpack:
          batch = work->unpack_batch;
          break;
        case StepKind::kMove:
          batch = work == nullptr ? copies->fused.pull_batch
                                  : batch_of(*work->move_batch);
          break;
        case StepKind::kExchange: {
          Exchange& exchange =
              exchanges_[{work->index, PartOf(schedule, step.round), rank}];
          exchange.step = number;
          for (uint32_t i = 0; i < work->operations_count; ++i) {
            const Operation& operation =
                copies->operations[work->operations_begin + i];
            exchange.operations.push_back(operation);
            Touch(number, operation.data, operation.size_bytes,
                  operation.kind == fb::MessageKind::kRecv);
          }
          break;
        }
        default:
          break;
      }
      if (batch.has_value()) TouchBatch(number, *copies, *batch);
    }
  }

  static uint32_t PartOf(const RankSchedule& schedule, uint32_t round) {
    uint32_t part = 0;
    while (round > part && schedule.rounds()[round - part - 1].index ==
                               schedule.rounds()[round].index) {
      ++part;
    }
    return part;
  }

  void Touch(uint32_t step, const void* data, uint64_t bytes, bool writes) {
    if (bytes == 0) return;
    const auto begin = reinterpret_cast<uint64_t>(data);
    if (!order_.accesses_.empty()) {
      Access& last = order_.accesses_.back();
      if (last.step == step && last.writes == writes && last.end == begin) {
        last.end += bytes;
        return;
      }
    }
    order_.accesses_.push_back(
        {.begin = begin, .end = begin + bytes, .step = step, .writes = writes});
  }

  void TouchBatch(uint32_t step, const RoundCopies& copies, size_t number) {
    const CopyBatch& batch = copies.batches[number];
    const auto at = [&](const CopyAddress& address) {
      return copies.table[address.entry] + address.byte_offset;
    };
    for (const StridedCopy& copy : batch.copies) {
      const absl::Span<const CopyLoop> loops =
          absl::MakeConstSpan(batch.loops)
              .subspan(copy.loops_begin, copy.loops_count);
      for (const bool writes : {false, true}) {
        if (!writes && batch.kind == CopyKind::kZero) continue;
        ForEachIteration(loops, copy.from, copy.to,
                         [&](const CopyAddress& from, const CopyAddress& to) {
                           const CopyAddress& here = writes ? to : from;
                           Touch(step, at(here), DTypeBytes(here.dtype),
                                 writes);
                         });
      }
    }
    for (const BlockQuantize& op : batch.quantizes) {
      TouchQuantize(step, copies, batch, op);
    }
  }

  void TouchQuantize(uint32_t step, const RoundCopies& copies,
                     const CopyBatch& batch, const BlockQuantize& op) {
    const std::vector<CopyStride> runs = RowRunsOf(batch, op);
    const auto visit = [&](auto&& self, uint32_t loop, CopyAddress input,
                           CopyAddress output, CopyAddress scales) -> void {
      const auto move = [](CopyAddress& at, const CopyStride& by) {
        at.entry += by.entries;
        at.byte_offset += by.bytes;
      };
      if (loop < op.loops_count) {
        const QuantizeLoop& of = batch.quantize_loops[op.loops_begin + loop];
        for (uint64_t i = 0; i < of.extent; ++i) {
          self(self, loop + 1, input, output, scales);
          move(input, of.input);
          move(output, of.output);
          move(scales, of.scales);
        }
        return;
      }
      const auto touch = [&](const CopyAddress& at, uint64_t offset,
                             uint64_t count, bool writes) {
        Touch(step, copies.table[at.entry] + at.byte_offset + offset,
              count * DTypeBytes(at.dtype), writes);
      };
      for (uint64_t row = 0; row < op.rows; ++row) {
        CopyAddress from = input;
        uint64_t of_run = row;
        if (op.run_rows > 0) {
          move(from, runs[row / op.run_rows]);
          of_run = row % op.run_rows;
        }
        touch(from, of_run * op.input_row_bytes, op.columns, false);
        touch(output, row * op.output_row_bytes, op.columns, true);
        if (row % op.block_rows != 0) continue;
        touch(scales, row / op.block_rows * op.scale_row_bytes,
              (op.columns + op.block_columns - 1) / op.block_columns, true);
      }
    };
    visit(visit, 0, op.input, op.output, op.scales);
  }

  // What a rank receives is there after its sender came to the exchange.
  void JoinExchanges() {
    for (const auto& [at, exchange] : exchanges_) {
      const auto [round, part, rank] = at;
      for (const Operation& operation : exchange.operations) {
        if (operation.kind != fb::MessageKind::kRecv) continue;
        const auto sender = exchanges_.find({round, part, operation.peer});
        if (sender == exchanges_.end()) continue;
        order_.arrows_.push_back(
            {.from = 2 * sender->second.step, .to = 2 * exchange.step + 1});
      }
    }
  }

  // The k-th call meets the k-th wait.
  void JoinFences(const Calls& calls, const Calls& awaits) {
    for (const auto& [pair, waiting] : awaits) {
      const auto called = calls.find(pair);
      if (called == calls.end()) continue;
      const size_t count = std::min(waiting.size(), called->second.size());
      for (size_t i = 0; i < count; ++i) {
        order_.arrows_.push_back(
            {.from = 2 * called->second[i] + 1, .to = 2 * waiting[i] + 1});
      }
    }
  }

  const PlanFile& plan_;
  const RefitOrderOptions& options_;
  RefitOrder& order_;
  // By round of the plan, part of it, and rank.
  std::map<std::tuple<uint32_t, uint32_t, int32_t>, Exchange> exchanges_;
  // By the rank that calls and the one that waits.
  Calls granted_, await_grants_, finished_, await_finishes_;
};

RefitOrder::RefitOrder(const PlanFile& plan, const RefitOrderOptions& options) {
  Lister(plan, options, *this).List();
}

std::string RefitOrder::KindOfWait(size_t wait) const {
  return absl::StrCat(kinds_[waits_[wait].to / 2], " after ",
                      kinds_[waits_[wait].from / 2]);
}

std::vector<std::vector<uint64_t>> RefitOrder::NodesBefore(
    size_t without_wait) const {
  const size_t nodes = 2 * names_.size();
  std::vector<std::vector<Node>> next(nodes);
  std::vector<uint32_t> left(nodes, 0);
  const auto add = [&](const Arrow& arrow) {
    next[arrow.from].push_back(arrow.to);
    ++left[arrow.to];
  };
  for (const Arrow& arrow : arrows_) add(arrow);
  for (size_t i = 0; i < waits_.size(); ++i) {
    if (i != without_wait) add(waits_[i]);
  }
  std::vector<Node> ready;
  for (Node node = 0; node < nodes; ++node) {
    if (left[node] == 0) ready.push_back(node);
  }
  std::vector<std::vector<uint64_t>> before(
      nodes, std::vector<uint64_t>((nodes + 63) / 64, 0));
  for (size_t i = 0; i < ready.size(); ++i) {
    const Node node = ready[i];
    before[node][node / 64] |= uint64_t{1} << (node % 64);
    for (const Node other : next[node]) {
      for (size_t word = 0; word < before[node].size(); ++word) {
        before[other][word] |= before[node][word];
      }
      if (--left[other] == 0) ready.push_back(other);
    }
  }
  if (ready.size() < nodes) before.clear();
  return before;
}

std::string RefitOrder::FirstRace(size_t without_wait) const {
  const std::vector<std::vector<uint64_t>> before = NodesBefore(without_wait);
  if (before.empty()) return "steps wait for each other in a circle";
  const auto ends_before = [&](uint32_t a, uint32_t b) {
    const Node end = 2 * a + 1;
    return (before[2 * b][end / 64] >> (end % 64) & 1) != 0;
  };
  absl::flat_hash_set<std::pair<uint32_t, uint32_t>> ordered;
  for (size_t i = 0; i < accesses_.size(); ++i) {
    const Access& a = accesses_[i];
    for (size_t j = i + 1; j < accesses_.size() && accesses_[j].begin < a.end;
         ++j) {
      const Access& b = accesses_[j];
      if (a.step == b.step || (!a.writes && !b.writes) ||
          !ordered.insert(std::minmax(a.step, b.step)).second) {
        continue;
      }
      if (ends_before(a.step, b.step) || ends_before(b.step, a.step)) continue;
      return absl::StrCat(names_[a.step], a.writes ? " writes" : " reads",
                          " what ", names_[b.step],
                          b.writes ? " writes" : " reads",
                          ", and neither comes first");
    }
  }
  return "";
}

namespace {

// What the order proof says of lists that `edit` changes; "": they are ordered.
std::string ViolationOf(const PlanFile& plan, proof::Movers movers,
                        const EditSteps& edit) {
  proof::Steps steps(uint64_t{1} << 30);
  proof::Violations violations(plan.body(), &steps);
  proof::CheckOrder(
      plan, movers,
      [&](int32_t rank) {
        proof::ListedSteps listed = proof::ListRankSteps(plan, rank, movers);
        if (edit) edit(rank, listed.steps);
        return listed;
      },
      steps, violations);
  return violations.empty() ? "" : violations.text();
}

// One call of the fence, and the wait for it: number `number` between them.
struct Fence {
  StepKind call = StepKind::kGrant;
  StepKind wait = StepKind::kAwaitGrants;
  int32_t caller = 0;
  int32_t waiter = 0;
  size_t number = 0;

  std::string Name() const {
    return absl::StrCat(StepKindName(call), " ", number, " of rank ", caller,
                        " to rank ", waiter);
  }
};

std::vector<Fence> FencesOf(const PlanFile& plan, proof::Movers movers) {
  std::vector<Fence> fences;
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    std::map<std::pair<StepKind, int32_t>, size_t> called;
    const proof::ListedSteps listed = proof::ListRankSteps(plan, rank, movers);
    for (const Step& step : listed.steps) {
      if (step.kind != StepKind::kGrant && step.kind != StepKind::kFinish) {
        continue;
      }
      for (const int32_t peer : step.peers) {
        fences.push_back({.call = step.kind,
                          .wait = step.kind == StepKind::kGrant
                                      ? StepKind::kAwaitGrants
                                      : StepKind::kAwaitFinishes,
                          .caller = rank,
                          .waiter = peer,
                          .number = called[{step.kind, peer}]++});
      }
    }
  }
  return fences;
}

// Takes `peer` out of the number-th step of `kind` that has it. The step's
// peers are in `kept` then.
void TakeOut(StepKind kind, int32_t peer, size_t number,
             std::vector<Step>& steps, std::vector<int32_t>& kept) {
  for (Step& step : steps) {
    if (step.kind != kind ||
        std::find(step.peers.begin(), step.peers.end(), peer) ==
            step.peers.end() ||
        number-- > 0) {
      continue;
    }
    kept.assign(step.peers.begin(), step.peers.end());
    std::erase(kept, peer);
    step.peers = kept;
    return;
  }
}

}  // namespace

OrderMutations MutateOrder(const PlanFile& plan, proof::Movers movers) {
  OrderMutations result;
  const RefitOrder order(plan, {.movers = movers});
  result.missed = ViolationOf(plan, movers, {});
  if (result.missed.empty()) result.missed = order.FirstRace();
  const auto count = [&](bool is_noticed, const std::string& what,
                         const std::function<std::string()>& race) {
    ++result.tried;
    if (is_noticed) {
      ++result.noticed;
    } else if (result.missed.empty()) {
      result.missed = race();
      if (!result.missed.empty()) {
        result.missed = absl::StrCat("without ", what, ": ", result.missed);
      }
    }
  };
  for (size_t wait = 0; wait < order.waits(); ++wait) {
    const RefitOrder::Wait& at = order.WaitAt(wait);
    const EditSteps edit = [&](int32_t rank, std::vector<Step>& steps) {
      if (rank != at.rank) return;
      auto& after = steps[at.step].after;
      after.erase(after.begin() + at.entry);
    };
    count(!ViolationOf(plan, movers, edit).empty(), order.KindOfWait(wait),
          [&] { return order.FirstRace(wait); });
  }
  for (const Fence& fence : FencesOf(plan, movers)) {
    std::map<int32_t, std::vector<int32_t>> kept;  // by rank
    const EditSteps edit = [&](int32_t rank, std::vector<Step>& steps) {
      if (rank == fence.caller) {
        TakeOut(fence.call, fence.waiter, fence.number, steps, kept[rank]);
      } else if (rank == fence.waiter) {
        TakeOut(fence.wait, fence.caller, fence.number, steps, kept[rank]);
      }
    };
    count(!ViolationOf(plan, movers, edit).empty(), fence.Name(), [&] {
      return RefitOrder(plan, {.movers = movers, .edit = edit}).FirstRace();
    });
  }
  return result;
}

}  // namespace refit
