// libsodium: MACs, keyed hashes and the system's random numbers.
#ifndef REFIT_CONTROL_SODIUM_H_
#define REFIT_CONTROL_SODIUM_H_

#include <sodium.h>

#include <cstdlib>

namespace refit {

// To be called before any of its functions. Thread-safe. A system that gives no
// random numbers ends the process.
inline void InitSodium() {
  static const bool is_ready = sodium_init() >= 0;
  if (!is_ready) std::abort();
}

}  // namespace refit

#endif  // REFIT_CONTROL_SODIUM_H_
