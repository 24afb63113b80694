#include "plan/enum_text.h"

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {

const char* EnumText(fb::Side side) {
  switch (side) {
    case fb::Side::kSource:
      return "source";
    case fb::Side::kDestination:
      return "destination";
  }
  return "unknown";
}

const char* EnumText(fb::Route route) {
  switch (route) {
    case fb::Route::kUnspecified:
      return "unspecified";
    case fb::Route::kLocal:
      return "local";
    case fb::Route::kPeer:
      return "peer";
    case fb::Route::kNetwork:
      return "network";
  }
  return "unknown";
}

const char* EnumText(fb::Mechanism mechanism) {
  switch (mechanism) {
    case fb::Mechanism::kStaged:
      return "staged";
    case fb::Mechanism::kDirect:
      return "direct";
  }
  return "unknown";
}

const char* EnumText(fb::SkipReason reason) {
  switch (reason) {
    case fb::SkipReason::kUnspecified:
      return "unspecified";
    case fb::SkipReason::kTied:
      return "tied";
    case fb::SkipReason::kExcluded:
      return "excluded";
    case fb::SkipReason::kFrozen:
      return "frozen";
    case fb::SkipReason::kDerived:
      return "derived";
    case fb::SkipReason::kUnread:
      return "unread";
  }
  return "unknown";
}

const char* EnumText(fb::RegionKind kind) {
  switch (kind) {
    case fb::RegionKind::kUnspecified:
      return "unspecified";
    case fb::RegionKind::kFill:
      return "fill";
    case fb::RegionKind::kSkip:
      return "skip";
  }
  return "unknown";
}

const char* EnumText(fb::ScaleFormat format) {
  switch (format) {
    case fb::ScaleFormat::kUnspecified:
      return "unspecified";
    case fb::ScaleFormat::kFp32:
      return "fp32";
    case fb::ScaleFormat::kUe8m0:
      return "ue8m0";
    case fb::ScaleFormat::kE8m0:
      return "e8m0";
  }
  return "unknown";
}

const char* EnumText(fb::DeltaChanges changes) {
  switch (changes) {
    case fb::DeltaChanges::kUnspecified:
      return "unspecified";
    case fb::DeltaChanges::kSnapshot:
      return "snapshot";
    case fb::DeltaChanges::kBitmap:
      return "bitmap";
  }
  return "unknown";
}

// The table of names holds literals, so the view is terminated.
const char* EnumText(fb::DType dtype) { return DTypeName(dtype).data(); }

std::string RouteText(fb::Route route, fb::Mechanism mechanism) {
  std::string text = EnumText(route);
  if (mechanism != fb::Mechanism::kStaged) {
    text += std::string(" ") + EnumText(mechanism);
  }
  return text;
}

std::string RungText(uint32_t elements_per_slot) {
  return elements_per_slot == 1 ? "whole"
                                : absl::StrCat("1/", elements_per_slot);
}

std::string DeltaText(const fb::Delta& delta) {
  std::string text =
      absl::StrCat("changes ", EnumText(delta.changes()), " dense_every ",
                   delta.dense_every(), delta.check() ? " check" : "");
  if (delta.rungs() == nullptr) return text;
  for (uint32_t i = 0; i < delta.rungs()->size(); ++i) {
    absl::StrAppend(&text, i == 0 ? " rungs 1/" : " 1/",
                    uint64_t{1} << delta.rungs()->Get(i));
  }
  return text;
}

}  // namespace refit
