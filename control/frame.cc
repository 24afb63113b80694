#include "control/frame.h"

#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"

namespace refit::control {
namespace {

constexpr uint32_t kFrameMagic = 0x50434652;  // "RFCP"
constexpr size_t kMagicBytes = 4;
constexpr size_t kHeaderBytes = 32;
constexpr size_t kValueHeaderBytes = sizeof(uint32_t) + sizeof(uint64_t);

bool IsFrameType(uint32_t type) {
  return type >= static_cast<uint32_t>(FrameType::kHello) &&
         type <= static_cast<uint32_t>(FrameType::kLater);
}

}  // namespace

std::string Encode(const Frame& frame) {
  assert(frame.payload.size() <= kPayloadBytesMax);
  return PayloadWriter()
      .U32(kFrameMagic)
      .U32(static_cast<uint32_t>(frame.type))
      .U64(frame.step)
      .U64(frame.sequence)
      .U32(static_cast<uint32_t>(frame.rank))
      .U32(static_cast<uint32_t>(frame.payload.size()))
      .Bytes(frame.payload)
      .Take();
}

absl::StatusOr<std::optional<Frame>> FrameReader::Next() {
  const std::string_view bytes = std::string_view(buffer_).substr(begin_);
  // Checked before the header is whole: a stranger may never send so much.
  if (bytes.size() >= kMagicBytes &&
      PayloadReader(bytes).U32() != kFrameMagic) {
    return absl::InvalidArgumentError("these bytes are of another protocol");
  }
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  PayloadReader header(bytes.substr(kMagicBytes, kHeaderBytes - kMagicBytes));
  const uint32_t type = header.U32();
  Frame frame;
  frame.step = header.U64();
  frame.sequence = header.U64();
  frame.rank = static_cast<int32_t>(header.U32());
  const uint32_t size = header.U32();
  if (!IsFrameType(type)) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no frame of type ", type));
  }
  if (size > payload_bytes_max_) {
    return absl::InvalidArgumentError(
        absl::StrCat("a payload of ", size, " bytes exceeds the limit of ",
                     payload_bytes_max_));
  }
  if (bytes.size() < kHeaderBytes + size) return std::nullopt;
  frame.type = static_cast<FrameType>(type);
  frame.payload = bytes.substr(kHeaderBytes, size);
  begin_ += kHeaderBytes + size;
  // Moved to the front only when most of the buffer is behind, so that many
  // small frames cost one move.
  if (begin_ > buffer_.size() / 2) {
    buffer_.erase(0, begin_);
    begin_ = 0;
  }
  return frame;
}

std::string StatusPayload(const absl::Status& status) {
  return PayloadWriter()
      .U32(static_cast<uint32_t>(status.code()))
      .String(std::string(status.message()))
      .Take();
}

absl::Status PayloadStatus(std::string_view payload) {
  PayloadReader reader(payload);
  const uint32_t code = reader.U32();
  const std::string message = reader.String();
  if (!reader.Complete() || code == 0) {
    return absl::InternalError("a failure came without a status");
  }
  const bool known =
      code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(
      known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
      message);
}

std::optional<Hello> ParseHello(std::string_view payload) {
  PayloadReader reader(payload);
  Hello hello;
  hello.version = reader.U32();
  // Another version may have other fields behind this one.
  if (reader.ok() && hello.version != kProtocolVersion) return hello;
  return ParseStruct<Hello>(payload);
}

uint64_t ResultBytes(const Results& results) {
  uint64_t size = sizeof(uint64_t);
  for (const auto& result : results)
    size += kValueHeaderBytes + result.value.size();
  return size;
}

std::string ResultPayload(const Results& results) {
  PayloadWriter writer;
  writer.U64(results.size());
  for (const auto& [rank, value] : results) {
    writer.U32(static_cast<uint32_t>(rank)).U64(value.size()).Bytes(value);
  }
  return writer.Take();
}

std::optional<Results> ParseResult(std::string_view payload) {
  PayloadReader reader(payload);
  Results results(reader.Count(kValueHeaderBytes));
  for (auto& [rank, value] : results) {
    rank = static_cast<int32_t>(reader.U32());
    value = reader.Bytes(reader.U64());
  }
  if (!reader.Complete()) return std::nullopt;
  return results;
}

}  // namespace refit::control
