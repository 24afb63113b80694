// The links between the ranks of a plan, and which of them a message crosses.
#ifndef REFIT_SIMULATOR_LINKS_H_
#define REFIT_SIMULATOR_LINKS_H_

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "plan/plan_file.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// Where ranks are, and what joins them.
struct Sites {
  std::vector<uint32_t> hosts;  // by rank
  int32_t source_ranks = 0;
  bool colocated = false;  // a destination rank uses the GPU of a source rank
  uint32_t hosts_per_domain = 1;  // of NVLink
  uint32_t gpus_per_nic = 1;
  uint32_t hosts_per_leaf = 0;  // 0: all
  bool rails = false;
  double spine_oversubscription = 1;

  // Whether the NICs of a host are on one leaf of several, or on some.
  bool HasLeaves() const { return rails || hosts_per_leaf > 0; }
};
Sites SitesOf(const PlanFile& plan);

// What is wrong with the options for this plan.
absl::Status CheckOptions(const PlanFile& plan, const Options& options);

// Where a rank is: numbers of what it shares with others.
struct Place {
  uint32_t gpu = 0;
  uint32_t nic = 0;  // that it uses, by the lowest GPU of it
  uint32_t host = 0;
  uint32_t domain = 0;  // that NVLink joins
  // That its NIC is on; kNone where the way between leaves has no limit.
  uint32_t leaf = kNone;
  // How many times slower it is.
  double slowness = 1;
};

// Links are numbered in the order in which messages first cross them.
class Links {
 public:
  // Requires that all ranks of the options are there.
  Links(Sites sites, Options options);

  // What is wrong with the dead NICs.
  absl::Status CheckNics() const;

  const Place& place(int32_t rank) const {
    return places_[static_cast<size_t>(rank)];
  }
  // Of the link of this kind that the rank uses.
  double BytesPerSecond(LinkKind kind, int32_t rank) const {
    return SpeedOf(kind, OwnerOf(kind, rank));
  }
  // Of the links of each kind that it may use.
  std::vector<double> SpeedsOf(int32_t rank) const;

  // Adds the message's bytes to the links that it crosses.
  LinkList Cross(fb::Route route, int32_t source, int32_t destination,
                 uint64_t size_bytes);

  absl::Span<const Link> all() const { return links_; }
  uint32_t size() const { return static_cast<uint32_t>(links_.size()); }
  const Link& operator[](uint32_t link) const { return links_[link]; }
  // The link of `rank` that is to it what `link` is to the rank that crossed it
  // first, which CrossedBy names.
  Link LikeThatOf(uint32_t link, int32_t rank) const;
  int32_t CrossedBy(uint32_t link) const { return ranks_[link]; }

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

  void AddNics();
  void AddWhatIfs();
  void AddPlaces();
  int32_t ranks() const { return static_cast<int32_t>(sites_.hosts.size()); }
  // By the lowest rank that uses it.
  uint32_t GpuOf(int32_t rank) const;
  const Gpu& gpu(int32_t rank) const { return gpus_[GpuOf(rank)]; }
  // The NIC that the GPU uses.
  const Nic& NicOf(const Gpu& gpu) const;
  // The leaf of the NIC; kNone where the way between leaves has no limit.
  uint32_t LeafOf(const Nic& nic) const;
  uint32_t OwnerOf(LinkKind kind, int32_t rank) const;
  uint32_t NamedOwnerOf(LinkKind kind, uint32_t owner) const;
  uint32_t Find(LinkKind kind, int32_t rank);
  double SpeedOf(LinkKind kind, uint32_t owner) const;
  double UplinkSpeed(LinkKind kind, uint32_t owner) const;

  const Sites sites_;
  const Options options_;
  std::vector<Gpu> gpus_;
  std::vector<Nic> nics_;
  std::map<uint32_t, uint32_t> nics_of_host_;  // how many
  uint32_t most_nics_ = 0;                     // of a host
  std::vector<Place> places_;                  // by rank
  std::vector<Link> links_;
  std::vector<int32_t> ranks_;  // by link: who crossed it first
  absl::flat_hash_map<uint64_t, uint32_t> numbers_;  // by kind and owner
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_LINKS_H_
