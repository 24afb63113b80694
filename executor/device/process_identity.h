// Which process memory belongs to.
#ifndef REFIT_EXECUTOR_DEVICE_PROCESS_IDENTITY_H_
#define REFIT_EXECUTOR_DEVICE_PROCESS_IDENTITY_H_

#include <cstdint>

namespace refit {

// Differs between all processes of all containers, whose process ids need not.
struct ProcessIdentity {
  uint64_t process = 0;
  uint64_t random = 0;

  friend bool operator==(const ProcessIdentity&,
                         const ProcessIdentity&) = default;
};

// This process's; a child after fork has its own.
ProcessIdentity ThisProcess();

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_PROCESS_IDENTITY_H_
