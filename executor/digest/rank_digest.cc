#include "executor/digest/rank_digest.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "executor/device/element_digest.h"

namespace refit {
namespace {

constexpr size_t kZeroBatch = 0;
constexpr size_t kDigestBatch = 1;

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

// Gives the copies of `batch` their steps. Returns after how many arrivals each
// begins.
std::vector<size_t> CutByArrivals(const Arrivals& arrivals, CopyBatch& batch) {
  std::vector<size_t> of_copy;
  std::map<size_t, uint32_t> steps;
  for (const StridedCopy& copy : batch.copies) {
    of_copy.push_back(
        BeginsAfter(copy,
                    absl::MakeConstSpan(batch.loops)
                        .subspan(copy.loops_begin, copy.loops_count),
                    arrivals));
    steps[of_copy.back()];
  }
  std::vector<size_t> begins_after;
  for (auto& [after, step] : steps) {
    step = static_cast<uint32_t>(begins_after.size());
    begins_after.push_back(after);
  }
  for (size_t i = 0; i < batch.copies.size(); ++i) {
    batch.copies[i].step = steps[of_copy[i]];
  }
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
  std::vector<CopyBatch> batches(2);
  CopyBatch& digests = batches[kDigestBatch];
  const uint64_t sums_entry = addresses.size();
  AppendDigests(plan, TensorTable(plan, rank), made->boxes_, sums_entry,
                made->parts_, digests);
  // A rank that digests nothing has one step, of nothing.
  made->begins_after_ = {0};
  if (arrivals != nullptr && !digests.copies.empty()) {
    made->begins_after_ = CutByArrivals(*arrivals, digests);
  }
  const uint64_t begun_at = made->parts_.size() * sizeof(DigestSum);
  digests.begun = {.entry = sums_entry, .byte_offset = begun_at};
  const uint64_t sums_bytes =
      begun_at + made->begins_after_.size() * sizeof(uint32_t);
  CopyBatch& zero = batches[kZeroBatch];
  zero.kind = CopyKind::kZero;
  zero.copies.push_back(
      {.from = {},
       .to = {.entry = sums_entry, .byte_offset = 0, .dtype = DType::kInt32},
       .loops_begin = 0,
       .loops_count = 1});
  zero.loops.push_back({.extent = sums_bytes / sizeof(uint32_t),
                        .from = {},
                        .to = {.entries = 0, .bytes = sizeof(uint32_t)}});
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
  const absl::Status status = Restart(stream);
  return status.ok() ? EnqueueRest(stream) : status;
}

absl::Status RankDigest::Restart(Stream stream) {
  enqueued_ = 0;
  return batches_->Enqueue(kZeroBatch, stream);
}

absl::Status RankDigest::EnqueueArrived(size_t arrivals, Stream stream) {
  for (;
       enqueued_ < begins_after_.size() && begins_after_[enqueued_] <= arrivals;
       ++enqueued_) {
    const absl::Status status = batches_->EnqueueStep(
        kDigestBatch, static_cast<uint32_t>(enqueued_), stream,
        /*unless=*/nullptr, {.way = DeviceUse::Way::kBesideRounds});
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status RankDigest::EnqueueRest(Stream stream) {
  return batches_->Enqueue(kDigestBatch, stream);
}

absl::StatusOr<std::vector<uint64_t>> RankDigest::Read() {
  std::vector<DigestSum> sums(parts_.size());
  absl::Status status =
      device_.Copy(reinterpret_cast<std::byte*>(sums.data()), sums_->data(),
                   sums.size() * sizeof(DigestSum), stream_->get());
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
