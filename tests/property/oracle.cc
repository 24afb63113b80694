#include "tests/property/oracle.h"

#include <cmath>
#include <cstring>
#include <map>
#include <string_view>

#include "tests/property/draw.h"

namespace refit {
namespace {

// An IEEE-like binary format of at most 32 bits.
struct FloatFormat {
  int precision;  // significant bits, the implicit one included
  int exponent_max;
  int bits;

  int exponent_min() const { return 1 - exponent_max; }
};

FloatFormat FormatOf(std::string_view dtype) {
  if (dtype == "bf16") return {.precision = 8, .exponent_max = 127, .bits = 16};
  if (dtype == "fp16") return {.precision = 11, .exponent_max = 15, .bits = 16};
  return {.precision = 24, .exponent_max = 127, .bits = 32};
}

// The bits of `value` rounded to nearest, ties to even. No NaN.
uint64_t Encode(double value, const FloatFormat& format) {
  const uint64_t sign = std::signbit(value) ? 1 : 0;
  const uint64_t sign_bit = sign << (format.bits - 1);
  const uint64_t infinity = static_cast<uint64_t>(2 * format.exponent_max + 1)
                            << (format.precision - 1);
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign_bit;
  if (std::isinf(magnitude)) return sign_bit | infinity;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  --exponent;  // magnitude is in [2^exponent, 2^(exponent + 1))
  if (exponent < format.exponent_min()) exponent = format.exponent_min();
  // In units of the last significant bit; nearbyint rounds ties to even.
  double units =
      std::nearbyint(std::ldexp(magnitude, format.precision - 1 - exponent));
  if (units == std::ldexp(1.0, format.precision)) {
    units /= 2;
    ++exponent;
  }
  const uint64_t implicit = uint64_t{1} << (format.precision - 1);
  const auto significand = static_cast<uint64_t>(units);
  uint64_t exponent_field = 0;
  if (significand >= implicit) {
    exponent_field = static_cast<uint64_t>(exponent + format.exponent_max);
  }
  if (exponent > format.exponent_max) return sign_bit | infinity;
  return sign_bit | (exponent_field << (format.precision - 1)) |
         (significand & (implicit - 1));
}

double Decode(uint64_t bits, const FloatFormat& format) {
  const uint64_t implicit = uint64_t{1} << (format.precision - 1);
  const int exponent_mask = 2 * format.exponent_max + 1;
  const bool negative = (bits >> (format.bits - 1)) != 0;
  uint64_t significand = bits & (implicit - 1);
  const int exponent_field =
      static_cast<int>(bits >> (format.precision - 1)) & exponent_mask;
  if (exponent_field == exponent_mask) return negative ? -HUGE_VAL : HUGE_VAL;
  int exponent = format.exponent_min();
  if (exponent_field > 0) {
    exponent = exponent_field - format.exponent_max;
    significand |= implicit;
  }
  const double magnitude = std::ldexp(static_cast<double>(significand),
                                      exponent - format.precision + 1);
  return negative ? -magnitude : magnitude;
}

// A number that stresses rounding: common magnitudes, halfway cases of the
// 16-bit formats, their subnormals, zeros.
double DrawNumber(uint64_t bits) {
  Draw draw(bits);
  double significand =
      1 + std::ldexp(static_cast<double>(draw.Bits() >> 41), -23);
  if (draw.Chance(20)) {
    const int precision = draw.Chance(50) ? 8 : 11;
    const double odd = static_cast<double>(2 * draw.Between(0, 127) + 1);
    significand = 1 + std::ldexp(odd, -precision);
  }
  int64_t exponent = draw.Between(-6, 6);
  if (draw.Chance(15)) exponent = draw.Between(-28, -13);
  if (draw.Chance(3)) exponent = draw.Between(13, 17);
  if (draw.Chance(3)) return draw.Chance(50) ? 0.0 : -0.0;
  const double magnitude = std::ldexp(significand, static_cast<int>(exponent));
  return draw.Chance(50) ? -magnitude : magnitude;
}

uint64_t ElementSeed(uint64_t seed, int32_t tensor, int64_t element) {
  return Mix(seed ^ Mix(static_cast<uint64_t>(tensor) + 1)) +
         static_cast<uint64_t>(element);
}

// The dtype of each logical tensor on one side.
std::map<int32_t, std::string> DTypesOf(const PhysicalSide& side) {
  std::map<int32_t, std::string> dtypes;
  for (const std::vector<PhysicalTensor>& rank : side) {
    for (const PhysicalTensor& tensor : rank) {
      int32_t last = -1;
      for (const Cell& cell : tensor.cells) {
        if (cell.tensor != last) dtypes[cell.tensor] = tensor.dtype;
        last = cell.tensor;
      }
    }
  }
  return dtypes;
}

class Filler {
 public:
  Filler(uint64_t seed, const PhysicalSide& source,
         const PhysicalSide& destination, const std::vector<bool>& excluded)
      : seed_(seed),
        source_dtypes_(DTypesOf(source)),
        destination_dtypes_(DTypesOf(destination)),
        excluded_(excluded) {}

