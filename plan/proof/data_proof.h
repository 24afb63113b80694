// Invariants 1, 2, 3 and 6 of the data itself: symbolic execution of one
// destination rank's part of all programs.
#ifndef REFIT_PLAN_PROOF_DATA_PROOF_H_
#define REFIT_PLAN_PROOF_DATA_PROOF_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "plan/dtype.h"
#include "plan/message_lists.h"
#include "plan/plan_file.h"
#include "plan/proof/affine.h"
#include "plan/proof/buffer_facts.h"
#include "plan/proof/schedule_proof.h"
#include "plan/proof/steps.h"
#include "plan/proof/violations.h"

namespace refit::proof {

inline constexpr uint64_t kStepsPerCopy = 16;      // to find where it is
inline constexpr uint64_t kStepsPerKnownCopy = 4;  // where that is known

inline int64_t OffsetOf(const fb::Copy& copy) {
  return static_cast<int64_t>(copy.offset());
}

inline bool IsSkipped(const fb::Param& param) {
  return param.skip() != fb::SkipReason::kUnspecified;
}

// Follows every byte into the destination ranks, which are asked in ascending
// order.
class DataProof {
 public:
  // `facts` by Body.buffers. All arguments must outlive the proof.
  DataProof(const MessageLists& messages, const std::vector<BufferFacts>& facts,
            const Partners& partners, Steps& steps, Violations& violations);

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
    int32_t part = 0;   // of the buffer
    Sequence elements;  // the param's flat indices, less the part's param_base
    const fb::Copy* copy = nullptr;
  };
  // Those of a copy list, of ranks whose buffers have one geometry.
  struct PackedList {
    std::vector<Packed> copies;  // ascending
    bool relays = false;         // of a destination rank
    bool is_kept = false;        // for the proof's life
  };
  // Coordinates of a part of a buffer that a copy writes.
  struct Landing {
    uint32_t slot = 0;
    int32_t part = 0;
    Box box;
    int64_t volume = 0;  // of the box
  };
  // A copy of a receive: where it writes, and what should come there.
  struct Unpacked {
    Landing landing;
    uint32_t param = 0;
    DType buffer = DType::kUnspecified;
    Sequence elements;  // as those of Packed
    const fb::Copy* copy = nullptr;
  };
  struct UnpackedList;
  // Two lists, and what else of a message their comparison depends on.
  struct Comparison {
    const PackedList* packed = nullptr;
    const void* packed_from = nullptr;  // the buffers
    const UnpackedList* unpacked = nullptr;
    const void* unpacked_to = nullptr;
    bool is_direct = false;
    int64_t held_begin = 0;
    int64_t held_end = 0;

    friend bool operator==(const Comparison&, const Comparison&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Comparison& c) {
      return H::combine(std::move(h), c.packed, c.packed_from, c.unpacked,
                        c.unpacked_to, c.is_direct, c.held_begin, c.held_end);
    }
  };
  struct UnpackedList {
    std::vector<Unpacked> copies;
    int64_t bytes = 0;
    bool is_kept = false;
    // The last that was known or without a report: the next is often like it.
    mutable Comparison last;
    mutable int64_t last_bytes = 0;
  };
  // When: a quantized element is written after the rounds, a filled one before.
  struct Write {
    const Landing* landing = nullptr;
    int64_t round = Site::kBeforeRounds;

    const Box& box() const { return landing->box; }
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

    Site At(const fb::Copy& copy) const { return At(copy, OffsetOf(copy)); }
    Site At(const fb::Copy& copy, int64_t offset) const {
      return {.rank = rank,
              .round = message->round(),
              .buffer_slot = copy.buffer_slot(),
              .offset = offset};
    }
  };

