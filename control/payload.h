// What processes tell each other, field by field: little-endian whatever the
// host's order, no padding, every field checked when it is read.
#ifndef REFIT_CONTROL_PAYLOAD_H_
#define REFIT_CONTROL_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/types/span.h"

namespace refit {

// Writes fields, in order.
class PayloadWriter {
 public:
  PayloadWriter& U8(uint8_t value);
  PayloadWriter& U16(uint16_t value);
  PayloadWriter& U32(uint32_t value);
  PayloadWriter& U64(uint64_t value);
  PayloadWriter& Bool(bool value) { return U8(value ? 1 : 0); }
  // Without its length: the reader knows it.
  PayloadWriter& Bytes(std::string_view value);
  PayloadWriter& String(std::string_view value);
  PayloadWriter& Ranks(absl::Span<const int32_t> ranks);
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what a PayloadWriter wrote. Past the end, or where a field has a value
// that none is written with, everything is zero or empty and `ok` is false.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : bytes_(bytes) {}

  uint8_t U8();
  uint16_t U16();
  uint32_t U32();
  uint64_t U64();
  bool Bool();
  std::string_view Bytes(size_t size) { return Take(size); }
  std::string String();
  std::vector<int32_t> Ranks();
  // How many elements follow, of at least `element_bytes` each. More than can
  // be there is an error: a count cannot make this process run out of memory.
  uint64_t Count(size_t element_bytes);
  void Fail();
  // Everything was there, and nothing is left.
  bool Complete() const { return ok_ && bytes_.empty(); }
  bool ok() const { return ok_; }
  std::string_view rest() const { return bytes_; }

 private:
  std::string_view Take(uint64_t size);

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace refit

#endif  // REFIT_CONTROL_PAYLOAD_H_
