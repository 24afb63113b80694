#include "executor/device/process_identity.h"

#include <unistd.h>

#include <random>

namespace refit {

ProcessIdentity ThisProcess() {
  static const uint64_t random = [] {
    std::random_device device;
    return uint64_t{device()} << 32 | device();
  }();
  return {.process = static_cast<uint64_t>(getpid()), .random = random};
}

}  // namespace refit
