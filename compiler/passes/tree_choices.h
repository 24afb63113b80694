// Which flows hosts pass on to each other, by what links between hosts carry.
#ifndef REFIT_COMPILER_PASSES_TREE_CHOICES_H_
#define REFIT_COMPILER_PASSES_TREE_CHOICES_H_

#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "compiler/ir/module.h"
#include "compiler/passes/flows.h"

namespace refit {

// Trees take rounds until all have begun, and sources that feed every host do
// not: these may send more than ranks receive, by this factor.
inline constexpr double kGainOfTrees = 1.25;

// The links between hosts: NICs, which ranks may share, and the ways of leaf
// switches to the others, where these are narrower than their NICs. Parts of a
// folded job have an equal share of a leaf's way.
class NetworkLinks {
 public:
  explicit NetworkLinks(const Module& module);

  // Sends, or receives, for these ranks.
  size_t EgressOf(Rank rank) const { return nics_[IndexOf(rank)]; }
  size_t IngressOf(Rank rank) const { return nics_.size() + EgressOf(rank); }
  bool has_leaves() const { return !leaves_.empty(); }
  size_t UplinkOf(Rank rank) const { return leaves_[IndexOf(rank)]; }
  // Of the same leaf.
  static size_t DownlinkOf(size_t uplink) { return uplink + 1; }

  size_t size() const { return bytes_per_second_.size(); }
  // How many NICs the sources of a part of the job have.
  size_t SourceNics(int32_t part) const {
    return source_nics_[static_cast<size_t>(part)].size();
  }
  bool IsEgress(size_t link) const { return link < nics_.size(); }
  // By which bytes arrive at ranks, or in leaves.
  bool IsIngress(size_t link) const {
    const size_t leaves = 2 * nics_.size();
    return link >= leaves ? (link - leaves) % 2 == 1 : !IsEgress(link);
  }
  double bytes_per_second(size_t link) const { return bytes_per_second_[link]; }

 private:
  std::vector<std::set<size_t>> source_nics_;  // by part
  std::vector<size_t> nics_;                   // by rank
  std::vector<size_t> leaves_;  // by rank: the uplink; the downlink follows it
  std::vector<double> bytes_per_second_;  // by link
};

// A share that hosts may pass on to each other.
struct TreeChoice {
  const FlowKey* key = nullptr;
  const Holders* holders = nullptr;
  Share* share = nullptr;
};

// Flows that share links at a time: those of one wave and one part of the job.
struct FlowsOfPart {
  int32_t part = 0;
  std::vector<Flows::value_type*> flows;
  bool in_chain = false;  // what goes along trees does, of any number of hosts
};

// How long links are busy with them, if holders feed every host but for the
// shares that are chosen.
class TreeChoices {
 public:
  // Links and flows outlive this. `near_send`: what is chosen is sent by
  // receivers on the sources' host, too.
  TreeChoices(const NetworkLinks& links, const FlowsOfPart& of, bool near_send);

  // Of the links by which bytes arrive, if each byte crosses them once.
  double LongestOnce() const { return longest_once_; }
  // If it crosses them for each host.
  double LongestArriving() const;
  double Longest() const;
  // Of NICs that send.
  double LongestSent() const { return sent_[Busiest()]; }
  double MeanSent() const;  // of sources
  // The NIC that sends longest.
  size_t Busiest() const;

  // Those by which no link is busy for longer than `target`, or as little
  // longer as there are any: of each link those that save most first.
  std::vector<TreeChoice> Choose(double target);
  // The same for NICs that send and shares that one rank of each host wants,
  // spread over the flows: NICs take turns, so that each leaves others
  // receivers that pass on little.
  std::vector<TreeChoice> ChooseSpread(double target);

 private:
  struct Saving {
    size_t choice = 0;
    double seconds = 0;
  };

  void Add(const TreeChoice& choice);
  bool MaySave(size_t link, const Saving& saving, double target) const;
  void Take(size_t choice, std::vector<TreeChoice>& chosen);

  const NetworkLinks& links_;
  const size_t source_nics_;
  const bool near_send_;
  std::vector<double> sent_;  // seconds, by link
  double longest_once_ = 0;
  std::vector<double> once_;  // by link
  std::vector<TreeChoice> choices_;
  // What a choice saves, by link of it.
  std::vector<std::vector<std::pair<size_t, double>>> saved_;
  std::vector<std::vector<Saving>> by_link_;
  std::vector<bool> is_chosen_;
};

}  // namespace refit

#endif  // REFIT_COMPILER_PASSES_TREE_CHOICES_H_
