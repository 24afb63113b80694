#include "plan/proof/name_proof.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "plan/vector_length.h"

namespace refit::proof {
namespace {

// Of distinct namings, and of a rank: one of the largest models has some 50,000
// tensors. Keeps hostile plans from costing time and memory.
constexpr uint64_t kMostNames = uint64_t{1} << 22;

// A tensor of stack number `stack` of a list. Hashes decide nothing: tensors
// of equal hash are compared by name.
struct NamedTensor {
  size_t hash = 0;
  uint32_t stack = 0;
  uint64_t ordinal = 0;
};

template <typename Stack>
uint64_t TensorsOf(const Stack& stack) {
  uint64_t tensors = 1;
  const uint32_t dims = Length(stack.index());
  for (uint32_t d = 0; d < dims; ++d) tensors *= stack.index()->Get(d)->count();
  return tensors;
}

template <typename Stack>
std::vector<size_t> HashNames(const Stack& stack) {
  std::vector<size_t> hashes(TensorsOf(stack));
  for (uint64_t i = 0; i < hashes.size(); ++i) {
    hashes[i] = absl::Hash<std::string>()(TensorName(stack, i));
  }
  return hashes;
}

// What the names of a stack depend on: its pattern and numbers. Ranks that
// shard the same params hold different buffers under the same names.
std::string NamingOf(const fb::Buffer& buffer) {
  std::string naming = buffer.name()->str();
  if (buffer.index() == nullptr) return naming;
  for (const fb::IndexDim* dim : *buffer.index()) {
    absl::StrAppend(&naming, "\n", dim->first(), " ", dim->count());
    if (dim->numbers() == nullptr) continue;
    for (const int32_t number : *dim->numbers()) {
      absl::StrAppend(&naming, " ", number);
    }
  }
  return naming;
}

// One buffer for each distinct naming, and every buffer's naming.
struct Namings {
  std::vector<const fb::Buffer*> buffers;  // by naming
  std::vector<uint32_t> of_buffer;
};

Namings FindNamings(const fb::Body& body) {
  Namings namings;
  absl::flat_hash_map<std::string, uint32_t> ids;
  for (const fb::Buffer* buffer : *body.buffers()) {
    const auto [it, is_new] = ids.try_emplace(
        NamingOf(*buffer), static_cast<uint32_t>(namings.buffers.size()));
    if (is_new) namings.buffers.push_back(buffer);
    namings.of_buffer.push_back(it->second);
  }
  return namings;
}

// The first two tensors of equal name, in the order of the later one.
template <typename StackAt>
std::pair<const NamedTensor*, const NamedTensor*> FindEqualNames(
    std::vector<NamedTensor>& tensors, const StackAt& stack_at) {
  std::sort(tensors.begin(), tensors.end(),
            [](const NamedTensor& a, const NamedTensor& b) {
              return std::tie(a.hash, a.stack, a.ordinal) <
                     std::tie(b.hash, b.stack, b.ordinal);
            });
  std::pair<const NamedTensor*, const NamedTensor*> first = {nullptr, nullptr};
  for (size_t begin = 0, end = 1; begin < tensors.size(); begin = end++) {
    while (end < tensors.size() && tensors[end].hash == tensors[begin].hash) {
      ++end;
    }
    if (end - begin == 1) continue;
    std::map<std::string, const NamedTensor*> by_name;
    for (size_t i = begin; i < end; ++i) {
      const NamedTensor& tensor = tensors[i];
      const auto [known, is_new] = by_name.try_emplace(
          TensorName(stack_at(tensor.stack), tensor.ordinal), &tensor);
      if (is_new) continue;
      if (first.second == nullptr ||
          std::tie(tensor.stack, tensor.ordinal) <
              std::tie(first.second->stack, first.second->ordinal)) {
        first = {known->second, &tensor};
      }
      break;
    }
  }
  return first;
}

void CheckParamNames(const fb::Body& body, Violations& violations) {
  std::vector<NamedTensor> tensors;
  for (uint32_t i = 0; i < body.params()->size(); ++i) {
    const std::vector<size_t> hashes = HashNames(*body.params()->Get(i));
    for (uint64_t k = 0; k < hashes.size(); ++k) {
      tensors.push_back({hashes[k], i, k});
    }
  }
  const auto stack_at = [&](uint32_t i) -> const fb::Param& {
    return *body.params()->Get(i);
  };
  const auto equal = FindEqualNames(tensors, stack_at);
  if (equal.first == nullptr) return;
  violations.Report({}, Invariant::kWellFormedInputs, [&] {
    return absl::StrCat(
        "params ", equal.first->stack, " and ", equal.second->stack,
        " both hold ",
        TensorName(stack_at(equal.second->stack), equal.second->ordinal));
  });
}

void ReportTooMany(uint64_t names, const Site& site, Violations& violations) {
  violations.Report(site, Invariant::kWellFormedInputs, [&] {
    return absl::StrCat("has ", names, " names; the proof takes up to ",
                        kMostNames);
  });
}

}  // namespace

void CheckNames(const fb::Body& body, Violations& violations) {
  const Namings namings = FindNamings(body);
  uint64_t names = 0;
  for (const fb::Param* param : *body.params()) names += TensorsOf(*param);
  for (const fb::Buffer* buffer : namings.buffers) names += TensorsOf(*buffer);
  if (names > kMostNames) {
    ReportTooMany(names, {}, violations);
    return;
  }
  CheckParamNames(body, violations);
  std::vector<std::vector<size_t>> hashes_of(namings.buffers.size());
  // Each list of namings is looked at for its first rank.
  absl::flat_hash_set<std::vector<uint32_t>> seen;
  for (uint32_t rank = 0; rank < body.programs()->size(); ++rank) {
    std::vector<uint32_t> list;
    for (const uint32_t buffer : *body.programs()->Get(rank)->buffers()) {
      list.push_back(namings.of_buffer[buffer]);
    }
    if (!seen.insert(list).second) continue;
    uint64_t held = 0;
    for (const uint32_t naming : list) {
      held += TensorsOf(*namings.buffers[naming]);
    }
    if (held > kMostNames) {
      ReportTooMany(held, {.rank = rank}, violations);
      continue;
    }
    std::vector<NamedTensor> tensors;
    for (uint32_t slot = 0; slot < list.size(); ++slot) {
      std::vector<size_t>& hashes = hashes_of[list[slot]];
      if (hashes.empty()) hashes = HashNames(*namings.buffers[list[slot]]);
      for (uint64_t k = 0; k < hashes.size(); ++k) {
        tensors.push_back({hashes[k], slot, k});
      }
    }
    const auto stack_at = [&](uint32_t slot) -> const fb::Buffer& {
      return *namings.buffers[list[slot]];
    };
    const auto equal = FindEqualNames(tensors, stack_at);
    if (equal.first == nullptr) continue;
    violations.Report({.rank = rank}, Invariant::kWellFormedInputs, [&] {
      return absl::StrCat(
          "buffer slots ", equal.first->stack, " and ", equal.second->stack,
          " both hold ",
          TensorName(stack_at(equal.second->stack), equal.second->ordinal));
    });
  }
}

}  // namespace refit::proof
