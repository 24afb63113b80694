#include "executor/device/host_identity.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>

namespace refit {
namespace {

// "" where NCCL_HOSTID is not set.
std::string ChosenHost() {
  const char* chosen = std::getenv("NCCL_HOSTID");
  return chosen == nullptr ? "" : chosen;
}

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0) return "";
  return name;
}

}  // namespace

std::string ThisHost() {
  if (const std::string chosen = ChosenHost(); !chosen.empty()) {
    return "NCCL_HOSTID " + chosen;
  }
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  if (std::getline(file, boot_id) && !boot_id.empty()) {
    return "boot id " + boot_id;
  }
  return "host name " + HostName();
}

std::string ThisHostName() {
  const std::string chosen = ChosenHost();
  return chosen.empty() ? HostName() : chosen;
}

}  // namespace refit
