// PlanFile: the loader. Everything past `Open` may index the plan without
// checks.
#ifndef REFIT_PLAN_PLAN_FILE_H_
#define REFIT_PLAN_PLAN_FILE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/message_lists.h"
#include "plan/vector_length.h"
#include "plan_generated.h"

namespace refit {

inline constexpr uint32_t kFormatMajor = 1;
inline constexpr uint32_t kFormatMinor = 13;
// Bits of `required_features`.
inline constexpr uint64_t kFeatureDirectRounds = 1;
inline constexpr uint64_t kFeaturePostHooks = 2;
inline constexpr uint64_t kFeatureQuantization = 4;
inline constexpr uint64_t kFeatureRelays = 8;  // destination ranks that send
inline constexpr uint64_t kFeatureStagedRelays = 16;  // and in staged rounds
inline constexpr uint64_t kFeatureDelta = 32;
inline constexpr uint64_t kFeatureShifts = 64;        // of programs
inline constexpr uint64_t kFeatureStagedDelta = 128;  // in staged rounds
// Ranks that deal out what they hold for others of their host.
inline constexpr uint64_t kFeatureDealing = 256;
inline constexpr uint64_t kFeaturePackedMessages = 512;
inline constexpr uint64_t kFeatureBroadcasts = 1024;
// Those this build knows.
inline constexpr uint64_t kKnownFeatures =
    kFeatureDirectRounds | kFeaturePostHooks | kFeatureQuantization |
    kFeatureRelays | kFeatureStagedRelays | kFeatureDelta | kFeatureShifts |
    kFeatureStagedDelta | kFeatureDealing | kFeaturePackedMessages |
    kFeatureBroadcasts;
// The format_version of a plan with this body that requires `features`: the
// oldest that has all of both, 1.1 at least.
uint32_t FormatVersionFor(const fb::Body& body, uint64_t features);
// XXH3-128 of `bytes`.
fb::Digest DigestOf(absl::Span<const uint8_t> bytes);

// Plan.file_digest of a file with these bytes. Requires that `plan` is in them
// and has the field, whatever it says.
fb::Digest FileDigestOf(absl::Span<const uint8_t> bytes, const fb::Plan& plan);
// 32 hex digits, high half first.
std::string DigestText(const fb::Digest& digest);

// An open, structurally sound plan.
//
// `Open` and `FromBytes` check, in this order: the file identifier; that the
// FlatBuffer is well formed; format version (a newer major is refused, a newer
// minor is read); required features; the body's digest; that the body ends the
// file; and every index and range of the body:
//   * dtypes, enums and reserved fields hold known values; sizes do not
//   overflow 63 bits
//   * copies stay inside their copy list, loops inside their pool, buffers
//   inside their tables
//   * each copy stays inside its tensors (no loop runs across two tensors of a
//     stack except from one whole tensor to the next) and inside its message's
//     staging range
//   * packed messages can be read: their ranges and counts agree
//   * messages stay inside the staging arena, name a known round and an
//   existing peer other than themselves
//   * fragments and regions have one entry per dimension and stay inside param
//   and buffer
//   * post-hooks have names, and only a destination's buffers have them
//   * quantizations relate params of the right shapes and dtypes; what is
//   quantized, and what is written, stays inside its tensors
//   * relays name each send of a destination rank, and a receive before it
//   * requirements are words, each side's key once
//   * windows of scratch stay inside the rank's arena and have known rounds
// It promises that nothing needs a bounds check, not that the plan is right:
// refit-verify proves that (plan/proof). Errors: kNotFound, kPermissionDenied
// or kUnavailable (the file cannot be read), kFailedPrecondition (newer major
// or unknown feature), kInvalidArgument (any other fault of the content), one
// sentence with the place. Open's begin with the path.
//
// Thread-safe once open. Movable. Accessors are valid for the object's life.
class PlanFile {
 public:
  // Maps the file read-only; reads what cannot be mapped, such as a pipe.
  static absl::StatusOr<PlanFile> Open(const std::string& path);
  static absl::StatusOr<PlanFile> FromBytes(std::vector<uint8_t> bytes);

  PlanFile(PlanFile&&) noexcept;
  PlanFile& operator=(PlanFile&&) noexcept;
  ~PlanFile();

  const fb::Plan& plan() const { return *plan_; }
  const fb::Body& body() const { return *body_; }
  // Those of each program. They stay where they are when the plan is moved.
  const MessageLists& messages() const { return *messages_; }
  absl::Span<const uint8_t> bytes() const;
  // Those of a plan that FromBytes made; a copy of any other's.
  std::vector<uint8_t> TakeBytes() &&;

  int32_t source_ranks() const;
  int32_t world_size() const;
  fb::Side side(int32_t rank) const;

 private:
  class Bytes;
  explicit PlanFile(std::unique_ptr<Bytes> bytes);
  absl::Status Check();
  absl::Status CheckFileDigest() const;
  absl::Status CheckBodyBytes();

