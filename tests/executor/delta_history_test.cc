// Histories of a trainer and its engines, with deltas and without: both leave
// the same bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "plan/schedule/rank_schedule.h"
#include "runner/fragment_walk.h"
#include "tests/executor/delta_world.h"
#include "tests/executor/nccl_delta_world.h"
#include "tests/sanitizers.h"

namespace refit {
namespace {

struct HistoryJob {
  std::string name;
  std::string before_options;  // of the job, up to its options
  // On which some rounds are direct, and others are not.
  std::string hosts = R"("gpus_per_host": 3)";
};

std::vector<HistoryJob> HistoryJobs() {
  return {// Rows to columns; a cast; a vector that all ranks hold, and one of
          // another dtype; odd sizes.
          {"generic", R"job({
        "model": {"parameters": [
          {"name": "layers.0.w", "shape": [24, 20], "dtype": "bf16"},
          {"name": "layers.1.w", "shape": [24, 20], "dtype": "bf16"},
          {"name": "cast.w", "shape": [12, 10], "dtype": "fp32"},
          {"name": "norm", "shape": [37], "dtype": "bf16"},
          {"name": "bias", "shape": [3], "dtype": "fp32"}]},
        "source": {"layout": "generic", "meshes": {"m": {"axes": {"a": 2}}},
          "tensors": [
            {"match": "*w", "mesh": "m", "placements": ["Shard(0)"]},
            {"match": "*", "mesh": "m", "placements": ["Replicate"]}]},
        "destination": {"layout": "generic",
          "meshes": {"m": {"axes": {"a": 2}}},
          "tensors": [
            {"match": "cast.w", "mesh": "m", "placements": ["Shard(1)"],
             "dtype": "bf16"},
            {"match": "*w", "mesh": "m", "placements": ["Shard(1)"]},
            {"match": "*", "mesh": "m", "placements": ["Replicate"]}]})job"},
          // Experts to expert slices, of two engines.
          {"moe", R"job({"model": "tiny-moe.config.json",
        "source": {"layout": "megatron", "tensor_parallel": 2,
                   "expert_parallel": 2},
        "destination": {"layout": "vllm", "tensor_parallel": 2,
                        "replicas": 2})job"},
          // A post-hook that rewrites what was moved, in place.
          {"hybrid", R"job({"model": "tiny-hybrid.config.json",
        "source": {"layout": "megatron", "tensor_parallel": 2,
                   "expert_parallel": 2},
        "destination": {"layout": "vllm", "tensor_parallel": 1})job",
           R"("hosts": [0, 1, 1])"},
          // Stages, padding, replicated heads.
          {"dense", R"job({"model": "tiny-dense.config.json",
        "source": {"layout": "megatron", "tensor_parallel": 2,
                   "pipeline_parallel": 2, "make_vocab_size_divisible_by": 4},
        "destination": {"layout": "vllm", "tensor_parallel": 4})job"}};
}

PlanFile PlanOf(const HistoryJob& job, const std::string& options,
                const std::string& hosts = R"("gpus_per_host": 64)") {
  return PlanOfJob(job.before_options + ", \"topology\": {" + hosts +
                       "}, \"options\": {" + options + "}}",
                   REFIT_GOLDEN_JOBS);
}

// Where the sources hold what: a trainer's replicas of a value are equal.
class Replicas {
 public:
  struct Element {
    int32_t rank = 0;
    size_t tensor = 0;
    uint64_t element = 0;
  };

