#include "control/payload.h"

namespace refit {
namespace {

template <typename T>
void AppendLittleEndian(std::string& bytes, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i)));
  }
}

// 0 for no bytes.
template <typename T>
T LittleEndian(std::string_view bytes) {
  T value = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    value = static_cast<T>(value | T{static_cast<unsigned char>(bytes[i])}
                                       << (8 * i));
  }
  return value;
}

}  // namespace

PayloadWriter& PayloadWriter::U8(uint8_t value) {
  bytes_.push_back(static_cast<char>(value));
  return *this;
}

PayloadWriter& PayloadWriter::U16(uint16_t value) {
  AppendLittleEndian(bytes_, value);
  return *this;
}

PayloadWriter& PayloadWriter::U32(uint32_t value) {
  AppendLittleEndian(bytes_, value);
  return *this;
}

PayloadWriter& PayloadWriter::U64(uint64_t value) {
  AppendLittleEndian(bytes_, value);
  return *this;
}

PayloadWriter& PayloadWriter::Bytes(std::string_view value) {
  bytes_.append(value);
  return *this;
}

PayloadWriter& PayloadWriter::String(std::string_view value) {
  return U64(value.size()).Bytes(value);
}

PayloadWriter& PayloadWriter::Ranks(absl::Span<const int32_t> ranks) {
  U64(ranks.size());
  for (int32_t rank : ranks) U32(static_cast<uint32_t>(rank));
  return *this;
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

uint8_t PayloadReader::U8() {
  return LittleEndian<uint8_t>(Take(sizeof(uint8_t)));
}

uint16_t PayloadReader::U16() {
  return LittleEndian<uint16_t>(Take(sizeof(uint16_t)));
}

uint32_t PayloadReader::U32() {
  return LittleEndian<uint32_t>(Take(sizeof(uint32_t)));
}

uint64_t PayloadReader::U64() {
  return LittleEndian<uint64_t>(Take(sizeof(uint64_t)));
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

std::vector<int32_t> PayloadReader::Ranks() {
  std::vector<int32_t> ranks(Count(sizeof(uint32_t)));
  for (int32_t& rank : ranks) rank = static_cast<int32_t>(U32());
  return ranks;
}

}  // namespace refit
