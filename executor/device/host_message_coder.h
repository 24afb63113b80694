// The MessageCoder of the host's memory, which codes on the calling thread.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_
#define REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/types/span.h"
#include "refit/device.h"

namespace refit {

// As Device::PrepareCodes.
std::unique_ptr<MessageCoder> MakeHostMessageCoder(
    absl::Span<std::byte* const> table, const ChangeEntries& changes,
    absl::Span<const MessageToCode> messages);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_
