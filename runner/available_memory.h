// How much memory this process may still take.
#ifndef REFIT_RUNNER_AVAILABLE_MEMORY_H_
#define REFIT_RUNNER_AVAILABLE_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>

namespace refit {

// Bytes: what /proc/meminfo calls available, or the limit of this container's
// control group if that is less. nullopt where the system does not say. `root`
// stands before all paths.
std::optional<uint64_t> AvailableMemoryBytes(const std::string& root = "");

}  // namespace refit

#endif  // REFIT_RUNNER_AVAILABLE_MEMORY_H_
