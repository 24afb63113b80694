#include "control/sodium.h"

#include <cstdlib>

namespace refit {

void InitSodium() {
  static const bool is_ready = sodium_init() >= 0;
  if (!is_ready) std::abort();
}

}  // namespace refit
