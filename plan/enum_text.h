// The words for the plan's enum values, in every message and text.
#ifndef REFIT_PLAN_ENUM_TEXT_H_
#define REFIT_PLAN_ENUM_TEXT_H_

#include <string>

#include "plan_generated.h"

namespace refit {

// "peer", "tied", "bf16" …; "unspecified", or "unknown" for no value of the
// enum.
const char* EnumText(fb::Side side);
const char* EnumText(fb::Route route);
const char* EnumText(fb::Mechanism mechanism);
const char* EnumText(fb::SkipReason reason);
const char* EnumText(fb::RegionKind kind);
const char* EnumText(fb::DType dtype);
const char* EnumText(fb::ScaleFormat format);
const char* EnumText(fb::DeltaChanges changes);

// "network", "peer direct": the mechanism is named where it is not staged.
std::string RouteText(fb::Route route, fb::Mechanism mechanism);

// Of a delta refit, for how many elements of a staged message there is room for
// one that changed: "1/64"; 1: "whole".
std::string RungText(uint32_t elements_per_slot);

// "changes snapshot dense_every 20 check rungs 1/128 1/64 1/32".
std::string DeltaText(const fb::Delta& delta);

}  // namespace refit

#endif  // REFIT_PLAN_ENUM_TEXT_H_
