// The links between the ranks of a plan, and which of them a message crosses.
#ifndef REFIT_SIMULATOR_LINKS_H_
#define REFIT_SIMULATOR_LINKS_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "plan/plan_file.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// The GPU of a rank, by the lowest rank that uses it.
uint32_t GpuOf(const PlanFile& plan, int32_t rank);

// What is wrong with the options for this plan.
absl::Status CheckOptions(const PlanFile& plan, const Options& options);

// Links are numbered in the order in which messages first cross them.
class Links {
 public:
  // Requires that CheckOptions finds nothing wrong. Both outlive this.
  Links(const PlanFile& plan, const Options& options);

  // Adds the message's bytes to the links that it crosses.
  LinkList Cross(fb::Route route, int32_t source, int32_t destination,
                 uint64_t size_bytes);

  // How many times slower the rank is.
  double Slowness(int32_t rank) const { return gpu(rank).slowness; }

  std::vector<Link> Take() { return std::move(links_); }

 private:
  // Of ranks that share it, if they do.
  struct Gpu {
    uint32_t host = 0;
    double slowness = 1;
    double nic_slowness = 1;
    bool nic_is_dead = false;
  };

  const Gpu& gpu(int32_t rank) const { return gpus_[GpuOf(plan_, rank)]; }
  // The GPU whose NIC the rank uses.
  uint32_t NicOf(int32_t rank) const;
  uint32_t Find(LinkKind kind, uint32_t owner);
  double SpeedOf(LinkKind kind, uint32_t owner) const;

  const PlanFile& plan_;
  const Options& options_;
  std::vector<Gpu> gpus_;
  absl::flat_hash_map<uint32_t, uint32_t> gpus_of_host_;  // how many
  std::vector<Link> links_;
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;  // by kind and owner
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_LINKS_H_
