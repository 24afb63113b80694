// A module of one param that ranks of several hosts want: for the tests of
// flows.
#ifndef REFIT_TESTS_COMPILER_FLOWS_TESTING_H_
#define REFIT_TESTS_COMPILER_FLOWS_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "compiler/passes/passes.h"

namespace refit {

inline constexpr int64_t kRows = 1 << 20;
inline constexpr int64_t kColumns = 1024;
inline constexpr int64_t kBytes = kRows * kColumns * 2;

struct FlowShape {
  int32_t sources = 1;  // of host 0, in equal blocks of rows
  int32_t near = 0;     // destinations of host 0
  int32_t hosts = 2;    // others
  int32_t members = 1;  // of each of them
  // Every second destination of a host wants the first half of the columns
  // alone, the others the second.
  bool halves = false;
};

inline Module ModuleOf(const FlowShape& shape) {
  Module module;
  module.limits = {.bucket_bytes = int64_t{256} << 20,
                   .staging_bytes = int64_t{1} << 30,
                   .relays = true,
                   .shape = {}};
  module.topology.peer_bytes_per_second = 370e9;
  module.topology.network_bytes_per_second = 50e9;
  module.topology.host.assign(static_cast<size_t>(shape.sources + shape.near),
                              0);
  for (int32_t host = 1; host <= shape.hosts; ++host) {
    module.topology.host.insert(module.topology.host.end(),
                                static_cast<size_t>(shape.members), host);
  }
  module.source.ranks.resize(static_cast<size_t>(shape.sources));
  module.destination.ranks.resize(
      static_cast<size_t>(shape.near + shape.hosts * shape.members));
  module.params.push_back({.name = "w",
                           .index = {},
                           .shape = {kRows, kColumns},
                           .dtype = DType::kBf16});
  const int64_t parts = shape.halves ? 2 : 1;
  for (int64_t part = 0; part < parts; ++part) {
    std::vector<Rank> destinations;
    for (int32_t rank = shape.sources; rank < module.world_size(); ++rank) {
      if (rank % parts == part) destinations.push_back(Rank{rank});
    }
    for (int32_t source = 0; source < shape.sources; ++source) {
      const Box box = {
          .lo = {kRows * source / shape.sources, kColumns * part / parts},
          .hi = {kRows * (source + 1) / shape.sources,
                 kColumns * (part + 1) / parts}};
      module.pieces.push_back({.param = ParamId{0},
                               .box = box,
                               .destination_box = box,
                               .sources = {Rank{source}},
                               .sources_of_other_waves = {},
                               .destinations = destinations,
                               .relays = {},
                               .wire_dtype = DType::kBf16,
                               .destination_dtype = DType::kBf16});
    }
  }
  return module;
}

inline void RouteModule(Module& module) {
  const Job job;
  const Model model;
  Diagnostics diagnostics;
  EXPECT_TRUE(
      RouteFlows({.job = job, .model = model, .diagnostics = diagnostics},
                 module)
          .ok());
}

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_FLOWS_TESTING_H_
