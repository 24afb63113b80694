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
    case LinkKind::kHostUplink:
      return "uplink";
    case LinkKind::kHostDownlink:
      return "downlink";
  }
  return "unknown";
}

bool IsOfHost(LinkKind kind) {
  return kind == LinkKind::kHostUplink || kind == LinkKind::kHostDownlink;
}

std::string LinkText(const Link& link) {
  return absl::StrCat(LinkKindText(link.kind),
                      IsOfHost(link.kind) ? " of host " : " of rank ",
                      link.owner);
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
  std::set<uint32_t> dead;
  for (const int32_t rank : options.dead_nics) dead.insert(GpuOf(plan, rank));
  std::set<uint32_t> hosts;  // with a NIC that works
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    if (!dead.contains(GpuOf(plan, rank))) hosts.insert(HostOf(plan, rank));
  }
  for (const int32_t rank : options.dead_nics) {
    if (hosts.contains(HostOf(plan, rank))) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--dead-nic names rank ", rank, "; its host ",
                     HostOf(plan, rank), " has no other NIC for its messages"));
  }
  return absl::OkStatus();
}

Links::Links(const PlanFile& plan, const Options& options)
    : plan_(plan), options_(options) {
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    const uint32_t number = GpuOf(plan, rank);
    if (number >= gpus_.size()) gpus_.resize(number + 1);
    gpus_[number].host = HostOf(plan, rank);
  }
  for (const Gpu& gpu : gpus_) ++gpus_of_host_[gpu.host];
  const auto slow = [&](int32_t rank, double Gpu::*slowness, double factor) {
    double& of_gpu = gpus_[GpuOf(plan, rank)].*slowness;
    of_gpu = std::max(of_gpu, factor);
  };
  for (const auto& [rank, factor] : options.slow_ranks) {
    slow(rank, &Gpu::slowness, factor);
  }
  for (const auto& [rank, factor] : options.slow_nics) {
    slow(rank, &Gpu::nic_slowness, factor);
  }
  for (const int32_t rank : options.dead_nics) {
    gpus_[GpuOf(plan, rank)].nic_is_dead = true;
  }
}

// That of the next GPU of the host, in a circle, if its own is dead.
uint32_t Links::NicOf(int32_t rank) const {
  const uint32_t own = GpuOf(plan_, rank);
  uint32_t nic = own;
  while (gpus_[nic].nic_is_dead || gpus_[nic].host != gpus_[own].host) {
    nic = (nic + 1) % static_cast<uint32_t>(gpus_.size());
    if (nic == own) break;
  }
  return nic;
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
             (gpus_[owner].slowness * gpus_[owner].nic_slowness);
    case LinkKind::kHostUplink:
    case LinkKind::kHostDownlink:
      break;
  }
  // Of the switch: slow NICs do not make it slower.
  return gpus_of_host_.at(owner) * options_.network_bytes_per_second /
         *options_.oversubscription;
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
  switch (route) {
    case fb::Route::kLocal:
      crossed.push_back(Find(LinkKind::kLocal, GpuOf(plan_, source)));
      break;
    case fb::Route::kNetwork:
      crossed.push_back(Find(LinkKind::kNetworkEgress, NicOf(source)));
      if (options_.oversubscription.has_value()) {
        crossed.push_back(Find(LinkKind::kHostUplink, gpu(source).host));
        crossed.push_back(Find(LinkKind::kHostDownlink, gpu(destination).host));
      }
      crossed.push_back(Find(LinkKind::kNetworkIngress, NicOf(destination)));
      break;
    default:
      crossed.push_back(Find(LinkKind::kPeerEgress, GpuOf(plan_, source)));
      crossed.push_back(
          Find(LinkKind::kPeerIngress, GpuOf(plan_, destination)));
  }
  for (const uint32_t link : crossed) links_[link].bytes += size_bytes;
  return crossed;
}

}  // namespace refit::simulator
