// The method over a stand-in for NCCL M2N: ranks are threads, memory is the
// host's, and tensors are moved when all ranks have called for them.
#include "bench/m2n_method.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "refit/host_device.h"
#include "runner/rank_threads.h"
#include "tests/executor/fake_nccl/fake_nccl.h"
#include "tests/executor/nccl_world.h"

namespace refit {
namespace {

constexpr int kRanks = 4;
constexpr char kStaged[] = R"("peer": "staged")";

// A side of a call, with what it points to.
struct Side {
  explicit Side(const m2n::DistTensor& given)
      : data(static_cast<std::byte*>(given.data)),
        shape(given.local_shape, given.local_shape + given.dims),
        dtype(given.dtype),
        mesh{given.mesh->extents[0], given.mesh->extents[1]},
        placements{given.placements[0], given.placements[1]},
        start_rank(given.mesh->start_rank) {
    EXPECT_EQ(given.size, sizeof(m2n::DistTensor));
    EXPECT_EQ(given.version, 2u);
    EXPECT_EQ(given.mesh->size, sizeof(m2n::Mesh));
    EXPECT_EQ(given.mesh->version, 2u);
    EXPECT_EQ(given.mesh->axes, 2);
  }

  bool Has(int rank) const {
    return rank >= start_rank && rank < start_rank + mesh[0] * mesh[1];
  }
  // Where the part of `rank` begins in the whole tensor, in dimension `d`.
  size_t Begin(int rank, size_t d) const {
    const int at[2] = {(rank - start_rank) / mesh[1],
                       (rank - start_rank) % mesh[1]};
    for (int axis = 0; axis < 2; ++axis) {
      if (placements[axis] == static_cast<int>(d)) {
        return static_cast<size_t>(at[axis]) * shape[d];
      }
    }
    return 0;
  }

  std::byte* data;
  std::vector<size_t> shape;
  int dtype;
  int mesh[2];
  int placements[2];
  int start_rank;
};

struct Call {
  Side source;
  Side destination;
};

struct World {
  std::vector<Call> calls[kRanks];
  bool in_group[kRanks] = {};
  uint64_t groups[kRanks] = {};
  std::barrier<> all{kRanks};
  std::atomic<bool> corrupts = false;
  std::atomic<bool> fails = false;
};
World* world = nullptr;
thread_local int this_rank = 0;

// What rank `this_rank` gets in call `i`, element by element.
void Receive(size_t i) {
  const Side& mine = world->calls[this_rank][i].destination;
  if (!mine.Has(this_rank)) {
    EXPECT_EQ(mine.data, nullptr);
    return;
  }
  ASSERT_NE(mine.data, nullptr);
  const size_t bytes = mine.dtype == m2n::NcclDataType(DType::kFp32) ? 4 : 2;
  size_t elements = 1;
  for (const size_t extent : mine.shape) elements *= extent;
  for (size_t element = 0; element < elements; ++element) {
    for (int sender = 0; sender < kRanks; ++sender) {
      const Side& theirs = world->calls[sender][i].source;
      if (!theirs.Has(sender)) continue;
      size_t rest = element;
      size_t from = 0;
      size_t stride = 1;
      bool holds = true;
      for (size_t d = mine.shape.size(); d-- > 0;) {
        const size_t at = mine.Begin(this_rank, d) + rest % mine.shape[d];
        rest /= mine.shape[d];
        const size_t begin = theirs.Begin(sender, d);
        holds &= at >= begin && at < begin + theirs.shape[d];
        from += (at - begin) * stride;
        stride *= theirs.shape[d];
      }
      if (!holds) continue;
      std::memcpy(mine.data + element * bytes, theirs.data + from * bytes,
                  bytes);
      break;
    }
  }
  if (world->corrupts && i == 0) mine.data[0] ^= std::byte{1};
}

void ReceiveAll() {
  world->all.arrive_and_wait();
  for (size_t i = 0; i < world->calls[this_rank].size(); ++i) Receive(i);
  world->all.arrive_and_wait();
  world->calls[this_rank].clear();
}

m2n::Api FakeM2n() {
  m2n::Api api;
  api.Init = [](m2n::Handle* handle, const void*) {
    *handle = reinterpret_cast<m2n::Handle>(1);
    return nccl::kSuccess;
  };
  api.Finalize = [](m2n::Handle) { return nccl::kSuccess; };
  api.GetLastError = [] { return "what went wrong"; };
  api.GroupStart = [] {
    world->in_group[this_rank] = true;
    ++world->groups[this_rank];
    return nccl::kSuccess;
  };
  api.Reshard = [](m2n::Handle, nccl::Comm, const m2n::DistTensor* source,
                   const m2n::DistTensor* destination, nccl::CudaStream) {
    world->calls[this_rank].push_back({Side(*source), Side(*destination)});
    if (world->fails) return nccl::kInvalidArgument;
    if (!world->in_group[this_rank]) ReceiveAll();
    return nccl::kSuccess;
  };
  api.GroupEnd = [] {
    world->in_group[this_rank] = false;
    if (world->fails) return nccl::kInvalidArgument;
    ReceiveAll();
    return nccl::kSuccess;
  };
  return api;
}

class M2nMethodTest : public testing::Test {
 protected:
  M2nMethodTest() {
    fake_nccl_reset();
    world = &world_;
  }

