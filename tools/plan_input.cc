#include "tools/plan_input.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace refit {
namespace {

// FlatBuffers ends at 2 GiB; more than that from a pipe is no plan.
constexpr size_t kPlanBytesMax = size_t{1} << 31;

absl::StatusOr<std::vector<uint8_t>> ReadStdin() {
  std::vector<uint8_t> bytes;
  size_t size = 0;
  while (true) {
    bytes.resize(std::max<size_t>(2 * size, 1 << 16));
    size += std::fread(bytes.data() + size, 1, bytes.size() - size, stdin);
    if (size < bytes.size()) break;
    // The identifier first, so that a wrong pipe is not read to its end.
    const size_t identifier_end =
        flatbuffers::kFileIdentifierLength + sizeof(flatbuffers::uoffset_t);
    if (size >= identifier_end && !fb::PlanBufferHasIdentifier(bytes.data())) {
      bytes.resize(identifier_end);
      return bytes;
    }
    if (size >= kPlanBytesMax) {
      return absl::InvalidArgumentError("more than 2 GiB; wanted a plan");
    }
  }
  if (std::ferror(stdin)) {
    return absl::UnavailableError(
        absl::StrCat("read failed: ", std::strerror(errno)));
  }
  bytes.resize(size);
  return bytes;
}

absl::StatusOr<PlanFile> ReadPlan() {
  absl::StatusOr<std::vector<uint8_t>> bytes = ReadStdin();
  if (!bytes.ok()) return bytes.status();
  return PlanFile::FromBytes(*std::move(bytes));
}

}  // namespace

absl::StatusOr<PlanFile> OpenPlan(const std::string& path) {
  if (path != "-") return PlanFile::Open(path);
  absl::StatusOr<PlanFile> plan = ReadPlan();
  if (plan.ok()) return plan;
  return absl::Status(plan.status().code(),
                      absl::StrCat("<stdin>: ", plan.status().message()));
}

absl::Status WriteStdout(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() ||
      std::fflush(stdout) != 0) {
    return absl::UnavailableError(
        absl::StrCat("standard output: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace refit
