#include "executor/transport/control_frame.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"

namespace refit::control {
namespace {

constexpr uint32_t kMagic = 0x50434652;  // "RFCP"
constexpr size_t kMagicBytes = 4;
constexpr size_t kHeaderBytes = 32;

template <typename T>
void AppendLittleEndian(std::string& bytes, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) {
    bytes.push_back(static_cast<char>(value >> (8 * i)));
  }
}

template <typename T>
T LittleEndian(std::string_view bytes) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i) {
    value |= T{static_cast<unsigned char>(bytes[i])} << (8 * i);
  }
  return value;
}

bool IsFrameType(uint32_t type) {
  return type >= static_cast<uint32_t>(FrameType::kHello) &&
         type <= static_cast<uint32_t>(FrameType::kGone);
}

}  // namespace

std::string Encode(const Frame& frame) {
  assert(frame.payload.size() <= kPayloadBytesMax);
  std::string bytes;
  bytes.reserve(kHeaderBytes + frame.payload.size());
  AppendLittleEndian(bytes, kMagic);
  AppendLittleEndian(bytes, static_cast<uint32_t>(frame.type));
  AppendLittleEndian(bytes, frame.step);
  AppendLittleEndian(bytes, frame.sequence);
  AppendLittleEndian(bytes, static_cast<uint32_t>(frame.rank));
  AppendLittleEndian(bytes, static_cast<uint32_t>(frame.payload.size()));
  bytes.append(frame.payload);
  return bytes;
}

absl::StatusOr<std::optional<Frame>> FrameReader::Next() {
  const std::string_view bytes = std::string_view(buffer_).substr(begin_);
  // Checked before the header is whole: a stranger may never send so much.
  if (bytes.size() >= kMagicBytes && LittleEndian<uint32_t>(bytes) != kMagic) {
    return absl::InvalidArgumentError("these bytes are of another protocol");
  }
  if (bytes.size() < kHeaderBytes) return std::nullopt;
  const auto type = LittleEndian<uint32_t>(bytes.substr(4));
  const auto size = LittleEndian<uint32_t>(bytes.substr(28));
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
  Frame frame;
  frame.type = static_cast<FrameType>(type);
  frame.step = LittleEndian<uint64_t>(bytes.substr(8));
  frame.sequence = LittleEndian<uint64_t>(bytes.substr(16));
  frame.rank = static_cast<int32_t>(LittleEndian<uint32_t>(bytes.substr(24)));
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

PayloadWriter& PayloadWriter::U32(uint32_t value) {
  AppendLittleEndian(bytes_, value);
  return *this;
}

PayloadWriter& PayloadWriter::U64(uint64_t value) {
  AppendLittleEndian(bytes_, value);
  return *this;
}

PayloadWriter& PayloadWriter::String(std::string_view value) {
  U64(value.size());
  bytes_.append(value);
  return *this;
}

PayloadWriter& PayloadWriter::Ranks(absl::Span<const int32_t> ranks) {
  U64(ranks.size());
  for (int32_t rank : ranks) U32(static_cast<uint32_t>(rank));
  return *this;
}

std::string_view PayloadReader::Take(uint64_t size) {
  if (size > bytes_.size()) {
    ok_ = false;
    bytes_ = {};
    return {};
  }
  const std::string_view taken = bytes_.substr(0, size);
  bytes_.remove_prefix(size);
  return taken;
}

uint32_t PayloadReader::U32() {
  const std::string_view bytes = Take(sizeof(uint32_t));
  return bytes.empty() ? 0 : LittleEndian<uint32_t>(bytes);
}

uint64_t PayloadReader::U64() {
  const std::string_view bytes = Take(sizeof(uint64_t));
  return bytes.empty() ? 0 : LittleEndian<uint64_t>(bytes);
}

std::string PayloadReader::String() { return std::string(Take(U64())); }

std::vector<int32_t> PayloadReader::Ranks() {
  std::vector<int32_t> ranks;
  const uint64_t count = U64();
  if (count > bytes_.size() / sizeof(uint32_t)) {
    ok_ = false;
    return ranks;
  }
  for (uint64_t i = 0; i < count; ++i) {
    ranks.push_back(static_cast<int32_t>(U32()));
  }
  return ranks;
}

std::string StatusPayload(const absl::Status& status) {
  return PayloadWriter()
      .U32(static_cast<uint32_t>(status.code()))
      .String(std::string(status.message()))
      .Take();
}

absl::Status PayloadStatus(std::string_view payload) {
  PayloadReader reader(payload);
  const auto code = static_cast<absl::StatusCode>(reader.U32());
  const std::string message = reader.String();
  if (!reader.Complete() || code == absl::StatusCode::kOk) {
    return absl::InternalError("a failure came without a status");
  }
  return absl::Status(code, message);
}

std::string HelloPayload(const Hello& hello) {
  return PayloadWriter()
      .U32(hello.version)
      .U32(static_cast<uint32_t>(hello.world_size))
      .U64(hello.remaining_ms)
      .U64(hello.nonce)
      .String(hello.process)
      .Take();
}

std::optional<Hello> ParseHello(std::string_view payload) {
  PayloadReader reader(payload);
  Hello hello;
  hello.version = reader.U32();
  // Another version may have other fields behind this one.
  if (reader.ok() && hello.version != kProtocolVersion) return hello;
  hello.world_size = static_cast<int32_t>(reader.U32());
  hello.remaining_ms = std::min(reader.U64(), kRemainingMsMax);
  hello.nonce = reader.U64();
  hello.process = reader.String();
  if (!reader.Complete()) return std::nullopt;
  return hello;
}

std::string ContributionPayload(CollectiveKind kind, uint64_t remaining_ms,
                                std::string_view what,
                                absl::Span<const int32_t> to,
                                absl::Span<const int32_t> from,
                                std::string_view bytes) {
  return PayloadWriter()
      .U32(static_cast<uint32_t>(kind))
      .U64(remaining_ms)
      .String(what)
      .Ranks(to)
      .Ranks(from)
      .String(bytes)
      .Take();
}

std::optional<Contribution> ParseContribution(std::string_view payload) {
  PayloadReader reader(payload);
  Contribution contribution;
  const uint32_t kind = reader.U32();
  contribution.kind = static_cast<CollectiveKind>(kind);
  contribution.remaining_ms = std::min(reader.U64(), kRemainingMsMax);
  contribution.what = reader.String();
  contribution.to = reader.Ranks();
  contribution.from = reader.Ranks();
  contribution.bytes = reader.String();
  const bool known = kind <= static_cast<uint32_t>(CollectiveKind::kExchange);
  if (!reader.Complete() || !known) return std::nullopt;
  return contribution;
}

}  // namespace refit::control
