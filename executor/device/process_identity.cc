#include "executor/device/process_identity.h"

#include <unistd.h>

#include "control/payload.h"
#include "control/token.h"

namespace refit {

ProcessIdentity ThisProcess() {
  static const uint64_t random = [] {
    const Token token = NewToken();
    return PayloadReader(TokenBytes(token)).U64();
  }();
  return {.process = static_cast<uint64_t>(getpid()), .random = random};
}

}  // namespace refit
