#include "compiler/ir/module.h"

#include <cmath>
#include <iterator>
#include <numeric>

#include "absl/hash/hash.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

Dims VirtualShapeOf(const std::vector<IndexDim>& index, const Dims& shape) {
  Dims dims;
  for (const IndexDim& dim : index) dims.push_back(dim.extent());
  dims.insert(dims.end(), shape.begin(), shape.end());
  return dims;
}

}  // namespace

IndexDim Consecutive(int32_t first, int64_t count) {
  IndexDim dim;
  dim.numbers.resize(static_cast<size_t>(count));
  std::iota(dim.numbers.begin(), dim.numbers.end(), first);
  return dim;
}

std::string Param::FirstName() const {
  std::vector<int32_t> first;
  for (const IndexDim& dim : index) first.push_back(dim.numbers[0]);
  return ExpandName(name, first);
}

Dims Param::VirtualShape() const { return VirtualShapeOf(index, shape); }

std::vector<Dims> Param::Factors() const {
  std::vector<Dims> factors;
  for (const int64_t extent : shape) factors.push_back({extent});
  const auto join = [&](size_t dim, size_t count) {
    for (size_t i = dim + 1; i < dim + count; ++i) {
      factors[dim].push_back(shape[i]);
    }
    const auto begin = factors.begin() + static_cast<ptrdiff_t>(dim) + 1;
    factors.erase(begin, begin + static_cast<ptrdiff_t>(count) - 1);
  };
  switch (split) {
    case Split::kNone:
      break;
    case Split::kLastInPairs:
      join(shape.size() - 2, 2);
      break;
    case Split::kRowsInHeadPairs:
      join(0, 3);
      break;
  }
  return factors;
}

Dims Param::StoredShape() const {
  Dims stored;
  for (const Dims& of_dim : Factors()) stored.push_back(Product(of_dim));
  return stored;
}

Dims Buffer::VirtualShape() const { return VirtualShapeOf(index, shape); }

BufferId BufferTable::Intern(Buffer buffer) {
  // The hash only finds candidates; ids follow the order of first appearance,
  // so plans do not depend on it.
  std::vector<BufferId>& ids = ids_by_hash_[absl::HashOf(buffer)];
  for (BufferId id : ids) {
    if (buffers_[IndexOf(id)] == buffer) return id;
  }
  const BufferId id{static_cast<int32_t>(buffers_.size())};
  buffers_.push_back(std::move(buffer));
  ids.push_back(id);
  return id;
}

void BufferTable::AddPostHooks(BufferId id, std::vector<PostHook> hooks) {
  std::vector<PostHook>& own = buffers_[IndexOf(id)].post_hooks;
  own.insert(own.end(), std::make_move_iterator(hooks.begin()),
             std::make_move_iterator(hooks.end()));
}

const std::vector<BufferId>& Module::buffers_of(Rank rank) const {
  const int32_t number = static_cast<int32_t>(rank);
  return number < source_ranks()
             ? source.ranks[static_cast<size_t>(number)]
             : destination.ranks[static_cast<size_t>(number - source_ranks())];
}

AlikeParts Module::AlikePartsOf(Rank rank) const {
  if (!fold.has_value()) {
    return {.sources = source_ranks(),
            .destinations = world_size() - source_ranks()};
  }
  return fold->LikeThat(PartOf(rank));
}

int64_t Module::PlannedSources() const {
  if (!fold.has_value()) return source_ranks();
  int64_t sources = 0;
  for (const AlikeParts& alike : fold->alike) sources += alike.sources;
  return sources;
}

Rank Module::FirstOf(Rank rank) const {
  if (!fold.has_value()) return rank;
  const AlikeParts alike = AlikePartsOf(rank);
  const int32_t shift =
      IsRelay(rank) ? alike.destination_shift : alike.source_shift;
  return Rank{static_cast<int32_t>(rank) -
              (PartOf(rank) - alike.first) * shift};
}

double Topology::BytesPerSecond(Route route) const {
  switch (route) {
    case Route::kLocal:
      return local_bytes_per_second;
    case Route::kPeer:
      return peer_bytes_per_second;
    case Route::kNetwork:
    case Route::kUnspecified:
      return network_bytes_per_second;
  }
  return network_bytes_per_second;
}

int32_t Topology::DomainOf(int32_t host_number) const {
  return fabric.has_value() ? host_number / fabric->hosts_per_nvlink_domain
                            : host_number;
}

bool Topology::HasNarrowLeaves() const {
  return fabric.has_value() && !fabric->rails && fabric->hosts_per_leaf > 0 &&
         fabric->spine_oversubscription > 1;
}

bool Module::DefersStores() const {
  return std::none_of(quantizations.begin(), quantizations.end(),
                      [](const Quantization& of) {
                        return of.at == QuantizedAt::kDestination;
                      });
}

bool Module::JoinsHosts() const {
  return topology.fabric.has_value() && limits.joins_hosts &&
         topology.fabric->hosts_per_nvlink_domain > 1 && !limits.by_rails &&
         !topology.colocated &&
         static_cast<double>(RoomOfHeldRound(limits)) >=
             2 * topology.network_bytes_per_second * kStagedRoundSeconds;
}

double Module::RoundSeconds(Route route) const {
  if (MechanismOf(route) == Mechanism::kDirect) return kDirectRoundSeconds;
  return StagedRoundOf(route).StartSeconds(1);
}

Mechanism Module::MechanismOf(Route route) const {
  return route == Route::kNetwork ? Mechanism::kStaged : limits.mapped;
}

Rank Module::SentBy(size_t number) const {
  const Message& message = messages[number];
  if (!message.is_sent_with_other()) return message.source;
  const Message& first = messages[static_cast<size_t>(message.broadcast.first)];
  return messages[number - static_cast<size_t>(first.broadcast.stride)]
      .destination;
}

int64_t Module::WireBytes(const Piece& piece) const {
  return piece.box.Volume() * DTypeBytes(piece.wire_dtype);
}

}  // namespace refit
