// What travels between a rank and the server of the control plane: frames of a
// fixed little-endian header {magic, type, step, sequence, rank, payload size}
// and a payload.
#ifndef REFIT_CONTROL_FRAME_H_
#define REFIT_CONTROL_FRAME_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/compared_structs.h"
#include "control/payload.h"
#include "refit/control_plane.h"

namespace refit::control {

// Ranks that meet must speak the same; any change to what follows raises it.
inline constexpr uint32_t kProtocolVersion = 14;

// Larger payloads are refused at both ends, so that no size field can make a
// process run out of memory.
inline constexpr uint64_t kPayloadBytesMax = uint64_t{256} << 20;

// The same for an end that has not proved to be a member yet.
inline constexpr uint64_t kStrangerBytesMax = 4096;

// Longer times are cut to this at both ends: sums with it do not overflow.
inline constexpr uint64_t kRemainingMsMax = uint64_t{1000} * 3600 * 24 * 365;

// The sequence of a kAborted.
inline constexpr uint64_t kMissed = 1;

// Hellos and refusals keep their number and what their payloads begin with in
// every version, so that ranks of two versions can tell each other.
enum class FrameType : uint32_t {
  // From a rank.
  kHello = 1,         // who it says it is
  kBegin = 2,         // of a step; its sequence is the StepPurpose
  kContribution = 3,  // to a collective
  kAbort = 4,
  kGoodbye = 5,  // also from the server, when it ends; with the newest step
  // From the server.
  kWelcome = 6,  // all ranks have come
  kRefused = 7,  // to meet; with a status
  kResult = 8,   // of a collective; ResultPayload
  // The step, by `rank`; with a status. To all ranks at once, so also of steps
  // that this rank is yet to begin; its sequence is kMissed then, if others
  // were called for the step and this rank was not.
  kAborted = 9,
  // Of the proof of membership (membership.h).
  kChallenge = 10,  // from the server
  kProof = 11,      // from a rank
  kAccepted = 12,   // from the server, with its own proof
  kLater = 13,      // from the server: it cannot meet now; with a status
};

struct Frame {
  FrameType type = FrameType::kHello;
  uint64_t step = 0;
  uint64_t sequence = 0;  // of the collective in its step
  int32_t rank = -1;      // whom it is from or about; -1: nobody
  std::string payload = {};
};

// Says hello for a member that comes only to end the meeting. It may not know
// how many ranks there are, so its world size does not count.
inline constexpr int32_t kNoRank = -1;

// Requires: the payload is at most kPayloadBytesMax.
std::string Encode(const Frame& frame);

// An encoded frame; one that goes to all ranks exists once.
using SharedBytes = std::shared_ptr<const std::string>;
inline SharedBytes EncodeShared(const Frame& frame) {
  return std::make_shared<const std::string>(Encode(frame));
}

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

// What is wrong with an end that sends other frames than it should.
inline absl::Status OffProtocol() {
  return absl::UnavailableError("it does not keep to the protocol");
}

std::string StatusPayload(const absl::Status& status);
// The status of a payload; kInternal if it holds none.
absl::Status PayloadStatus(std::string_view payload);

using Nonce = std::array<char, 32>;
using Mac = std::array<char, 32>;

// The structs of payloads travel as StructBytes writes them.

// Anybody can say this.
struct Hello {
  uint32_t version = kProtocolVersion;
  int32_t world_size = 0;
  uint64_t id_name = 0;  // of the unique id; 0: of none
  Nonce nonce = {};      // of this connection

  static auto FieldsOf(auto& self) {
    return std::tie(self.version, self.world_size, self.id_name, self.nonce);
  }
};
// Also that of another version, of which only the version counts.
std::optional<Hello> ParseHello(std::string_view payload);

// What counts only once it is proved.
struct ProofClaims {
  uint64_t remaining_ms = 0;  // until the rank's deadline; clocks differ
  std::string process;        // names it to people

  static auto FieldsOf(auto& self) {
    return std::tie(self.remaining_ms, self.process);
  }
};

struct Proof {
  ProofClaims claims;
  Mac mac = {};

  static auto FieldsOf(auto& self) { return std::tie(self.claims, self.mac); }
};

struct Contribution {
  bool exchanges = false;  // else it compares
  uint64_t remaining_ms = 0;
  std::string what = {};
  std::vector<int32_t> to = {};    // of an exchange
  std::vector<int32_t> from = {};  // of an exchange
  std::string bytes = {};

  static auto FieldsOf(auto& self) {
    return std::tie(self.exchanges, self.remaining_ms, self.what, self.to,
                    self.from, self.bytes);
  }
};

// What a rank gets of a collective: of a comparison the values with their first
// ranks, of an exchange those that the rank asked for.
using Results = std::vector<OfRank<std::string_view>>;
uint64_t ResultBytes(const Results& results);  // of its payload
std::string ResultPayload(const Results& results);
// The views are into `payload`.
std::optional<Results> ParseResult(std::string_view payload);

}  // namespace refit::control

#endif  // REFIT_CONTROL_FRAME_H_
