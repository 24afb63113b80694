// The MessageCoder of the host's memory, which codes on the calling thread.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_
#define REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_

#include <memory>
#include <vector>

#include "refit/device.h"

namespace refit {

std::unique_ptr<MessageCoder> MakeHostMessageCoder(
    std::vector<MessageToCode> messages);

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_MESSAGE_CODER_H_
