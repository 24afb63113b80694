#include "compiler/model/stacks.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "compiler/job/json.h"
#include "llvm/ADT/MapVector.h"
#include "llvm/ADT/STLExtras.h"
#include "plan/file_limits.h"
#include "plan/plan_file.h"

namespace refit {
namespace {

constexpr size_t kIndexDimsMax = 2;
constexpr int64_t kStackElementsMax = int64_t{1} << 58;

// The number a name component stands for, if writing it again gives the same
// component.
std::optional<int32_t> NumberOf(std::string_view component) {
  const bool all_digits =
      component.find_first_not_of("0123456789") == std::string_view::npos;
  const bool leading_zero = component.size() > 1 && component[0] == '0';
  int32_t number = 0;
  if (component.empty() || !all_digits || leading_zero ||
      !absl::SimpleAtoi(std::string(component), &number)) {
    return std::nullopt;
  }
  return number;
}

using Numbers = std::vector<int32_t>;

// "model.layers.3.up.weight" → "model.layers.{0}.up.weight" and [3].
std::pair<std::string, Numbers> TakeNumbers(std::string_view name) {
  std::string pattern;
  Numbers numbers;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view component = name.substr(begin, end - begin);
    const std::optional<int32_t> number = NumberOf(component);
    if (begin > 0) pattern += '.';
    if (number.has_value() && numbers.size() < kIndexDimsMax) {
      pattern += absl::StrFormat("{%d}", numbers.size());
      numbers.push_back(*number);
    } else {
      pattern += component;
    }
    begin = end + 1;
  }
  return {std::move(pattern), std::move(numbers)};
}

// Parameters that could be one stack have the same pattern, shape and dtype.
using Alike = std::tuple<std::string, Dims, DType>;
// Numbers of their names, with their position in the list.
using Members = std::vector<std::pair<Numbers, size_t>>;
// In order of their first member.
using Groups =
    llvm::MapVector<Alike, Members, absl::flat_hash_map<Alike, unsigned>,
                    std::vector<std::pair<Alike, Members>>>;

// The part of a group that is a full product of numbers.
struct Block {
  size_t first_position = 0;
  std::vector<IndexDim> index;
};

Groups GroupByPattern(const std::vector<NamedTensor>& tensors) {
  Groups groups;
  for (const auto& tensor : llvm::enumerate(tensors)) {
    auto [pattern, numbers] = TakeNumbers(tensor.value().name);
    groups[{std::move(pattern), tensor.value().shape, tensor.value().dtype}]
        .emplace_back(std::move(numbers), tensor.index());
  }
  return groups;
}

// One block for each distinct set of second numbers, which all first numbers
// with that set share.
std::vector<Block> CutIntoProducts(const Members& members) {
  const size_t dims = members.front().first.size();
  if (dims == 0) return {{.first_position = members[0].second, .index = {}}};

  struct Row {
    std::set<int32_t> seconds;
    size_t first_position = std::numeric_limits<size_t>::max();
  };
  std::map<int32_t, Row> rows;
  for (const auto& [numbers, position] : members) {
    Row& row = rows[numbers[0]];
    if (dims > 1) row.seconds.insert(numbers[1]);
    row.first_position = std::min(row.first_position, position);
  }
  std::map<std::set<int32_t>, Block> blocks;
  for (const auto& [first, row] : rows) {
    const auto [found, is_new] = blocks.try_emplace(
        row.seconds, Block{.first_position = row.first_position,
                           .index = std::vector<IndexDim>(dims)});
    Block& block = found->second;
    block.index[0].numbers.push_back(first);
    block.first_position = std::min(block.first_position, row.first_position);
    if (is_new && dims > 1) {
      block.index[1].numbers.assign(row.seconds.begin(), row.seconds.end());
    }
  }
  std::vector<Block> result;
  for (auto& [seconds, block] : blocks) result.push_back(std::move(block));
  return result;
}

Param ParamOf(const Alike& alike, Block block) {
  const auto& [pattern, shape, dtype] = alike;
  Param param = {.name = pattern,
                 .index = std::move(block.index),
                 .shape = shape,
                 .dtype = dtype};
  // A stack of one is a parameter like any other.
  Numbers only;
  for (const IndexDim& dim : param.index) {
    if (dim.extent() == 1) only.push_back(dim.numbers[0]);
  }
  if (only.size() == param.index.size()) {
    param.name = ExpandName(param.name, only);
    param.index.clear();
  }
  return param;
}

bool HasFewDims(std::string_view name, size_t dims, const Place& place,
                Diagnostics& diagnostics) {
  return dims <= kDimsMax ||
         diagnostics.Error(place,
                           "parameter %s has %d dimensions; wanted at most %d",
                           Quoted(name), dims, kDimsMax);
}

// The parts of members with these rules, over the dims from `dim` on.
std::vector<RulePart> Partition(const Param& param,
                                absl::Span<const int32_t> rules, size_t dim) {
  if (dim == param.index.size()) {
    return {{.rule = rules[0], .positions = {}}};
  }
  const size_t extent = param.index[dim].numbers.size();
  const size_t of_each = rules.size() / std::max<size_t>(extent, 1);
  // Positions with equal parts stay together.
  struct Equal {
    std::vector<RulePart> parts;
    std::vector<int32_t> positions;
  };
  std::vector<Equal> groups;
  for (size_t i = 0; i < extent; ++i) {
    std::vector<RulePart> parts =
        Partition(param, rules.subspan(i * of_each, of_each), dim + 1);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const Equal& e) { return e.parts == parts; });
    if (group == groups.end()) {
      group =
          groups.insert(group, {.parts = std::move(parts), .positions = {}});
    }
    group->positions.push_back(static_cast<int32_t>(i));
  }
  std::vector<RulePart> result;
  for (const Equal& group : groups) {
    for (const RulePart& part : group.parts) {
      RulePart& whole =
          result.emplace_back(RulePart{.rule = part.rule, .positions = {}});
      whole.positions.push_back(group.positions);
      whole.positions.insert(whole.positions.end(), part.positions.begin(),
                             part.positions.end());
    }
  }
  return result;
}

}  // namespace

