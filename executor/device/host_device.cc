#include "refit/host_device.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/host_copy.h"

namespace refit {
namespace {

// Mapped, so that pages never touched cost nothing.
class HostMemory : public DeviceMemory {
 public:
  HostMemory(std::byte* data, uint64_t size_bytes)
      : DeviceMemory(data, size_bytes) {}
  ~HostMemory() override {
    if (data() != nullptr) munmap(data(), size_bytes());
  }
};

class HostPreparedCopies : public PreparedCopies {
 public:
  HostPreparedCopies(absl::Span<std::byte* const> tensors,
                     absl::Span<const CopyBatch> batches)
      : tensors_(tensors.begin(), tensors.end()) {
    for (const CopyBatch& batch : batches) {
      batch_begin_.push_back(copies_.size());
      for (const StridedCopy& copy : batch.copies) {
        copies_.push_back(
            MakeHostCopy(batch.kind, copy,
                         absl::MakeConstSpan(batch.loops)
                             .subspan(copy.loops_begin, copy.loops_count)));
      }
    }
    batch_begin_.push_back(copies_.size());
  }

  absl::Status Enqueue(size_t batch, Stream) override {
    for (size_t i = batch_begin_[batch]; i < batch_begin_[batch + 1]; ++i) {
      RunHostCopy(copies_[i], tensors_.data());
    }
    return absl::OkStatus();
  }

 private:
  std::vector<std::byte*> tensors_;
  std::vector<HostCopy> copies_;
  std::vector<size_t> batch_begin_;  // into copies_; one more than batches
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> HostDevice::Allocate(
    uint64_t size_bytes) {
  if (size_bytes == 0) return std::make_unique<HostMemory>(nullptr, 0);
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", size_bytes, " bytes"));
  }
  // Fewer page faults and TLB misses; only a hint.
  madvise(data, size_bytes, MADV_HUGEPAGE);
  return std::make_unique<HostMemory>(static_cast<std::byte*>(data),
                                      size_bytes);
}

absl::StatusOr<std::unique_ptr<PreparedCopies>> HostDevice::Prepare(
    absl::Span<std::byte* const> tensors, absl::Span<const CopyBatch> batches) {
  return std::make_unique<HostPreparedCopies>(tensors, batches);
}

absl::Status HostDevice::Copy(std::byte* to, const std::byte* from,
                              uint64_t size_bytes, Stream) {
  if (size_bytes > 0) CopyContiguous(to, from, size_bytes);
  return absl::OkStatus();
}

absl::Status HostDevice::Zero(std::byte* to, uint64_t size_bytes, Stream) {
  if (size_bytes > 0) std::memset(to, 0, size_bytes);
  return absl::OkStatus();
}

absl::Status HostDevice::Synchronize(Stream) { return absl::OkStatus(); }

}  // namespace refit
