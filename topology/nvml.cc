// NVIDIA's management library, loaded at run time: a host without GPUs has
// none. Only functions that all its versions since 2017 have.
#include <dlfcn.h>

#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "topology/probe.h"

namespace refit {
namespace {

using Result = int;  // nvmlReturn_t; 0: success
using Device = void*;

constexpr unsigned int kNvlinksMax = 18;

class Library {
 public:
  Library() : handle_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {}
  ~Library() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool is_open() const { return handle_ != nullptr; }
  template <typename F>
  bool Find(const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle_, name));
    return function != nullptr;
  }

 private:
  void* handle_;
};

// NVML counts its names of versions and not the versions: 6 is NVLink 4.0
// (nvmlNvlinkVersion_t of nvml.h).
std::string NvlinkVersionName(unsigned int version) {
  constexpr const char* kNames[] = {"",    "1.0", "2.0", "2.2",
                                    "3.0", "3.1", "4.0", "5.0"};
  if (version < std::size(kNames)) return kNames[version];
  return absl::StrCat("NVML's number ", version);
}

}  // namespace

absl::StatusOr<std::vector<GpuFacts>> ReadNvml() {
  Library library;
  if (!library.is_open()) {
    return absl::UnavailableError("there is no libnvidia-ml.so.1 here");
  }
  Result (*init)() = nullptr;
  Result (*shutdown)() = nullptr;
  Result (*count_of)(unsigned int*) = nullptr;
  Result (*device_of)(unsigned int, Device*) = nullptr;
  Result (*name_of)(Device, char*, unsigned int) = nullptr;
  Result (*nvlink_state)(Device, unsigned int, int*) = nullptr;
  Result (*nvlink_version)(Device, unsigned int, unsigned int*) = nullptr;
  if (!library.Find("nvmlInit_v2", init) ||
      !library.Find("nvmlShutdown", shutdown) ||
      !library.Find("nvmlDeviceGetCount_v2", count_of) ||
      !library.Find("nvmlDeviceGetHandleByIndex_v2", device_of) ||
      !library.Find("nvmlDeviceGetName", name_of) ||
      !library.Find("nvmlDeviceGetNvLinkState", nvlink_state) ||
      !library.Find("nvmlDeviceGetNvLinkVersion", nvlink_version)) {
    return absl::UnavailableError("libnvidia-ml.so.1 is too old");
  }
  if (const Result result = init(); result != 0) {
    return absl::UnavailableError(absl::StrCat("nvmlInit fails: ", result));
  }
  std::vector<GpuFacts> gpus;
  unsigned int count = 0;
  Result result = count_of(&count);
  for (unsigned int i = 0; result == 0 && i < count; ++i) {
    Device device = nullptr;
    char name[96] = {};
    if ((result = device_of(i, &device)) != 0 ||
        (result = name_of(device, name, sizeof(name) - 1)) != 0) {
      break;
    }
    GpuFacts gpu;
    gpu.name = name;
    for (unsigned int link = 0; link < kNvlinksMax; ++link) {
      int is_up = 0;
      unsigned int version = 0;
      if (nvlink_state(device, link, &is_up) != 0 || is_up != 1) continue;
      ++gpu.nvlinks;
      if (nvlink_version(device, link, &version) == 0) {
        gpu.nvlink_version = NvlinkVersionName(version);
      }
    }
    gpus.push_back(gpu);
  }
  shutdown();
  if (result != 0) {
    return absl::UnavailableError(absl::StrCat("NVML fails: ", result));
  }
  return gpus;
}

}  // namespace refit
