#include "executor/device/cuda/cuda_copies.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/bulk_copy_kernel.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/lower_copies.h"
#include "executor/device/cuda/scoped_device.h"

namespace refit {
namespace {

// Enough to hide latency, few enough that a block has many tiles.
constexpr uint32_t kBlocksPerMultiprocessor = 4;

// A batch of kHalf has one thread block on half of the multiprocessors, four on
// each otherwise: so a quantization and what it goes on beside have
// multiprocessors of their own. Half of them saturate NVLink. Plain copies of
// kLink and kTwoLinks have as many threads.
constexpr uint32_t kHalfDivisor = 8;

// Tiles of digests that a block takes at a time: so many that it seldom adds to
// sums in memory, and so few that all blocks end together.
constexpr uint32_t kDigestChunkMax = 32;
constexpr uint32_t kDigestChunksPerBlock = 8;

using cuda::KernelTile;

// The steps of digests, for `blocks` thread blocks.
std::vector<cuda::KernelDigestStep> DigestSteps(
    absl::Span<const KernelStep> steps, uint32_t blocks) {
  std::vector<cuda::KernelDigestStep> lowered;
  uint32_t begin = 0;
  for (const KernelStep& step : steps) {
    lowered.push_back(
        {.begin = begin,
         .end = begin + step.others,
         .chunk = std::clamp(step.others / (blocks * kDigestChunksPerBlock), 1u,
                             kDigestChunkMax)});
    begin += step.others;
  }
  return lowered;
}

// What kernels read, in one piece of device memory that begins at `base`.
class DeviceImage {
 public:
  explicit DeviceImage(std::byte* base) : base_(base) {}

  // Where the values will be.
  template <typename Value>
  const Value* Add(const std::vector<Value>& values) {
    bytes_.resize((bytes_.size() + 15) / 16 * 16);
    const size_t at = bytes_.size();
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    bytes_.insert(bytes_.end(), bytes, bytes + values.size() * sizeof(Value));
    return reinterpret_cast<const Value*>(base_ + at);
  }
  const std::vector<std::byte>& bytes() const { return bytes_; }

 private:
  std::byte* const base_;
  std::vector<std::byte> bytes_;
};

class CudaPreparedCopies : public PreparedCopies {
 public:
  CudaPreparedCopies(int device, const CudaKernelLimits& limits)
      : device_(device),
        limits_(limits),
        blocks_max_(limits.multiprocessors * kBlocksPerMultiprocessor) {}
  ~CudaPreparedCopies() override {
    const ScopedDevice current(device_);
    cudaFree(memory_);
  }

  absl::Status Upload(absl::Span<std::byte* const> table,
                      absl::Span<const KernelProgram> programs) {
    const size_t size_bytes = Place(table, programs, nullptr).bytes().size();
    absl::Status status = CudaStatus(
        cudaMalloc(&memory_, std::max<size_t>(size_bytes, 16)), "cudaMalloc");
    if (!status.ok()) return status;
    const DeviceImage image =
        Place(table, programs, static_cast<std::byte*>(memory_));
    return CudaStatus(cudaMemcpy(memory_, image.bytes().data(), size_bytes,
                                 cudaMemcpyHostToDevice),
                      "cudaMemcpy");
  }

  absl::Status Enqueue(size_t batch, Stream stream, const uint32_t* unless,
                       const DeviceUse& use) override {
    return Enqueue(batches_[batch], 0, batches_[batch].steps.size(), stream,
                   unless, use);
  }

  absl::Status EnqueueStep(size_t batch, uint32_t step, Stream stream,
                           const uint32_t* unless,
                           const DeviceUse& use) override {
    // What is no copy is of step 0.
    const Batch& of = batches_[batch];
    if (step > 0 && step >= of.steps.size()) return absl::OkStatus();
    return Enqueue(of, step, step + 1, stream, unless, use);
  }

 private:
  struct Batch {
    cuda::KernelBatch copies;
    const KernelTile* parted_tiles = nullptr;
    std::vector<KernelStep> steps;
    cuda::QuantizeBatch quantizes;
    cuda::ApplyBatch applies;
    std::optional<cuda::DigestBatch> digests;
    uint32_t blocks = 0;
    uint32_t bulk_blocks = 0;  // 0: no bulk copies, unless bounded
  };

  // Sets the batches as they are in memory at `base`.
  DeviceImage Place(absl::Span<std::byte* const> table,
                    absl::Span<const KernelProgram> programs, std::byte* base) {
    DeviceImage image(base);
    batches_.clear();
    std::byte* const* const entries =
        image.Add(std::vector<std::byte*>(table.begin(), table.end()));
    for (const KernelProgram& program : programs) {
      batches_.push_back(BatchOf(program, table, entries, image));
    }
    return image;
  }