  // On each rank, after one refit's bytes.
  std::vector<absl::StatusOr<std::optional<uint64_t>>> Wrong(
      const PlanFile& plan = CompiledPlan(ReshardJob(2, 2, kStaged))) {
    const auto tensors = M2nTensors(plan);
    EXPECT_TRUE(tensors.ok()) << tensors.status();
    const m2n::Api api = FakeM2n();
    const absl::StatusOr<nccl::Api> nccl = nccl::Load();
    EXPECT_TRUE(nccl.ok()) << nccl.status();
    const TcpRendezvous meeting = *LoopbackRendezvous(kRanks);
    std::vector<absl::StatusOr<std::optional<uint64_t>>> wrong(
        kRanks, absl::UnknownError(""));
    const auto run =
        [&](int32_t rank) -> absl::StatusOr<std::optional<uint64_t>> {
      TcpRendezvous mine = meeting;
      mine.rank = rank;
      auto control = ConnectTcp(
          mine, std::chrono::steady_clock::now() + ExecutorWorld::kTimeout);
      if (!control.ok()) return control.status();
      const auto made = WorldRank::Create(plan, *std::move(control),
                                          std::make_shared<DistantDevice>(),
                                          ExecutorWorld::kTimeout);
      if (!made.ok()) return made.status();
      const auto method =
          MakeM2nMethod(plan, **made, *nccl, api, *tensors, groups_);
      if (!method.ok()) return method.status();
      if (absl::Status s = (*method)->Enqueue((*made)->stream()); !s.ok()) {
        return s;
      }
      sent_bytes_ += (*method)->sent_bytes();
      return (*method)->WrongElements();
    };
    EXPECT_TRUE(RunRankThreads(kRanks, [&](int32_t rank) {
                  fake_nccl_set_rank(rank);
                  this_rank = rank;
                  wrong[rank] = run(rank);
                }).ok());
    return wrong;
  }

  // What programs take for a GPU, though it works on the calling thread.
  class DistantDevice : public HostDevice {
   public:
    bool IsHost() const override { return false; }
  };

  World world_;
  bool groups_ = false;
  std::atomic<uint64_t> sent_bytes_ = 0;
};

TEST_F(M2nMethodTest, MovesEveryValue) {
  for (const auto& of_rank : Wrong()) {
    ASSERT_TRUE(of_rank.ok()) << of_rank.status();
    EXPECT_EQ(**of_rank, 0u);
  }
  EXPECT_EQ(sent_bytes_, 960u * 160 * 2 + 2400 * 7 * 4);
  EXPECT_EQ(world_.groups[0], 0u);
}

TEST_F(M2nMethodTest, MovesEveryValueInGroups) {
  groups_ = true;
  for (const auto& of_rank : Wrong()) {
    ASSERT_TRUE(of_rank.ok()) << of_rank.status();
    EXPECT_EQ(**of_rank, 0u);
  }
  EXPECT_EQ(world_.groups[0], 2u);  // the refit and the check
}

// Queries, keys and values stand in one tensor, in another order on each side.
TEST_F(M2nMethodTest, MovesPartsOfTensors) {
  const PlanFile plan = CompiledPlan(
      R"({"model": "config.json",
          "source": {"layout": "megatron", "tensor_parallel": 2},
          "destination": {"layout": "vllm", "tensor_parallel": 2},
          "options": {"peer": "staged"}})",
      R"({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2,
          "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
          "intermediate_size": 48, "vocab_size": 64,
          "tie_word_embeddings": false, "torch_dtype": "bfloat16"})");
  for (const auto& of_rank : Wrong(plan)) {
    ASSERT_TRUE(of_rank.ok()) << of_rank.status();
    EXPECT_EQ(**of_rank, 0u);
  }
}

TEST_F(M2nMethodTest, CountsWhatIsWrong) {
  world_.corrupts = true;
  uint64_t wrong = 0;
  for (const auto& of_rank : Wrong()) {
    ASSERT_TRUE(of_rank.ok()) << of_rank.status();
    wrong += **of_rank;
  }
  EXPECT_EQ(wrong, 4u);  // an element of each tensor on each destination
}

TEST_F(M2nMethodTest, ErrorsHaveTheLibrarysOwnText) {
  world_.fails = true;
  for (const auto& of_rank : Wrong()) {
    EXPECT_EQ(of_rank.status().message(),
              "ncclReshard of nccl_m2n: NCCL error 4, what went wrong");
  }
}

}  // namespace
}  // namespace refit
