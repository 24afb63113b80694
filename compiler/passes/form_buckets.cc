#include <algorithm>
#include <limits>
#include <utility>

#include "compiler/passes/passes.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

// A slab that does not fit into what is left of a bucket is cut only when
// closing the bucket early would waste more than this part of it.
constexpr int64_t kWasteDivisor = 32;

// One message's contents while it is filled.
struct Bucket {
  std::vector<Packed> contents;
  int64_t size_bytes = 0;
};

// Fills buckets with the boxes of one pair of ranks, in order.
class Packer {
 public:
  explicit Packer(int64_t bucket_bytes) : bucket_bytes_(bucket_bytes) {}

  void Add(PieceId piece, const Box& box, int64_t element_bytes);
  std::vector<Bucket> Take() { return std::move(buckets_); }

 private:
  void Place(PieceId piece, const Box& box, int64_t bytes);
  int64_t Free() const {
    return buckets_.empty()
               ? 0
               : bucket_bytes_ - AlignStaging(buckets_.back().size_bytes);
  }

  int64_t bucket_bytes_;
  std::vector<Bucket> buckets_;
};

void Packer::Place(PieceId piece, const Box& box, int64_t bytes) {
  if (buckets_.empty() || bytes > Free()) buckets_.emplace_back();
  Bucket& bucket = buckets_.back();
  const int64_t offset = AlignStaging(bucket.size_bytes);
  bucket.contents.push_back(
      {.piece = piece, .box = box, .staging_offset = offset});
  bucket.size_bytes = offset + bytes;
}

void Packer::Add(PieceId piece, const Box& box, int64_t element_bytes) {
  const int64_t waste_max = bucket_bytes_ / kWasteDivisor;
  Box rest = box;
  while (!rest.Empty()) {
    const int64_t bytes = rest.Volume() * element_bytes;
    if (bytes <= Free() || (bytes <= bucket_bytes_ && Free() <= waste_max)) {
      Place(piece, rest, bytes);
      return;
    }
    // Cut along the outermost dimension that can be cut: as many whole slabs
    // as fit now, then the rest.
    size_t dim = 0;
    while (rest.extent(dim) == 1) ++dim;
    const int64_t slab_bytes = bytes / rest.extent(dim);
    const int64_t room = Free() <= waste_max ? bucket_bytes_ : Free();
    const int64_t slabs = room / slab_bytes;
    if (slabs == 0 && slab_bytes <= waste_max) {
      // The slab is small and yet does not fit: a new bucket serves it better.
      buckets_.emplace_back();
      continue;
    }
    Box first = rest;
    rest.lo[dim] += std::max<int64_t>(slabs, 1);
    first.hi[dim] = rest.lo[dim];
    if (slabs == 0) {
      Add(piece, first, element_bytes);  // cuts inside one slab
    } else {
      Place(piece, first, slabs * slab_bytes);
    }
  }
}

// The buckets of one list of pieces, which many pairs share.
struct PackedPieces {
  std::vector<int32_t> contents;  // into Module::contents
  std::vector<int64_t> size_bytes;
};

// The size to fill buckets to: messages of one size keep the ranks of a round
// equally busy, so that a pair's bytes are cut evenly rather than into full
// buckets and a remainder. The slack is what closing buckets early may waste.
int64_t EvenBucketBytes(const std::vector<PieceId>& pieces,
                        const Module& module) {
  const int64_t limit = module.limits.bucket_bytes;
  int64_t total = 0;
  for (PieceId id : pieces) {
    total += AlignStaging(module.WireBytes(module.piece(id)));
  }
  const int64_t count = (total + limit - 1) / limit;
  const int64_t even = total / count;
  return std::min(limit, AlignStaging(even + even / kWasteDivisor * 2));
}

PackedPieces PackPieces(const std::vector<PieceId>& pieces, Mechanism mechanism,
                        Module& module) {
  // What is stored directly fills no bucket: it is one message.
  Packer packer(mechanism == Mechanism::kDirect
                    ? std::numeric_limits<int64_t>::max() / 2
                    : EvenBucketBytes(pieces, module));
  for (PieceId id : pieces) {
    const Piece& piece = module.piece(id);
    packer.Add(id, piece.box, DTypeBytes(piece.wire_dtype));
  }
  PackedPieces packed;
  for (Bucket& bucket : packer.Take()) {
    packed.contents.push_back(static_cast<int32_t>(module.contents.size()));
    packed.size_bytes.push_back(bucket.size_bytes);
    module.contents.push_back(std::move(bucket.contents));
  }
  return packed;
}

}  // namespace

absl::Status FormBuckets(const PassOptions&, Module& module) {
  absl::flat_hash_map<std::pair<Mechanism, std::vector<PieceId>>, PackedPieces>
      packed_by_pieces;
  const std::vector<Transfer>& transfers = module.transfers;
  for (size_t begin = 0; begin < transfers.size();) {
    const Rank source = transfers[begin].source;
    const Rank destination = transfers[begin].destination;
    const Route route = module.RouteBetween(source, destination);
    std::pair<Mechanism, std::vector<PieceId>> key = {module.MechanismOf(route),
                                                      {}};
    const Mechanism mechanism = key.first;
    std::vector<PieceId>& pieces = key.second;
    size_t end = begin;
    for (; end < transfers.size() && transfers[end].source == source &&
           transfers[end].destination == destination;
         ++end) {
      pieces.push_back(transfers[end].piece);
    }
    begin = end;
    auto it = packed_by_pieces.find(key);
    if (it == packed_by_pieces.end()) {
      PackedPieces packed = PackPieces(pieces, mechanism, module);
      it = packed_by_pieces.emplace(std::move(key), std::move(packed)).first;
    }
    for (size_t i = 0; i < it->second.contents.size(); ++i) {
      module.messages.push_back({.source = source,
                                 .destination = destination,
                                 .route = route,
                                 .mechanism = mechanism,
                                 .contents = it->second.contents[i],
                                 .size_bytes = it->second.size_bytes[i]});
    }
  }
  return absl::OkStatus();
}

}  // namespace refit
