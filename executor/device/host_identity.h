// Which machine this process runs on.
#ifndef REFIT_EXECUTOR_DEVICE_HOST_IDENTITY_H_
#define REFIT_EXECUTOR_DEVICE_HOST_IDENTITY_H_

#include <string>

namespace refit {

// NCCL_HOSTID where it is set, as NCCL has it, which is how one machine stands
// in for several; else the boot id of the kernel; else the host name. Not the
// host name first: containers of one machine have names of their own, and share
// its GPUs' memory all the same.
std::string ThisHost();

// The same for a message: NCCL_HOSTID or the host name.
std::string ThisHostName();

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_HOST_IDENTITY_H_
