// PeerMemory: what a rank shows of its tensors to peers, and maps of theirs.
// What the plan that follows needs of it stays shown and mapped.
#ifndef REFIT_EXECUTOR_PEER_MEMORY_H_
#define REFIT_EXECUTOR_PEER_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "refit/device.h"
#include "refit/transport.h"

namespace refit {

class PeerMemory {
 public:
  // `earlier` is of the executor whose place this one's takes in the process,
  // or null. Its tensors are where they were, in the memory they were.
  PeerMemory(Device& device, const PeerMemory* earlier);

  // Shows the rank's tensors, so that peers can map them while the result
  // lives. `addresses` are by entry of its TensorTable.
  absl::StatusOr<std::shared_ptr<ExportedMemory>> Export(
      const PlanFile& plan, int32_t rank,
      absl::Span<std::byte* const> addresses);

  // Maps what Export of rank `peer` shows.
  absl::StatusOr<std::shared_ptr<MappedMemory>> Import(
      const PlanFile& plan, int32_t peer, std::string_view exported,
      Deadline deadline);

  // Lets go of what was exported and imported earlier, and asked for no more.
  void DropUnused() { earlier_ = {}; }

 private:
  struct Exported {
    std::vector<MemoryRange> ranges;
    std::shared_ptr<ExportedMemory> memory;
  };
  struct Imported {
    std::vector<uint64_t> sizes;
    std::shared_ptr<MappedMemory> memory;
  };
  struct Lists {
    std::vector<Exported> exported;
    // By ExportedMemory::bytes: those of no two exports are equal, even of the
    // same addresses.
    std::map<std::string, Imported, std::less<>> imported;
  };

  Device& device_;
  Lists now_;
  Lists earlier_;  // until DropUnused
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_PEER_MEMORY_H_
