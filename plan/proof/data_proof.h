// Invariants 1, 2, 3 and 6 of the data itself: symbolic execution of one
// destination rank's part of all programs.
#ifndef REFIT_PLAN_PROOF_DATA_PROOF_H_
#define REFIT_PLAN_PROOF_DATA_PROOF_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "plan/dtype.h"
#include "plan/proof/affine.h"
#include "plan/proof/buffer_facts.h"
#include "plan/proof/schedule_proof.h"
#include "plan/proof/violations.h"

namespace refit::proof {

// Follows every byte into the destination ranks, which are asked in ascending
// order.
class DataProof {
 public:
  // `facts` by Body.buffers. All arguments must outlive the proof.
  DataProof(const fb::Body& body, const std::vector<BufferFacts>& facts,
            const Partners& partners, Violations& violations);

  // For each message that `rank` receives and that has a sender:
  //   * what the sender packs comes from fragments of moved params, and no
  //     staging byte is packed twice (invariants 1, 2, 3);
  //   * each unpacked element was packed, at the same position, from the same
  //     element of the same param, with at most one, declared cast (2, 6);
  //   * in a direct round each copy of the receiver is one of the sender's, so
  //     that one loop nest can visit both (2).
  // Then, of all that was unpacked and zeroed: every fragment of a moved param
  // and every fill region is tiled exactly, nothing else is written (1). And of
  // all that `rank` itself sends: it was written in an earlier round, and if
  // the plan says what feeds a relay, no later than that (2).
  //
  // A rank whose program is that of an earlier one, fed by programs that are
  // those of the earlier one's senders, receives what that one does: what was
  // found there holds here.
  void FollowInto(uint32_t rank);

  // That a source rank's scratch holds what it says: every element of it is
  // quantized from the right elements, once (1, 2). For a destination
  // FollowInto says so of what is quantized after the last round.
  void FollowQuantization(uint32_t rank);

  int64_t moved_bytes() const { return moved_bytes_; }

 private:
  // A copy of a send: what a range of the message's staging bytes holds.
  struct Packed {
    int64_t begin = 0;  // bytes from the start of the message
    int64_t end = 0;
    uint32_t param = 0;
    DType wire = DType::kUnspecified;
    DType buffer = DType::kUnspecified;
    Sequence elements;  // the param's flat indices
    Digits loops;       // of the copy
  };
  // Coordinates of a part of a buffer that are written. A quantized element
  // is written after the rounds.
  struct Write {
    uint32_t slot = 0;
    int32_t part = 0;
    int64_t round = Site::kBeforeRounds;  // a fill
    Box box;
  };
  // Coordinates of a part of a buffer that are relayed.
  struct Read {
    uint32_t slot = 0;
    int32_t part = 0;
    int64_t round = 0;
    const fb::Message* fed_by = nullptr;  // null: the plan does not say
    int64_t offset = 0;                   // of the copy
    Box box;
  };
  // One end of a message.
  struct End {
    uint32_t rank = 0;
    const fb::Message* message = nullptr;

    Site At(const fb::Copy& copy, int64_t offset) const {
      return {.rank = rank,
              .round = message->round(),
              .buffer_slot = copy.buffer_slot(),
              .offset = offset};
    }
  };

  const BufferFacts& FactsAt(uint32_t rank, uint32_t slot) const;
  const fb::Buffer& BufferAt(uint32_t rank, uint32_t slot) const;
  Digits LoopsOf(const fb::Copy& copy) const;
  absl::Span<const fb::Copy* const> CopiesOf(uint32_t list);
  bool CheckAlignment(const End& end, const fb::Copy& copy);

  // Of what `copy` addresses, if it is scratch (3).
  void CheckWindow(const End& end, const fb::Copy& copy);
  // That what an operation addresses of scratch has one window (3).
  void CheckOneWindow(uint32_t rank, const fb::Quantize& op);

  // What a held message consists of: bytes of a message that its sender packs
  // and the rank between them holds.
  struct Held {
    uint32_t rank = 0;      // that packs it
    uint32_t position = 0;  // of the message there
    int64_t begin = 0;      // of the bytes in it
    int64_t end = 0;
  };
  // Of the send `position` of `rank`, which packs nothing; nullopt after a
  // report.
  std::optional<Held> HeldBy(uint32_t rank, uint32_t position) const;
  bool IsHeldSend(uint32_t rank, const fb::Message& send) const;

  // What is sent as message `position` of `rank`; false after a report that it
  // cannot be known.
  bool PackSend(uint32_t rank, uint32_t position);
  void Pack(const End& send);
  void PackOne(const End& send, const fb::Copy& copy);
  void Unpack(const End& recv);
  void UnpackOne(const End& recv, const fb::Copy& copy);
  void Compare(const End& recv, const fb::Copy& copy, const Digits& loops,
               uint32_t param, const Sequence& elements);
  void CheckDirect(const End& recv, const fb::Copy& copy, const Digits& loops);
  bool CompareDTypes(const End& recv, const fb::Copy& copy,
                     const Packed& packed);
  void ReportOutside(const End& recv, const fb::Copy& copy);
  void Fill(uint32_t rank);
  void Quantize(uint32_t rank);
  void QuantizeOne(uint32_t rank, const fb::Quantize& op);
  // The param's elements that stand at `digits` from `offset` of a buffer, when
  // they lie in one fragment of `param`; reports and returns nothing otherwise.
  std::optional<Sequence> Operand(const char* what, uint32_t rank,
                                  uint32_t slot, int64_t offset,
                                  const Digits& digits, uint32_t param,
                                  bool is_written);
  // Of a source, only its scratch has to be written.
  void CheckWrites(uint32_t rank);
  void CheckTiling(uint32_t rank, uint32_t slot, const Part& part,
                   absl::Span<const Write> writes);
  void ListReads(uint32_t rank);
  // Whether an executor waits for `write` before it relays what `read` is.
  bool IsAwaited(const Write& write, const Read& read) const;
  void CheckRelays(uint32_t rank);

  // Whether what was followed into `alike` is what comes into `rank`.
  bool IsFollowed(uint32_t rank, uint32_t alike) const;

  const fb::Body& body_;
  const std::vector<BufferFacts>& facts_;
  const Partners& partners_;
  Violations& violations_;
  absl::flat_hash_set<std::pair<DType, DType>> casts_;
  int64_t moved_bytes_ = 0;
  // What was followed into ranks, by their list of messages.
  struct Followed {
    uint32_t rank = 0;
    int64_t moved_bytes = 0;
  };
  absl::flat_hash_map<const void*, Followed> followed_;

  // Of the message or rank at hand; kept to save allocations.
  std::vector<const fb::Copy*> copies_;
  std::vector<Packed> packed_;
  uint32_t packed_by_ = 0;  // not the rank that sends it if that holds it
  bool is_packed_known_ = true;
  std::vector<Write> writes_;
  std::vector<Read> reads_;
  Placement placement_;
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_DATA_PROOF_H_
