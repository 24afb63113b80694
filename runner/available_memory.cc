#include "runner/available_memory.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

namespace refit {

std::optional<uint64_t> AvailableMemoryBytes(const std::string& root) {
  std::optional<uint64_t> available;
  std::ifstream meminfo(root + "/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    unsigned long long kibibytes = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %llu kB", &kibibytes) == 1) {
      available = uint64_t{kibibytes} * 1024;
    }
  }
  // As a container sees its own group: version 2, then 1.
  for (const char* limit_path :
       {"/sys/fs/cgroup/memory.max",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    uint64_t limit = 0;
    // Without a limit the file says "max", or a number beyond any memory.
    if (std::ifstream(root + limit_path) >> limit) {
      available = std::min(available.value_or(limit), limit);
    }
  }
  return available;
}

}  // namespace refit