  Batch BatchOf(const KernelProgram& program,
                absl::Span<std::byte* const> table, std::byte* const* entries,
                DeviceImage& image) const {
    const uint32_t links = program.share == DeviceShare::kLink       ? 1
                           : program.share == DeviceShare::kTwoLinks ? 2
                                                                     : 0;
    Batch batch = {
        .copies = {.table = entries,
                   .copies = image.Add(program.copies),
                   .tiles = image.Add(program.tiles),
                   .tiles_count = static_cast<uint32_t>(program.tiles.size())},
        .parted_tiles = nullptr,
        .steps = program.steps,
        .quantizes = {{.table = entries,
                       .operations = image.Add(program.quantizes),
                       .operations_count =
                           static_cast<uint32_t>(program.quantizes.size()),
                       .tiles_count = program.quantize_tiles,
                       .order = program.quantize_order.empty()
                                    ? nullptr
                                    : image.Add(program.quantize_order)},
                      image.Add(program.row_runs)},
        .applies = {.table = entries,
                    .operations = image.Add(program.applies),
                    .operations_count =
                        static_cast<uint32_t>(program.applies.size()),
                    .tiles_count = program.apply_tiles},
        .digests = std::nullopt,
        .blocks = program.share == DeviceShare::kAll
                      ? blocks_max_
                      : std::max(1u, blocks_max_ / kHalfDivisor),
        .bulk_blocks = links * limits_.link_multiprocessors};
    batch.parted_tiles = program.parted_tiles.empty()
                             ? batch.copies.tiles
                             : image.Add(program.parted_tiles);
    if (program.digests.empty()) return batch;
    const CopyAddress& begun = program.begun;
    batch.digests = {
        .batch = batch.copies,
        .digests = image.Add(program.digests),
        .steps = image.Add(DigestSteps(program.steps, blocks_max_)),
        .begun = reinterpret_cast<uint32_t*>(table[begun.entry] +
                                             begun.byte_offset)};
    return batch;
  }

  absl::Status Enqueue(const Batch& batch, size_t steps_begin, size_t steps_end,
                       Stream stream, const uint32_t* unless,
                       const DeviceUse& use) {
    const ScopedDevice current(device_);
    const absl::Span<const KernelStep> steps = batch.steps;
    const KernelStep before =
        SumOfSteps(steps.subspan(0, std::min(steps_begin, steps.size())));
    steps_end = std::min(steps_end, steps.size());
    const KernelStep until = SumOfSteps(steps.subspan(0, steps_end));
    cuda::KernelBatch copies = batch.copies;
    copies.tiles += before.others + before.bulk;
    copies.tiles_count =
        until.others + until.bulk - before.others - before.bulk;
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    const auto [blocks, bulk_blocks] = BlocksOf(batch, use);
    if (batch.digests.has_value()) {
      if (copies.tiles_count == 0) return absl::OkStatus();
      return CudaStatus(
          cuda::LaunchDigests(
              *batch.digests, static_cast<uint32_t>(steps_begin),
              static_cast<uint32_t>(steps_end),
              std::min(blocks, copies.tiles_count), unless, cuda_stream),
          "launch of the digest kernel");
    }
    absl::Status status;
    if (bulk_blocks > 0 && limits_.has_bulk_copies) {
      cuda::KernelBatch bulk = copies;
      bulk.tiles = batch.parted_tiles + SumOfSteps(steps).others + before.bulk;
      bulk.tiles_count = until.bulk - before.bulk;
      copies.tiles = batch.parted_tiles + before.others;
      copies.tiles_count = until.others - before.others;
      status = CudaStatus(
          cuda::LaunchBulkCopies(bulk, bulk_blocks, unless, cuda_stream),
          "launch of the bulk copy kernel");
    }
    status.Update(
        CudaStatus(cuda::LaunchCopies(copies, blocks, unless, cuda_stream),
                   "launch of the copy kernel"));
    if (steps_begin > 0) return status;
    status.Update(CudaStatus(
        cuda::LaunchQuantizes(batch.quantizes, blocks, unless, cuda_stream),
        "launch of the quantization kernel"));
    status.Update(CudaStatus(
        cuda::LaunchApplies(batch.applies, blocks, unless, cuda_stream),
        "launch of the post-hook kernel"));
    return status;
  }

  // Thread blocks of bulk copies, which have a multiprocessor each, and of what
  // the batch's other kernels do. Without bulk blocks these do all.
  struct Blocks {
    uint32_t blocks = 0;
    uint32_t bulk_blocks = 0;
  };
  Blocks BlocksOf(const Batch& batch, const DeviceUse& use) const {
    const uint32_t all = limits_.multiprocessors;
    const uint32_t blocks = batch.blocks;
    switch (use.way) {
      case DeviceUse::Way::kShare:
        return {blocks, batch.bulk_blocks};
      case DeviceUse::Way::kBulk: {
        if (use.at_most == 0) return {blocks, all};
        const uint32_t most = std::min(use.at_most, all);
        return {std::min(blocks, most), most};
      }
      case DeviceUse::Way::kBesideDigests:
        return {std::min(blocks, all), all};
      case DeviceUse::Way::kBesideRounds:
        return {std::max(1u, blocks / kHalfDivisor), batch.bulk_blocks};
      case DeviceUse::Way::kFew:
        return {std::min(blocks, Few() * kBlocksPerMultiprocessor), Few()};
      case DeviceUse::Way::kMost:
        return {std::min(blocks, (all - Few()) * kBlocksPerMultiprocessor),
                all - Few()};
    }
    return {};
  }

  // Multiprocessors of kFew.
  uint32_t Few() const { return 2 * limits_.link_multiprocessors; }

  const int device_;
  const CudaKernelLimits limits_;
  const uint32_t blocks_max_;
  void* memory_ = nullptr;
  std::vector<Batch> batches_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PreparedCopies>> PrepareCudaCopies(
    int device, const CudaKernelLimits& limits,
    absl::Span<std::byte* const> table, absl::Span<const CopyBatch> batches) {
  std::vector<KernelProgram> programs;
  for (const CopyBatch& batch : batches) {
    programs.push_back(LowerForKernel(batch, table));
    programs.back().share = batch.share;
    if (programs.back().tiles.size() > cuda::kTilesMax) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a batch of ", programs.back().tiles.size(),
                       " tiles is too large for one kernel"));
    }
  }
  auto prepared = std::make_unique<CudaPreparedCopies>(device, limits);
  if (absl::Status s = prepared->Upload(table, programs); !s.ok()) return s;
  return prepared;
}

}  // namespace refit
