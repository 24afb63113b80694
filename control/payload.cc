#include "control/payload.h"

namespace refit {

PayloadWriter& PayloadWriter::Integer(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) {
    bytes_.push_back(static_cast<char>(value >> (8 * i)));
  }
  return *this;
}

PayloadWriter& PayloadWriter::Bytes(std::string_view value) {
  bytes_.append(value);
  return *this;
}

PayloadWriter& PayloadWriter::String(std::string_view value) {
  return U64(value.size()).Bytes(value);
}

void PayloadReader::Fail() {
  ok_ = false;
  bytes_ = {};
}

std::string_view PayloadReader::Take(uint64_t size) {
  if (size > bytes_.size()) {
    Fail();
    return {};
  }
  const std::string_view taken = bytes_.substr(0, size);
  bytes_.remove_prefix(size);
  return taken;
}

uint64_t PayloadReader::Integer(int bytes) {
  const std::string_view taken = Take(static_cast<uint64_t>(bytes));
  uint64_t value = 0;
  for (size_t i = 0; i < taken.size(); ++i) {
    value |= uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
  }
  return value;
}

bool PayloadReader::Bool() {
  const uint8_t value = U8();
  if (value > 1) Fail();
  return value == 1;
}

std::string PayloadReader::String() { return std::string(Take(U64())); }

uint64_t PayloadReader::Count(size_t element_bytes) {
  const uint64_t count = U64();
  if (count <= bytes_.size() / element_bytes) return count;
  Fail();
  return 0;
}

}  // namespace refit