  explicit Replicas(const PlanFile& plan) {
    std::map<std::tuple<uint32_t, uint64_t, uint64_t>, size_t> known;
    const fb::Body& body = plan.body();
    for (int32_t rank = 0; rank < plan.source_ranks(); ++rank) {
      size_t first_tensor = 0;
      for (const uint32_t number : *body.programs()->Get(rank)->buffers()) {
        const fb::Buffer& buffer = *body.buffers()->Get(number);
        for (const fb::Fragment* fragment : *buffer.fragments()) {
          const fb::Param& param = *body.params()->Get(fragment->param());
          FragmentWalk(*fragment, param, buffer)
              .Visit(0, 1, [&](const WalkRow& row) {
                for (uint64_t i = 0; i < row.count; ++i) {
                  const auto [found, added] = known.try_emplace(
                      {fragment->param(), row.param.tensor,
                       row.param.element + i * row.param_stride},
                      replicas_.size());
                  if (added) replicas_.emplace_back();
                  replicas_[found->second].push_back(
                      {.rank = rank,
                       .tensor = first_tensor + row.buffer.tensor,
                       .element = row.buffer.element + i * row.buffer_stride});
                }
              });
        }
        first_tensor += StackTensors(buffer);
      }
    }
    for (size_t i = 0; i < replicas_.size(); ++i) {
      for (const Element& element : replicas_[i]) {
        auto& values = value_of_[{element.rank, element.tensor}];
        if (values.size() <= element.element) {
          values.resize(element.element + 1, replicas_.size());
        }
        values[element.element] = i;
      }
    }
  }

  size_t values() const { return replicas_.size(); }
  const std::vector<Element>& of(size_t value) const {
    return replicas_[value];
  }
  // The values of a tensor, by element; values() of what holds none.
  const std::vector<size_t>& in(int32_t rank, size_t tensor) const {
    static const std::vector<size_t> kNone;
    const auto found = value_of_.find({rank, tensor});
    return found == value_of_.end() ? kNone : found->second;
  }

 private:
  std::vector<std::vector<Element>> replicas_;  // by value
  std::map<std::pair<int32_t, size_t>, std::vector<size_t>> value_of_;
};

// What a history is lived on.
enum class HistoryWorld {
  kThreads,
  kNccl,  // on devices that work on streams
};

class History {
 public:
  History(const PlanFile& plan, const PlanFile& dense, const Replicas& replicas,
          HistoryWorld kind, uint32_t seed)
      : devices_(plan.world_size()),
        on_nccl_(kind == HistoryWorld::kNccl),
        world_(on_nccl_ ? NcclDeltaWorld(plan, devices_)
                        : std::make_unique<DeltaWorld>(plan)),
        twin_(dense),
        replicas_(replicas),
        marks_(plan.body().delta()->changes() == fb::DeltaChanges::kBitmap),
        random_(seed) {}

  void Live() {
    for (int32_t rank = 0; rank < Sources(); ++rank) {
      if (marks_) GiveBitmaps(rank);
    }
    for (size_t value = 0; value < replicas_.values(); ++value) {
      SetBits(value, random_());
    }
    ASSERT_TRUE(world_->Start().ok());
    ASSERT_TRUE(twin_.Start().ok());
    Refit();
    for (int step = 0; step < 6; ++step) {
      // Some changes are of versions that are never sent.
      for (uint32_t changes = Draw(3); changes > 0; --changes) Change();
      switch (Draw(8)) {
        case 0:
          Tear();
          break;
        case 1:
          Rebind();
          break;
        case 2:
          Replace();
          break;
        default:
          break;
      }
      Refit();
      if (testing::Test::HasFatalFailure()) return;
    }
  }

  uint32_t deltas() const { return deltas_; }
  uint64_t left_out_bytes() const { return left_out_bytes_; }

 private:
  uint32_t Draw(uint64_t below) {
    return static_cast<uint32_t>(random_() % below);
  }
  int32_t Sources() const { return world_->plan().source_ranks(); }
  int32_t Ranks() const { return world_->plan().world_size(); }

  // A few tensors have none.
  void GiveBitmaps(int32_t rank) {
    world_->GiveBitmaps(rank);
    for (BoundTensor& tensor : world_->tensors[rank]) {
      if (Draw(16) == 0) tensor.changes = nullptr;
    }
  }

  BoundTensor& TensorOf(const Replicas::Element& element) {
    return world_->tensors[element.rank][element.tensor];
  }

