#include "executor/device/cuda/cuda_message_coder.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/message_code_kernel.h"

namespace refit {
namespace {

// As many as a multiprocessor holds at a time.
constexpr uint32_t kCodeBlocksPerMultiprocessor = 4;

using cuda::KernelChanged;
using cuda::KernelCodes;
using cuda::KernelCodeTile;
using cuda::KernelMessage;
using cuda::KernelRange;

static_assert(sizeof(ChangedElements) == sizeof(KernelChanged));

// An array of the device's, freed by scope.
template <typename Element>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data_); }

  // One element more: no array is empty.
  absl::Status Allocate(size_t count) {
    const uint64_t size_bytes = (count + 1) * sizeof(Element);
    void* data = nullptr;
    const absl::Status status =
        CudaStatus(cudaMalloc(&data, size_bytes), "cudaMalloc");
    if (!status.ok()) {
      return absl::Status(
          status.code(),
          absl::StrCat("no memory for ", size_bytes,
                       " bytes of what codes messages: ", status.message()));
    }
    data_ = static_cast<Element*>(data);
    return absl::OkStatus();
  }
  absl::Status Upload(const std::vector<Element>& elements) {
    absl::Status status = Allocate(elements.size());
    if (!status.ok() || elements.empty()) return status;
    return CudaStatus(
        cudaMemcpy(data_, elements.data(), elements.size() * sizeof(Element),
                   cudaMemcpyHostToDevice),
        "cudaMemcpy");
  }
  Element* data() const { return data_; }

 private:
  Element* data_ = nullptr;
};

class CudaMessageCoder : public MessageCoder {
 public:
  CudaMessageCoder(int device, uint32_t multiprocessors)
      : device_(device),
        blocks_max_(multiprocessors * kCodeBlocksPerMultiprocessor) {}
  ~CudaMessageCoder() override {
    const ScopedDevice current(device_);
    arrays_.reset();
  }

  absl::Status Upload(const std::vector<MessageToCode>& messages) {
    std::vector<KernelMessage> kernel_messages;
    std::vector<KernelRange> ranges;
    std::vector<KernelCodeTile> tiles;
    for (const MessageToCode& of : messages) {
      rungs_ = std::max(rungs_, static_cast<uint32_t>(of.rooms.size()));
    }
    std::vector<uint64_t> rooms(messages.size() * rungs_);
    for (size_t i = 0; i < messages.size(); ++i) {
      const MessageToCode& of = messages[i];
      std::copy(of.rooms.begin(), of.rooms.end(),
                rooms.begin() + static_cast<ptrdiff_t>(i * rungs_));
      tiles_before_.push_back(tiles.size());
      is_send_.push_back(of.before != nullptr);
      KernelMessage message = {};
      message.first_tile = tiles.size();
      always_.push_back(0);
      if (of.message.element_bytes != 0) {
        message.elements = of.elements;
        message.before = of.before;
        message.code = of.code;
        message.size_bytes = of.message.size_bytes;
        message.element_bytes = of.message.element_bytes;
        message.is_aligned = (reinterpret_cast<uintptr_t>(of.elements) |
                              reinterpret_cast<uintptr_t>(of.before)) %
                                 16 ==
                             0;
        const auto first_range = static_cast<uint32_t>(ranges.size());
        for (const ElementRange& range : of.message.ranges) {
          ranges.push_back({.begin_byte = range.begin_byte,
                            .end_byte = range.end_byte,
                            .element_bytes = range.element_bytes,
                            .always = range.always ? 1U : 0U});
          if (range.always) {
            always_.back() += range.size_bytes() / of.message.element_bytes;
          }
        }
        message.ranges_end = static_cast<uint32_t>(ranges.size());
        uint32_t range = first_range;
        for (uint64_t at = 0; at < message.size_bytes;
             at += cuda::kCodeTileBytes) {
          while (range < message.ranges_end && ranges[range].end_byte <= at) {
            ++range;
          }
          tiles.push_back(
              {.message = static_cast<uint32_t>(i), .first_range = range});
          ++message.tiles;
        }
      }
      kernel_messages.push_back(message);
    }
    tiles_before_.push_back(tiles.size());
    changed_.resize(messages.size());
    arrays_ = std::make_unique<Arrays>();
    absl::Status status = arrays_->messages.Upload(kernel_messages);
    status.Update(arrays_->ranges.Upload(ranges));
    status.Update(arrays_->tiles.Upload(tiles));
    status.Update(arrays_->rooms.Upload(rooms));
    status.Update(arrays_->changed.Allocate(messages.size()));
    status.Update(arrays_->totals.Allocate(messages.size()));
    status.Update(arrays_->bases.Allocate(tiles.size()));
    status.Update(arrays_->failure.Allocate(1));
    codes_ = {.messages = arrays_->messages.data(),
              .ranges = arrays_->ranges.data(),
              .tiles = arrays_->tiles.data(),
              .rooms = arrays_->rooms.data(),
              .rungs = rungs_,
              .changed = arrays_->changed.data(),
              .totals = arrays_->totals.data(),
              .bases = arrays_->bases.data(),
              .failure = arrays_->failure.data()};
    return status;
  }

