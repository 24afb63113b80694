#include "compiler/passes/routed_pieces.h"

#include <algorithm>
#include <cassert>
#include <numeric>
#include <utility>

#include "compiler/passes/packer.h"
#include "plan/plan_file.h"

namespace refit {

Piece& RoutedPieces::Add(PieceId id, const Box& box, Rank root,
                         std::vector<Relay> relays,
                         absl::Span<const Rank> sources) {
  return AddPart(id, box, {&root, 1}, std::move(relays), sources);
}

void RoutedPieces::AddBroadcast(PieceId id, const Box& box,
                                absl::Span<const Rank> roots,
                                std::vector<Relay> relays,
                                absl::Span<const Rank> sources) {
  AddPart(id, box, roots, std::move(relays), sources).broadcasts = true;
  broadcasts_ = true;
  // One root passes on what it is sent.
  if (roots.size() == 1) {
    held_rounds_ = std::max(held_rounds_, kHeldRoundsOfBroadcast);
  }
}

Piece& RoutedPieces::AddPart(PieceId id, const Box& box,
                             absl::Span<const Rank> roots,
                             std::vector<Relay> relays,
                             absl::Span<const Rank> sources) {
  const Piece& whole = module_.piece(id);
  Piece& part = parts_[IndexOf(id)].emplace_back(whole);
  part.box = box;
  part.root_keeps = std::binary_search(whole.destinations.begin(),
                                       whole.destinations.end(), roots.front());
  // A new list each, since parts are many, and the old one has room for all
  // receivers.
  part.destinations = std::vector<Rank>(roots.begin(), roots.end());
  part.relays = std::move(relays);
  part.is_routed = true;
  if (!sources.empty()) {
    part.sources = std::vector<Rank>(sources.begin(), sources.end());
  }
  ++count_;
  routes_ = true;
  return part;
}

void RoutedPieces::AddRelayed(PieceId id, const Box& box, Rank first,
                              std::vector<Relay> relays) {
  Feed(id, {&first, 1});
  for (const Relay& relay : relays) Feed(id, {&relay.receiver, 1});
  Piece& part = parts_[IndexOf(id)].emplace_back(module_.piece(id));
  part.box = box;
  part.destinations = std::vector<Rank>{first};
  part.relays = std::move(relays);
  ++count_;
}

void RoutedPieces::Cut(
    absl::Span<const PieceId> pieces, std::vector<int64_t> ranges,
    const std::function<void(const Packed&, size_t range)>& add) const {
  const int64_t bytes =
      std::accumulate(ranges.begin(), ranges.end(), int64_t{0});
  const int64_t waste_bytes = bytes / std::ssize(ranges) / Packer::kUnevenPart;
  // Where a range ends may differ by that, so smaller ones get nothing.
  std::vector<size_t> numbers;
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i] <= waste_bytes) continue;
    numbers.push_back(i);
    sizes.push_back(AlignStaging(ranges[i]));
  }
  assert(!sizes.empty());
  Packer packer(std::move(sizes), waste_bytes, pieces.size());
  for (const PieceId id : pieces) {
    const Piece& piece = module_.piece(id);
    packer.Add(id, piece.box, DTypeBytes(piece.wire_dtype));
  }
  const std::vector<Bucket> buckets = packer.Take();
  for (size_t i = 0; i < buckets.size(); ++i) {
    for (const Packed& packed : buckets[i].contents) {
      add(packed, numbers[std::min(i, numbers.size() - 1)]);
    }
  }
}

void RoutedPieces::Finish() {
  std::vector<Piece> pieces;
  pieces.reserve(module_.pieces.size() + count_);
  for (size_t i = 0; i < parts_.size(); ++i) {
    Piece& piece = module_.pieces[i];
    std::vector<Rank>& fed = fed_[i];
    std::sort(fed.begin(), fed.end());
    std::erase_if(piece.destinations, [&](Rank receiver) {
      return std::binary_search(fed.begin(), fed.end(), receiver);
    });
    if (!piece.destinations.empty()) pieces.push_back(std::move(piece));
    for (Piece& part : parts_[i]) pieces.push_back(std::move(part));
  }
  module_.pieces = std::move(pieces);
}

}  // namespace refit
