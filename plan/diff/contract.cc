#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "plan/diff/stages.h"
#include "plan/text/plan_view.h"

namespace refit {
namespace {

constexpr DifferenceClass kContract = DifferenceClass::kContract;
// How many fragments of a layout one line shows.
constexpr size_t kFragmentsPerLine = 3;

// How many groups of ranks one line lists.
constexpr size_t kGroupsPerLine = 4;

// A rule and what it says, for one tensor.
using ChangeList = std::vector<std::pair<std::string, std::string>>;

bool SameShape(const flatbuffers::Vector<uint64_t>* a,
               const flatbuffers::Vector<uint64_t>* b) {
  return Length(a) == Length(b) &&
         (Length(a) == 0 || std::equal(a->begin(), a->end(), b->begin()));
}

// Shape and dtype of two params or two buffers.
template <typename Stack>
ChangeList TypeChanges(const Stack& a, const Stack& b) {
  ChangeList changes;
  if (a.dtype() != b.dtype()) {
    changes.emplace_back(
        "DTYPE_CHANGED",
        absl::StrCat(EnumText(a.dtype()), " -> ", EnumText(b.dtype())));
  }
  if (!SameShape(a.shape(), b.shape())) {
    changes.emplace_back(
        "SHAPE_CHANGED",
        absl::StrCat(DimsText(a.shape()), " -> ", DimsText(b.shape())));
  }
  return changes;
}

template <typename Stack>
std::string TypeText(const Stack& stack) {
  return absl::StrCat(EnumText(stack.dtype()), " ", DimsText(stack.shape()));
}

std::string PostHooksText(const fb::Buffer& buffer) {
  std::vector<std::string> hooks;
  for (uint32_t i = 0; i < Length(buffer.post_hooks()); ++i) {
    hooks.push_back(PostHookText(*buffer.post_hooks()->Get(i)));
  }
  return hooks.empty() ? "none" : absl::StrJoin(hooks, ", ");
}

ChangeList BufferChanges(const fb::Buffer& a, const fb::Buffer& b) {
  ChangeList changes = TypeChanges(a, b);
  const std::string hooks_a = PostHooksText(a);
  const std::string hooks_b = PostHooksText(b);
  if (hooks_a != hooks_b) {
    changes.emplace_back("POST_HOOKS_CHANGED",
                         absl::StrCat(hooks_a, " -> ", hooks_b));
  }
  return changes;
}

ChangeList ParamChanges(const fb::Param* a, const fb::Param* b) {
  if (a == nullptr) return {{"PARAM_ADDED", TypeText(*b)}};
  if (b == nullptr) return {{"PARAM_REMOVED", TypeText(*a)}};
  ChangeList changes = TypeChanges(*a, *b);
  const bool a_moved = a->skip() == fb::SkipReason::kUnspecified;
  const bool b_moved = b->skip() == fb::SkipReason::kUnspecified;
  if (a_moved && !b_moved) {
    changes.emplace_back("SKIP_ADDED", EnumText(b->skip()));
  } else if (!a_moved && b_moved) {
    changes.emplace_back("SKIP_REMOVED",
                         absl::StrCat("was ", EnumText(a->skip())));
  } else if (a->skip() != b->skip()) {
    changes.emplace_back(
        "SKIP_CHANGED",
        absl::StrCat(EnumText(a->skip()), " -> ", EnumText(b->skip())));
  }
  return changes;
}

void CompareParams(const PlanFacts& a, const PlanFacts& b, DiffReport& report) {
  // By name: the param of each plan, if it has it.
  std::map<NameId, std::pair<const fb::Param*, const fb::Param*>> params;
  for (uint32_t i = 0; i < a.params().size(); ++i) {
    for (const NameId id : a.params()[i])
      params[id].first = a.body().params()->Get(i);
  }
  for (uint32_t i = 0; i < b.params().size(); ++i) {
    for (const NameId id : b.params()[i])
      params[id].second = b.body().params()->Get(i);
  }
  for (const auto& [id, both] : params) {
    for (const auto& [rule, change] : ParamChanges(both.first, both.second)) {
      report.AddParam(rule, id, change);
    }
  }
}

NamedFacts SkipsOf(const fb::Body& body) {
  NamedFacts skips;
  for (uint32_t i = 0; i < Length(body.skips()); ++i) {
    const fb::Skip& skip = *body.skips()->Get(i);
    std::string reason = EnumText(skip.reason());
    if (skip.detail() != nullptr && skip.detail()->size() > 0) {
      absl::StrAppend(&reason, " ", QuotedText(skip.detail()));
    }
    skips[absl::StrCat("skip ", QuotedText(skip.name()))].insert(reason);
  }
  return skips;
}

void CompareCasts(const fb::Body& a, const fb::Body& b, DiffReport& report) {
  const auto casts_of = [](const fb::Body& body) {
    std::set<std::string> casts;
    for (uint32_t i = 0; i < Length(body.casts()); ++i) {
      const fb::Cast& cast = *body.casts()->Get(i);
      casts.insert(absl::StrCat("cast ", EnumText(cast.from()), " -> ",
                                EnumText(cast.to())));
    }
    return casts;
  };
  const std::set<std::string> casts_a = casts_of(a);
  const std::set<std::string> casts_b = casts_of(b);
  for (const std::string& cast : casts_a) {
    if (casts_b.count(cast) == 0) report.Add(kContract, "CAST_REMOVED", cast);
  }
  for (const std::string& cast : casts_b) {
    if (casts_a.count(cast) == 0) report.Add(kContract, "CAST_ADDED", cast);
  }
}

NamedFacts DeltaOf(const fb::Body& body) {
  if (body.delta() == nullptr) return {};
  return {{"delta", {DeltaText(*body.delta())}}};
}

NamedFacts RequirementsOf(const fb::Body& body) {
  NamedFacts requirements;
  for (uint32_t i = 0; i < Length(body.requirements()); ++i) {
    const fb::Requirement& requirement = *body.requirements()->Get(i);
    requirements[absl::StrCat(EnumText(requirement.side()), " ",
                              requirement.key()->str())]
        .insert(requirement.value()->str());
  }
  return requirements;
}

// Ranks that share a host, or what joins hosts.
using RankGroups = std::set<std::vector<int32_t>>;

// `hosts_per_group`: 0 puts all hosts into one group. Numbers of hosts are only
// labels, unless several make a group.
RankGroups GroupsOf(const fb::Body& body, uint32_t hosts_per_group) {
  std::map<uint32_t, std::vector<int32_t>> by_number;
  for (const auto& [host, ranks] : RanksByHost(body)) {
    std::vector<int32_t>& group =
        by_number[hosts_per_group == 0 ? 0 : host / hosts_per_group];
    group.insert(group.end(), ranks.begin(), ranks.end());
  }
  RankGroups groups;
  for (auto& [number, ranks] : by_number) {
    std::sort(ranks.begin(), ranks.end());
    groups.insert(std::move(ranks));
  }
  return groups;
}

// "hosts: 0..3 -> 0..1 | 2..3", or how many there are. `what` names the groups.
std::string GroupsText(const char* what, const RankGroups& a,
                       const RankGroups& b) {
  const auto text = [](const RankGroups& groups) {
    return absl::StrJoin(
        groups, " | ", [](std::string* out, const std::vector<int32_t>& ranks) {
          out->append(NumberSetText(ranks));
        });
  };
  if (std::max(a.size(), b.size()) <= kGroupsPerLine) {
    return absl::StrCat(what, ": ", text(a), " -> ", text(b));
  }
  return a.size() == b.size()
             ? absl::StrCat(what, ": other ranks share each of ", a.size())
             : absl::StrCat(what, ": ", a.size(), " -> ", b.size());
}

// Which hosts are joined follows from their numbers. Where the number of hosts
// that are joined differs, the topology's own difference says so.
void CompareJoinedHosts(const fb::Body& a, const fb::Body& b,
                        DiffReport& report) {
  if (a.topology() == nullptr || b.topology() == nullptr) return;
  const auto compare = [&](const char* what, uint32_t hosts_a,
                           uint32_t hosts_b) {
    if (hosts_a != hosts_b) return;
    const RankGroups groups_a = GroupsOf(a, hosts_a);
    const RankGroups groups_b = GroupsOf(b, hosts_b);
    if (groups_a == groups_b) return;
    report.Add(DifferenceClass::kSchedule, "TOPOLOGY_CHANGED",
               GroupsText(what, groups_a, groups_b));
  };
  compare("nvlink domains", a.topology()->hosts_per_nvlink_domain(),
          b.topology()->hosts_per_nvlink_domain());
  compare("leaves", a.topology()->hosts_per_leaf(),
          b.topology()->hosts_per_leaf());
}

void CompareRanks(const PlanFile& a, const PlanFile& b, DiffReport& report) {
  const auto add = [&](const char* what, const std::string& from,
                       const std::string& to) {
    if (from != to) {
      report.Add(kContract, "RANKS_CHANGED",
                 absl::StrCat(what, ": ", from, " -> ", to));
    }
  };
  add("source ranks", absl::StrCat(a.source_ranks()),
      absl::StrCat(b.source_ranks()));
  add("destination ranks", absl::StrCat(a.world_size() - a.source_ranks()),
      absl::StrCat(b.world_size() - b.source_ranks()));
  add("colocated", a.body().colocated() ? "yes" : "no",
      b.body().colocated() ? "yes" : "no");
  if (a.world_size() != b.world_size()) return;
  const RankGroups hosts_a = GroupsOf(a.body(), 1);
  const RankGroups hosts_b = GroupsOf(b.body(), 1);
  if (hosts_a != hosts_b) {
    report.Add(kContract, "RANKS_CHANGED",
               GroupsText("hosts", hosts_a, hosts_b));
  } else {
    CompareJoinedHosts(a.body(), b.body(), report);
  }
}

// One tensor of a rank: where its plan describes it.
struct HeldTensor {
  NameId name = 0;
  uint32_t buffer = 0;
  uint32_t ordinal = 0;
  bool is_scratch = false;  // the executor's own: no worker binds it
};

// Those of the rank's worker, which holds no scratch.
std::vector<HeldTensor> TensorsOf(const PlanFacts& facts, int32_t rank) {
  const fb::RankProgram& program =
      *facts.body().programs()->Get(static_cast<uint32_t>(rank));
  const uint32_t bound = Length(program.buffers()) - program.scratch_buffers();
  std::vector<HeldTensor> tensors;
  for (uint32_t slot = 0; slot < Length(program.buffers()); ++slot) {
    const uint32_t buffer = program.buffers()->Get(slot);
    const std::vector<NameId>& names = facts.buffers()[buffer];
    for (uint32_t ordinal = 0; ordinal < names.size(); ++ordinal) {
      tensors.push_back({.name = names[ordinal],
                         .buffer = buffer,
                         .ordinal = ordinal,
                         .is_scratch = slot >= bound});
    }
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const HeldTensor& a, const HeldTensor& b) {
              return std::tie(a.name, a.buffer, a.ordinal) <
                     std::tie(b.name, b.buffer, b.ordinal);
            });
  return tensors;
}

// What a buffer holds, a line for each fragment and region, free of ids.
std::set<std::string> LayoutLines(const fb::Body& body,
                                  const fb::Buffer& buffer) {
  std::set<std::string> lines;
  for (uint32_t i = 0; i < Length(buffer.fragments()); ++i) {
    const fb::Fragment& fragment = *buffer.fragments()->Get(i);
    const fb::Param& param = *body.params()->Get(fragment.param());
    lines.insert(absl::StrCat(QuotedText(param.name()),
                              IndexText(param.index()), " ", BoxText(fragment),
                              " at ", fragment.offset(), " strides ",
                              DimsText(fragment.stride())));
  }
  for (uint32_t i = 0; i < Length(buffer.regions()); ++i) {
    const fb::Region& region = *buffer.regions()->Get(i);
    lines.insert(
        absl::StrCat(EnumText(region.kind()),
                     region.kind() == fb::RegionKind::kSkip
                         ? absl::StrCat(" ", EnumText(region.reason()))
                         : "",
                     " ", DimsText(region.extent()), " at ", region.offset(),
                     " strides ", DimsText(region.stride()),
                     region.detail() == nullptr
                         ? ""
                         : absl::StrCat(" ", QuotedText(region.detail()))));
  }
  return lines;
}

// The lines of `lines` that `others` lacks, the first few.
std::string OwnLines(const std::set<std::string>& lines,
                     const std::set<std::string>& others) {
  std::vector<std::string> own;
  std::set_difference(lines.begin(), lines.end(), others.begin(), others.end(),
                      std::back_inserter(own));
  if (own.empty()) return "nothing else";
  const size_t hidden = own.size() - std::min(own.size(), kFragmentsPerLine);
  own.resize(own.size() - hidden);
  if (hidden > 0) own.push_back(absl::StrCat("and ", hidden, " more"));
  return absl::StrJoin(own, ", ");
}

class BufferComparison {
 public:
  BufferComparison(const PlanFacts& a, const PlanFacts& b, DiffReport& report)
      : a_(a), b_(b), report_(report) {}

