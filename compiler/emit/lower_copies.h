// Turns boxes of params into strided copies of a rank's buffers, writing equal
// loops and equal copy lists once.
#ifndef REFIT_COMPILER_EMIT_LOWER_COPIES_H_
#define REFIT_COMPILER_EMIT_LOWER_COPIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
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
  // Where a param stands in one list of buffers.
  struct Site {
    uint32_t slot;
    const Buffer* buffer;
    const Fragment* fragment;
  };
  // A rank's buffers; ranks with equal lists share one.
  struct RankBuffers {
    std::vector<BufferId> buffers;
    absl::flat_hash_map<std::pair<ParamId, Box>, std::vector<Site>>
        sites_by_box;
    std::vector<std::vector<Site>> sites_by_param;
    // Where the last pack of a param was found: the next is near.
    std::vector<size_t> last_packed_site;
  };

  size_t AddRankBuffers(const std::vector<BufferId>& buffers);
  uint32_t InternLoops(absl::Span<const fb::Loop> loops);
  uint32_t InternList(absl::Span<const fb::Copy> copies);
  // The strided box {offset, extent, stride} of a buffer.
  fb::Copy Lower(uint32_t slot, const Buffer& buffer, int64_t offset,
                 const Dims& extent, const Dims& stride, DType wire_dtype,
                 int64_t staging_offset);
  // The site of `param` whose fragment contains `box`; null if there is none.
  const Site* FindContaining(RankBuffers& held, const Piece& piece,
                             const Box& box);
  // The sites that the piece is meant for; null if there are none.
  const std::vector<Site>* FindWritten(const RankBuffers& held,
                                       const Piece& piece) const;
  fb::Copy LowerPacked(const Site& site, const Packed& packed);

  const Module& module_;
  std::vector<RankBuffers> rank_buffers_;
  absl::flat_hash_map<std::vector<BufferId>, size_t> rank_buffers_ids_;
  std::vector<size_t> buffers_of_rank_;
  absl::flat_hash_map<std::pair<size_t, int32_t>, uint32_t> pack_lists_;
  absl::flat_hash_map<std::pair<size_t, int32_t>, uint32_t> relay_lists_;
  absl::flat_hash_map<std::pair<size_t, int32_t>, uint32_t> unpack_lists_;

  std::vector<fb::Copy> list_;  // at hand; kept to save allocations
  std::vector<fb::Loop> loops_;
  std::vector<fb::Copy> copies_;
  std::vector<fb::CopyList> lists_;
  absl::flat_hash_map<std::string, uint32_t> loops_by_bytes_;
  absl::flat_hash_map<std::string, uint32_t> lists_by_bytes_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_EMIT_LOWER_COPIES_H_
