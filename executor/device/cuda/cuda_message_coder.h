// The MessageCoder of a GPU.
#ifndef REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MESSAGE_CODER_H_
#define REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MESSAGE_CODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// Of device number `device`, which is the current one.
absl::StatusOr<std::unique_ptr<MessageCoder>> MakeCudaMessageCoder(
    int device, uint32_t multiprocessors, absl::Span<std::byte* const> table,
    const ChangeEntries& changes, absl::Span<const MessageToCode> messages);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_CUDA_CUDA_MESSAGE_CODER_H_
