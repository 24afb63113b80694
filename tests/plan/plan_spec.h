// A plan as plain values, for tests that need one without the compiler.
#ifndef REFIT_TESTS_PLAN_PLAN_SPEC_H_
#define REFIT_TESTS_PLAN_PLAN_SPEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// The tables of schema/plan.fbs, by value.
struct PlanSpec {
  struct IndexDim {
    int32_t first = 0;
    uint32_t count = 0;
    std::vector<int32_t> numbers = {};  // empty: counted from `first`
  };
  struct Param {
    std::string name;
    std::vector<IndexDim> index;
    std::vector<uint64_t> shape;
    fb::DType dtype = fb::DType::kBf16;
    fb::SkipReason skip = fb::SkipReason::kUnspecified;
  };
  struct Fragment {
    uint32_t param = 0;
    std::vector<uint64_t> lo, extent;
    uint64_t offset = 0;
    std::vector<uint64_t> stride;
  };
  struct Region {
    fb::RegionKind kind = fb::RegionKind::kFill;
    fb::SkipReason reason = fb::SkipReason::kUnspecified;
    uint64_t offset = 0;
    std::vector<uint64_t> extent, stride;
    std::string detail;
  };
  struct PostHook {
    std::string name, detail;
  };
  struct Buffer {
    std::string name;
    std::vector<IndexDim> index;
    std::vector<uint64_t> shape;
    fb::DType dtype = fb::DType::kBf16;
    std::vector<Fragment> fragments;
    std::vector<Region> regions;
    std::vector<PostHook> post_hooks = {};
  };
  struct Copy {
    uint32_t slot = 0;
    uint64_t offset = 0;
    std::vector<fb::Loop> loops;
    uint64_t staging_offset = 0;
    fb::DType dtype = fb::DType::kBf16;
  };
  struct Program {
    std::vector<uint32_t> buffers;
    std::vector<fb::Message> messages;
    uint32_t fills = 0;
    uint64_t staging_bytes = 0;
    uint32_t host = 0;
    uint32_t scratch_buffers = 0;
    std::vector<fb::Quantize> quantizes = {};
    std::vector<fb::ScratchWindow> scratch_windows = {};
    uint64_t scratch_arena_bytes = 0;
    std::vector<fb::Relay> relays = {};  // empty: not said
    uint32_t source_shift = 0, destination_shift = 0;
    // The earlier rank whose lists it shares instead of having `buffers`,
    // `messages` and what follows from them.
    std::optional<size_t> shares = std::nullopt;
    // Into `packed_messages`; without `messages`, these are left out.
    int32_t message_list = -1;
  };
  struct Quantization {
    uint32_t of = 0, data = 0, scales = 0;
    uint32_t block_rows = 0, block_columns = 0;
    fb::ScaleFormat format = fb::ScaleFormat::kFp32;
  };
  struct Requirement {
    fb::Side side = fb::Side::kDestination;
    std::string key, value;
  };
  struct Skip {
    std::string name;
    fb::SkipReason reason = fb::SkipReason::kUnspecified;
    std::string detail;
  };
  struct Cast {
    fb::DType from, to;
  };

  uint32_t source_ranks = 0;
  std::vector<Param> params;
  std::vector<Buffer> buffers;
  std::vector<Program> programs;
  std::vector<fb::Route> rounds;
  std::vector<fb::Mechanism> mechanisms;  // by round; staged where absent
  std::vector<std::vector<Copy>> copy_lists;
  // Further lists at the end, each with the copies of one of `copy_lists`.
  std::vector<uint32_t> shared_copy_lists = {};
  std::vector<Skip> skips;
  std::vector<Cast> casts;
  std::vector<Quantization> quantizations = {};
  std::vector<fb::QuantizeLoop> quantize_loops = {};
  std::vector<Requirement> requirements = {};
  struct Delta {
    fb::DeltaChanges changes = fb::DeltaChanges::kSnapshot;
    uint32_t dense_every = 20;
    bool check = true;
    std::vector<uint8_t> rungs = {};
  };
  std::optional<Delta> delta = std::nullopt;
  struct Topology {
    std::string machine = {};
    uint32_t hosts_per_nvlink_domain = 1, gpus_per_nic = 1, hosts_per_leaf = 0;
    bool rails = false;
    double spine_oversubscription = 1;
    double peer_bytes_per_second = 370e9, network_bytes_per_second = 50e9;
  };
  std::optional<Topology> topology = std::nullopt;
  std::optional<fb::PackedMessagesT> packed_messages = std::nullopt;
  uint64_t bucket_bytes = 0;
  uint64_t staging_bytes = 0;
  uint32_t slots = 0;
  uint32_t operations_per_round = 0;
  uint32_t network_peers = 0;
  uint32_t direct_multiprocessors = 0;
  bool direct_pulls = false;
  uint64_t moved_bytes = 0;
  bool colocated = false;
  uint32_t format_version = 0;  // 0: the oldest that has all of the body
  std::string producer;
  std::vector<std::pair<std::string, std::string>> job;  // absent if empty
};

fb::Message SendTo(uint32_t peer, uint32_t round, uint32_t copies,
                   uint64_t staging_offset, uint64_t size_bytes);
fb::Message RecvFrom(uint32_t peer, uint32_t round, uint32_t copies,
                     uint64_t staging_offset, uint64_t size_bytes);

std::vector<uint8_t> BuildPlan(const PlanSpec& spec);
// Fails the test when the loader refuses the plan.
PlanFile OpenSpec(const PlanSpec& spec);

// What programs carry out of an open plan: all but `producer` and stats.
PlanSpec SpecOf(const fb::Body& body);

// Two source ranks hold the halves of a projection (two layers of [4, 8]) and
// a norm each; two destination ranks hold all of it, the projection with a
// fifth row of padding. Rank 0 sends its half to rank 2, then to rank 3, rank
// 1 the other way round; each brings its first receiver the norm. lm_head is
// tied.
PlanSpec SampleSpec();

// Packs the messages of all programs, as the schema says. Requires that their
// offsets and sizes are as packed messages have them.
void PackMessages(PlanSpec& spec);

// SampleSpec twice, on two hosts: ranks 2 and 3 have the programs of 0 and 1,
// and ranks 6 and 7 those of 4 and 5, with all peers two ranks on.
PlanSpec FoldedSpec();

// Rank 0 holds two layers of a bf16 matrix of [3, 6], quantizes them into
// scratch in blocks of 2 x 4, and sends values and scales to rank 1.
PlanSpec QuantizedSpec();

// The same, a layer after the other: each is quantized into windows of the same
// bytes and sent in a round of its own.
PlanSpec WindowedSpec();

// Rank 0 sends the halves of a tensor of 16 elements to rank 1 of another host,
// in rounds 0 and 1. Rank 1 wants the first and deals out the second to rank 2
// of its host, in round 2.
PlanSpec DealtSpec();

}  // namespace refit

#endif  // REFIT_TESTS_PLAN_PLAN_SPEC_H_
