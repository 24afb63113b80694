#include "executor/post_hooks.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"
#include "plan/nearest_word.h"
#include "plan/post_hooks.h"

namespace refit {
namespace {

struct FunctionName {
  PostHookName name;
  ElementFunction function;
};
constexpr FunctionName kFunctions[] = {
    {"add-one", ElementFunction::kAddOne},
    {"subtract-one", ElementFunction::kSubtractOne},
    {"negative-exp", ElementFunction::kNegativeExp},
    {"log-of-negative", ElementFunction::kLogOfNegative},
};

// "" for a name that this plan has, or that another may have: a worker names at
// bind all that it performs. A plan of a newer compiler may have more.
std::string UnknownHook(const std::set<std::string>& of_plan,
                        const std::string& name) {
  std::vector<std::string_view> known(of_plan.begin(), of_plan.end());
  known.insert(known.end(), std::begin(kPostHookNames),
               std::end(kPostHookNames));
  if (std::find(known.begin(), known.end(), name) != known.end()) return "";
  const std::string nearest = NearestWord(name, known);
  return absl::StrCat(
      "unknown: post-hook \"", name, "\", which bind was given, is none",
      nearest.empty() ? "" : absl::StrCat("; did you mean \"", nearest, "\"?"));
}

// Tensors with the same mistake make one line.
class Mistakes {
 public:
  void Add(std::string mistake, std::string advice, const std::string& tensor) {
    Line& line = lines_[{std::move(mistake), std::move(advice)}];
    if (line.tensors++ == 0) line.first = tensor;
  }

  std::vector<std::string> Lines() const {
    std::vector<std::string> lines;
    for (const auto& [key, line] : lines_) {
      const auto& [mistake, advice] = key;
      lines.push_back(absl::StrCat(
          mistake, " of \"", line.first, "\"",
          line.tensors == 1
              ? ""
              : absl::StrCat(" and of ", line.tensors - 1, " more tensor",
                             line.tensors == 2 ? "" : "s"),
          ": ", advice));
    }
    return lines;
  }

 private:
  struct Line {
    std::string first;
    size_t tensors = 0;
  };
  std::map<std::pair<std::string, std::string>, Line> lines_;
};

class Assignment {
 public:
  Assignment(const TensorTable& table,
             absl::Span<const PostHookPerformer> performers)
      : table_(table),
        performers_(performers),
        partly_skipped_(table.PartlySkipped()) {
    assigned_.batch.kind = CopyKind::kApply;
  }

  AssignedHooks Assign() {
    table_.ForEachPostHook(
        [&](size_t slot, uint64_t entry, const fb::PostHook& hook) {
          Add(slot, entry, hook);
        });
    assigned_.problems = mistakes_.Lines();
    const std::set<std::string> of_plan = table_.PostHookNames();
    for (const PostHookPerformer& performer : performers_) {
      std::string unknown = UnknownHook(of_plan, performer.name);
      if (!unknown.empty()) assigned_.problems.push_back(std::move(unknown));
    }
    return std::move(assigned_);
  }

 private:
  bool CallerPerforms(std::string_view name) const {
    return std::any_of(performers_.begin(), performers_.end(),
                       [&](const PostHookPerformer& performer) {
                         return performer.name == name;
                       });
  }

  void Add(size_t slot, uint64_t entry, const fb::PostHook& planned) {
    const fb::Buffer& stack = table_.buffer(slot);
    const std::string tensor = table_.Name(slot, entry - table_.begin(slot));
    const std::string name = planned.name()->str();
    const std::string quoted = absl::StrCat("post-hook \"", name, "\"");
    const bool by_caller = CallerPerforms(name);
    const std::optional<ElementFunction> function =
        FunctionOfHook(name, stack.dtype());
    assigned_.hooks.push_back({.tensor = tensor,
                               .name = name,
                               .detail = planned.detail()->str(),
                               .by_executor = !by_caller && function});
    if (entry_ != entry) callers_.clear();
    entry_ = entry;
    if (by_caller) {
      callers_ = name;
    } else if (!function.has_value()) {
      mistakes_.Add(absl::StrCat("not performed: ", quoted),
                    absl::StrCat(planned.detail()->str(),
                                 "; a caller that does so after each refit "
                                 "names it at bind"),
                    tensor);
    } else if (!callers_.empty()) {
      mistakes_.Add(absl::StrCat("out of order: ", quoted),
                    absl::StrCat("it comes after \"", callers_,
                                 "\", which the caller performs; name both"),
                    tensor);
    } else if (partly_skipped_[entry]) {
      mistakes_.Add(absl::StrCat("unsafe: ", quoted),
                    "no refit writes all of the tensor, and what it leaves "
                    "alone would be changed again each time; name the hook "
                    "and perform it",
                    tensor);
    } else {
      Apply(entry, TensorElements(stack), stack.dtype(), *function);
    }
  }

  void Apply(uint64_t entry, uint64_t elements, DType dtype,
             ElementFunction function) {
    if (elements == 0) return;
    CopyBatch& batch = assigned_.batch;
    if (batch.applies.empty() || batch.applies.back().tensor.entry != entry) {
      batch.applies.push_back(
          {.tensor = {.entry = entry, .byte_offset = 0, .dtype = dtype},
           .elements = elements,
           .functions_begin = static_cast<uint32_t>(batch.functions.size())});
    }
    batch.functions.push_back(function);
    ++batch.applies.back().functions_count;
  }

  const TensorTable& table_;
  const absl::Span<const PostHookPerformer> performers_;
  const std::vector<bool> partly_skipped_;
  uint64_t entry_ = 0;
  std::string callers_;  // the last hook of `entry_` that the caller performs
  Mistakes mistakes_;
  AssignedHooks assigned_;
};

}  // namespace

std::optional<ElementFunction> FunctionOfHook(std::string_view name,
                                              DType dtype) {
  if (dtype != DType::kBf16 && dtype != DType::kFp16 && dtype != DType::kFp32) {
    return std::nullopt;
  }
  for (const FunctionName& known : kFunctions) {
    if (known.name.text() == name) return known.function;
  }
  return std::nullopt;
}

AssignedHooks AssignPostHooks(const TensorTable& table,
                              absl::Span<const PostHookPerformer> performers) {
  return Assignment(table, performers).Assign();
}

}  // namespace refit
