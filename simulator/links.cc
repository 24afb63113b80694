#include "simulator/links.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/str_cat.h"

namespace refit::simulator {
namespace {

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

Sites SitesOf(const PlanFile& plan) {
  Sites sites = {.hosts = {},
                 .source_ranks = plan.source_ranks(),
                 .colocated = plan.body().colocated()};
  for (const fb::RankProgram* program : *plan.body().programs()) {
    sites.hosts.push_back(program->host());
  }
  if (const fb::Topology* const topology = plan.body().topology()) {
    sites.hosts_per_domain = topology->hosts_per_nvlink_domain();
    sites.gpus_per_nic = topology->gpus_per_nic();
    sites.hosts_per_leaf = topology->hosts_per_leaf();
    sites.rails = topology->rails();
    sites.spine_oversubscription = topology->spine_oversubscription();
  }
  return sites;
}

uint32_t BindingLink(absl::Span<const Link> links) {
  const auto key = [&](uint32_t link) {
    return std::tuple(-links[link].BusySeconds(), links[link].kind,
                      links[link].owner);
  };
  uint32_t binding = kNone;
  for (uint32_t link = 0; link < links.size(); ++link) {
    if (links[link].bytes == 0) continue;
    if (binding == kNone || key(link) < key(binding)) binding = link;
  }
  return binding;
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
  return Links(SitesOf(plan), options).CheckNics();
}

uint32_t Links::GpuOf(int32_t rank) const {
  const bool shares = sites_.colocated && rank >= sites_.source_ranks;
  return static_cast<uint32_t>(shares ? rank - sites_.source_ranks : rank);
}

Links::Links(Sites sites, Options options)
    : sites_(std::move(sites)), options_(std::move(options)) {
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    const uint32_t number = GpuOf(rank);
    if (number >= gpus_.size()) gpus_.resize(number + 1);
    gpus_[number].host = sites_.hosts[static_cast<size_t>(rank)];
  }
  AddNics();
  AddWhatIfs();
  AddPlaces();
}

void Links::AddNics() {
  std::map<uint32_t, std::vector<uint32_t>> gpus_by_host;
  for (uint32_t i = 0; i < gpus_.size(); ++i) {
    gpus_by_host[gpus_[i].host].push_back(i);
  }
  for (const auto& [host, gpus] : gpus_by_host) {
    for (uint32_t i = 0; i < gpus.size(); ++i) {
      if (i % sites_.gpus_per_nic == 0) {
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
    slow(gpus_[GpuOf(rank)].slowness, factor);
  }
  for (const auto& [rank, factor] : options_.slow_nics) {
    slow(nics_[gpu(rank).nic].slowness, factor);
  }
  for (const int32_t rank : options_.dead_nics) {
    nics_[gpu(rank).nic].is_dead = true;
  }
}

void Links::AddPlaces() {
  for (int32_t rank = 0; rank < ranks(); ++rank) {
    const Gpu& of = gpu(rank);
    const Nic& nic = NicOf(of);
    places_.push_back({.gpu = GpuOf(rank),
                       .nic = nic.owner,
                       .host = of.host,
                       .domain = of.host / sites_.hosts_per_domain,
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
      (sites_.HasLeaves() && sites_.spine_oversubscription != 1);
  if (!is_limited) return kNone;
  if (!sites_.HasLeaves()) return nic.host;
  const uint32_t hosts = sites_.hosts_per_leaf;
  const uint32_t group = hosts == 0 ? 0 : nic.host / hosts;
  return sites_.rails ? group * most_nics_ + nic.position : group;
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
    const auto hosts = sites_.hosts_per_leaf == 0
                           ? static_cast<uint32_t>(nics_of_host_.size())
                           : sites_.hosts_per_leaf;
    nics = hosts * (sites_.rails ? 1.0 : most_nics_);
  }
  const double oversubscription =
      options_.oversubscription.value_or(sites_.spine_oversubscription);
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
    kinds.push_back(sites_.HasLeaves() ? LinkKind::kLeafUplink
                                       : LinkKind::kHostUplink);
  }
  std::vector<double> speeds;
  for (const LinkKind kind : kinds) {
    speeds.push_back(SpeedOf(kind, OwnerOf(kind, rank)));
  }
  return speeds;
}

// By the rank that uses it so: on a shared GPU the destination rank receives.
uint32_t Links::NamedOwnerOf(LinkKind kind, uint32_t owner) const {
  const bool receives = kind == LinkKind::kPeerIngress ||
                        kind == LinkKind::kNetworkIngress ||
                        kind == LinkKind::kSlowIngress;
  if (!sites_.colocated || !receives) return owner;
  const uint32_t receiver = owner + static_cast<uint32_t>(sites_.source_ranks);
  return receiver < sites_.hosts.size() ? receiver : owner;
}

uint32_t Links::Find(LinkKind kind, int32_t rank) {
  const uint32_t owner = OwnerOf(kind, rank);
  const uint64_t key = static_cast<uint64_t>(kind) << 32 | owner;
  const auto [found, inserted] = numbers_.try_emplace(key, size());
  if (inserted) {
    links_.push_back({.kind = kind,
                      .owner = NamedOwnerOf(kind, owner),
                      .bytes_per_second = SpeedOf(kind, owner)});
    ranks_.push_back(rank);
  }
  return found->second;
}

Link Links::LikeThatOf(uint32_t link, int32_t rank) const {
  Link like = links_[link];
  like.owner = NamedOwnerOf(like.kind, OwnerOf(like.kind, rank));
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
      const bool leaves = sites_.HasLeaves();
      cross(leaves ? LinkKind::kLeafUplink : LinkKind::kHostUplink, source);
      cross(leaves ? LinkKind::kLeafDownlink : LinkKind::kHostDownlink,
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