  void SetBits(size_t value, uint64_t bits) {
    for (const Replicas::Element& replica : replicas_.of(value)) {
      BoundTensor& tensor = TensorOf(replica);
      const uint64_t size = DTypeBytes(tensor.dtype);
      std::memcpy(static_cast<std::byte*>(tensor.data) + replica.element * size,
                  &bits, size);
      if (tensor.changes == nullptr) continue;
      tensor.changes[replica.element / 32] |= uint32_t{1}
                                              << (replica.element % 32);
    }
  }

  void ChangeValue(size_t value, uint32_t kind) {
    const Replicas::Element& first = replicas_.of(value).front();
    const BoundTensor& tensor = TensorOf(first);
    const uint64_t size = DTypeBytes(tensor.dtype);
    uint64_t bits = 0;
    std::memcpy(&bits,
                static_cast<std::byte*>(tensor.data) + first.element * size,
                size);
    const uint64_t sign = uint64_t{1} << (8 * size - 1);
    switch (kind) {
      case 0:  // one ulp
        bits += Draw(2) == 0 ? 1 : -1;
        break;
      case 1:  // 0 and -0
        bits = Draw(2) == 0 ? sign : 0;
        break;
      case 2:  // NaNs of all payloads
        bits = (size == 4 ? uint64_t{0x7f800000} : uint64_t{0x7f80}) |
               (1 + Draw(size == 4 ? 0x7fffff : 0x7f)) |
               (Draw(2) == 0 ? sign : 0);
        break;
      case 3:  // marked, but as it was
        break;
      default:
        bits = random_();
    }
    SetBits(value, bits);
  }

  void Change() {
    const uint32_t kind = Draw(6);
    if (Draw(4) > 0) {
      for (uint32_t i = 1 + Draw(20); i > 0; --i) {
        ChangeValue(Draw(replicas_.values()), kind);
      }
      return;
    }
    // A whole tensor.
    const int32_t rank = static_cast<int32_t>(Draw(Sources()));
    for (const size_t value :
         replicas_.in(rank, Draw(world_->tensors[rank].size()))) {
      if (value < replicas_.values()) ChangeValue(value, kind);
    }
  }

  void Refit() {
    for (int32_t rank = 0; rank < Sources(); ++rank) {
      for (size_t i = 0; i < world_->tensors[rank].size(); ++i) {
        const BoundTensor& tensor = world_->tensors[rank][i];
        if (tensor.size_bytes == 0) continue;
        std::memcpy(twin_.tensors[rank][i].data, tensor.data,
                    tensor.size_bytes);
      }
    }
    RunOptions options;
    options.dense = Draw(10) == 0;
    const absl::Status status = world_->Refit(options);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_TRUE(twin_.Refit().ok());
    for (int32_t rank = 0; rank < Ranks(); ++rank) {
      const DeltaReport& report = world_->report(rank);
      ASSERT_EQ(report.is_delta, world_->report().is_delta);
      ASSERT_EQ(report.version, world_->report().version);
      if (!report.is_delta) continue;
      ++deltas_;
      ASSERT_LE(report.stored_bytes, report.dense_bytes);
      left_out_bytes_ += report.dense_bytes - report.stored_bytes;
    }
    for (int32_t rank = Sources(); rank < Ranks(); ++rank) {
      for (size_t i = 0; i < world_->tensors[rank].size(); ++i) {
        const BoundTensor& tensor = world_->tensors[rank][i];
        if (tensor.size_bytes == 0) continue;
        ASSERT_EQ(std::memcmp(tensor.data, twin_.tensors[rank][i].data,
                              tensor.size_bytes),
                  0)
            << tensor.name << " of rank " << rank << " after "
            << (world_->report().is_delta ? "a delta" : "dense");
      }
    }
  }

  // A refit that one rank ends, at whatever point the others are.
  void Tear() {
    const auto victim = static_cast<int32_t>(Draw(Ranks()));
    const std::vector<const void*> elsewhere(world_->tensors[victim].size(),
                                             &random_);
    const auto statuses = world_->OnAllRanks([&](int32_t rank) {
      RunOptions options;
      if (rank == victim) options.addresses = elsewhere;
      return world_->RefitOf(rank, options);
    });
    for (const absl::Status& status : statuses) ASSERT_FALSE(status.ok());
    for (int32_t rank = 0; rank < Ranks(); ++rank) {
      ASSERT_EQ(world_->executor(rank).state(), ExecutorState::kTorn);
    }
    // NCCL's communicators are gone.
    if (on_nccl_) {
      ASSERT_TRUE(world_->Connect().ok());
    }
  }