  void FindGeometries();
  const BufferFacts& FactsAt(uint32_t rank, uint32_t slot) const;
  const fb::Buffer& BufferAt(uint32_t rank, uint32_t slot) const;
  Digits DigitsOf(const fb::Copy& copy) const;
  // None when the steps are used up.
  absl::Span<const fb::Copy> TakeCopies(uint32_t list, uint64_t steps_per_copy);
  // The part of a buffer that a copy lies in, with its place there in
  // placement_; -1 when there is none. Requires no flaw.
  int32_t PlaceCopy(const BufferFacts& facts, const fb::Copy& copy) {
    return facts.Find(OffsetOf(copy), DigitsOf(copy), placement_);
  }
  // What placement_ stands for in the part, counted from its first element.
  Sequence ElementsPlaced(const BufferFacts& facts, const Part& part) const;
  int64_t BytesOf(const fb::Copy& copy) const {
    return static_cast<int64_t>(CopyElements(body_, copy)) *
           DTypeBytes(copy.wire_dtype());
  }
  void CheckAlignment(const End& end, const fb::Copy& copy);
  // Of what the copies of `end` address, if it is scratch (3).
  void CheckWindows(const End& end);
  // That what an operation addresses of scratch has one window (3).
  void CheckOneWindow(uint32_t rank, const fb::Quantize& op);

  // What a held message consists of: bytes of a message that its sender packs,
  // and that the ranks between them hold, one after the other.
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

  // The two ends of a message's way: the one that packs its bytes is another
  // than the one that sends them where the latter only holds them.
  struct Origin {
    End sends;
    End packs;
    std::optional<Held> held;
  };
  // Of message `position` of `rank`; nullopt after a report that it cannot be
  // known.
  std::optional<Origin> OriginOf(uint32_t rank, uint32_t position) const;

  // Follows a message into `recv`; what it writes goes to `writes_`. What holds
  // of copy lists holds of all messages that have them: of one list if the
  // rank's buffers have the same geometry, of the lists of both ends if both
  // ranks have the same buffers. So each of these is looked at once.
  void FollowMessage(const End& recv, const std::optional<Origin>& origin);
  // What placement_ writes of a part of the buffer in `slot`.
  Landing LandingIn(uint32_t slot, int32_t part) const;
  void AddWrite(const Landing& landing, int64_t round);

  // What a list packs or writes. A list that gave rise to a report is not
  // kept, so that it is reported of each rank; it is valid until the next
  // one, or until the next rank.
  const PackedList& Pack(const End& send);
  const UnpackedList& Unpack(const End& recv);
  void PackOne(const End& send, const fb::Copy& copy, PackedList& packed);
  void UnpackOne(const End& recv, const fb::Copy& copy, UnpackedList& unpacked);
  // The part of `packed` that `send` holds; nullopt after a report.
  std::optional<PackedList> CutToHeld(const End& send, const Held& held,
                                      const PackedList& packed);
  // Returns the bytes that the message moves.
  int64_t CompareLists(const End& recv, const Origin& origin,
                       const PackedList& packed, const UnpackedList& unpacked);
  void Compare(const End& recv, const Unpacked& unpacked, uint32_t packed_by,
               const PackedList& sent);
  // The param's flat indices, of a copy of `rank`.
  Sequence ElementsPacked(uint32_t rank, const Packed& packed) const;
  int64_t ParamBase(uint32_t rank, uint32_t slot, int32_t part) const;
  void CheckDirect(const End& recv, const Unpacked& unpacked,
                   const PackedList& sent);
  bool CompareDTypes(const End& recv, const Unpacked& unpacked,
                     const Packed& packed, bool relays);
  void ReportOutside(const End& recv, const fb::Copy& copy);
  void Fill(uint32_t rank);
  void Quantize(uint32_t rank);
  void QuantizeOne(uint32_t rank, const fb::Quantize& op);
  // The param's elements that stand at `digits` from `offset` of a buffer, when
  // they lie in one fragment of `param`; reports and returns nothing otherwise.
  std::optional<Sequence> Operand(const char* what, uint32_t rank,
                                  uint32_t slot, uint64_t offset,
                                  const Digits& digits, uint32_t param,
                                  bool is_written);
  void ReportQuantize(uint32_t rank, uint32_t slot, uint64_t offset,
                      absl::FunctionRef<std::string()> text);
  // Of a source, only its scratch has to be written.
  void CheckWrites(uint32_t rank);
  void SortWrites(uint32_t rank);
  void SortWritesBy(size_t keys,
                    absl::FunctionRef<size_t(const Write&)> key_of);
  void CheckTiling(uint32_t rank, uint32_t slot, const Part& part,
                   absl::Span<const Write> writes);
  void ListReads(uint32_t rank);
  // Whether an executor waits for `write` before it relays what `read` is.
  bool IsAwaited(const Write& write, const Read& read) const;
  void CheckRelays(uint32_t rank);

