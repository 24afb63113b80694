#include "simulator/links.h"

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"

namespace refit::simulator {
namespace {

uint32_t HostOf(const PlanFile& plan, int32_t rank) {
  return plan.body().programs()->Get(static_cast<uint32_t>(rank))->host();
}

absl::Status CheckRank(const PlanFile& plan, const char* flag, int32_t rank) {
  if (rank >= 0 && rank < plan.world_size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " names rank ", rank,
                                                 "; this plan has ranks 0..",
                                                 plan.world_size() - 1));
}

}  // namespace

const char* LinkKindText(LinkKind kind) {
  switch (kind) {
    case LinkKind::kLocal:
      return "copies";
    case LinkKind::kPeerEgress:
      return "peer egress";
    case LinkKind::kPeerIngress:
      return "peer ingress";
    case LinkKind::kNetworkEgress:
      return "network egress";
    case LinkKind::kNetworkIngress:
      return "network ingress";
    case LinkKind::kSlowEgress:
      return "slow network egress";
    case LinkKind::kSlowIngress:
      return "slow network ingress";
    case LinkKind::kHostUplink:
    case LinkKind::kLeafUplink:
      return "uplink";
    case LinkKind::kHostDownlink:
    case LinkKind::kLeafDownlink:
      return "downlink";
  }
  return "unknown";
}

bool IsOfSwitch(LinkKind kind) {
  switch (kind) {
    case LinkKind::kHostUplink:
    case LinkKind::kHostDownlink:
    case LinkKind::kLeafUplink:
    case LinkKind::kLeafDownlink:
      return true;
    default:
      return false;
  }
}

std::string LinkOwnerText(const Link& link) {
  const bool of_leaf = link.kind == LinkKind::kLeafUplink ||
                       link.kind == LinkKind::kLeafDownlink;
  return absl::StrCat(of_leaf                 ? "leaf "
                      : IsOfSwitch(link.kind) ? "host "
                                              : "rank ",
                      link.owner);
}

std::string LinkText(const Link& link) {
  return absl::StrCat(LinkKindText(link.kind), " of ", LinkOwnerText(link));
}

void UseSpeedsOf(const PlanFile& plan, Options& options) {
  const fb::Topology* const topology = plan.body().topology();
  if (topology == nullptr) return;
  options.peer_bytes_per_second = topology->peer_bytes_per_second();
  options.network_bytes_per_second = topology->network_bytes_per_second();
  options.has_plan_speeds = true;
}

uint32_t GpuOf(const PlanFile& plan, int32_t rank) {
  const int32_t sources = plan.source_ranks();
  const bool shares = plan.body().colocated() && rank >= sources;
  return static_cast<uint32_t>(shares ? rank - sources : rank);
}

absl::Status CheckOptions(const PlanFile& plan, const Options& options) {
  absl::Status status;
  for (const auto& [rank, factor] : options.slow_ranks) {
    status.Update(CheckRank(plan, "--slow-rank", rank));
  }
  for (const auto& [rank, factor] : options.slow_nics) {
    status.Update(CheckRank(plan, "--slow-nic", rank));
  }
  for (const int32_t rank : options.dead_nics) {
    status.Update(CheckRank(plan, "--dead-nic", rank));
  }
  if (!status.ok()) return status;
  return Links(plan, options).CheckNics();
}

Links::Links(const PlanFile& plan, const Options& options)
    : plan_(plan), options_(options), topology_(plan.body().topology()) {
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const uint32_t number = GpuOf(plan, rank);
    if (number >= gpus_.size()) gpus_.resize(number + 1);
    gpus_[number].host = HostOf(plan, rank);
  }
  AddNics();
  AddWhatIfs();
}

void Links::AddNics() {
  const uint32_t gpus_per_nic =
      topology_ == nullptr ? 1 : topology_->gpus_per_nic();
  std::map<uint32_t, std::vector<uint32_t>> gpus_by_host;
  for (uint32_t i = 0; i < gpus_.size(); ++i) {
    gpus_by_host[gpus_[i].host].push_back(i);
  }
  for (const auto& [host, gpus] : gpus_by_host) {
    for (uint32_t i = 0; i < gpus.size(); ++i) {
      if (i % gpus_per_nic == 0) {
        nics_.push_back({.host = host,
                         .position = nics_of_host_[host]++,
                         .owner = gpus[i]});
      }
      gpus_[gpus[i]].nic = static_cast<uint32_t>(nics_.size() - 1);
    }
    most_nics_ = std::max(most_nics_, nics_of_host_[host]);
  }
}

void Links::AddWhatIfs() {
  const auto slow = [](double& slowness, double factor) {
    slowness = std::max(slowness, factor);
  };
  for (const auto& [rank, factor] : options_.slow_ranks) {
    slow(gpus_[GpuOf(plan_, rank)].slowness, factor);
  }
  for (const auto& [rank, factor] : options_.slow_nics) {
    slow(nics_[gpu(rank).nic].slowness, factor);
  }
  for (const int32_t rank : options_.dead_nics) {
    nics_[gpu(rank).nic].is_dead = true;
  }
}

absl::Status Links::CheckNics() const {
  for (const int32_t rank : options_.dead_nics) {
    if (!NicOf(rank).is_dead) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--dead-nic names rank ", rank, "; its host ",
                     gpu(rank).host, " has no other NIC for its messages"));
  }
  return absl::OkStatus();
}

