#include "plan/enum_text.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {

namespace {

// `words`: for the values of the enum, which count from 0.
template <typename Enum, size_t kWords>
const char* WordOf(Enum value, const char* const (&words)[kWords]) {
  static_assert(kWords == static_cast<size_t>(Enum::MAX) + 1);
  const auto index = static_cast<size_t>(value);
  return index < kWords ? words[index] : "unknown";
}

}  // namespace

const char* EnumText(fb::Side side) {
  return WordOf(side, {"source", "destination"});
}

const char* EnumText(fb::Route route) {
  return WordOf(route, {"unspecified", "local", "peer", "network"});
}

const char* EnumText(fb::Mechanism mechanism) {
  return WordOf(mechanism, {"staged", "direct"});
}

const char* EnumText(fb::SkipReason reason) {
  return WordOf(reason, {"unspecified", "tied", "excluded", "frozen", "derived",
                         "unread"});
}

const char* EnumText(fb::RegionKind kind) {
  return WordOf(kind, {"unspecified", "fill", "skip"});
}

const char* EnumText(fb::ScaleFormat format) {
  return WordOf(format, {"unspecified", "fp32", "ue8m0", "e8m0"});
}

const char* EnumText(fb::DeltaChanges changes) {
  return WordOf(changes, {"unspecified", "snapshot", "bitmap"});
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
