// The brute-force oracle: every element of every tensor of every rank, written
// down one by one. It knows jobs as the tests draw them and nothing of the
// compiler.
#ifndef REFIT_TESTS_PROPERTY_ORACLE_H_
#define REFIT_TESTS_PROPERTY_ORACLE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "tests/property/chain.h"

namespace refit {

// A parameter as the checkpoint names it.
struct LogicalTensor {
  std::string name;
  std::vector<int64_t> shape;
  std::string dtype;
};

// What an element of a rank's tensor is: an element of a logical tensor.
struct Cell {
  int32_t tensor = 0;
  int64_t element = 0;  // row-major
};

// A tensor of one rank.
struct PhysicalTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<Cell> cells;  // row-major
};

// By rank of the side.
using PhysicalSide = std::vector<std::vector<PhysicalTensor>>;

int64_t Product(const std::vector<int64_t>& extents);

// Fills the tensors of `chain`: sources with values of `seed`, destinations
// with what these must become. Elements of a logical tensor marked in
// `excluded` (by position) are not touched.
void FillTensors(uint64_t seed, const PhysicalSide& source,
                 const PhysicalSide& destination,
                 const std::vector<bool>& excluded, ChainCase& chain);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_ORACLE_H_
