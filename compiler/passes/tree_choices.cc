#include "compiler/passes/tree_choices.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "compiler/module_sites.h"
#include "simulator/links.h"

namespace refit {

NetworkLinks::NetworkLinks(const Module& module) {
  using simulator::LinkKind;
  const simulator::Options options = LinkOptionsOf(module);
  const simulator::Links links(SitesOf(module), options);
  const int32_t ranks = module.world_size();
  bytes_per_second_.resize(2 * static_cast<size_t>(ranks));
  for (int32_t rank = 0; rank < ranks; ++rank) {
    nics_.push_back(links.place(rank).nic);
    const double nic = links.BytesPerSecond(LinkKind::kNetworkEgress, rank);
    bytes_per_second_[nics_.back()] = nic;
    bytes_per_second_[static_cast<size_t>(ranks) + nics_.back()] = nic;
  }
  source_nics_.resize(static_cast<size_t>(module.parts()));
  for (int32_t rank = 0; rank < module.source_ranks(); ++rank) {
    const auto part = static_cast<size_t>(module.PartOf(Rank{rank}));
    source_nics_[part].insert(EgressOf(Rank{rank}));
  }
  if (!module.topology.HasNarrowLeaves()) return;
  std::map<uint32_t, std::set<int32_t>> parts_of;  // by leaf
  for (int32_t rank = 0; rank < ranks; ++rank) {
    parts_of[links.place(rank).leaf].insert(module.PartOf(Rank{rank}));
  }
  std::map<uint32_t, size_t> uplinks;  // by leaf
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const uint32_t leaf = links.place(rank).leaf;
    const auto [found, is_new] =
        uplinks.emplace(leaf, bytes_per_second_.size());
    leaves_.push_back(found->second);
    if (!is_new) continue;
    const double way = links.BytesPerSecond(LinkKind::kLeafUplink, rank) /
                       static_cast<double>(parts_of[leaf].size());
    bytes_per_second_.insert(bytes_per_second_.end(), {way, way});
  }
}

TreeChoices::TreeChoices(const NetworkLinks& links, const FlowsOfPart& of,
                         bool near_send)
    : links_(links),
      source_nics_(links.SourceNics(of.part)),
      near_send_(near_send),
      sent_(links.size(), 0),
      once_(sent_),
      by_link_(sent_.size()) {
  for (Flows::value_type* const of_key : of.flows) {
    for (auto& [holders, share] : of_key->second) {
      Add({.key = &of_key->first, .holders = &holders, .share = &share});
    }
  }
  for (size_t link = 0; link < once_.size(); ++link) {
    if (links.IsEgress(link)) continue;
    longest_once_ = std::max(longest_once_, once_[link]);
  }
  is_chosen_.resize(choices_.size(), false);
}

void TreeChoices::Add(const TreeChoice& choice) {
  const std::vector<Members>& hosts = choice.key->hosts;
  const auto bytes = static_cast<double>(choice.share->bytes);
  const auto count = static_cast<double>(hosts.size());
  const auto holders = static_cast<double>(choice.holders->size());
  std::map<size_t, double> saved;
  // `fed`: if holders feed every host; `passed_on`: if hosts pass it on.
  const auto cross = [&](size_t link, double fed, double passed_on) {
    const double speed = links_.bytes_per_second(link);
    sent_[link] += fed / speed;
    once_[link] += passed_on / speed;
    if (fed > passed_on) saved[link] += (fed - passed_on) / speed;
  };
  // Receivers on the sources' host send as much as the sources then.
  const double senders =
      holders + (near_send_ ? static_cast<double>(choice.key->near.size()) : 0);
  for (const Rank holder : *choice.holders) {
    cross(links_.EgressOf(holder), bytes * count / holders, bytes / senders);
  }
  for (const Members& members : hosts) {
    for (const Rank member : members) {
      const double part = bytes / static_cast<double>(members.size());
      cross(links_.IngressOf(member), part, part);
    }
  }
  if (links_.has_leaves()) {
    std::map<size_t, double> holders_of, hosts_of;  // by uplink
    for (const Rank holder : *choice.holders) {
      ++holders_of[links_.UplinkOf(holder)];
    }
    for (const Members& members : hosts) {
      ++hosts_of[links_.UplinkOf(members.front())];
    }
    for (const auto& [uplink, of_leaf] : holders_of) {
      const auto inside = hosts_of.find(uplink);
      const double outside =
          count - (inside == hosts_of.end() ? 0 : inside->second);
      const double part = bytes * of_leaf / holders;
      if (outside > 0) cross(uplink, part * outside, part);
    }
    for (const auto& [uplink, of_leaf] : hosts_of) {
      const auto inside = holders_of.find(uplink);
      const double outside =
          holders - (inside == holders_of.end() ? 0 : inside->second);
      const double part = bytes * outside / holders;
      if (outside > 0)
        cross(NetworkLinks::DownlinkOf(uplink), part * of_leaf, part);
    }
  }
  if (saved.empty()) return;
  for (const auto& [link, seconds] : saved) {
    by_link_[link].push_back({.choice = choices_.size(), .seconds = seconds});
  }
  choices_.push_back(choice);
  saved_.emplace_back(saved.begin(), saved.end());
}

