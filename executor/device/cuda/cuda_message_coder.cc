#include "executor/device/cuda/cuda_message_coder.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/device/cuda/cuda_status.h"
#include "executor/device/cuda/lower_copies.h"
#include "executor/device/cuda/message_code_kernel.h"
#include "executor/device/cuda/scoped_device.h"
#include "plan/schedule/coded_message.h"

namespace refit {
namespace {

using cuda::KernelBox;
using cuda::KernelChanged;
using cuda::KernelCodes;
using cuda::KernelCodeTile;
using cuda::KernelCopy;
using cuda::KernelMessage;
using cuda::KernelRoom;

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
  CudaMessageCoder(int device, uint32_t multiprocessors, ChangesBy changes_by)
      : device_(device),
        multiprocessors_(multiprocessors),
        changes_by_(changes_by) {}
  ~CudaMessageCoder() override {
    const ScopedDevice current(device_);
    arrays_.reset();
  }

  absl::Status Upload(absl::Span<std::byte* const> table,
                      uint64_t change_entries,
                      absl::Span<const MessageToCode> messages) {
    for (const MessageToCode& of : messages) {
      rungs_ = std::max(rungs_, static_cast<uint32_t>(of.rooms.size()));
    }
    Lowered lowered;
    for (const MessageToCode& of : messages) Lower(of, table, lowered);
    tiles_before_.push_back(lowered.tiles.size());
    changed_.resize(messages.size());
    arrays_ = std::make_unique<Arrays>();
    absl::Status status = arrays_->bits.Allocate(lowered.words);
    status.Update(arrays_->table.Upload({table.begin(), table.end()}));
    status.Update(arrays_->copies.Upload(lowered.copies));
    status.Update(arrays_->boxes.Upload(lowered.boxes));
    status.Update(arrays_->messages.Upload(lowered.messages));
    status.Update(arrays_->tiles.Upload(lowered.tiles));
    status.Update(arrays_->rooms.Upload(lowered.rooms));
    status.Update(arrays_->changed.Allocate(messages.size()));
    status.Update(arrays_->totals.Allocate(messages.size()));
    status.Update(arrays_->bases.Allocate(lowered.tiles.size()));
    status.Update(arrays_->failure.Allocate(1));
    codes_ = {.table = arrays_->table.data(),
              .change_entries = change_entries,
              .copies = arrays_->copies.data(),
              .boxes = arrays_->boxes.data(),
              .messages = arrays_->messages.data(),
              .tiles = arrays_->tiles.data(),
              .tiles_count = lowered.tiles.size(),
              .rooms = arrays_->rooms.data(),
              .messages_count = static_cast<uint32_t>(messages.size()),
              .rungs = rungs_,
              .bits = arrays_->bits.data(),
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

  absl::Status Count(Stream stream) override {
    const ScopedDevice current(device_);
    return CudaStatus(
        cuda::LaunchCount(codes_, changes_by_ == ChangesBy::kMarks,
                          multiprocessors_, static_cast<cudaStream_t>(stream)),
        "launch of the kernels that count changes");
  }

  absl::StatusOr<absl::Span<const ChangedElements>> Counted(
      Stream stream) override {
    absl::Status status =
        Read(changed_.data(), codes_.changed,
             changed_.size() * sizeof(ChangedElements), stream);
    if (!status.ok()) return status;
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
                           static_cast<uint32_t>(rung), multiprocessors_,
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
                          static_cast<uint32_t>(rung), multiprocessors_,
                          static_cast<cudaStream_t>(stream)),
        "launch of the kernels that apply changes");
  }

  absl::Status Keep(Stream stream) override {
    if (changes_by_ == ChangesBy::kMarks) return absl::OkStatus();
    const ScopedDevice current(device_);
    return CudaStatus(cuda::LaunchKeep(codes_, multiprocessors_,
                                       static_cast<cudaStream_t>(stream)),
                      "launch of the kernel that keeps what was sent");
  }

  absl::StatusOr<std::optional<CodingFailure>> FirstFailure(
      Stream stream) override {
    uint64_t failure = 0;
    absl::Status status =
        Read(&failure, codes_.failure, sizeof(failure), stream);
    if (!status.ok()) return status;
    if (failure == 0) return std::nullopt;
    return CodingFailure{
        static_cast<size_t>(failure - 1),
        absl::DataLossError("what changed is not encoded as it should be")};
  }

