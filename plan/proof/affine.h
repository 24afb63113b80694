// The arithmetic of the proof: sequences of indices and strided sets, held as
// digits of a mixed radix, so that nothing ever visits single elements.
//
// All values are nonnegative and below 2^63; the loader (plan/plan_file.h) saw
// to that.
#ifndef REFIT_PLAN_PROOF_AFFINE_H_
#define REFIT_PLAN_PROOF_AFFINE_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"

namespace refit::proof {

// One loop: `extent` values, `stride` apart.
struct Digit {
  int64_t extent = 1;
  int64_t stride = 0;

  friend bool operator==(const Digit&, const Digit&) = default;
};
using Digits = absl::InlinedVector<Digit, 6>;

// The sequence of the values base + sum(k_i * stride_i), the k_i running
// row-major over [0, extent_i), the last digit fastest.
//
// In canonical form no extent is 1 and no digit continues its inner neighbour
// (stride == inner extent * inner stride). Then the innermost extent is the
// length of the longest arithmetic progression at the start, and so on
// outwards: two canonical sequences are equal exactly when their values are.
struct Sequence {
  int64_t base = 0;
  Digits digits;

  friend bool operator==(const Sequence&, const Sequence&) = default;
};

// Brings `sequence` to canonical form; its values do not change.
void Canonicalize(Sequence& sequence);

int64_t CountOf(const Sequence& sequence);

// Value number `position`, which must be below the count.
int64_t ValueAt(const Sequence& sequence, int64_t position);

// Values [begin, begin + count) as canonical sequences, to be read one after
// the other. At most two per digit and one.
std::vector<Sequence> Slice(const Sequence& sequence, int64_t begin,
                            int64_t count);

// The first k in [0, count) for which value a_begin + k of `a` is not value
// b_begin + k of `b`; nullopt when the ranges are equal. Both canonical.
std::optional<int64_t> FirstDifference(const Sequence& a, int64_t a_begin,
                                       const Sequence& b, int64_t b_begin,
                                       int64_t count);

// The set of the values offset + sum(k_i * stride_i). The digits are sorted by
// stride, largest first, and nested: stride_i > sum over j > i of
// (extent_j - 1) * stride_j. So every value has exactly one set of k_i, and the
// k_i are the coordinates of the value. No extent is 1.
struct Lattice {
  int64_t offset = 0;
  Digits digits;
  // digits[i] came from dimension `dimensions[i]` of the caller.
  absl::InlinedVector<uint8_t, 6> dimensions;

  int64_t Volume() const;
  int64_t Last() const;  // the largest value
  // The value where digit d is coordinates[d].
  int64_t At(absl::Span<const int64_t> coordinates) const;
};

// nullopt when the digits do not nest.
std::optional<Lattice> MakeLattice(int64_t offset,
                                   absl::Span<const Digit> digits);

// Half-open ranges of coordinates.
struct Box {
  absl::InlinedVector<int64_t, 6> lo;
  absl::InlinedVector<int64_t, 6> hi;
};

// A sequence seen in the coordinates of a lattice: it starts at `start` and
// each of its digits, outermost first, moves along one dimension.
struct Placement {
  struct Move {
    uint8_t dimension = 0;
    int64_t extent = 1;
    int64_t stride = 0;  // in the dimension's coordinate
  };
  absl::InlinedVector<int64_t, 6> start;
  absl::InlinedVector<Move, 8> moves;

  // The least box that holds all coordinates.
  Box Hull() const;
  // Whether each element of the hull is visited exactly once.
  bool FillsHull() const;
};

// Places the sequence offset + sum(k_i * digits_i) in `lattice`. A digit that
// runs over several dimensions is split where their strides chain exactly.
// False when a value is not in the lattice, or when the moves are not affine
// in its coordinates. `placement` is overwritten.
bool Place(const Lattice& lattice, int64_t offset,
           absl::Span<const Digit> digits, Placement& placement);

enum class Intersection : uint8_t { kEmpty, kShared, kUnknown };

// Whether two lattices share a value. kUnknown when the search grows too large.
Intersection Intersect(const Lattice& a, const Lattice& b);

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_AFFINE_H_