  TensorBytes Fill(const PhysicalTensor& tensor, bool is_source,
                   uint64_t garbage_seed) const {
    TensorBytes filled = {.name = tensor.name,
                          .dtype = tensor.dtype,
                          .shape = tensor.shape,
                          .bytes = {}};
    const auto size = static_cast<size_t>(ElementBytes(tensor.dtype));
    filled.bytes.resize(tensor.cells.size() * size);
    std::byte* to = filled.bytes.data();
    for (size_t i = 0; i < tensor.cells.size(); ++i, to += size) {
      const Cell& cell = tensor.cells[i];
      const bool is_excluded = excluded_[cell.tensor];
      if (is_excluded && !is_source) {
        std::memset(to, static_cast<int>(kUntouchedByte), size);
        continue;
      }
      const uint64_t bits =
          is_excluded ? Mix(garbage_seed + i) : BitsOf(cell, is_source);
      std::memcpy(to, &bits, size);  // little-endian, as all our targets
    }
    return filled;
  }

 private:
  uint64_t BitsOf(const Cell& cell, bool is_source) const {
    const uint64_t seed = ElementSeed(seed_, cell.tensor, cell.element);
    const std::string& from = source_dtypes_.at(cell.tensor);
    const auto to = destination_dtypes_.find(cell.tensor);
    if (to == destination_dtypes_.end() || to->second == from) return Mix(seed);
    const uint64_t source_bits = Encode(DrawNumber(seed), FormatOf(from));
    if (is_source) return source_bits;
    return Encode(Decode(source_bits, FormatOf(from)), FormatOf(to->second));
  }

  const uint64_t seed_;
  const std::map<int32_t, std::string> source_dtypes_;
  const std::map<int32_t, std::string> destination_dtypes_;
  const std::vector<bool>& excluded_;
};

}  // namespace

int64_t Product(const std::vector<int64_t>& extents) {
  int64_t product = 1;
  for (const int64_t extent : extents) product *= extent;
  return product;
}

void FillTensors(uint64_t seed, const PhysicalSide& source,
                 const PhysicalSide& destination,
                 const std::vector<bool>& excluded, ChainCase& chain) {
  const Filler filler(seed, source, destination, excluded);
  uint64_t garbage_seed = Mix(~seed);
  const auto fill = [&](const PhysicalSide& side, bool is_source,
                        std::vector<std::vector<TensorBytes>>& out) {
    for (const std::vector<PhysicalTensor>& rank : side) {
      out.emplace_back();
      for (const PhysicalTensor& tensor : rank) {
        out.back().push_back(filler.Fill(tensor, is_source, garbage_seed));
        garbage_seed = Mix(garbage_seed);
      }
    }
  };
  fill(source, true, chain.sources);
  fill(destination, false, chain.destinations);
}

}  // namespace refit
