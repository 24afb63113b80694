#include "executor/digest/state_check.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "control/payload.h"
#include "control/waiting.h"
#include "executor/agreement.h"
#include "plan/scratch_windows.h"
#include "refit/state_digest.h"

namespace refit {
namespace {

// Regions whose params are looked for when they differ, and params that the
// error names.
constexpr size_t kRegionsMax = 4;
constexpr size_t kNamedParamsMax = 5;

constexpr size_t kRegionSumBytes = 20;
constexpr size_t kParamSumBytes = 20;

absl::Status Damaged(size_t rank) {
  return absl::InternalError(
      absl::StrCat("the digests of rank ", rank, " cannot be read"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateCheck>> StateCheck::Create(
    const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
    Device& device, absl::Span<std::byte* const> addresses, Arrivals arrivals) {
  // A host's thread would keep its peers waiting meanwhile.
  if (device.IsHost()) {
    std::fill(arrivals.digested_after.begin(), arrivals.digested_after.end(),
              arrivals.count);
  }
  std::unique_ptr<StateCheck> check(new StateCheck(plan, std::move(arrivals)));
  const fb::RankProgram& program = *plan.body().programs()->Get(rank);
  std::map<size_t, size_t> launch_of;  // by slot of scratch
  for (size_t launch = 0; launch < schedule.quantizes().size(); ++launch) {
    for (const uint32_t operation : schedule.quantizes()[launch].operations) {
      const fb::Quantize& op = *program.quantizes()->Get(operation);
      for (const size_t slot :
           {op.input_slot(), op.output_slot(), op.scale_slot()}) {
        launch_of[slot] = launch;
      }
    }
  }
  std::vector<DigestBox> of_tensors;
  std::vector<std::vector<DigestBox>> of_launches(schedule.quantizes().size());
  for (DigestBox& box : BoxesOfRegions(plan, rank, check->regions_)) {
    if (!IsScratch(program, static_cast<uint32_t>(box.slot))) {
      of_tensors.push_back(std::move(box));
    } else if (const auto launch = launch_of.find(box.slot);
               launch != launch_of.end()) {
      of_launches[launch->second].push_back(std::move(box));
    }
  }
  absl::Status status;
  const auto make = [&](auto& target, auto made) {
    if (made.ok()) target = *std::move(made);
    status.Update(made.status());
  };
  make(check->tensors_,
       RankDigest::Create(plan, rank, device, addresses, std::move(of_tensors),
                          &check->arrivals_));
  for (std::vector<DigestBox>& boxes : of_launches) {
    make(check->scratch_.emplace_back(),
         RankDigest::Create(plan, rank, device, addresses, std::move(boxes)));
  }
  make(check->stream_, device.CreateStream());
  make(check->digested_, device.CreateEvent());
  if (status.ok()) {
    // What has to wait for all is the rest.
    for (const size_t arrivals : check->tensors_->due()) {
      if (arrivals < check->arrivals_.count) check->due_.push_back(arrivals);
    }
    status = check->digest_time_.Reserve(check->due_.size() + 1, device);
  }
  if (!status.ok()) return status;
  return check;
}

absl::Status StateCheck::Begin(Stream stream) {
  digest_time_.Restart();
  // Steps of a refit that failed may still be to come.
  absl::Status status = digested_->Record(stream_->get());
  status.Update(digested_->Await(stream));
  status.Update(tensors_->Restart(stream));
  return status;
}

absl::Status StateCheck::EnqueueArrived(size_t arrivals) {
  return digest_time_.Time(stream_->get(), [&] {
    return tensors_->EnqueueArrived(arrivals, stream_->get());
  });
}

absl::Status StateCheck::EnqueueRest(Stream stream) {
  return digest_time_.Time(stream,
                           [&] { return tensors_->EnqueueRest(stream); });
}

bool StateCheck::DigestsScratch() const {
  const auto& programs = *plan_.body().programs();
  return std::any_of(programs.begin(), programs.end(), [](const auto* program) {
    return program->quantizes() != nullptr && program->quantizes()->size() > 0;
  });
}

absl::StatusOr<std::vector<StateCheck::PartSum>> StateCheck::ReadSums() {
  std::vector<PartSum> sums;
  size_t first_box = 0;
  const auto read = [&](RankDigest& digest) {
    const absl::StatusOr<std::vector<uint64_t>> of_parts = digest.Read();
    if (!of_parts.ok()) return of_parts.status();
    for (size_t i = 0; i < of_parts->size(); ++i) {
      const DigestPart& part = digest.parts()[i];
      sums.push_back({.box = first_box + part.box,
                      .region = digest.boxes()[part.box].region,
                      .part = part,
                      .sum = (*of_parts)[i]});
    }
    first_box += digest.boxes().size();
    return absl::OkStatus();
  };
  absl::Status status = read(*tensors_);
  for (const std::unique_ptr<RankDigest>& scratch : scratch_) {
    if (status.ok()) status = read(*scratch);
  }
  if (!status.ok()) return status;
  return sums;
}

// By box of the rank: its region, elements and sum. Parts of a box follow each
// other.
std::string StateCheck::RegionSums(absl::Span<const PartSum> sums) const {
  PayloadWriter boxes;
  uint64_t count = 0;
  for (size_t i = 0; i < sums.size();) {
    const PartSum& first = sums[i];
    StateDigest digest;
    for (; i < sums.size() && sums[i].box == first.box; ++i) {
      digest += {.sum = sums[i].sum, .elements = sums[i].part.elements};
    }
    boxes.U32(first.region).U64(digest.elements).U64(digest.sum);
    ++count;
  }
  return PayloadWriter().U64(count).Bytes(boxes.Take()).Take();
}

absl::StatusOr<std::string> StateCheck::CompareRegions(
    absl::Span<const std::string> by_rank) const {
  std::vector<StateDigest> source(regions_.size());
  std::vector<Difference> differences;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const bool is_source =
        plan_.side(static_cast<int32_t>(rank)) == fb::Side::kSource;
    PayloadReader reader(by_rank[rank]);
    for (uint64_t left = reader.Count(kRegionSumBytes); left > 0; --left) {
      const uint32_t region = reader.U32();
      StateDigest digest;
      digest.elements = reader.U64();
      digest.sum = reader.U64();
      if (region >= regions_.size()) return Damaged(rank);
      if (is_source) {
        source[region] += digest;
      } else if (source[region].elements == digest.elements &&
                 source[region] != digest) {
        differences.push_back(
            {.rank = static_cast<int32_t>(rank), .region = region});
      }
    }
    if (!reader.Complete()) return Damaged(rank);
  }
  std::set<uint32_t> not_compared;
  for (size_t i = 0; i < regions_.size(); ++i) {
    if (source[i].elements != ElementsOf(regions_[i].box)) {
      not_compared.insert(regions_[i].param);
    }
  }
  PayloadWriter writer;
  writer.U64(differences.size());
  for (const Difference& difference : differences) {
    writer.U32(static_cast<uint32_t>(difference.rank)).U32(difference.region);
  }
  writer.U64(not_compared.size());
  for (const uint32_t param : not_compared) writer.U32(param);
  return writer.Take();
}

absl::StatusOr<StateCheck::Comparison> StateCheck::ReadComparison(
    const std::string& bytes) const {
  Comparison comparison;
  PayloadReader reader(bytes);
  for (uint64_t left = reader.Count(2 * sizeof(uint32_t)); left > 0; --left) {
    Difference& difference = comparison.differences.emplace_back();
    difference.rank = static_cast<int32_t>(reader.U32());
    difference.region = reader.U32();
    if (difference.region >= regions_.size()) return Damaged(0);
  }
  for (uint64_t left = reader.Count(sizeof(uint32_t)); left > 0; --left) {
    const uint32_t param = reader.U32();
    if (param >= plan_.body().params()->size()) return Damaged(0);
    comparison.not_compared.push_back(param);
  }
  if (!reader.Complete()) return Damaged(0);
  return comparison;
}

// The first regions that differ, at most `count`.
std::set<uint32_t> StateCheck::FirstRegions(const Comparison& comparison,
                                            size_t count) {
  std::set<uint32_t> regions;
  for (const Difference& difference : comparison.differences) {
    if (regions.size() < count) regions.insert(difference.region);
  }
  return regions;
}

// By param of the first regions that differ.
std::string StateCheck::ParamSums(absl::Span<const PartSum> sums,
                                  const Comparison& comparison) const {
  const std::set<uint32_t> wanted = FirstRegions(comparison, kRegionsMax);
  PayloadWriter entries;
  uint64_t count = 0;
  for (const PartSum& sum : sums) {
    if (!wanted.contains(sum.region)) continue;
    ++count;
    entries.U32(sum.region).U64(sum.part.ordinal).U64(sum.sum);
  }
  return PayloadWriter().U64(count).Bytes(entries.Take()).Take();
}

// The error's text. Params of further regions may differ too: `is_part`.
absl::StatusOr<std::string> StateCheck::CompareParams(
    absl::Span<const std::string> by_rank, bool is_part) const {
  std::map<std::pair<uint32_t, uint64_t>, StateDigest> source;
  std::map<std::string, std::vector<int32_t>> ranks_of;  // by param
  for (size_t r = 0; r < by_rank.size(); ++r) {
    const auto rank = static_cast<int32_t>(r);
    PayloadReader reader(by_rank[r]);
    for (uint64_t left = reader.Count(kParamSumBytes); left > 0; --left) {
      const uint32_t region = reader.U32();
      const uint64_t ordinal = reader.U64();
      const StateDigest digest = {.sum = reader.U64(), .elements = 0};
      if (region >= regions_.size()) return Damaged(r);
      StateDigest& expected = source[{region, ordinal}];
      if (plan_.side(rank) == fb::Side::kSource) {
        expected += digest;
      } else if (expected != digest) {
        const fb::Param& param =
            *plan_.body().params()->Get(regions_[region].param);
        std::vector<int32_t>& ranks = ranks_of[TensorName(param, ordinal)];
        if (ranks.empty() || ranks.back() != rank) ranks.push_back(rank);
      }
    }
    if (!reader.Complete()) return Damaged(r);
  }
  std::string text;
  size_t named = 0;
  for (const auto& [param, ranks] : ranks_of) {
    if (++named > kNamedParamsMax) break;
    absl::StrAppend(&text, text.empty() ? "" : "; ", "\"", param, "\" on ",
                    RanksText(ranks));
  }
  if (named > kNamedParamsMax) {
    absl::StrAppend(&text, "; and ", is_part ? "at least " : "",
                    ranks_of.size() - kNamedParamsMax, " more params");
  } else if (is_part) {
    absl::StrAppend(&text, "; and perhaps more");
  }
  return text;
}

absl::Status StateCheck::Compare(Transport& transport, Deadline deadline) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const absl::Status status = CompareSums(transport, deadline);
  compare_seconds_ =
      std::chrono::duration<double>(Clock::now() - start).count();
  return status;
}

absl::StatusOr<double> StateCheck::Seconds() const {
  const absl::StatusOr<double> digested = digest_time_.Seconds();
  if (!digested.ok()) return digested.status();
  return *digested + compare_seconds_;
}

absl::Status StateCheck::CompareSums(Transport& transport, Deadline deadline) {
  const absl::StatusOr<std::vector<PartSum>> sums = ReadSums();
  const absl::StatusOr<std::string> mine =
      sums.ok() ? absl::StatusOr<std::string>(RegionSums(*sums))
                : sums.status();
  const absl::StatusOr<std::string> decided = ThroughRankZero(
      transport, deadline, mine,
      [&](absl::Span<const std::string> all) { return CompareRegions(all); });
  if (!decided.ok()) return decided.status();
  const absl::StatusOr<Comparison> comparison = ReadComparison(*decided);
  if (!comparison.ok()) return comparison.status();
  not_compared_.clear();
  for (const uint32_t param : comparison->not_compared) {
    not_compared_.push_back(plan_.body().params()->Get(param)->name()->str());
  }
  if (comparison->differences.empty()) return absl::OkStatus();
  const bool is_part =
      FirstRegions(*comparison, kRegionsMax + 1).size() > kRegionsMax;
  const absl::StatusOr<std::string> text =
      ThroughRankZero(transport, deadline, ParamSums(*sums, *comparison),
                      [&](absl::Span<const std::string> all) {
                        return CompareParams(all, is_part);
                      });
  if (!text.ok()) return text.status();
  return absl::DataLossError(absl::StrCat(
      "after the refit the destination does not hold what the source holds: ",
      *text));
}

}  // namespace refit
