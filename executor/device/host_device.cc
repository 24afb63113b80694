#include "refit/host_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/host_apply.h"
#include "executor/device/host_copy.h"
#include "executor/device/host_digest.h"
#include "executor/device/host_fence.h"
#include "executor/device/host_message_coder.h"
#include "executor/device/host_quantize.h"
#include "executor/device/marking_cast.h"
#include "executor/device/memory_export.h"

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
  HostPreparedCopies(absl::Span<std::byte* const> table,
                     absl::Span<const CopyBatch> batches)
      : table_(table.begin(), table.end()) {
    for (const CopyBatch& batch : batches) {
      batch_begin_.push_back(copies_.size());
      quantize_begin_.push_back(quantizes_.size());
      apply_begin_.push_back(applies_.size());
      digest_begin_.push_back(digests_.size());
      begun_.push_back(batch.begun);
      for (const ElementApply& apply : batch.applies) {
        const auto functions = batch.functions.begin() + apply.functions_begin;
        applies_.push_back(
            {.apply = apply,
             .functions = {functions, functions + apply.functions_count}});
      }
      for (const BlockQuantize& quantize : batch.quantizes) {
        quantizes_.push_back(
            {.quantize = quantize,
             .loops = {batch.quantize_loops.begin() + quantize.loops_begin,
                       batch.quantize_loops.begin() + quantize.loops_begin +
                           quantize.loops_count},
             .runs = RowRunsOf(batch, quantize)});
      }
      for (size_t i = 0; i < batch.copies.size(); ++i) {
        const StridedCopy& copy = batch.copies[i];
        std::vector<uint32_t>& steps =
            batch.kind == CopyKind::kDigest ? digest_steps_ : copy_steps_;
        steps.push_back(copy.step);
        const auto loops = absl::MakeConstSpan(batch.loops)
                               .subspan(copy.loops_begin, copy.loops_count);
        if (batch.kind == CopyKind::kDigest) {
          digests_.push_back(MakeHostDigest(copy, loops, batch.digests[i]));
        } else {
          copies_.push_back(MakeHostCopy(batch.kind, copy, loops));
        }
      }
    }
    batch_begin_.push_back(copies_.size());
    quantize_begin_.push_back(quantizes_.size());
    apply_begin_.push_back(applies_.size());
    digest_begin_.push_back(digests_.size());
  }

  absl::Status Enqueue(size_t batch, Stream, const uint32_t* unless,
                       const DeviceUse&) override {
    if (unless != nullptr && *unless != 0) return absl::OkStatus();
    RunCopies(batch, [](uint32_t) { return true; });
    RunOthers(batch);
    return absl::OkStatus();
  }

  absl::Status EnqueueStep(size_t batch, uint32_t step, Stream,
                           const uint32_t* unless, const DeviceUse&) override {
    if (unless != nullptr && *unless != 0) return absl::OkStatus();
    RunCopies(batch, [&](uint32_t of) { return of == step; });
    if (step == 0) RunOthers(batch);
    return absl::OkStatus();
  }

 private:
  // Those of the steps that `takes` names.
  template <typename Takes>
  void RunCopies(size_t batch, const Takes& takes) {
    for (size_t i = batch_begin_[batch]; i < batch_begin_[batch + 1]; ++i) {
      if (takes(copy_steps_[i])) RunHostCopy(copies_[i], table_.data());
    }
    RunDigests(batch, takes);
  }

  template <typename Takes>
  void RunDigests(size_t batch, const Takes& takes) {
    const absl::Span<const HostDigest> digests =
        absl::MakeConstSpan(digests_).subspan(
            digest_begin_[batch],
            digest_begin_[batch + 1] - digest_begin_[batch]);
    if (digests.empty()) return;
    const absl::Span<const uint32_t> steps =
        absl::MakeConstSpan(digest_steps_)
            .subspan(digest_begin_[batch], digests.size());
    auto* const begun = reinterpret_cast<uint32_t*>(
        table_[begun_[batch].entry] + begun_[batch].byte_offset);
    std::vector<bool> is_begun;
    for (size_t i = 0; i < digests.size(); ++i) {
      while (is_begun.size() <= steps[i]) {
        is_begun.push_back(begun[is_begun.size()] != 0);
      }
      if (!takes(steps[i]) || is_begun[steps[i]]) continue;
      RunHostDigest(digests[i], table_.data());
      begun[steps[i]] = 1;
    }
  }

  void RunOthers(size_t batch) {
    for (size_t i = quantize_begin_[batch]; i < quantize_begin_[batch + 1];
         ++i) {
      RunHostQuantize(quantizes_[i], table_.data());
    }
    for (size_t i = apply_begin_[batch]; i < apply_begin_[batch + 1]; ++i) {
      RunHostApply(applies_[i], table_.data());
    }
  }

  std::vector<std::byte*> table_;
  std::vector<HostCopy> copies_;
  std::vector<HostQuantize> quantizes_;
  std::vector<HostApply> applies_;
  std::vector<HostDigest> digests_;
  std::vector<uint32_t> copy_steps_;
  std::vector<uint32_t> digest_steps_;
  std::vector<CopyAddress> begun_;  // by batch, of its digests
  // Into copies_, quantizes_, applies_ and digests_; one more than batches.
  std::vector<size_t> batch_begin_;
  std::vector<size_t> quantize_begin_;
  std::vector<size_t> apply_begin_;
  std::vector<size_t> digest_begin_;
};

