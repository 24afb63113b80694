// What processes tell each other, field by field: little-endian whatever the
// host's order, no padding, every field checked when it is read.
#ifndef REFIT_CONTROL_PAYLOAD_H_
#define REFIT_CONTROL_PAYLOAD_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace refit {

// Writes fields, in order.
class PayloadWriter {
 public:
  PayloadWriter& U8(uint8_t value) { return Integer(value, 1); }
  PayloadWriter& U16(uint16_t value) { return Integer(value, 2); }
  PayloadWriter& U32(uint32_t value) { return Integer(value, 4); }
  PayloadWriter& U64(uint64_t value) { return Integer(value, 8); }
  PayloadWriter& Bool(bool value) { return U8(value ? 1 : 0); }
  // Without its length: the reader knows it.
  PayloadWriter& Bytes(std::string_view value);
  PayloadWriter& String(std::string_view value);
  std::string Take() { return std::move(bytes_); }

 private:
  PayloadWriter& Integer(uint64_t value, int bytes);

  std::string bytes_;
};

// Reads what a PayloadWriter wrote. Past the end, or where a field has a value
// that none is written with, everything is zero or empty and `ok` is false.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : bytes_(bytes) {}

  uint8_t U8() { return static_cast<uint8_t>(Integer(1)); }
  uint16_t U16() { return static_cast<uint16_t>(Integer(2)); }
  uint32_t U32() { return static_cast<uint32_t>(Integer(4)); }
  uint64_t U64() { return Integer(8); }
  bool Bool();
  std::string_view Bytes(size_t size) { return Take(size); }
  std::string String();
  // How many elements follow, of at least `element_bytes` each. More than can
  // be there is an error: a count cannot make this process run out of memory.
  uint64_t Count(size_t element_bytes);
  void Fail();
  // Everything was there, and nothing is left.
  bool Complete() const { return ok_ && bytes_.empty(); }
  bool ok() const { return ok_; }
  std::string_view rest() const { return bytes_; }

 private:
  uint64_t Integer(int bytes);
  std::string_view Take(uint64_t size);

  std::string_view bytes_;
  bool ok_ = true;
};

}  // namespace refit

#endif  // REFIT_CONTROL_PAYLOAD_H_
