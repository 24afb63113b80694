#include "executor/digest/rank_digest.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "executor/device/element_digest.h"

namespace refit {
namespace {

constexpr size_t kZeroBatch = 0;
constexpr size_t kBesideBatch = 1;  // beside rounds
constexpr size_t kLastBatch = 2;

uint64_t SumModuloP(const DigestSum& sum) {
  // 2^64 is 8 mod p.
  return DigestReduced(DigestFold(sum.low) +
                       DigestReduced(DigestReduced(sum.high) * 8));
}

// After how many arrivals what `copy` reads is whole.
size_t BeginsAfter(const StridedCopy& copy, absl::Span<const CopyLoop> loops,
                   const Arrivals& arrivals) {
  uint64_t last = copy.from.entry;
  for (const CopyLoop& loop : loops) {
    last += (loop.extent - 1) * loop.from.entries;
  }
  const auto begin = arrivals.digested_after.begin();
  return *std::max_element(begin + static_cast<ptrdiff_t>(copy.from.entry),
                           begin + static_cast<ptrdiff_t>(last) + 1);
}

// Moves to `beside` what need not wait for the last arrival, step by step.
// Returns after how many arrivals each step begins.
std::vector<size_t> TakeArrived(const Arrivals& arrivals, CopyBatch& last,
                                CopyBatch& beside) {
  std::vector<size_t> of_copy;
  std::map<size_t, uint32_t> steps;
  for (const StridedCopy& copy : last.copies) {
    of_copy.push_back(
        BeginsAfter(copy,
                    absl::MakeConstSpan(last.loops)
                        .subspan(copy.loops_begin, copy.loops_count),
                    arrivals));
    if (of_copy.back() < arrivals.count) steps[of_copy.back()];
  }
  std::vector<size_t> begins_after;
  for (auto& [after, step] : steps) {
    step = static_cast<uint32_t>(begins_after.size());
    begins_after.push_back(after);
  }
  beside.kind = last.kind;
  beside.share = DeviceShare::kHalf;
  beside.loops = last.loops;
  CopyBatch kept = last;
  kept.copies.clear();
  kept.digests.clear();
  for (size_t i = 0; i < last.copies.size(); ++i) {
    const auto step = steps.find(of_copy[i]);
    CopyBatch& batch = step == steps.end() ? kept : beside;
    batch.copies.push_back(last.copies[i]);
    if (step != steps.end()) batch.copies.back().step = step->second;
    batch.digests.push_back(last.digests[i]);
  }
  last = std::move(kept);
  return begins_after;
}

}  // namespace

StateDigest& StateDigest::operator+=(const StateDigest& other) {
  sum = DigestReduced(DigestReduced(sum) + DigestReduced(other.sum));
  elements += other.elements;
  return *this;
}

absl::StatusOr<std::unique_ptr<RankDigest>> RankDigest::Create(
    const PlanFile& plan, int32_t rank, Device& device,
    absl::Span<std::byte* const> addresses, std::vector<DigestBox> boxes,
    const Arrivals* arrivals) {
  std::unique_ptr<RankDigest> made(new RankDigest(device, std::move(boxes)));
  std::vector<CopyBatch> batches(3);
  const uint64_t sums_entry = addresses.size();
  AppendDigests(plan, TensorTable(plan, rank), made->boxes_, sums_entry,
                made->parts_, batches[kLastBatch]);
  if (arrivals != nullptr) {
    made->begins_after_ =
        TakeArrived(*arrivals, batches[kLastBatch], batches[kBesideBatch]);
    made->begins_after_.push_back(arrivals->count);
  }
  const uint64_t sums_bytes = made->parts_.size() * sizeof(DigestSum);
  CopyBatch& zero = batches[kZeroBatch];
  zero.kind = CopyKind::kZero;
  if (sums_bytes > 0) {
    zero.copies.push_back(
        {.from = {},
         .to = {.entry = sums_entry, .byte_offset = 0, .dtype = DType::kInt64},
         .loops_begin = 0,
         .loops_count = 1});
    zero.loops.push_back({.extent = sums_bytes / sizeof(uint64_t),
                          .from = {},
                          .to = {.entries = 0, .bytes = sizeof(uint64_t)}});
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> sums =
      device.Allocate(sums_bytes);
  if (!sums.ok()) return sums.status();
  made->sums_ = *std::move(sums);
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = device.CreateStream();
  if (!stream.ok()) return stream.status();
  made->stream_ = *std::move(stream);
  std::vector<std::byte*> table(addresses.begin(), addresses.end());
  table.push_back(made->sums_->data());
  absl::StatusOr<std::unique_ptr<PreparedCopies>> prepared =
      device.Prepare(table, batches);
  if (!prepared.ok()) return prepared.status();
  made->batches_ = *std::move(prepared);
  return made;
}

absl::Status RankDigest::Enqueue(Stream stream) {
  absl::Status status = batches_->Enqueue(kZeroBatch, stream);
  if (status.ok()) status = batches_->Enqueue(kBesideBatch, stream);
  if (status.ok()) status = batches_->Enqueue(kLastBatch, stream);
  return status;
}

absl::Status RankDigest::Restart(Stream stream) {
  enqueued_ = 0;
  return batches_->Enqueue(kZeroBatch, stream);
}

bool RankDigest::IsDue(size_t arrivals) const {
  return enqueued_ < begins_after_.size() &&
         begins_after_[enqueued_] <= arrivals;
}

absl::Status RankDigest::EnqueueArrived(size_t arrivals, Stream stream) {
  for (; IsDue(arrivals); ++enqueued_) {
    const absl::Status status =
        enqueued_ + 1 < begins_after_.size()
            ? batches_->EnqueueStep(kBesideBatch,
                                    static_cast<uint32_t>(enqueued_), stream)
            : batches_->Enqueue(kLastBatch, stream);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint64_t>> RankDigest::Read() {
  std::vector<DigestSum> sums(parts_.size());
  absl::Status status =
      device_.Copy(reinterpret_cast<std::byte*>(sums.data()), sums_->data(),
                   sums_->size_bytes(), stream_->get());
  if (status.ok()) status = device_.Synchronize(stream_->get());
  if (!status.ok()) return status;
  std::vector<uint64_t> reduced;
  for (const DigestSum& sum : sums) reduced.push_back(SumModuloP(sum));
  return reduced;
}

std::vector<ParamDigest> ParamDigests(const PlanFile& plan,
                                      const RankDigest& digest,
                                      absl::Span<const uint64_t> sums) {
  std::map<std::tuple<uint32_t, uint64_t, DType>, StateDigest> of_param;
  for (size_t i = 0; i < sums.size(); ++i) {
    const DigestPart& part = digest.parts()[i];
    of_param[{part.param, part.ordinal, digest.boxes()[part.box].dtype}] +=
        {.sum = sums[i], .elements = part.elements};
  }
  std::vector<ParamDigest> digests;
  for (const auto& [key, of_one] : of_param) {
    const auto [param, ordinal, dtype] = key;
    digests.push_back(
        {.param = TensorName(*plan.body().params()->Get(param), ordinal),
         .dtype = dtype,
         .digest = of_one});
  }
  return digests;
}

}  // namespace refit
