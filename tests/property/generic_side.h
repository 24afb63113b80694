// Generic sides as the tests draw them, their text in a job, and what they
// mean, element by element.
#ifndef REFIT_TESTS_PROPERTY_GENERIC_SIDE_H_
#define REFIT_TESTS_PROPERTY_GENERIC_SIDE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tests/property/draw.h"
#include "tests/property/oracle.h"

namespace refit {

struct GenericPlacement {
  enum class Kind : uint8_t { kReplicate, kShard, kStridedShard };
  Kind kind = Kind::kReplicate;
  int64_t dim = 0;
  int64_t split_factor = 1;
};

struct GenericMesh {
  std::string name;
  std::vector<int64_t> sizes;  // axis 0 slowest
  std::vector<int64_t> ranks;  // row-major over the axes
};

struct GenericRule {
  std::string match;  // '*' is its only wildcard
  size_t mesh = 0;
  std::vector<GenericPlacement> placements;
  std::string rename;  // "": none
  std::string dtype;   // "": none
};

struct GenericSide {
  std::vector<GenericMesh> meshes;
  std::vector<GenericRule> rules;
  std::string dtype;  // "": the model's
};

// The side as an object of the job.
std::string SideText(const GenericSide& side);

// Tensors that no rule matches are on no rank.
PhysicalSide LayOutSide(const GenericSide& side,
                        const std::vector<LogicalTensor>& tensors);

// A side of at most `ranks_max` ranks that places all of `tensors`. Keeps all
// dtypes.
GenericSide DrawGenericSide(Draw& draw,
                            const std::vector<LogicalTensor>& tensors,
                            int64_t ranks_max);

// The name with its numbers between dots replaced by '*'.
std::string StarPattern(const std::string& name);

// Whether `pattern` matches all of `name`.
bool StarMatches(const std::string& pattern, const std::string& name);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_GENERIC_SIDE_H_
