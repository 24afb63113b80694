// Ranges that profilers show beside a refit's kernels, through NVTX where the
// CUDA toolkit was there at build time; nothing at all elsewhere.
#ifndef REFIT_EXECUTOR_NVTX_H_
#define REFIT_EXECUTOR_NVTX_H_

#include <cstdint>
#include <string>

#ifdef REFIT_NVTX
#include <nvtx3/nvToolsExt.h>

#include "absl/strings/str_cat.h"
#endif
#include "plan/enum_text.h"

namespace refit {

#ifdef REFIT_NVTX

// "refit round 3 peer direct". Made before Run, which must not allocate.
class RoundRangeText {
 public:
  RoundRangeText() = default;
  RoundRangeText(uint32_t round, fb::Route route, fb::Mechanism mechanism)
      : text_(absl::StrCat("refit round ", round, " ",
                           RouteText(route, mechanism))) {}
  const char* c_str() const { return text_.c_str(); }

 private:
  std::string text_;
};

// A range of the calling thread, from here to the end of scope. The text must
// outlive it.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* text) {
    nvtxEventAttributes_t attributes = {};
    attributes.version = NVTX_VERSION;
    attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
    attributes.message.ascii = text;
    nvtxDomainRangePushEx(Domain(), &attributes);
  }
  explicit ProfilerRange(const RoundRangeText& text)
      : ProfilerRange(text.c_str()) {}
  ~ProfilerRange() { nvtxDomainRangePop(Domain()); }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  // Of its own, so that a worker's profile can leave it in or out.
  static nvtxDomainHandle_t Domain() {
    static const nvtxDomainHandle_t domain = nvtxDomainCreateA("refit");
    return domain;
  }
};

#else

class RoundRangeText {
 public:
  RoundRangeText() = default;
  RoundRangeText(uint32_t, fb::Route, fb::Mechanism) {}
};

class ProfilerRange {
 public:
  explicit ProfilerRange(const char*) {}
  explicit ProfilerRange(const RoundRangeText&) {}
};

#endif

}  // namespace refit

#endif  // REFIT_EXECUTOR_NVTX_H_
