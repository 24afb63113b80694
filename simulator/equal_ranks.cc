#include "simulator/equal_ranks.h"

#include <algorithm>
#include <array>
#include <map>
#include <utility>

#include "simulator/links.h"

namespace refit::simulator {
namespace {

using Part = std::vector<int32_t>;
using Shifts = std::pair<uint32_t, uint32_t>;  // of sources, of destinations

Shifts ShiftsOf(const fb::Body& body, uint32_t rank) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  return {program.source_shift(), program.destination_shift()};
}

// By rank without shifts: those of all that share its lists. Ranks with equal
// ones are a part, which others are like. Empty: the plan has no such parts.
std::vector<std::vector<Shifts>> ListShifts(const fb::Body& body) {
  const auto& programs = *body.programs();
  std::vector<std::vector<Shifts>> shifts_of;
  shifts_of.resize(programs.size());
  bool any = false;
  for (uint32_t rank = 0; rank < programs.size(); ++rank) {
    const Shifts shifts = ShiftsOf(body, rank);
    const uint32_t shift =
        rank < body.source_ranks() ? shifts.first : shifts.second;
    if (shift > rank) return {};
    const uint32_t first = rank - shift;
    const bool is_source = rank < body.source_ranks();
    if (is_source != (first < body.source_ranks()) ||
        ShiftsOf(body, first) != Shifts() ||
        !AreShared(*programs.Get(first), *programs.Get(rank))) {
      return {};
    }
    shifts_of[first].push_back(shifts);
    any |= shifts != Shifts();
  }
  if (!any) shifts_of.clear();
  return shifts_of;
}

// Parts that are alike.
using AlikeParts = std::vector<Part>;

// Empty: the plan has no such parts.
std::vector<AlikeParts> PartsOf(const fb::Body& body) {
  if (body.colocated()) return {};
  const std::vector<std::vector<Shifts>> shifts_of = ListShifts(body);
  std::map<std::vector<Shifts>, AlikeParts> by_shifts;
  for (uint32_t rank = 0; rank < shifts_of.size(); ++rank) {
    const std::vector<Shifts>& shifts = shifts_of[rank];
    if (shifts.empty()) continue;
    AlikeParts& parts =
        by_shifts.try_emplace(shifts, shifts.size()).first->second;
    for (size_t part = 0; part < shifts.size(); ++part) {
      parts[part].push_back(static_cast<int32_t>(
          rank + (rank < body.source_ranks() ? shifts[part].first
                                             : shifts[part].second)));
    }
    const bool stays_in_part = ForEachMessage(
        body, *body.programs()->Get(rank), [&](const fb::Message& message) {
          return shifts_of[message.peer()] == shifts;
        });
    if (!stays_in_part) return {};
  }
  std::vector<AlikeParts> all;
  for (auto& [shifts, parts] : by_shifts) all.push_back(std::move(parts));
  return all;
}

using Things = std::array<uint32_t, 5>;

Things ThingsOf(const Place& place) {
  return {place.gpu, place.nic, place.leaf, place.host, place.domain};
}
// Those of which a link is: the others only say which links a message crosses.
constexpr size_t kThingsWithLinks = 3;

bool ShareLinks(const std::vector<AlikeParts>& all, const Links& links) {
  std::array<std::map<uint32_t, const Part*>, kThingsWithLinks> parts_of;
  for (const AlikeParts& parts : all) {
    for (const Part& part : parts) {
      for (const int32_t rank : part) {
        const Things things = ThingsOf(links.place(rank));
        for (size_t i = 0; i < kThingsWithLinks; ++i) {
          if (things[i] == kNone) continue;
          const auto found = parts_of[i].try_emplace(things[i], &part).first;
          if (found->second != &part) return true;
        }
      }
    }
  }
  return false;
}

// What of a rank's place counts, with things numbered as they come in its part.
using LikePlace = std::pair<Things, std::vector<double>>;

std::vector<LikePlace> PlacesOf(const Part& part, const Links& links) {
  std::array<std::map<uint32_t, uint32_t>, std::tuple_size_v<Things>> numbers;
  std::vector<LikePlace> places;
  for (const int32_t rank : part) {
    Things things = ThingsOf(links.place(rank));
    for (size_t i = 0; i < things.size(); ++i) {
      const auto next = static_cast<uint32_t>(numbers[i].size());
      things[i] = numbers[i].try_emplace(things[i], next).first->second;
    }
    places.emplace_back(things, links.SpeedsOf(rank));
  }
  return places;
}

}  // namespace

EqualRanks::EqualRanks(const PlanFile& plan, const Links& links) {
  std::vector<AlikeParts> all = PartsOf(plan.body());
  if (all.empty() || ShareLinks(all, links)) return;
  const auto ranks = static_cast<size_t>(plan.world_size());
  part_.resize(ranks);
  position_.resize(ranks);
  stand_ins_.resize(ranks);
  for (AlikeParts& parts : all) AddParts(std::move(parts), links);
  std::vector<uint32_t> stand_for(ranks, 0);
  for (const int32_t stand_in : stand_ins_) {
    ++stand_for[static_cast<size_t>(stand_in)];
  }
  for (const int32_t stand_in : stand_ins_) {
    counts_.push_back(stand_for[static_cast<size_t>(stand_in)]);
  }
}

void EqualRanks::AddParts(std::vector<std::vector<int32_t>> parts,
                          const Links& links) {
  std::vector<std::pair<std::vector<LikePlace>, Part>> distinct;
  for (Part& part : parts) {
    std::vector<LikePlace> places = PlacesOf(part, links);
    auto stands_in =
        std::find_if(distinct.begin(), distinct.end(),
                     [&](const auto& other) { return other.first == places; });
    if (stands_in == distinct.end()) {
      stands_in = distinct.emplace(stands_in, std::move(places), part);
    }
    for (size_t position = 0; position < part.size(); ++position) {
      const auto rank = static_cast<size_t>(part[position]);
      part_[rank] = parts_.size();
      position_[rank] = position;
      stand_ins_[rank] = stands_in->second[position];
    }
    parts_.push_back(std::move(part));
  }
}

}  // namespace refit::simulator
