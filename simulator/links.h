// The links between the ranks of a plan, and which of them a message crosses.
#ifndef REFIT_SIMULATOR_LINKS_H_
#define REFIT_SIMULATOR_LINKS_H_

#include <cstdint>
#include <map>
#include <optional>
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
  // Requires that all ranks of the options are there. Both outlive this.
  Links(const PlanFile& plan, const Options& options);

  // What is wrong with the dead NICs.
  absl::Status CheckNics() const;

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
    uint32_t nic = 0;  // in nics_
    double slowness = 1;
  };
  // In the order of hosts, and in each host in that of GPUs.
  struct Nic {
    uint32_t host = 0;
    uint32_t position = 0;  // in its host
    uint32_t owner = 0;     // the first of its GPUs
    double slowness = 1;
    bool is_dead = false;
  };

  const Gpu& gpu(int32_t rank) const { return gpus_[GpuOf(plan_, rank)]; }
  void AddNics();
  void AddWhatIfs();
  // Whether NVLink joins the hosts of both.
  bool ShareDomain(int32_t a, int32_t b) const;
  // The NIC that the rank uses.
  const Nic& NicOf(int32_t rank) const;
  // The leaf of the NIC; nothing where all are on one.
  std::optional<uint32_t> LeafOf(const Nic& nic) const;
  uint32_t Find(LinkKind kind, uint32_t owner);
  double SpeedOf(LinkKind kind, uint32_t owner) const;
  double UplinkSpeed(LinkKind kind, uint32_t owner) const;

  const PlanFile& plan_;
  const Options& options_;
  const fb::Topology* const topology_;  // nullptr: the plan does not say
  std::vector<Gpu> gpus_;
  std::vector<Nic> nics_;
  std::map<uint32_t, uint32_t> nics_of_host_;  // how many
  uint32_t most_nics_ = 0;                     // of a host
  std::vector<Link> links_;
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;  // by kind and owner
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_LINKS_H_