  // Returns the names of changed tensors, ascending.
  std::vector<NameId> Compare(int32_t rank);

 private:
  const ChangeList& Changes(uint32_t a, uint32_t b);
  const std::string& LayoutChange(uint32_t a, uint32_t b);

  const PlanFacts& a_;
  const PlanFacts& b_;
  DiffReport& report_;
  // By buffer of each plan: many ranks and tensors share them.
  std::map<std::pair<uint32_t, uint32_t>, ChangeList> changes_;
  std::map<std::pair<uint32_t, uint32_t>, std::string> layout_changes_;
};

const ChangeList& BufferComparison::Changes(uint32_t a, uint32_t b) {
  const auto [entry, is_new] = changes_.try_emplace({a, b});
  if (is_new) {
    entry->second = BufferChanges(*a_.body().buffers()->Get(a),
                                  *b_.body().buffers()->Get(b));
  }
  return entry->second;
}

const std::string& BufferComparison::LayoutChange(uint32_t a, uint32_t b) {
  const auto [entry, is_new] = layout_changes_.try_emplace({a, b});
  if (is_new) {
    const std::set<std::string> lines_a =
        LayoutLines(a_.body(), *a_.body().buffers()->Get(a));
    const std::set<std::string> lines_b =
        LayoutLines(b_.body(), *b_.body().buffers()->Get(b));
    entry->second = absl::StrCat("holds ", OwnLines(lines_a, lines_b), " -> ",
                                 OwnLines(lines_b, lines_a));
  }
  return entry->second;
}

std::vector<NameId> BufferComparison::Compare(int32_t rank) {
  const std::vector<HeldTensor> tensors_a = TensorsOf(a_, rank);
  const std::vector<HeldTensor> tensors_b = TensorsOf(b_, rank);
  std::vector<NameId> changed;
  const auto add = [&](const std::string& rule, NameId name,
                       const std::string& change) {
    report_.AddBuffer(kContract, rule, rank, name, change);
    if (changed.empty() || changed.back() != name) changed.push_back(name);
  };
  auto a = tensors_a.begin();
  auto b = tensors_b.begin();
  while (a != tensors_a.end() || b != tensors_b.end()) {
    if (b == tensors_b.end() || (a != tensors_a.end() && a->name < b->name)) {
      if (!a->is_scratch) {
        add("BUFFER_REMOVED", a->name,
            TypeText(*a_.body().buffers()->Get(a->buffer)));
      }
      ++a;
    } else if (a == tensors_a.end() || b->name < a->name) {
      if (!b->is_scratch) {
        add("BUFFER_ADDED", b->name,
            TypeText(*b_.body().buffers()->Get(b->buffer)));
      }
      ++b;
    } else if (a->is_scratch && b->is_scratch) {
      ++a;
      ++b;
    } else {
      bool same_shape = true;
      for (const auto& [rule, change] : Changes(a->buffer, b->buffer)) {
        same_shape = same_shape && rule != "SHAPE_CHANGED";
        add(rule, a->name, change);
      }
      // With another shape, another layout goes without saying.
      if (same_shape && a_.layouts()[a->buffer][a->ordinal] !=
                            b_.layouts()[b->buffer][b->ordinal]) {
        add("LAYOUT_CHANGED", a->name, LayoutChange(a->buffer, b->buffer));
      }
      if (a->is_scratch != b->is_scratch) {
        const auto text = [](bool is_scratch) {
          return is_scratch ? "scratch" : "bound by the worker";
        };
        add("SCRATCH_CHANGED", a->name,
            absl::StrCat(text(a->is_scratch), " -> ", text(b->is_scratch)));
      }
      ++a;
      ++b;
    }
  }
  return changed;
}

// What the ranks of a side hold under one name, each once.
struct SideTensor {
  std::set<std::string> dtypes;
  std::set<std::string> shapes;
  std::set<Residue> layouts;
};

std::map<NameId, SideTensor> SideTensors(const PlanFacts& facts,
                                         fb::Side side) {
  std::set<uint32_t> held;  // entries of Body.buffers
  const PlanFile& plan = facts.plan();
  for (int32_t rank = 0; rank < plan.world_size(); ++rank) {
    if (plan.side(rank) != side) continue;
    const fb::RankProgram& program =
        *plan.body().programs()->Get(static_cast<uint32_t>(rank));
    const uint32_t bound =
        Length(program.buffers()) - program.scratch_buffers();
    for (uint32_t slot = 0; slot < bound; ++slot) {
      held.insert(program.buffers()->Get(slot));
    }
  }
  std::map<NameId, SideTensor> tensors;
  for (const uint32_t id : held) {
    const fb::Buffer& buffer = *plan.body().buffers()->Get(id);
    for (size_t ordinal = 0; ordinal < facts.buffers()[id].size(); ++ordinal) {
      SideTensor& tensor = tensors[facts.buffers()[id][ordinal]];
      tensor.dtypes.insert(EnumText(buffer.dtype()));
      tensor.shapes.insert(DimsText(buffer.shape()));
      tensor.layouts.insert(facts.layouts()[id][ordinal]);
    }
  }
  return tensors;
}

// For plans whose rank numbers name different ranks: what each side holds as a
// whole.
void CompareSide(const PlanFacts& a, const PlanFacts& b, fb::Side side,
                 DiffReport& report) {
  const std::map<NameId, SideTensor> tensors_a = SideTensors(a, side);
  const std::map<NameId, SideTensor> tensors_b = SideTensors(b, side);
  const auto text = [](const std::set<std::string>& words) {
    return absl::StrJoin(words, " | ");
  };
  for (const auto& [name, of_a] : tensors_a) {
    const auto found = tensors_b.find(name);
    if (found == tensors_b.end()) {
      report.AddSideBuffer(
          "BUFFER_REMOVED", side, name,
          absl::StrCat(text(of_a.dtypes), " ", text(of_a.shapes)));
      continue;
    }
    const SideTensor& of_b = found->second;
    if (of_a.dtypes != of_b.dtypes) {
      report.AddSideBuffer(
          "DTYPE_CHANGED", side, name,
          absl::StrCat(text(of_a.dtypes), " -> ", text(of_b.dtypes)));
    }
    if (of_a.shapes != of_b.shapes) {
      report.AddSideBuffer(
          "SHAPE_CHANGED", side, name,
          absl::StrCat(text(of_a.shapes), " -> ", text(of_b.shapes)));
    } else if (of_a.layouts != of_b.layouts) {
      report.AddSideBuffer("LAYOUT_CHANGED", side, name,
                           "some rank holds other elements");
    }
  }
  for (const auto& [name, of_b] : tensors_b) {
    if (tensors_a.count(name) != 0) continue;
    report.AddSideBuffer(
        "BUFFER_ADDED", side, name,
        absl::StrCat(text(of_b.dtypes), " ", text(of_b.shapes)));
  }
}

}  // namespace

ChangedTensors CompareContracts(const PlanFacts& a, const PlanFacts& b,
                                int32_t common_ranks, DiffReport& report) {
  CompareParams(a, b, report);
  report.AddFacts(kContract, "SKIP", SkipsOf(a.body()), SkipsOf(b.body()));
  CompareCasts(a.body(), b.body(), report);
  report.AddFacts(kContract, "REQUIREMENT", RequirementsOf(a.body()),
                  RequirementsOf(b.body()));
  report.AddFacts(kContract, "DELTA", DeltaOf(a.body()), DeltaOf(b.body()));
  CompareRanks(a.plan(), b.plan(), report);
  if (a.plan().source_ranks() != b.plan().source_ranks()) {
    CompareSide(a, b, fb::Side::kSource, report);
    CompareSide(a, b, fb::Side::kDestination, report);
  }
  BufferComparison buffers(a, b, report);
  ChangedTensors changed;
  for (int32_t rank = 0; rank < common_ranks; ++rank)
    changed.push_back(buffers.Compare(rank));
  return changed;
}

}  // namespace refit
