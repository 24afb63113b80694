// Builds small plans by hand, so that the executor's tests need no compiler.
#ifndef REFIT_TESTS_EXECUTOR_PLAN_BUILDER_H_
#define REFIT_TESTS_EXECUTOR_PLAN_BUILDER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "plan/dtype.h"
#include "plan/plan_file.h"

namespace refit {

// Mirrors of the schema's tables, with the fields that the tests set.
struct PlanBuilder {
  struct Param {
    std::string name = {};
    std::vector<uint32_t> index = {};  // counts; numbers start at 0
    std::vector<uint64_t> shape = {};
    DType dtype = DType::kBf16;
    fb::SkipReason skip = fb::SkipReason::kUnspecified;
  };
  struct Fragment {
    uint32_t param = 0;
    std::vector<uint64_t> lo = {};
    std::vector<uint64_t> extent = {};
    uint64_t offset = 0;
    std::vector<uint64_t> stride = {};
  };
  struct Region {
    fb::RegionKind kind = fb::RegionKind::kFill;
    uint64_t offset = 0;
    std::vector<uint64_t> extent = {};
    std::vector<uint64_t> stride = {};
  };
  struct Buffer {
    std::string name = {};
    std::vector<uint32_t> index = {};
    std::vector<uint64_t> shape = {};
    DType dtype = DType::kBf16;
    std::vector<Fragment> fragments = {};
    std::vector<Region> regions = {};
    std::vector<std::string> post_hooks = {};  // by name
  };
  struct Copy {
    uint32_t slot = 0;
    uint64_t offset = 0;
    std::vector<fb::Loop> loops = {};
    DType wire_dtype = DType::kBf16;
    uint64_t staging_offset = 0;
  };
  struct Message {
    uint32_t round = 0;
    fb::MessageKind kind = fb::MessageKind::kSend;
    uint32_t peer = 0;
    uint64_t staging_offset = 0;
    uint64_t size_bytes = 0;
    std::vector<Copy> copies = {};
  };
  struct Rank {
    std::vector<uint32_t> buffers = {};
    std::vector<Message> messages = {};
    std::vector<Copy> fills = {};
    uint64_t staging_bytes = 0;
    // Positions among the messages as the plan sorts them; empty: not said.
    std::vector<fb::Relay> relays = {};
  };

  uint32_t source_ranks = 1;
  uint32_t rounds = 1;
  // By round; staged where absent.
  bool direct_pulls = false;
  std::vector<fb::Mechanism> mechanisms;
  fb::Route route = fb::Route::kPeer;
  fb::DeltaChanges delta = fb::DeltaChanges::kUnspecified;  // no deltas
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Rank> ranks;

  std::vector<uint8_t> Bytes() const;
  // Requires that the plan is sound.
  PlanFile Open() const;
};

// A stack of `layers` matrices [rows, columns], cut by rows over the source
// ranks and by columns over the destination ranks, whose buffers hold
// `padding` more columns each. A message carries one layer of one pair of
// ranks; a round carries one layer.
struct ReshardOptions {
  uint32_t source_ranks = 2;
  uint32_t destination_ranks = 2;
  uint32_t layers = 2;
  uint64_t rows = 8;
  uint64_t columns = 8;
  uint64_t padding = 0;
  DType source_dtype = DType::kBf16;
  DType destination_dtype = DType::kBf16;
  fb::RegionKind padding_kind = fb::RegionKind::kFill;
  fb::Mechanism mechanism = fb::Mechanism::kStaged;
  fb::Route route = fb::Route::kPeer;
};

PlanBuilder ReshardPlan(const ReshardOptions& options);

// One source rank feeds `replicas` that hold all it holds, a stack of `layers`
// matrices. In the direct round of a layer each replica is given a stripe of
// rows; in the next, it relays that to the others.
struct RelayOptions {
  uint32_t replicas = 3;
  uint32_t layers = 4;
  uint64_t rows_per_stripe = 2;
  uint64_t columns = 8;
};

PlanBuilder RelayPlan(const RelayOptions& options);

}  // namespace refit

#endif  // REFIT_TESTS_EXECUTOR_PLAN_BUILDER_H_
