// The copies of a rank as its schedule numbers their batches: each message from
// or to where it lies, and nothing quantized on the way.
#ifndef REFIT_PLAN_SCHEDULE_RANK_COPIES_H_
#define REFIT_PLAN_SCHEDULE_RANK_COPIES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "plan/plan_file.h"
#include "plan/schedule/direct_pairs.h"
#include "plan/schedule/round_copies.h"
#include "plan/schedule/tensor_box.h"
#include "plan/schedule/tensor_table.h"

namespace refit {

class RankCopies {
 public:
  // The references must outlive it.
  RankCopies(const PlanFile& plan, int32_t rank, const RankSchedule& schedule,
             const DirectPairs& peers);

  // Before any copy is added: where tensors and staging are.
  void Place(absl::Span<std::byte* const> tensors, std::byte* staging,
             const PeerAddresses& peer_tensors);
  // Instead, for what is the same wherever they are: nowhere.
  void PlaceNowhere();

 protected:
  void AddFills();
  void AddQuantizes();
  // Packing and unpacking go on beside the exchanges of other rounds: all but
  // the first and the last. A rank that relays unpacks, and packs again, within
  // one exchange. One that quantizes packs what is just ready.
  void ShareWithExchanges();
  absl::Status AddStagedRound(const RoundWork& work);
  absl::Status AddDirectRound(const RoundWork& work);

  // Message `i` of a round.
  const fb::Message& MessageOf(const RoundWork& work, uint32_t i) const {
    return MessageAt(schedule_.parts()[work.operations_begin + i].message);
  }
  int32_t PeerAt(const fb::Message& message) const {
    return static_cast<int32_t>(PeerOf(body_, program_, message));
  }
  // Whether this end of the message is the one that moves it.
  bool Moves(const fb::Message& message) const {
    return peers_.Moves(message.kind(), PeerAt(message));
  }
  // What moves message `i` of a direct round.
  absl::Status AddDirectMessage(const RoundWork& work, uint32_t i,
                                CopyBatch& batch) const;

  const PlanFile& plan_;
  const fb::Body& body_;
  const int32_t rank_;
  const fb::RankProgram& program_;
  const RankSchedule& schedule_;
  const DirectPairs& peers_;
  const TensorTable tensors_;
  std::map<int32_t, uint64_t> peer_begin_;  // in the table
  RoundCopies result_;

 private:
  // A box of a tensor that lies in one piece in a message.
  struct StagedBox {
    TensorBox box;
    uint64_t begin_byte = 0;  // from the start of the part
    DType wire_dtype = DType::kUnspecified;
  };
  // One end of a message: the rank's tensors and where they begin in the table
  // of addresses.
  struct MessageEnd {
    int32_t rank = 0;
    const TensorTable& tensors;
    uint64_t first_entry = 0;
    const fb::Message& message;
  };

  const fb::Message& MessageAt(uint32_t position) const {
    return *plan_.messages().Of(program_).Get(position);
  }
  void AddPeer(int32_t peer, absl::Span<std::byte* const> addresses);
  absl::StatusOr<std::vector<StagedBox>> BoxesOf(const fb::Message& message,
                                                 uint64_t begin_byte,
                                                 uint64_t size_bytes) const;
  absl::Status AddDirectCopies(const MessageEnd& send, const MessageEnd& recv,
                               uint32_t link, CopyBatch& batch) const;

  const std::vector<bool> is_dealt_;  // by message
  const bool has_steps_;
  std::byte* staging_ = nullptr;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_RANK_COPIES_H_
