// The whole product on one machine: a job's text in, the bytes of every
// destination rank out.
#ifndef REFIT_TESTS_PROPERTY_CHAIN_H_
#define REFIT_TESTS_PROPERTY_CHAIN_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "compiler/ir/module.h"

namespace refit {

// What stands in a destination before the refit, and after it wherever nothing
// is written.
inline constexpr std::byte kUntouchedByte{0xA5};

// A tensor of one rank with its content.
struct TensorBytes {
  std::string name;
  std::string dtype;  // as jobs name it
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
};

struct ChainCase {
  std::string job;
  std::function<void(Limits&)> change_limits = {};     // see CompileOptions
  std::vector<std::vector<TensorBytes>> sources;       // by source rank
  std::vector<std::vector<TensorBytes>> destinations;  // as they must become
};

// Reads, compiles (twice: the bytes must be equal), proves and opens the job's
// plan, runs all its ranks and compares every destination byte. Returns "" or
// what went wrong; `facts` are of the plan.
struct ChainFacts {
  uint64_t features = 0;
  // A rank passes on to another host what it only holds in staging.
  bool holds_between_hosts = false;
};
std::string RunChain(const ChainCase& chain);
std::string RunChain(const ChainCase& chain, ChainFacts& facts);

// Reads, compiles and proves the job alone.
std::string CompileChain(const std::string& job);

// Compiles and proves the job, and simulates its plan. The time, over the
// compiler's lower bound; or what went wrong, and 0.
struct TimeOverBound {
  double ratio = 0;
  double bound_seconds = 0;
  uint64_t features = 0;  // that the plan requires
  std::string error;
};
TimeOverBound SimulateChain(const std::string& job);

// Bytes of an element of a dtype that jobs name.
int64_t ElementBytes(const std::string& dtype);

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_CHAIN_H_
