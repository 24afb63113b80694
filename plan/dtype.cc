#include "plan/dtype.h"

#include <array>
#include <cstddef>

namespace refit {
namespace {

// element_types.h repeats what the schema numbers.
static_assert(element::kBf16 == DType::kBf16);
static_assert(element::kFp16 == DType::kFp16);
static_assert(element::kFp32 == DType::kFp32);
static_assert(element::kFp64 == DType::kFp64);
static_assert(element::kInt16 == DType::kInt16);
static_assert(element::kInt32 == DType::kInt32);
static_assert(element::kInt64 == DType::kInt64);
static_assert(scale_format::kUe8m0 == fb::ScaleFormat::kUe8m0);
static_assert(scale_format::kE8m0 == fb::ScaleFormat::kE8m0);

struct DTypeInfo {
  DType dtype;
  std::string_view name;
  std::string_view safetensors_name;
  int64_t size_bytes;
};

constexpr std::array kDTypes = {
    DTypeInfo{DType::kBf16, "bf16", "BF16", 2},
    DTypeInfo{DType::kFp16, "fp16", "F16", 2},
    DTypeInfo{DType::kFp32, "fp32", "F32", 4},
    DTypeInfo{DType::kFp64, "fp64", "F64", 8},
    DTypeInfo{DType::kInt8, "int8", "I8", 1},
    DTypeInfo{DType::kInt16, "int16", "I16", 2},
    DTypeInfo{DType::kInt32, "int32", "I32", 4},
    DTypeInfo{DType::kInt64, "int64", "I64", 8},
    DTypeInfo{DType::kUint8, "uint8", "U8", 1},
    DTypeInfo{DType::kBool, "bool", "BOOL", 1},
    DTypeInfo{DType::kFp8E4m3, "fp8_e4m3", "F8_E4M3", 1},
    DTypeInfo{DType::kFp8E5m2, "fp8_e5m2", "F8_E5M2", 1},
};

bool IsCastable(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kFp16 ||
         dtype == DType::kFp32;
}

}  // namespace

std::string_view DTypeName(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info.name;
  }
  return "unknown";
}

std::optional<DType> ParseDType(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.name == name) return info.dtype;
  }
  return std::nullopt;
}

std::string_view SafetensorsDTypeName(DType dtype) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.dtype == dtype) return info.safetensors_name;
  }
  return "unknown";
}

std::optional<DType> ParseSafetensorsDType(std::string_view name) {
  for (const DTypeInfo& info : kDTypes) {
    if (info.safetensors_name == name) return info.dtype;
  }
  return std::nullopt;
}

int64_t DTypeBytes(DType dtype) {
  // Asked for every element where tests walk tensors.
  static constexpr auto kBytes = [] {
    std::array<int64_t, static_cast<size_t>(DType::MAX) + 1> bytes = {};
    for (const DTypeInfo& info : kDTypes) {
      bytes[static_cast<size_t>(info.dtype)] = info.size_bytes;
    }
    return bytes;
  }();
  const auto index = static_cast<size_t>(dtype);
  return index < kBytes.size() ? kBytes[index] : 0;
}

bool IsSupportedCast(DType from, DType to) {
  return from != to && IsCastable(from) && IsCastable(to);
}

}  // namespace refit