  absl::Status Restart(Stream stream) override {
    const ScopedDevice current(device_);
    const auto zero = [&](void* data, size_t size_bytes) {
      return CudaStatus(cudaMemsetAsync(data, 0, size_bytes,
                                        static_cast<cudaStream_t>(stream)),
                        "cudaMemsetAsync");
    };
    absl::Status status =
        zero(codes_.changed, changed_.size() * sizeof(KernelChanged));
    status.Update(zero(codes_.failure, sizeof(*codes_.failure)));
    return status;
  }

  absl::Status Count(size_t begin, size_t count, Stream stream) override {
    const ScopedDevice current(device_);
    if (!HasAny(begin, count, /*send=*/true)) return absl::OkStatus();
    return CudaStatus(
        cuda::LaunchCount(codes_, WorkOf(begin, count), blocks_max_,
                          static_cast<cudaStream_t>(stream)),
        "launch of the kernels that count changes");
  }

  absl::StatusOr<absl::Span<const ChangedElements>> Counted(
      Stream stream) override {
    absl::Status status =
        Read(changed_.data(), codes_.changed,
             changed_.size() * sizeof(ChangedElements), stream);
    if (!status.ok()) return status;
    for (size_t i = 0; i < changed_.size(); ++i) {
      if (is_send_[i]) changed_[i].room += always_[i];
    }
    return changed_;
  }

  absl::Status Encode(size_t begin, size_t count, size_t rung,
                      Stream stream) override {
    const ScopedDevice current(device_);
    if (rung >= rungs_ || !HasAny(begin, count, /*send=*/true)) {
      return absl::OkStatus();
    }
    return CudaStatus(
        cuda::LaunchEncode(codes_, WorkOf(begin, count),
                           static_cast<uint32_t>(rung), blocks_max_,
                           static_cast<cudaStream_t>(stream)),
        "launch of the kernel that encodes changes");
  }

  absl::Status Apply(size_t begin, size_t count, size_t rung,
                     Stream stream) override {
    const ScopedDevice current(device_);
    if (rung >= rungs_ || !HasAny(begin, count, /*send=*/false)) {
      return absl::OkStatus();
    }
    return CudaStatus(
        cuda::LaunchApply(codes_, WorkOf(begin, count),
                          static_cast<uint32_t>(rung), blocks_max_,
                          static_cast<cudaStream_t>(stream)),
        "launch of the kernels that apply changes");
  }

  absl::StatusOr<std::optional<CodingFailure>> FirstFailure(
      Stream stream) override {
    uint64_t failure = 0;
    absl::Status status =
        Read(&failure, codes_.failure, sizeof(failure), stream);
    if (!status.ok()) return status;
    if (failure == 0) return std::nullopt;
    const auto message = static_cast<size_t>(failure - 1);
    return CodingFailure{
        message, is_send_[message]
                     ? absl::FailedPreconditionError(
                           "other elements changed than were counted")
                     : absl::DataLossError(
                           "what changed is not encoded as it should be")};
  }

 private:
  struct Arrays {
    DeviceArray<KernelMessage> messages;
    DeviceArray<KernelRange> ranges;
    DeviceArray<KernelCodeTile> tiles;
    DeviceArray<uint64_t> rooms;
    DeviceArray<KernelChanged> changed;
    DeviceArray<uint64_t> totals;
    DeviceArray<uint64_t> bases;
    DeviceArray<unsigned long long> failure;
  };

  // Whether one of the messages is of the kind, and sometimes coded.
  bool HasAny(size_t begin, size_t count, bool send) const {
    for (size_t i = begin; i < begin + count; ++i) {
      if (is_send_[i] == send && tiles_before_[i] < tiles_before_[i + 1]) {
        return true;
      }
    }
    return false;
  }

  cuda::CodeWork WorkOf(size_t begin, size_t count) const {
    return {.tiles_begin = tiles_before_[begin],
            .tiles_count = tiles_before_[begin + count] - tiles_before_[begin],
            .messages_begin = static_cast<uint32_t>(begin),
            .messages_count = static_cast<uint32_t>(count)};
  }

  absl::Status Read(void* to, const void* from, size_t size_bytes,
                    Stream stream) const {
    const ScopedDevice current(device_);
    const auto cuda_stream = static_cast<cudaStream_t>(stream);
    absl::Status status =
        CudaStatus(cudaMemcpyAsync(to, from, size_bytes, cudaMemcpyDeviceToHost,
                                   cuda_stream),
                   "cudaMemcpyAsync");
    if (!status.ok()) return status;
    return CudaStatus(cudaStreamSynchronize(cuda_stream),
                      "cudaStreamSynchronize");
  }

  const int device_;
  const uint32_t blocks_max_;
  uint32_t rungs_ = 0;
  std::vector<uint64_t> tiles_before_;  // by message; one more
  std::vector<bool> is_send_;           // by message
  std::vector<uint64_t> always_;        // likewise: elements always sent
  std::vector<ChangedElements> changed_;
  std::unique_ptr<Arrays> arrays_;
  KernelCodes codes_ = {};
};

}  // namespace

absl::StatusOr<std::unique_ptr<MessageCoder>> MakeCudaMessageCoder(
    int device, uint32_t multiprocessors,
    const std::vector<MessageToCode>& messages) {
  auto coder = std::make_unique<CudaMessageCoder>(device, multiprocessors);
  if (absl::Status s = coder->Upload(messages); !s.ok()) return s;
  return coder;
}

}  // namespace refit
