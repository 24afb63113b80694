#include "simulator/equal_ranks.h"

#include <array>
#include <map>
#include <utility>

#include "simulator/links.h"

namespace refit::simulator {
namespace {

using Part = std::vector<int32_t>;

// Empty: the plan has no such parts.
std::vector<Part> PartsOf(const fb::Body& body) {
  if (body.colocated()) return {};
  const auto& programs = *body.programs();
  using Shifts = std::pair<uint32_t, uint32_t>;  // of sources, of destinations
  const auto shifts_of = [&](uint32_t rank) {
    return Shifts(programs.Get(rank)->source_shift(),
                  programs.Get(rank)->destination_shift());
  };
  std::map<Shifts, Part> by_shifts;
  for (uint32_t rank = 0; rank < programs.size(); ++rank) {
    by_shifts[shifts_of(rank)].push_back(static_cast<int32_t>(rank));
  }
  if (by_shifts.size() < 2) return {};
  const Part& first = by_shifts.begin()->second;
  std::vector<Part> parts;
  uint32_t last_shift = 0;  // of destinations
  for (const auto& [shifts, part] : by_shifts) {
    // Ranks come in the order of their parts on both sides.
    if (part.size() != first.size() || shifts.second < last_shift) return {};
    last_shift = shifts.second;
    for (size_t i = 0; i < part.size(); ++i) {
      const auto of_first = static_cast<uint32_t>(first[i]);
      const auto rank = static_cast<uint32_t>(part[i]);
      const uint32_t shift =
          of_first < body.source_ranks() ? shifts.first : shifts.second;
      if (rank != of_first + shift ||
          !AreShared(*programs.Get(of_first), *programs.Get(rank))) {
        return {};
      }
    }
    parts.push_back(part);
  }
  for (const int32_t rank : first) {
    const fb::RankProgram& program = *programs.Get(static_cast<uint32_t>(rank));
    const bool stays_in_part =
        ForEachMessage(body, program, [&](const fb::Message& message) {
          return shifts_of(message.peer()) == Shifts();
        });
    if (!stays_in_part) return {};
  }
  return parts;
}

using Things = std::array<uint32_t, 5>;

Things ThingsOf(const Place& place) {
  return {place.gpu, place.nic, place.leaf, place.host, place.domain};
}
// Those of which a link is: the others only say which links a message crosses.
constexpr size_t kThingsWithLinks = 3;

bool ShareLinks(const std::vector<Part>& parts, const Links& links) {
  std::array<std::map<uint32_t, const Part*>, kThingsWithLinks> parts_of;
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

EqualRanks::EqualRanks(const PlanFile& plan, const Links& links)
    : parts_(PartsOf(plan.body())) {
  if (parts_.empty() || ShareLinks(parts_, links)) return;
  const auto ranks = static_cast<size_t>(plan.world_size());
  part_.resize(ranks);
  position_.resize(ranks);
  stand_ins_.resize(ranks);
  std::vector<std::pair<std::vector<LikePlace>, const Part*>> distinct;
  for (size_t i = 0; i < parts_.size(); ++i) {
    const Part& part = parts_[i];
    std::vector<LikePlace> places = PlacesOf(part, links);
    const Part* stands_in = nullptr;
    for (const auto& [others, other] : distinct) {
      if (stands_in == nullptr && others == places) stands_in = other;
    }
    if (stands_in == nullptr) {
      stands_in = &part;
      distinct.emplace_back(std::move(places), &part);
    }
    for (size_t position = 0; position < part.size(); ++position) {
      const auto rank = static_cast<size_t>(part[position]);
      part_[rank] = i;
      position_[rank] = position;
      stand_ins_[rank] = (*stands_in)[position];
    }
  }
  std::vector<uint32_t> stand_for(ranks, 0);
  for (const int32_t stand_in : stand_ins_) {
    ++stand_for[static_cast<size_t>(stand_in)];
  }
  for (const int32_t stand_in : stand_ins_) {
    counts_.push_back(stand_for[static_cast<size_t>(stand_in)]);
  }
}

}  // namespace refit::simulator