double TreeChoices::Longest() const {
  return *std::max_element(sent_.begin(), sent_.end());
}

double TreeChoices::LongestArriving() const {
  double longest = 0;
  for (size_t link = 0; link < sent_.size(); ++link) {
    if (links_.IsIngress(link)) longest = std::max(longest, sent_[link]);
  }
  return longest;
}

size_t TreeChoices::Busiest() const {
  size_t busiest = 0;
  for (size_t link = 0; links_.IsEgress(link); ++link) {
    if (sent_[link] > sent_[busiest]) busiest = link;
  }
  return busiest;
}

double TreeChoices::MeanSent() const {
  double sum = 0;
  for (size_t link = 0; links_.IsEgress(link); ++link) sum += sent_[link];
  return sum / static_cast<double>(source_nics_);
}

// Not if the link would be further below the target than it is above.
bool TreeChoices::MaySave(size_t link, const Saving& saving,
                          double target) const {
  return !is_chosen_[saving.choice] &&
         sent_[link] - saving.seconds / 2 >= target;
}

void TreeChoices::Take(size_t choice, std::vector<TreeChoice>& chosen) {
  chosen.push_back(choices_[choice]);
  is_chosen_[choice] = true;
  for (const auto& [link, seconds] : saved_[choice]) sent_[link] -= seconds;
}

std::vector<TreeChoice> TreeChoices::Choose(double target) {
  std::vector<TreeChoice> chosen;
  for (size_t link = 0; link < sent_.size(); ++link) {
    std::vector<Saving>& of_link = by_link_[link];
    std::stable_sort(
        of_link.begin(), of_link.end(),
        [](const Saving& a, const Saving& b) { return a.seconds > b.seconds; });
    for (const Saving& saving : of_link) {
      if (MaySave(link, saving, target) ||
          (!is_chosen_[saving.choice] && sent_[link] > target * kGainOfTrees)) {
        Take(saving.choice, chosen);
      }
    }
  }
  return chosen;
}

std::vector<TreeChoice> TreeChoices::ChooseSpread(double target) {
  const auto enters_by_one = [&](const Saving& saving) {
    const std::vector<Members>& hosts = choices_[saving.choice].key->hosts;
    return std::all_of(hosts.begin(), hosts.end(), [](const Members& members) {
      return members.size() == 1;
    });
  };
  std::vector<TreeChoice> chosen;
  std::map<const FlowKey*, int64_t> passed_on;
  for (bool any = true; any;) {
    any = false;
    for (size_t link = 0; links_.IsEgress(link); ++link) {
      const Saving* best = nullptr;
      for (const Saving& saving : by_link_[link]) {
        if (!enters_by_one(saving) || !MaySave(link, saving, target)) continue;
        if (best == nullptr || passed_on[choices_[saving.choice].key] <
                                   passed_on[choices_[best->choice].key]) {
          best = &saving;
        }
      }
      if (best == nullptr) continue;
      any = true;
      const TreeChoice& choice = choices_[best->choice];
      passed_on[choice.key] += choice.share->bytes;
      Take(best->choice, chosen);
    }
  }
  return chosen;
}

}  // namespace refit
