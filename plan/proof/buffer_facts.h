// What a buffer says of its elements, ready to be asked by the proof.
//
// This is where the proof meets the layout that the file declares: fragments
// and regions become lattices, are shown disjoint, and (of a destination) shown
// to leave no element out.
#ifndef REFIT_PLAN_PROOF_BUFFER_FACTS_H_
#define REFIT_PLAN_PROOF_BUFFER_FACTS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/proof/affine.h"
#include "plan/proof/proof.h"
#include "plan/proof/steps.h"

namespace refit::proof {

// A fragment, or a region: a lattice of buffer offsets with a meaning.
struct Part {
  Lattice lattice;
  const fb::Fragment* fragment = nullptr;  // or
  const fb::Region* region = nullptr;
  // Of a fragment: the param's flat index of the lattice's first element, and
  // how far an index along lattice digit i moves it.
  int64_t param_base = 0;
  absl::InlinedVector<int64_t, 6> param_strides;

  bool IsFill() const {
    return region != nullptr && region->kind() == fb::RegionKind::kFill;
  }
};

// A wrong of the buffer's own, whoever uses it.
struct BufferFlaw {
  Invariant invariant = Invariant::kWellFormedInputs;
  int64_t offset = -1;
  std::string text;
};

class BufferFacts {
 public:
  // `steps` must outlive it. Where they are used up, flaws are overlooked.
  BufferFacts(const fb::Body& body, const fb::Buffer& buffer, Steps& steps);

  const std::vector<Part>& parts() const { return parts_; }
  // Null for a number of none, -1.
  const Part* part(int32_t number) const {
    return number < 0 ? nullptr : &parts_[static_cast<size_t>(number)];
  }
  int64_t elements() const { return elements_; }
  // Those of skip regions, and of params that are declared as skipped.
  int64_t skipped_elements() const { return skipped_elements_; }

  // Invariant 6: every part is a lattice, no two of them share an element.
  const std::optional<BufferFlaw>& flaw() const { return flaw_; }
  // Invariant 1, of destinations: the parts leave no element out.
  const std::optional<BufferFlaw>& gap() const { return gap_; }

  // All that decides where a copy lies in the buffer, and what elements it has
  // there counted from its part's first: the lattices of the parts and what
  // they hold, but for Part::param_base. Ranks that hold other shards of the
  // same params are often equal in it.
  std::vector<int64_t> Geometry() const;

  // The part that holds all elements of the sequence offset + digits, with its
  // place there; -1 when there is none, or when the steps are used up. Requires
  // no flaw.
  int32_t Find(int64_t offset, absl::Span<const Digit> digits,
               Placement& placement) const;
  // The part that holds one element; -1 when there is none.
  int32_t Find(int64_t offset) const;

  // The param's flat indices that a placement in fragment `part` stands for,
  // in canonical form.
  Sequence ParamSequence(const Part& part, const Placement& placement) const;

 private:
  // Null, and flaw_ set, when the digits are no lattice.
  Part* AddPart(std::string_view kind, int64_t offset,
                absl::Span<const Digit> digits);
  void AddParts(const fb::Body& body, const fb::Buffer& buffer);
  void SortForFind();

  Steps* steps_;
  int64_t elements_ = 0;
  int64_t skipped_elements_ = 0;
  int64_t tensor_elements_ = 0;
  std::vector<Part> parts_;
  std::optional<BufferFlaw> flaw_;
  std::optional<BufferFlaw> gap_;

  // Parts by where they begin inside a tensor of the stack; `reach` is the
  // last element inside a tensor that this part or one before it touches.
  struct Span {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t reach = 0;
    int32_t part = 0;
  };
  std::vector<Span> spans_;
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_BUFFER_FACTS_H_