  // An engine's weights move to new memory, which holds none. Of a trainer's
  // tensors others have bitmaps then.
  void Rebind() {
    const auto rank = static_cast<int32_t>(Draw(Ranks()));
    world_->Allocate(rank);
    twin_.Allocate(rank);
    if (marks_ && rank < Sources()) GiveBitmaps(rank);
    ASSERT_TRUE(world_->Bind().ok());
    ASSERT_TRUE(twin_.Bind().ok());
  }

  // A worker ends, and another one comes in its place. Where Bind is local to a
  // rank, the others make new executors, too.
  void Replace() {
    const auto rank = static_cast<int32_t>(Draw(Ranks()));
    if (HasDirectRounds(world_->plan())) {
      world_->Replace(rank);
    } else {
      for (int32_t each = 0; each < Ranks(); ++each) world_->Replace(each);
    }
    if (rank >= Sources()) {
      world_->Allocate(rank);
      twin_.Allocate(rank);
      ASSERT_TRUE(twin_.Bind().ok());
    }
    ASSERT_TRUE(world_->Connect().ok());
    ASSERT_TRUE(world_->Bind().ok());
  }

  std::vector<LazyDevice> devices_;
  const bool on_nccl_;
  const std::unique_ptr<DeltaWorld> world_;
  DeltaWorld twin_;
  const Replicas& replicas_;
  const bool marks_;
  std::mt19937_64 random_;
  uint32_t deltas_ = 0;
  uint64_t left_out_bytes_ = 0;
};

constexpr uint32_t kSeeds = kSanitized ? 25 : 250;

class DeltaHistoryTest : public testing::TestWithParam<int> {};

TEST_P(DeltaHistoryTest, LeavesTheBitsOfDenseRefits) {
  const HistoryJob job = HistoryJobs()[GetParam()];
  const PlanFile dense = PlanOf(job, "");
  std::vector<PlanFile> plans;
  for (const std::string changes : {"snapshot", "bitmap"}) {
    const std::string delta =
        "\"delta\": {\"dense_every\": 4, \"changes\": \"" + changes + "\"}";
    const std::string small = delta + ", \"bucket_bytes\": 4096";
    plans.push_back(PlanOf(job, small + ", \"peer\": \"staged\""));
    // Staged rounds between hosts, direct ones inside.
    plans.push_back(PlanOf(job, small, job.hosts));
    ASSERT_TRUE(HasDirectRounds(plans.back()) && HasRungs(plans.back().body()));
    plans.push_back(PlanOf(job, small + ", \"peer\": \"staged\"", job.hosts));
  }
  const Replicas replicas(dense);
  uint64_t deltas = 0;
  uint64_t left_out_bytes = 0;
  for (uint32_t seed = 0; seed < kSeeds; ++seed) {
    // Few over NCCL: its ranks meet anew in each.
    constexpr size_t kOfNccl = 2;
    const size_t changes = seed % 2 * 3;
    const bool on_nccl = seed / 2 % 12 == 0;
    const size_t kind = on_nccl ? kOfNccl : seed / 2 % kOfNccl;
    History history(plans[changes + kind], dense, replicas,
                    on_nccl ? HistoryWorld::kNccl : HistoryWorld::kThreads,
                    seed);
    history.Live();
    ASSERT_FALSE(HasFatalFailure()) << job.name << ", seed " << seed;
    deltas += history.deltas();
    left_out_bytes += history.left_out_bytes();
  }
  EXPECT_GT(deltas, 2 * kSeeds);
  EXPECT_GT(left_out_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Jobs, DeltaHistoryTest, testing::Range(0, 4),
                         [](const testing::TestParamInfo<int>& info) {
                           return HistoryJobs()[info.param].name;
                         });

}  // namespace
}  // namespace refit
