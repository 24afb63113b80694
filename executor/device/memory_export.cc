#include "executor/device/memory_export.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "control/payload.h"

namespace refit {
namespace {

constexpr uint32_t kMagic = 0x33455352;  // "RSE3"
// No memory is larger, and sums of a few do not overflow.
constexpr uint64_t kSizeBytesMax = uint64_t{1} << 48;

constexpr size_t kAllocationBytes =
    2 * sizeof(uint8_t) + sizeof(uint64_t) + ExportedAllocation::kHandleBytes;
constexpr size_t kRangeBytes = 3 * sizeof(uint64_t);

ExportedAllocation ReadAllocation(PayloadReader& reader) {
  ExportedAllocation allocation;
  const uint8_t by = reader.U8();
  if (by > static_cast<uint8_t>(SharedBy::kFabricPage)) reader.Fail();
  allocation.by = static_cast<SharedBy>(by);
  allocation.continues = reader.Bool();
  allocation.size_bytes = reader.U64();
  const std::string_view handle = reader.Bytes(allocation.handle.size());
  std::copy(handle.begin(), handle.end(), allocation.handle.begin());
  return allocation;
}

ExportedRange ReadRange(PayloadReader& reader) {
  ExportedRange range;
  range.size_bytes = reader.U64();
  range.allocation = reader.U64();
  range.offset = reader.U64();
  return range;
}

bool IsGood(const MemoryExport& exported) {
  uint64_t total = 0;
  for (const ExportedAllocation& allocation : exported.allocations) {
    if (allocation.size_bytes == 0 || allocation.size_bytes > kSizeBytesMax ||
        (total += allocation.size_bytes) > kSizeBytesMax) {
      return false;
    }
  }
  return std::all_of(
      exported.ranges.begin(), exported.ranges.end(),
      [&](const ExportedRange& range) {
        if (range.allocation == ExportedRange::kNoAllocation) {
          return exported.kind == MemoryKind::kHost || range.size_bytes == 0;
        }
        return range.allocation < exported.allocations.size() &&
               range.offset < exported.allocations[range.allocation].size_bytes;
      });
}

absl::Status CheckSizes(const std::vector<ExportedRange>& ranges,
                        absl::Span<const uint64_t> sizes_bytes) {
  if (ranges.size() != sizes_bytes.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("shows ", ranges.size(), " tensors when it should be ",
                     sizes_bytes.size()));
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].size_bytes == sizes_bytes[i]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("shows tensor ", i, " with ", ranges[i].size_bytes,
                     " bytes when it should have ", sizes_bytes[i]));
  }
  return absl::OkStatus();
}

class Loan : public ExportedMemory {
 public:
  Loan(const Token& token, std::string bytes)
      : ExportedMemory(std::move(bytes)), token_(token) {}
  ~Loan() override { LentMemories().Remove(token_); }

 private:
  const Token token_;
};

}  // namespace

std::string WriteMemoryExport(const MemoryExport& exported) {
  PayloadWriter writer;
  writer.U32(kMagic)
      .U8(static_cast<uint8_t>(exported.kind))
      .U64(exported.process.process)
      .U64(exported.process.random)
      .Bytes(TokenBytes(exported.token))
      .String(exported.server)
      .U64(exported.allocations.size());
  for (const ExportedAllocation& allocation : exported.allocations) {
    writer.U8(static_cast<uint8_t>(allocation.by))
        .Bool(allocation.continues)
        .U64(allocation.size_bytes)
        .Bytes({allocation.handle.data(), allocation.handle.size()});
  }
  writer.U64(exported.ranges.size());
  for (const ExportedRange& range : exported.ranges) {
    writer.U64(range.size_bytes).U64(range.allocation).U64(range.offset);
  }
  return writer.Take();
}

absl::StatusOr<MemoryExport> ReadMemoryExport(
    std::string_view bytes, MemoryKind kind,
    absl::Span<const uint64_t> sizes_bytes) {
  PayloadReader reader(bytes);
  MemoryExport exported;
  const bool known =
      reader.U32() == kMagic && reader.U8() == static_cast<uint8_t>(kind);
  exported.kind = kind;
  exported.process.process = reader.U64();
  exported.process.random = reader.U64();
  exported.token = TokenOf(reader.Bytes(sizeof(Token))).value_or(Token{});
  exported.server = reader.String();
  exported.allocations.resize(reader.Count(kAllocationBytes));
  for (ExportedAllocation& allocation : exported.allocations) {
    allocation = ReadAllocation(reader);
  }
  exported.ranges.resize(reader.Count(kRangeBytes));
  for (ExportedRange& range : exported.ranges) range = ReadRange(reader);
  if (!known || !reader.Complete() || !IsGood(exported)) {
    return absl::InvalidArgumentError(
        absl::StrCat("not memory exported by a ",
                     kind == MemoryKind::kHost ? "host" : "CUDA", " device"));
  }
  absl::Status status = CheckSizes(exported.ranges, sizes_bytes);
  if (!status.ok()) return status;
  return exported;
}

TokenTable<const LentMemory>& LentMemories() {
  static auto* const memories = new TokenTable<const LentMemory>;
  return *memories;
}

std::unique_ptr<ExportedMemory> Lend(LentMemory memory, MemoryExport exported) {
  exported.kind = memory.kind;
  exported.process = ThisProcess();
  exported.token =
      LentMemories().Add(std::make_shared<const LentMemory>(std::move(memory)));
  return std::make_unique<Loan>(exported.token, WriteMemoryExport(exported));
}

absl::StatusOr<std::shared_ptr<const LentMemory>> FindLent(
    const MemoryExport& exported) {
  std::shared_ptr<const LentMemory> lent = LentMemories().Find(exported.token);
  if (lent == nullptr) {
    if (exported.process != ThisProcess()) return lent;
    return absl::NotFoundError("memory that its rank no longer shows");
  }
  // A peer that was shown the token may say it, and other sizes.
  const bool same =
      lent->kind == exported.kind &&
      std::equal(lent->ranges.begin(), lent->ranges.end(),
                 exported.ranges.begin(), exported.ranges.end(),
                 [](const MemoryRange& a, const ExportedRange& b) {
                   return a.size_bytes == b.size_bytes;
                 });
  if (same) return lent;
  return absl::InvalidArgumentError("memory of this process, of other sizes");
}

}  // namespace refit
