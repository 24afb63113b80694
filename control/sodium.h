// libsodium: MACs, keyed hashes and the system's random numbers.
#ifndef REFIT_CONTROL_SODIUM_H_
#define REFIT_CONTROL_SODIUM_H_

#include <sodium.h>

namespace refit {

// To be called before any of its functions. Thread-safe. A system that gives no
// random numbers ends the process.
void InitSodium();

}  // namespace refit

#endif  // REFIT_CONTROL_SODIUM_H_
