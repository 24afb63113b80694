#include "bench/m2n_method.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/measured_communicator.h"

namespace refit {
namespace {

// M2N fuses no more calls of a group than this; it makes larger groups one by
// one.
constexpr size_t kGroupMax = 4096;

// A side's descriptor and what it points to.
struct Descriptor {
  explicit Descriptor(const M2nSide& side, DType dtype)
      : extents(side.mesh),
        placements(side.placements),
        shape(side.local_shape.begin(), side.local_shape.end()) {
    mesh.extents = extents.data();
    mesh.start_rank = side.start_rank;
    tensor.local_shape = shape.data();
    tensor.dims = static_cast<int>(shape.size());
    tensor.dtype = m2n::NcclDataType(dtype);
    tensor.mesh = &mesh;
    tensor.placements = placements.data();
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  std::array<int, 2> extents;
  std::array<int, 2> placements;
  std::vector<size_t> shape;
  m2n::Mesh mesh;
  m2n::DistTensor tensor;
};

struct Call {
  std::unique_ptr<Descriptor> source;
  std::unique_ptr<Descriptor> destination;
};

class M2nMethod : public TransferMethod {
 public:
  M2nMethod(WorldRank& rank, const m2n::Api& api,
            std::unique_ptr<BlockingCommunicator> communicator,
            const std::vector<M2nTensor>& tensors, int32_t source_ranks,
            bool groups)
      : rank_(rank),
        api_(api),
        communicator_(std::move(communicator)),
        group_(groups ? kGroupMax : 1) {
    const int32_t me = rank.transport().rank();
    calls_.reserve(tensors.size());
    for (const M2nTensor& tensor : tensors) {
      Call call = {
          .source = std::make_unique<Descriptor>(tensor.source, tensor.dtype),
          .destination =
              std::make_unique<Descriptor>(tensor.destination, tensor.dtype)};
      for (const M2nTile& tile : tensor.tiles) {
        if (tile.rank != me) continue;
        Descriptor& mine = me < source_ranks ? *call.source : *call.destination;
        mine.tensor.data =
            static_cast<std::byte*>(rank.tensors()[tile.tensor].data) +
            tile.offset_bytes;
      }
      calls_.push_back(std::move(call));
      if (me == 0) received_bytes_ += tensor.received_bytes;
    }
  }
  ~M2nMethod() override {
    if (handle_ != nullptr) api_.Finalize(handle_);
  }

  absl::Status Init() {
    return StatusOf(api_.Init(&handle_, nullptr), "ncclM2nInit");
  }

  std::string name() const override {
    return absl::StrCat("NVIDIA's nccl_m2n", group_ > 1 ? ", groups" : "");
  }
  std::string remark() const override {
    const char* algorithm = std::getenv("NCCL_RESHARD_COPY_ALGORITHM");
    return absl::StrCat(calls_.size(), " tensors",
                        algorithm == nullptr ? "" : ", ",
                        algorithm == nullptr ? "" : algorithm);
  }
  // Of all ranks, where rank 0 is asked; it is not known who sends them.
  uint64_t sent_bytes() const override { return received_bytes_; }

  absl::Status Enqueue(Stream stream) override {
    for (size_t begin = 0; begin < calls_.size(); begin += group_) {
      const size_t end = std::min(begin + group_, calls_.size());
      absl::Status status =
          StatusOf(group_ > 1 ? Group(begin, end, stream)
                              : Reshard(calls_[begin], stream),
                   "ncclReshard");
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Of values that the destination did not hold before. Where the plan fills or
  // skips, M2N writes nothing, so that a refit comes first.
  absl::StatusOr<std::optional<uint64_t>> WrongElements() override {
    absl::Status status = rank_.FillSources();
    status.Update(rank_.PoisonDestinations());
    if (!status.ok()) return status;
    const absl::StatusOr<RefitMeasurement> refit = rank_.Refit();
    if (!refit.ok()) return refit.status();
    status = rank_.ChangeSources(1.0);
    status.Update(Enqueue(rank_.stream()));
    status.Update(rank_.device().Synchronize(rank_.stream()));
    if (!status.ok()) return status;
    const absl::StatusOr<CheckResult> check = rank_.Check();
    if (!check.ok()) return check.status();
    return check->wrong_elements;
  }

 private:
  nccl::Result Reshard(const Call& call, Stream stream) {
    return api_.Reshard(handle_, communicator_->get(), &call.source->tensor,
                        &call.destination->tensor, stream);
  }

  nccl::Result Group(size_t begin, size_t end, Stream stream) {
    nccl::Result result = api_.GroupStart();
    for (size_t i = begin; i < end && result == nccl::kSuccess; ++i) {
      result = Reshard(calls_[i], stream);
    }
    const nccl::Result ended = api_.GroupEnd();
    return result == nccl::kSuccess ? ended : result;
  }

  absl::Status StatusOf(nccl::Result result, const char* call) const {
    if (result == nccl::kSuccess) return absl::OkStatus();
    return absl::InternalError(absl::StrCat(call, " of nccl_m2n: NCCL error ",
                                            static_cast<int>(result), ", ",
                                            api_.GetLastError()));
  }

  WorldRank& rank_;
  const m2n::Api& api_;
  const std::unique_ptr<BlockingCommunicator> communicator_;
  const size_t group_;  // calls
  m2n::Handle handle_ = nullptr;
  std::vector<Call> calls_;
  uint64_t received_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TransferMethod>> MakeM2nMethod(
    const PlanFile& plan, WorldRank& rank, const nccl::Api& nccl,
    const m2n::Api& api, const std::vector<M2nTensor>& tensors, bool groups) {
  if (absl::Status s = rank.device().MakeCurrent(); !s.ok()) return s;
  absl::StatusOr<std::unique_ptr<BlockingCommunicator>> communicator =
      BlockingCommunicator::Make(rank.transport(), nccl);
  if (!communicator.ok()) return communicator.status();
  auto made = std::make_unique<M2nMethod>(rank, api, *std::move(communicator),
                                          tensors, plan.source_ranks(), groups);
  if (absl::Status s = made->Init(); !s.ok()) return s;
  return made;
}

}  // namespace refit