 private:
  struct Arrays {
    DeviceArray<std::byte*> table;
    DeviceArray<KernelCopy> copies;
    DeviceArray<KernelBox> boxes;
    DeviceArray<KernelMessage> messages;
    DeviceArray<KernelCodeTile> tiles;
    DeviceArray<KernelRoom> rooms;
    DeviceArray<uint32_t> bits;
    DeviceArray<KernelChanged> changed;
    DeviceArray<uint64_t> totals;
    DeviceArray<unsigned long long> bases;
    DeviceArray<unsigned long long> failure;
  };

  // All messages in the kernels' form, on the host.
  struct Lowered {
    std::vector<KernelCopy> copies;
    std::vector<KernelBox> boxes;
    std::vector<KernelMessage> messages;
    std::vector<KernelCodeTile> tiles;
    std::vector<KernelRoom> rooms;
    uint64_t words = 0;  // of the sends' bits
  };

  void Lower(const MessageToCode& of, absl::Span<std::byte* const> table,
             Lowered& lowered) {
    const auto number = static_cast<uint32_t>(lowered.messages.size());
    for (const uint64_t room : of.rooms) {
      lowered.rooms.push_back({of.code, room});
    }
    lowered.rooms.resize(uint64_t{number + 1} * rungs_);
    tiles_before_.push_back(lowered.tiles.size());
    is_send_.push_back(of.is_send);
    KernelMessage& message = lowered.messages.emplace_back();
    message.first_tile = lowered.tiles.size();
    if (of.message.element_bytes == 0) return;
    message.size_bytes = of.message.size_bytes;
    message.element_bytes = of.message.element_bytes;
    message.element_shift =
        static_cast<uint32_t>(std::countr_zero(of.message.element_bytes));
    message.is_send = of.is_send ? 1 : 0;
    auto box = static_cast<uint32_t>(lowered.boxes.size());
    for (size_t c = 0; c < of.copies.size(); ++c) {
      const StridedCopy& copy = of.copies[c];
      const auto loops = absl::MakeConstSpan(of.loops).subspan(
          copy.loops_begin, copy.loops_count);
      for (const KernelCopy& kernel : LowerPositions(copy, loops, table)) {
        AddBox(kernel, of.is_send && of.always[c], lowered);
      }
    }
    const auto boxes_end = static_cast<uint32_t>(lowered.boxes.size());
    if (of.is_send) {
      message.first_word = lowered.words;
      lowered.words += of.message.groups() * (kCodeGroupElements / 32);
    }
    const uint64_t tile_bytes = uint64_t{cuda::kCodeTileElements}
                                << message.element_shift;
    for (uint64_t at = 0; at < message.size_bytes; at += tile_bytes) {
      while (box < boxes_end && lowered.boxes[box].end_byte <= at) ++box;
      uint32_t end = box;
      while (end < boxes_end &&
             lowered.boxes[end].begin_byte < at + tile_bytes) {
        ++end;
      }
      lowered.tiles.push_back(
          {.message = number, .boxes_begin = box, .boxes_end = end});
      ++message.tiles;
    }
  }

  static void AddBox(const KernelCopy& copy, bool always, Lowered& lowered) {
    const uint64_t unit_bytes =
        copy.kind == cuda::KernelKind::kCast
            ? static_cast<uint64_t>(DTypeBytes(copy.to_dtype))
            : copy.unit_bytes;
    const uint64_t units = uint64_t{copy.rows} * copy.row_units;
    lowered.copies.push_back(copy);
    lowered.boxes.push_back({.begin_byte = copy.to_offset,
                             .end_byte = copy.to_offset + units * unit_bytes,
                             .always = always ? 1u : 0u});
  }

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
  const uint32_t multiprocessors_;
  const ChangesBy changes_by_;
  uint32_t rungs_ = 0;
  std::vector<uint64_t> tiles_before_;  // by message; one more
  std::vector<bool> is_send_;           // by message
  std::vector<ChangedElements> changed_;
  std::unique_ptr<Arrays> arrays_;
  KernelCodes codes_ = {};
};

}  // namespace

absl::StatusOr<std::unique_ptr<MessageCoder>> MakeCudaMessageCoder(
    int device, uint32_t multiprocessors, absl::Span<std::byte* const> table,
    const ChangeEntries& changes, absl::Span<const MessageToCode> messages) {
  auto coder =
      std::make_unique<CudaMessageCoder>(device, multiprocessors, changes.by);
  const absl::Status status = coder->Upload(table, changes.entries, messages);
  if (!status.ok()) return status;
  return coder;
}

}  // namespace refit
