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
    : plan_(plan),
      options_(options),
      topology_(plan.body().topology()),
      has_leaves_(topology_ != nullptr &&
                  (topology_->rails() || topology_->hosts_per_leaf() > 0)) {
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const uint32_t number = GpuOf(plan, rank);
    if (number >= gpus_.size()) gpus_.resize(number + 1);
    gpus_[number].host = HostOf(plan, rank);
  }
  AddNics();
  AddWhatIfs();
  AddPlaces();
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

void Links::AddPlaces() {
  const uint32_t hosts_per_domain =
      topology_ == nullptr ? 1 : topology_->hosts_per_nvlink_domain();
  for (int32_t rank = 0; rank < plan_.world_size(); ++rank) {
    const Gpu& of = gpu(rank);
    const Nic& nic = NicOf(of);
    places_.push_back({.gpu = GpuOf(plan_, rank),
                       .nic = nic.owner,
                       .host = of.host,
                       .domain = of.host / hosts_per_domain,
                       .leaf = LeafOf(nic),
                       .slowness = of.slowness});
  }
}

absl::Status Links::CheckNics() const {
  for (const int32_t rank : options_.dead_nics) {
    if (!NicOf(gpu(rank)).is_dead) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--dead-nic names rank ", rank, "; its host ",
                     gpu(rank).host, " has no other NIC for its messages"));
  }
  return absl::OkStatus();
}

// The next of the host, in a circle, if its own is dead.
const Links::Nic& Links::NicOf(const Gpu& gpu) const {
  const Nic& own = nics_[gpu.nic];
  const uint32_t first = gpu.nic - own.position;
  const uint32_t count = nics_of_host_.at(own.host);
  for (uint32_t i = 0; i < count; ++i) {
    const Nic& nic = nics_[first + (own.position + i) % count];
    if (!nic.is_dead) return nic;
  }
  return own;
}

uint32_t Links::LeafOf(const Nic& nic) const {
  const bool is_limited =
      options_.oversubscription.has_value() ||
      (has_leaves_ && topology_->spine_oversubscription() != 1);
  if (!is_limited) return kNone;
  if (!has_leaves_) return nic.host;
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

uint32_t Links::OwnerOf(LinkKind kind, int32_t rank) const {
  const Place& at = place(rank);
  if (IsOfSwitch(kind)) return at.leaf;
  const bool is_of_nic =
      kind == LinkKind::kNetworkEgress || kind == LinkKind::kNetworkIngress;
  return is_of_nic ? at.nic : at.gpu;
}

std::vector<double> Links::SpeedsOf(int32_t rank) const {
  std::vector<LinkKind> kinds = {LinkKind::kLocal, LinkKind::kPeerEgress,
                                 LinkKind::kNetworkEgress,
                                 LinkKind::kSlowEgress};
  if (place(rank).leaf != kNone) {
    kinds.push_back(has_leaves_ ? LinkKind::kLeafUplink
                                : LinkKind::kHostUplink);
  }
  std::vector<double> speeds;
  for (const LinkKind kind : kinds) {
    speeds.push_back(SpeedOf(kind, OwnerOf(kind, rank)));
  }
  return speeds;
}

uint32_t Links::Find(LinkKind kind, int32_t rank) {
  const uint32_t owner = OwnerOf(kind, rank);
  const uint64_t key = static_cast<uint64_t>(kind) << 32 | owner;
  const auto [found, inserted] = numbers_.try_emplace(key, size());
  if (inserted) {
    links_.push_back({.kind = kind,
                      .owner = owner,
                      .bytes_per_second = SpeedOf(kind, owner)});
    ranks_.push_back(rank);
  }
  return found->second;
}

Link Links::LikeThatOf(uint32_t link, int32_t rank) const {
  Link like = links_[link];
  like.owner = OwnerOf(like.kind, rank);
  return like;
}

LinkList Links::Cross(fb::Route route, int32_t source, int32_t destination,
                      uint64_t size_bytes) {
  const Place& from = place(source);
  const Place& to = place(destination);
  LinkList crossed;
  const auto cross = [&](LinkKind kind, int32_t rank) {
    const uint32_t link = Find(kind, rank);
    links_[link].bytes += size_bytes;
    crossed.push_back(link);
  };
  if (route == fb::Route::kLocal) {
    cross(LinkKind::kLocal, source);
  } else if (route == fb::Route::kNetwork && from.domain != to.domain) {
    // A slow rank does not slow the others that use its NIC.
    if (from.slowness > 1) cross(LinkKind::kSlowEgress, source);
    cross(LinkKind::kNetworkEgress, source);
    if (from.leaf != to.leaf) {
      cross(has_leaves_ ? LinkKind::kLeafUplink : LinkKind::kHostUplink,
            source);
      cross(has_leaves_ ? LinkKind::kLeafDownlink : LinkKind::kHostDownlink,
            destination);
    }
    cross(LinkKind::kNetworkIngress, destination);
    if (to.slowness > 1) cross(LinkKind::kSlowIngress, destination);
  } else {
    cross(LinkKind::kPeerEgress, source);
    cross(LinkKind::kPeerIngress, destination);
  }
  return crossed;
}

}  // namespace refit::simulator
