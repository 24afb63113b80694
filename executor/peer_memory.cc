#include "executor/peer_memory.h"

#include <algorithm>
#include <utility>

#include "plan/schedule/tensor_table.h"

namespace refit {
namespace {

// The bytes of each of a rank's tensors, by entry of its table.
std::vector<uint64_t> TensorSizes(const TensorTable& table) {
  std::vector<uint64_t> sizes;
  for (size_t slot = 0; slot < table.stacks(); ++slot) {
    const fb::Buffer& buffer = table.buffer(slot);
    sizes.insert(sizes.end(), table.begin(slot + 1) - table.begin(slot),
                 TensorElements(buffer) * DTypeBytes(buffer.dtype()));
  }
  return sizes;
}

bool AreEqual(const std::vector<MemoryRange>& a,
              const std::vector<MemoryRange>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const MemoryRange& one, const MemoryRange& other) {
                      return one.data == other.data &&
                             one.size_bytes == other.size_bytes;
                    });
}

}  // namespace

PeerMemory::PeerMemory(Device& device, const PeerMemory* earlier)
    : device_(device) {
  if (earlier != nullptr) earlier_ = earlier->now_;
}

absl::StatusOr<std::shared_ptr<ExportedMemory>> PeerMemory::Export(
    const PlanFile& plan, int32_t rank,
    absl::Span<std::byte* const> addresses) {
  const TensorTable table(plan, rank);
  std::vector<MemoryRange> ranges;
  const std::vector<uint64_t> sizes = TensorSizes(table);
  for (size_t entry = 0; entry < sizes.size(); ++entry) {
    ranges.push_back({.data = addresses[entry], .size_bytes = sizes[entry]});
  }
  const auto found =
      std::find_if(earlier_.exported.begin(), earlier_.exported.end(),
                   [&](const Exported& exported) {
                     return AreEqual(exported.ranges, ranges);
                   });
  if (found != earlier_.exported.end()) {
    now_.exported.push_back(*found);
    return found->memory;
  }
  absl::StatusOr<std::unique_ptr<ExportedMemory>> made = device_.Export(ranges);
  if (!made.ok()) return made.status();
  std::shared_ptr<ExportedMemory> exported = *std::move(made);
  // Scratch is the executor's: another one's may be at the same address.
  if (table.stacks() == table.workers_stacks()) {
    now_.exported.push_back({.ranges = std::move(ranges), .memory = exported});
  }
  return exported;
}

absl::StatusOr<std::shared_ptr<MappedMemory>> PeerMemory::Import(
    const PlanFile& plan, int32_t peer, std::string_view exported,
    Deadline deadline) {
  std::vector<uint64_t> sizes = TensorSizes(TensorTable(plan, peer));
  for (const Lists* lists : {&now_, &earlier_}) {
    const auto found = lists->imported.find(exported);
    if (found == lists->imported.end() || found->second.sizes != sizes)
      continue;
    const Imported mapped = found->second;
    now_.imported.insert_or_assign(std::string(exported), mapped);
    return mapped.memory;
  }
  absl::StatusOr<std::unique_ptr<MappedMemory>> made =
      device_.Import(exported, sizes, deadline);
  if (!made.ok()) return made.status();
  std::shared_ptr<MappedMemory> memory = *std::move(made);
  now_.imported.insert_or_assign(
      std::string(exported),
      Imported{.sizes = std::move(sizes), .memory = memory});
  return memory;
}

}  // namespace refit
