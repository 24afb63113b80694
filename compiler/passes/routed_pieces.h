// The parts of pieces that some ranks receive for others.
#ifndef REFIT_COMPILER_PASSES_ROUTED_PIECES_H_
#define REFIT_COMPILER_PASSES_ROUTED_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/types/span.h"
#include "compiler/ir/module.h"

namespace refit {

// Not thread-safe.
class RoutedPieces {
 public:
  // `module` must outlive it.
  explicit RoutedPieces(Module& module)
      : module_(module),
        parts_(module.pieces.size()),
        fed_(module.pieces.size()) {}

  // `box` of a piece goes to `root` and from there along `relays`, which ends
  // with this call. Without `sources`: from any that holds the piece. What it
  // returns may be changed until the next call.
  Piece& Add(PieceId id, const Box& box, Rank root, std::vector<Relay> relays,
             absl::Span<const Rank> sources = {});

  // The same along a tree that leads from host to host.
  void AddTree(PieceId id, const Box& box, Rank root,
               std::vector<Relay> relays) {
    Add(id, box, root, std::move(relays));
    held_rounds_ = kHeldRounds;
  }

  // The same, but each rank that sends to several of other hosts broadcasts:
  // a source to all of `roots`, or one root along its first `relays`.
  void AddBroadcast(PieceId id, const Box& box, absl::Span<const Rank> roots,
                    std::vector<Relay> relays,
                    absl::Span<const Rank> sources = {});

  // `box` of a piece goes to `first`, which passes it on along `relays`.
  void AddRelayed(PieceId id, const Box& box, Rank first,
                  std::vector<Relay> relays);

  // Cuts pieces into ranges of so many bytes, in their order. `add` gets each
  // box, and the number of its range: the last one has what rounding leaves
  // over, too.
  void Cut(absl::Span<const PieceId> pieces, std::vector<int64_t> ranges,
           const std::function<void(const Packed&, size_t range)>& add) const;

  // Parts of the piece feed these receivers.
  void Feed(PieceId id, absl::Span<const Rank> receivers) {
    std::vector<Rank>& fed = fed_[IndexOf(id)];
    fed.insert(fed.end(), receivers.begin(), receivers.end());
  }

  bool empty() const { return count_ == 0; }
  bool routes() const { return routes_; }  // anything but AddRelayed
  int32_t held_rounds() const { return held_rounds_; }  // Stats::held_rounds
  bool broadcasts() const { return broadcasts_; }

  // Puts the parts into the module, instead of what they feed.
  void Finish();

 private:
  Piece& AddPart(PieceId id, const Box& box, absl::Span<const Rank> roots,
                 std::vector<Relay> relays, absl::Span<const Rank> sources);

  Module& module_;
  std::vector<std::vector<Piece>> parts_;  // by piece
  std::vector<std::vector<Rank>> fed_;     // by piece
  size_t count_ = 0;
  bool routes_ = false;
  int32_t held_rounds_ = 0;
  bool broadcasts_ = false;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_ROUTED_PIECES_H_