bool CheckNames(const std::vector<NamedTensor>& tensors,
                Diagnostics& diagnostics) {
  bool good = true;
  absl::flat_hash_map<std::string_view, size_t> seen;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string& name = tensors[i].name;
    const bool is_name =
        !name.empty() && std::none_of(name.begin(), name.end(), [](char c) {
          const auto byte = static_cast<unsigned char>(c);
          return byte < 0x20 || byte == 0x7F || c == '{' || c == '}';
        });
    if (!is_name) {
      diagnostics.Error(
          tensors[i].place,
          "parameter name %s is empty or holds a brace or a control character",
          Quoted(name));
      good = false;
    } else if (!HasFewDims(name, tensors[i].shape.size(), tensors[i].place,
                           diagnostics)) {
      good = false;
    } else if (!seen.try_emplace(name, i).second) {
      diagnostics.Error(tensors[i].place, "parameter %s stands twice",
                        Quoted(name));
      good = false;
    }
  }
  return good;
}

std::vector<Param> FoldStacks(const std::vector<NamedTensor>& tensors) {
  std::vector<std::pair<size_t, Param>> by_position;
  for (const auto& [alike, members] : GroupByPattern(tensors)) {
    for (Block& block : CutIntoProducts(members)) {
      const size_t position = block.first_position;
      by_position.emplace_back(position, ParamOf(alike, std::move(block)));
    }
  }
  std::sort(by_position.begin(), by_position.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Param> params;
  params.reserve(by_position.size());
  for (auto& [position, param] : by_position) {
    params.push_back(std::move(param));
  }
  return params;
}

std::vector<std::string> MemberNames(const Param& param) {
  std::vector<Numbers> members = {{}};
  for (const IndexDim& dim : param.index) {
    std::vector<Numbers> longer;
    longer.reserve(members.size() * dim.numbers.size());
    for (const Numbers& member : members) {
      for (const int32_t number : dim.numbers) {
        longer.push_back(member);
        longer.back().push_back(number);
      }
    }
    members = std::move(longer);
  }
  std::vector<std::string> names;
  names.reserve(members.size());
  for (const Numbers& member : members) {
    names.push_back(ExpandName(param.name, member));
  }
  return names;
}

std::vector<RulePart> PartitionMembers(
    const Param& param,
    absl::FunctionRef<int32_t(const std::string& name, size_t number)>
        rule_of) {
  std::vector<int32_t> rules;
  for (const std::string& name : MemberNames(param)) {
    rules.push_back(rule_of(name, rules.size()));
  }
  return Partition(param, rules, 0);
}

std::vector<IndexDim> NumbersOf(
    const Param& param, const std::vector<std::vector<int32_t>>& positions) {
  std::vector<IndexDim> index(positions.size());
  for (size_t dim = 0; dim < index.size(); ++dim) {
    for (const int32_t position : positions[dim]) {
      index[dim].numbers.push_back(param.index[dim].numbers[position]);
    }
  }
  return index;
}

void CheckStackSize(const Param& param, const Place& place,
                    Diagnostics& diagnostics) {
  int64_t members = 1;
  for (const IndexDim& dim : param.index) members *= dim.extent();
  if (members > kStackTensorsMax) {
    diagnostics.Error(place, "%s stands for %d parameters; wanted at most %d",
                      Quoted(param.name), members, kStackTensorsMax);
    return;
  }
  if (!HasFewDims(param.name, param.shape.size(), place, diagnostics)) return;
  int64_t elements = 1;
  for (const int64_t extent : param.VirtualShape()) {
    if (extent > kStackElementsMax / elements) {
      diagnostics.Error(place, "parameters %s have more than %d elements",
                        Quoted(param.name), kStackElementsMax);
      return;
    }
    elements *= extent;
  }
}

}  // namespace refit