bool Links::ShareDomain(int32_t a, int32_t b) const {
  if (topology_ == nullptr) return gpu(a).host == gpu(b).host;
  const uint32_t hosts = topology_->hosts_per_nvlink_domain();
  return gpu(a).host / hosts == gpu(b).host / hosts;
}

// The next of the host, in a circle, if its own is dead.
const Links::Nic& Links::NicOf(int32_t rank) const {
  const Nic& own = nics_[gpu(rank).nic];
  const uint32_t first = gpu(rank).nic - own.position;
  const uint32_t count = nics_of_host_.at(own.host);
  for (uint32_t i = 0; i < count; ++i) {
    const Nic& nic = nics_[first + (own.position + i) % count];
    if (!nic.is_dead) return nic;
  }
  return own;
}

std::optional<uint32_t> Links::LeafOf(const Nic& nic) const {
  const bool says_leaves =
      topology_ != nullptr &&
      (topology_->rails() || topology_->hosts_per_leaf() > 0);
  if (!says_leaves) {
    if (!options_.oversubscription.has_value()) return std::nullopt;
    return nic.host;
  }
  if (!options_.oversubscription.has_value() &&
      topology_->spine_oversubscription() == 1) {
    return std::nullopt;
  }
  const uint32_t hosts = topology_->hosts_per_leaf();
  const uint32_t group = hosts == 0 ? 0 : nic.host / hosts;
  return topology_->rails() ? group * most_nics_ + nic.position : group;
}

double Links::SpeedOf(LinkKind kind, uint32_t owner) const {
  switch (kind) {
    case LinkKind::kLocal:
      return options_.local_bytes_per_second / gpus_[owner].slowness;
    case LinkKind::kPeerEgress:
    case LinkKind::kPeerIngress:
      return options_.peer_bytes_per_second / gpus_[owner].slowness;
    case LinkKind::kNetworkEgress:
    case LinkKind::kNetworkIngress:
      return options_.network_bytes_per_second /
             nics_[gpus_[owner].nic].slowness;
    case LinkKind::kSlowEgress:
    case LinkKind::kSlowIngress:
      return options_.network_bytes_per_second /
             (gpus_[owner].slowness * nics_[gpus_[owner].nic].slowness);
    default:
      return UplinkSpeed(kind, owner);
  }
}

// Of the switch: slow NICs do not make it slower, and hosts of the leaf that
// the plan has no ranks on have a part of it.
double Links::UplinkSpeed(LinkKind kind, uint32_t owner) const {
  double nics = 0;
  if (kind == LinkKind::kHostUplink || kind == LinkKind::kHostDownlink) {
    nics = nics_of_host_.at(owner);
  } else {
    const auto hosts = topology_->hosts_per_leaf() == 0
                           ? static_cast<uint32_t>(nics_of_host_.size())
                           : topology_->hosts_per_leaf();
    nics = hosts * (topology_->rails() ? 1.0 : most_nics_);
  }
  const double oversubscription = options_.oversubscription.value_or(
      topology_ == nullptr ? 1 : topology_->spine_oversubscription());
  return nics * options_.network_bytes_per_second / oversubscription;
}

uint32_t Links::Find(LinkKind kind, uint32_t owner) {
  const uint64_t key = static_cast<uint64_t>(kind) << 32 | owner;
  const auto [found, inserted] =
      numbers_.try_emplace(key, static_cast<uint32_t>(links_.size()));
  if (inserted) {
    links_.push_back({.kind = kind,
                      .owner = owner,
                      .bytes_per_second = SpeedOf(kind, owner)});
  }
  return found->second;
}

LinkList Links::Cross(fb::Route route, int32_t source, int32_t destination,
                      uint64_t size_bytes) {
  LinkList crossed;
  if (route == fb::Route::kLocal) {
    crossed.push_back(Find(LinkKind::kLocal, GpuOf(plan_, source)));
  } else if (route == fb::Route::kNetwork &&
             !ShareDomain(source, destination)) {
    const Nic& from = NicOf(source);
    const Nic& to = NicOf(destination);
    const std::optional<uint32_t> leaf = LeafOf(from);
    const std::optional<uint32_t> other = LeafOf(to);
    const bool of_host =
        topology_ == nullptr ||
        (!topology_->rails() && topology_->hosts_per_leaf() == 0);
    // A slow rank does not slow the others that use its NIC.
    const auto add_slow = [&](LinkKind kind, int32_t rank) {
      if (gpu(rank).slowness > 1) {
        crossed.push_back(Find(kind, GpuOf(plan_, rank)));
      }
    };
    add_slow(LinkKind::kSlowEgress, source);
    crossed.push_back(Find(LinkKind::kNetworkEgress, from.owner));
    if (leaf != other) {
      crossed.push_back(
          Find(of_host ? LinkKind::kHostUplink : LinkKind::kLeafUplink, *leaf));
      crossed.push_back(Find(
          of_host ? LinkKind::kHostDownlink : LinkKind::kLeafDownlink, *other));
    }
    crossed.push_back(Find(LinkKind::kNetworkIngress, to.owner));
    add_slow(LinkKind::kSlowIngress, destination);
  } else {
    crossed.push_back(Find(LinkKind::kPeerEgress, GpuOf(plan_, source)));
    crossed.push_back(Find(LinkKind::kPeerIngress, GpuOf(plan_, destination)));
  }
  for (const uint32_t link : crossed) links_[link].bytes += size_bytes;
  return crossed;
}

}  // namespace refit::simulator
