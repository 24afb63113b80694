#include "runner/safetensors_run.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "executor/binding.h"
#include "files/partial_files.h"
#include "runner/safetensors.h"

namespace refit {
namespace {

std::string PathIn(const std::string& directory, int32_t rank) {
  return (std::filesystem::path(directory) / RankFileName(rank)).string();
}

// What a destination rank's file holds: all but the wholly skipped tensors.
std::vector<BoundTensor> WrittenTensors(const PlanFile& plan, int32_t rank) {
  const std::vector<bool> skipped = TensorTable(plan, rank).Skipped();
  std::vector<BoundTensor> all = TensorsOfRank(plan, rank);
  std::vector<BoundTensor> written;
  for (size_t i = 0; i < all.size(); ++i) {
    if (!skipped[i]) written.push_back(std::move(all[i]));
  }
  return written;
}

// What the plan wants of a source rank's file, which may hold more. An error
// names the file.
absl::StatusOr<std::vector<BoundTensor>> ReadTensors(
    const PlanFile& plan, int32_t rank, const SafetensorsReader& reader,
    const std::string& path) {
  absl::flat_hash_set<std::string> wanted;
  for (const BoundTensor& tensor : TensorsOfRank(plan, rank)) {
    wanted.insert(tensor.name);
  }
  std::vector<BoundTensor> tensors;
  for (const BoundTensor& tensor : reader.tensors()) {
    if (wanted.contains(tensor.name)) tensors.push_back(tensor);
  }
  const absl::Status bound = BindTensors(TensorTable(plan, rank), rank, tensors,
                                         /*allows_unaligned=*/true)
                                 .status();
  if (bound.ok()) return tensors;
  return absl::Status(bound.code(), absl::StrCat(path, ": ", bound.message()));
}

}  // namespace

std::string RankFileName(int32_t rank) {
  return absl::StrFormat("rank-%05d.safetensors", rank);
}

absl::StatusOr<RunOfRanksResult> RunSafetensors(
    const PlanFile& plan, const std::string& source_dir,
    const std::string& destination_dir, const RunOfRanksOptions& options) {
  std::vector<SafetensorsReader> readers;
  std::unique_lock<std::recursive_mutex> held;  // longer than the writers live
  std::vector<SafetensorsWriter> writers;
  TensorsByRank tensors;
  for (int32_t rank = 0; rank < plan.source_ranks(); ++rank) {
    const std::string path = PathIn(source_dir, rank);
    absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(path);
    if (!reader.ok()) return reader.status();
    absl::StatusOr<std::vector<BoundTensor>> read =
        ReadTensors(plan, rank, *reader, path);
    if (!read.ok()) return read.status();
    tensors.push_back(*std::move(read));
    readers.push_back(*std::move(reader));
  }
  std::error_code error;
  std::filesystem::create_directories(destination_dir, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat(destination_dir, ": ", error.message()));
  }
  for (int32_t rank = plan.source_ranks(); rank < plan.world_size(); ++rank) {
    absl::StatusOr<SafetensorsWriter> writer = SafetensorsWriter::Create(
        PathIn(destination_dir, rank), WrittenTensors(plan, rank));
    if (!writer.ok()) return writer.status();
    tensors.push_back(writer->tensors());
    writers.push_back(*std::move(writer));
  }
  absl::StatusOr<std::unique_ptr<LocalRanks>> ranks =
      LocalRanks::Create(plan, tensors, options.timeout);
  if (!ranks.ok()) return ranks.status();
  RunOfRanksResult result;
  MeasureSizes(plan, result);
  for (int64_t i = 0; i < options.iterations; ++i) {
    absl::StatusOr<RefitMeasurement> refit = (*ranks)->Refit();
    if (!refit.ok()) return refit.status();
    result.refits.push_back(*refit);
  }
  for (SafetensorsWriter& writer : writers) {
    if (absl::Status s = writer.Finish(); !s.ok()) return s;
  }
  // All of them or none, also when a signal comes.
  held = PartialFiles::OfThisProcess().Hold();
  for (SafetensorsWriter& writer : writers) {
    absl::Status committed = writer.Commit();
    if (committed.ok()) continue;
    for (SafetensorsWriter& earlier : writers) earlier.Undo();
    return committed;
  }
  return result;
}

}  // namespace refit