  // Whether what was followed into `alike` is what comes into `rank`.
  bool IsFollowed(uint32_t rank, uint32_t alike) const;

  const fb::Body& body_;
  const MessageLists& messages_;
  const std::vector<BufferFacts>& facts_;
  const Partners& partners_;
  Steps& steps_;
  Violations& violations_;
  absl::flat_hash_set<std::pair<DType, DType>> casts_;
  int64_t moved_bytes_ = 0;
  // What was followed into ranks, by their list of messages.
  struct Followed {
    uint32_t rank = 0;
    int64_t moved_bytes = 0;
  };
  absl::flat_hash_map<const void*, Followed> followed_;

  // Whether to keep what a list of so many copies packs or writes.
  bool Keeps(size_t copies, int64_t reports_before);

  std::vector<uint32_t> geometry_;  // by rank: of its buffers
  // A file of few copies that ranks of ever other buffers share cannot make
  // the proof take memory for each.
  uint64_t kept_left_;
  // What copy lists pack or write, by a number that says for which ranks. Most
  // have one alone.
  template <typename List>
  class KeptLists {
   public:
    explicit KeptLists(size_t copy_lists)
        : ranks_(copy_lists), first_(copy_lists) {}

    // nullptr: not kept.
    const List* Find(uint32_t copy_list, uint32_t ranks) const {
      const std::unique_ptr<const List>& first = first_[copy_list];
      if (first == nullptr) return nullptr;
      if (ranks_[copy_list] == ranks) return first.get();
      const auto other = others_.find({copy_list, ranks});
      return other == others_.end() ? nullptr : other->second.get();
    }
    const List& Keep(uint32_t copy_list, uint32_t ranks, List list) {
      std::unique_ptr<const List>& kept = first_[copy_list] == nullptr
                                              ? first_[copy_list]
                                              : others_[{copy_list, ranks}];
      if (&kept == &first_[copy_list]) ranks_[copy_list] = ranks;
      kept = std::make_unique<const List>(std::move(list));
      return *kept;
    }

   private:
    std::vector<uint32_t> ranks_;  // by copy list, of `first_`
    std::vector<std::unique_ptr<const List>> first_;
    absl::flat_hash_map<std::pair<uint32_t, uint32_t>,
                        std::unique_ptr<const List>>
        others_;
  };
  // By geometry, and whether it is a relay that packs.
  KeptLists<PackedList> packed_lists_;
  // By geometry.
  KeptLists<UnpackedList> unpacked_lists_;
  // By what was compared without a report: the bytes moved.
  absl::flat_hash_map<Comparison, int64_t> compared_;

  // Of the message or rank at hand; kept to save allocations.
  PackedList packed_;
  std::deque<UnpackedList> unpacked_of_rank_;  // that are not kept
  std::deque<Landing> landings_of_rank_;       // of what is not unpacked
  std::vector<Write> writes_;
  std::vector<Write> sorted_writes_;
  std::vector<Read> reads_;
  std::vector<const Box*> boxes_;
  Placement placement_;
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_DATA_PROOF_H_