class HostStream : public DeviceStream {
 public:
  Stream get() const override { return nullptr; }
};

class HostEvent : public DeviceEvent {
 public:
  absl::Status Record(Stream) override { return absl::OkStatus(); }
  absl::Status Await(Stream) override { return absl::OkStatus(); }
  absl::StatusOr<bool> Reached() override { return true; }
};

class HostTimer : public DeviceTimer {
 public:
  absl::Status Start(Stream) override {
    start_ = Clock::now();
    return absl::OkStatus();
  }
  absl::Status Stop(Stream) override {
    stop_ = Clock::now();
    return absl::OkStatus();
  }
  absl::StatusOr<double> Seconds() override {
    return std::chrono::duration<double>(stop_ - start_).count();
  }
  absl::StatusOr<double> SecondsAfter(const DeviceTimer& origin) override {
    return std::chrono::duration<double>(
               start_ - static_cast<const HostTimer&>(origin).start_)
        .count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_;
  Clock::time_point stop_;
};

class HostProgress : public DeviceProgress {
 public:
  absl::Status Mark(uint32_t value, Stream) override {
    reached_ = value;
    return absl::OkStatus();
  }
  void Reset() override { reached_ = 0; }
  uint32_t reached() const override { return reached_; }

 private:
  std::atomic<uint32_t> reached_ = 0;
};

class HostMappedMemory : public MappedMemory {
 public:
  explicit HostMappedMemory(std::vector<std::byte*> addresses)
      : addresses_(std::move(addresses)) {}
  absl::Span<std::byte* const> addresses() const override { return addresses_; }

 private:
  std::vector<std::byte*> addresses_;
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
    absl::Span<std::byte* const> table, absl::Span<const CopyBatch> batches) {
  return std::make_unique<HostPreparedCopies>(table, batches);
}

absl::Status HostDevice::Copy(std::byte* to, const std::byte* from,
                              uint64_t size_bytes, Stream) {
  if (size_bytes > 0) CopyContiguous(to, from, size_bytes);
  return absl::OkStatus();
}

absl::Status HostDevice::CastAndMark(const MarkingCast& cast, Stream) {
  const absl::Status status = CheckMarkingCast(cast);
  if (status.ok()) RunMarkingCast(cast);
  return status;
}

absl::Status HostDevice::Synchronize(Stream) { return absl::OkStatus(); }

absl::StatusOr<std::unique_ptr<MessageCoder>> HostDevice::PrepareCodes(
    absl::Span<std::byte* const> table, const ChangeEntries& changes,
    std::vector<MessageToCode> messages) {
  return MakeHostMessageCoder(table, changes, messages);
}

absl::StatusOr<std::unique_ptr<DeviceStream>> HostDevice::CreateStream() {
  return std::make_unique<HostStream>();
}

absl::StatusOr<std::unique_ptr<DeviceEvent>> HostDevice::CreateEvent() {
  return std::make_unique<HostEvent>();
}

absl::StatusOr<std::unique_ptr<DeviceTimer>> HostDevice::CreateTimer() {
  return std::make_unique<HostTimer>();
}

absl::StatusOr<std::unique_ptr<DeviceProgress>> HostDevice::CreateProgress() {
  return std::make_unique<HostProgress>();
}

absl::StatusOr<std::unique_ptr<ExportedMemory>> HostDevice::Export(
    absl::Span<const MemoryRange> ranges) {
  MemoryExport exported;
  for (const MemoryRange& range : ranges) {
    exported.ranges.push_back({.size_bytes = range.size_bytes});
  }
  return Lend(
      {.ranges = {ranges.begin(), ranges.end()}, .pages = {}, .memory = {}},
      std::move(exported));
}

absl::StatusOr<std::unique_ptr<MappedMemory>> HostDevice::Import(
    std::string_view exported, absl::Span<const uint64_t> sizes_bytes,
    std::chrono::steady_clock::time_point) {
  const absl::StatusOr<MemoryExport> read =
      ReadMemoryExport(exported, MemoryKind::kHost, sizes_bytes);
  if (!read.ok()) return read.status();
  const absl::StatusOr<std::shared_ptr<const LentMemory>> lent =
      FindLent(*read);
  if (!lent.ok()) return lent.status();
  if (*lent == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("host memory of process ", read->process.process,
                     " cannot be mapped into process ", getpid()));
  }
  std::vector<std::byte*> addresses;
  for (const MemoryRange& range : (*lent)->ranges) {
    addresses.push_back(range.data);
  }
  return std::make_unique<HostMappedMemory>(std::move(addresses));
}

absl::StatusOr<std::unique_ptr<DeviceFence>> HostDevice::CreateFence(
    int32_t rank, int32_t, absl::Span<const int32_t>) {
  return std::make_unique<HostFence>(rank);
}

}  // namespace refit
