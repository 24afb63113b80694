// Turns boxes of params into strided copies of a rank's buffers, writing equal
// loops and equal copy lists once.
#ifndef REFIT_COMPILER_EMIT_LOWER_COPIES_H_
#define REFIT_COMPILER_EMIT_LOWER_COPIES_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "compiler/ir/module.h"
#include "plan_generated.h"

namespace refit {

class CopyLowering {
 public:
  explicit CopyLowering(const Module& module);

  // Copy list ids, into lists(). Packing reads any fragment that contains the
  // box; unpacking writes every fragment the piece is meant for; a relay reads
  // one of those that it wrote. kInternal: the rank has none, a mistake of an
  // earlier pass.
  absl::StatusOr<uint32_t> Pack(Rank source, int32_t contents);
  absl::StatusOr<uint32_t> Relay(Rank relay, int32_t contents);
  absl::StatusOr<uint32_t> Unpack(Rank destination, int32_t contents);
  // Of what is only held.
  uint32_t Nothing() { return InternList({}); }
  // Zeroes the fill regions of the rank's buffers.
  uint32_t Fill(Rank rank);

  const std::vector<fb::Loop>& loops() const { return loops_; }
  const std::vector<fb::Copy>& copies() const { return copies_; }
  const std::vector<fb::CopyList>& lists() const { return lists_; }

 private:
  using Loops = absl::InlinedVector<fb::Loop, 4>;

  // Where a param stands in one list of buffers.
  struct Site {
    uint32_t slot = 0;
    const Buffer* buffer = nullptr;
    const Fragment* fragment = nullptr;
    uint64_t tensor_elements = 0;
    // Of the last copy that was lowered here: the next is often like it.
    Loops last_loops;
    uint32_t last_loops_begin = 0;
  };
  // A rank's buffers; ranks with equal lists share one.
  struct RankBuffers {
    std::vector<BufferId> buffers;
    absl::flat_hash_map<int32_t, std::vector<Site>> sites_by_box;
    std::vector<std::vector<Site>> sites_by_param;
    // Where the last pack of a param was found: the next is near.
    std::vector<size_t> last_packed_site;
  };

  // What is asked of pieces most, close together.
  struct PieceFacts {
    ParamId param{};
    int32_t wave = 0;
    int32_t box = 0;  // of the receivers
    DType wire_dtype = DType::kUnspecified;
  };

  void ListPieces();
  size_t AddRankBuffers(const std::vector<BufferId>& buffers);
  uint32_t InternLoops(absl::Span<const fb::Loop> loops);
  uint32_t InternList(absl::Span<const fb::Copy> copies);
  // The next inner loop of a copy, one step of a tensor's `stride` each.
  static void AddLoop(int64_t extent, int64_t stride, uint64_t tensor_elements,
                      Loops& loops);
  // The site of `param` whose fragment contains `box`; null if there is none.
  Site* FindContaining(RankBuffers& held, const PieceFacts& piece,
                       const Box& box);
  // The sites that the piece is meant for; null if there are none.
  static std::vector<Site>* FindWritten(RankBuffers& held,
                                        const PieceFacts& piece);
  fb::Copy LowerPacked(Site& site, const Packed& packed, DType wire_dtype);

  const Module& module_;
  // The boxes that pieces are meant for, by param, and that of each piece.
  absl::flat_hash_map<std::pair<ParamId, Box>, int32_t> boxes_;
  std::vector<PieceFacts> pieces_;
  std::vector<RankBuffers> rank_buffers_;
  absl::flat_hash_map<std::vector<BufferId>, size_t> rank_buffers_ids_;
  std::vector<size_t> buffers_of_rank_;
  // The lists of contents for ranks with some buffers. As a rule all ranks that
  // send the same have the same, and so do those that receive it.
  class ListsOfContents {
   public:
    explicit ListsOfContents(size_t contents) : first_(contents) {}
    // A list's number, kNone before it has one.
    uint32_t& At(size_t held, int32_t contents) {
      First& first = first_[static_cast<size_t>(contents)];
      if (first.list == kNone) first.held = static_cast<uint32_t>(held);
      if (first.held == held) return first.list;
      return others_.try_emplace({held, contents}, kNone).first->second;
    }
    static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

   private:
    struct First {
      uint32_t held = 0;
      uint32_t list = kNone;
    };
    std::vector<First> first_;  // by contents
    absl::flat_hash_map<std::pair<size_t, int32_t>, uint32_t> others_;
  };
  ListsOfContents pack_lists_;
  ListsOfContents relay_lists_;
  ListsOfContents unpack_lists_;

  std::vector<fb::Copy> list_;  // at hand; kept to save allocations
  std::vector<fb::Loop> loops_;
  std::vector<fb::Copy> copies_;
  std::vector<fb::CopyList> lists_;
  absl::flat_hash_map<std::string, uint32_t> loops_by_bytes_;
  absl::flat_hash_map<std::string, uint32_t> lists_by_bytes_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_EMIT_LOWER_COPIES_H_