  std::unique_ptr<Bytes> bytes_;
  const fb::Plan* plan_ = nullptr;
  const fb::Body* body_ = nullptr;
  std::unique_ptr<const MessageLists> messages_;
};

// The times that the compiler expected: 0 and "" where the plan says none.
struct Estimates {
  double lower_bound_seconds = 0;
  double predicted_seconds = 0;
  std::string binding_link;
};
Estimates EstimatesOf(const PlanFile& plan);

// Bits of the features that the body uses: what a file that holds it must
// require of executors.
uint64_t RequiredFeatures(const fb::Body& body);

// 1 for a scalar.
uint64_t ProductOf(const flatbuffers::Vector<uint64_t>* dims);

// The number of elements of one tensor of a stack, which is a param or a
// buffer, and the number of its tensors.
template <typename Stack>
uint64_t TensorElements(const Stack& stack) {
  return ProductOf(stack.shape());
}
template <typename Stack>
uint64_t StackTensors(const Stack& stack) {
  uint64_t tensors = 1;
  for (uint32_t d = 0; d < Length(stack.index()); ++d) {
    tensors *= stack.index()->Get(d)->count();
  }
  return tensors;
}

// The number that stands at `position` of an index dimension.
int32_t IndexNumber(const fb::IndexDim& dim, uint32_t position);
// By index dimension, of tensor `ordinal` (row-major over them) of a stack.
std::vector<int32_t> IndexNumbers(
    const flatbuffers::Vector<flatbuffers::Offset<fb::IndexDim>>* index,
    uint64_t ordinal);

// Body.copy_lists[`list`].
absl::Span<const fb::Copy> CopiesOf(const fb::Body& body, uint32_t list);
// Outermost first.
absl::Span<const fb::Loop> LoopsOf(const fb::Body& body, const fb::Copy& copy);
absl::Span<const fb::QuantizeLoop> LoopsOf(const fb::Body& body,
                                           const fb::Quantize& op);
uint64_t CopyElements(const fb::Body& body, const fb::Copy& copy);

// Whether any rank broadcasts.
bool HasBroadcasts(const fb::Body& body);

// Whether delta refits have staged rounds.
inline bool HasRungs(const fb::Body& body) {
  return body.delta() != nullptr && body.delta()->rungs() != nullptr &&
         body.delta()->rungs()->size() > 0;
}

// The global rank that a message of `program` is for or from. Programs that
// differ only in their peers share their messages, and shift these.
inline uint32_t PeerOf(const fb::Body& body, const fb::RankProgram& program,
                       const fb::Message& message) {
  return message.peer() + (message.peer() < body.source_ranks()
                               ? program.source_shift()
                               : program.destination_shift());
}
inline uint32_t PeerOf(const fb::Body& body, uint32_t rank,
                       const fb::Message& message) {
  return PeerOf(body, *body.programs()->Get(rank), message);
}

// How bytes travel between these two ranks. A round of route kNetwork may have
// messages inside hosts as well, beside those between them.
fb::Route RouteBetween(const fb::Body& body, uint32_t source,
                       uint32_t destination);

// Whether `send`, which relays, passes on bytes that its rank only holds in
// staging: it packs nothing.
inline bool IsHeld(const fb::Body& body, const fb::Message& send) {
  return body.copy_lists()->Get(send.copies())->count() == 0 &&
         send.size_bytes() > 0;
}

// By position of the program's messages: whether it is a receive whose bytes
// the rank deals out. They stay in staging, also where it wants them itself.
std::vector<bool> DealtReceives(const MessageLists& messages,
                                const fb::RankProgram& program);

// The other end of message `position` of `rank`; null if there is none. A
// pair's messages of one round are in the same order at both ends.
const fb::Message* PartnerOf(const MessageLists& messages, uint32_t rank,
                             uint32_t position);

// Whether the two programs are one, but for the ranks of their peers and the
// host: the file has their lists once.
bool AreShared(const fb::RankProgram& a, const fb::RankProgram& b);

// The receive that brings what message `position` of `program` passes on; null
// for a message that is no relay, and in plans that do not say.
const fb::Message* FedBy(const MessageLists& messages,
                         const fb::RankProgram& program, uint32_t position);

// Bytes of a rank's scratch arena.
uint64_t ScratchBytes(const PlanFile& plan, int32_t rank);

// `pattern` with "{i}" replaced by numbers[i].
std::string ExpandName(std::string_view pattern,
                       absl::Span<const int32_t> numbers);
// The name of tensor `ordinal` of a stack, from its index numbers.
std::string TensorName(const fb::Buffer& buffer, uint64_t ordinal);
std::string TensorName(const fb::Param& param, uint64_t ordinal);

}  // namespace refit

#endif  // REFIT_PLAN_PLAN_FILE_H_
