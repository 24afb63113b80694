// What travels between a rank and the server of the control plane: frames of a
// fixed little-endian header {magic, type, step, sequence, rank, payload size}
// and a payload.
#ifndef REFIT_EXECUTOR_TRANSPORT_CONTROL_FRAME_H_
#define REFIT_EXECUTOR_TRANSPORT_CONTROL_FRAME_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace refit::control {

// Ranks that meet must speak the same; any change to what follows raises it.
inline constexpr uint32_t kProtocolVersion = 2;

// Larger payloads are refused on both sides, so that no size field can make a
// process run out of memory.
inline constexpr uint64_t kPayloadBytesMax = uint64_t{256} << 20;

// Longer times are cut to this on both sides: sums with it do not overflow.
inline constexpr uint64_t kRemainingMsMax = uint64_t{1000} * 3600 * 24 * 365;

enum class FrameType : uint32_t {
  // From a rank.
  kHello = 1,
  kBegin = 2,         // of a step
  kContribution = 3,  // to a collective
  kAbort = 4,
  kGoodbye = 5,  // also from the server, when rank 0 closes; with its step
  // From the server.
  kWelcome = 6,  // all ranks have come
  kRefused = 7,  // to meet; with a status
  kResult = 8,   // of a collective; a list
  kAborted = 9,  // the step, by `rank`; with a status
  kGone = 10,    // a rank; with a status. Nothing follows.
};

struct Frame {
  FrameType type = FrameType::kHello;
  uint64_t step = 0;
  uint64_t sequence = 0;  // of the collective in its step
  int32_t rank = -1;      // whom it is from or about; -1: nobody
  std::string payload = {};
};

// Requires: the payload is at most kPayloadBytesMax.
std::string Encode(const Frame& frame);

// Cuts a stream of bytes into frames.
class FrameReader {
 public:
  // A stranger may not send more than this before it has said who it is.
  explicit FrameReader(uint64_t payload_bytes_max)
      : payload_bytes_max_(payload_bytes_max) {}

  void set_payload_bytes_max(uint64_t bytes) { payload_bytes_max_ = bytes; }
  void Append(std::string_view bytes) { buffer_.append(bytes); }
  // The next whole frame, if there is one. Error: kInvalidArgument, the bytes
  // are not of this protocol; the stream is of no more use.
  absl::StatusOr<std::optional<Frame>> Next();

 private:
  uint64_t payload_bytes_max_;
  std::string buffer_;
  size_t begin_ = 0;  // of what has not been returned
};

// Payload fields, in order.
class PayloadWriter {
 public:
  PayloadWriter& U32(uint32_t value);
  PayloadWriter& U64(uint64_t value);
  PayloadWriter& String(std::string_view value);
  PayloadWriter& Ranks(absl::Span<const int32_t> ranks);
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Reads what a PayloadWriter wrote. Past the end everything is zero or empty
// and `ok` is false.
class PayloadReader {
 public:
  explicit PayloadReader(std::string_view bytes) : bytes_(bytes) {}

  uint32_t U32();
  uint64_t U64();
  std::string String();
  std::vector<int32_t> Ranks();
  // Everything was there, and nothing is left.
  bool Complete() const { return ok_ && bytes_.empty(); }
  bool ok() const { return ok_; }

 private:
  std::string_view Take(uint64_t size);

  std::string_view bytes_;
  bool ok_ = true;
};

std::string StatusPayload(const absl::Status& status);
// The status of a payload; kInternal if it holds none.
absl::Status PayloadStatus(std::string_view payload);

struct Hello {
  uint32_t version = kProtocolVersion;
  int32_t world_size = 0;
  uint64_t remaining_ms = 0;  // until the rank's deadline; clocks differ
  uint64_t nonce = 0;         // of the unique id; 0: of none
  std::string process;        // names it to people
};
std::string HelloPayload(const Hello& hello);
std::optional<Hello> ParseHello(std::string_view payload);

enum class CollectiveKind : uint32_t { kAllGather = 0, kExchange = 1 };

struct Contribution {
  CollectiveKind kind = CollectiveKind::kAllGather;
  uint64_t remaining_ms = 0;
  std::string what;
  std::vector<int32_t> to;    // of an exchange
  std::vector<int32_t> from;  // of an exchange
  std::string bytes;
};
std::string ContributionPayload(CollectiveKind kind, uint64_t remaining_ms,
                                std::string_view what,
                                absl::Span<const int32_t> to,
                                absl::Span<const int32_t> from,
                                std::string_view bytes);
std::optional<Contribution> ParseContribution(std::string_view payload);

}  // namespace refit::control

#endif  // REFIT_EXECUTOR_TRANSPORT_CONTROL_FRAME_H_
