#include "compiler/model/family.h"

#include <algorithm>
#include <cstddef>
#include <iterator>

#include "compiler/model/rules/rules.h"

// One line for each family in C++, in alphabetical order of model_type.
#define REFIT_FAMILIES(FAMILY) \
  FAMILY(kDeepseekV4)          \
  FAMILY(kNemotronH)           \
  FAMILY(kQwen3Next)

namespace refit {

#define REFIT_DECLARE(family) extern const Family family;
REFIT_FAMILIES(REFIT_DECLARE)

namespace {

#define REFIT_ADDRESS(family) &family,
constexpr const Family* kFamilies[] = {REFIT_FAMILIES(REFIT_ADDRESS)};

}  // namespace

std::string Renamed(std::string_view name, Renames renames) {
  std::string renamed(name);
  for (const auto& [from, to] : renames) {
    if (from.starts_with('^')) {
      const std::string_view start = from.substr(1);
      if (renamed.starts_with(start)) renamed.replace(0, start.size(), to);
      continue;
    }
    const size_t at = renamed.find(from);
    if (at != std::string::npos) renamed.replace(at, from.size(), to);
  }
  return renamed;
}

std::string_view ModuleOf(std::string_view name) {
  const size_t leaf = std::min(name.rfind('.'), name.size());
  const std::string_view before = name.substr(0, leaf);
  const size_t dot = before.rfind('.');
  return dot == std::string_view::npos ? before : before.substr(dot + 1);
}

std::string WithModule(std::string_view name, std::string_view module) {
  const std::string_view old = ModuleOf(name);
  std::string changed(name);
  changed.replace(static_cast<size_t>(old.data() - name.data()), old.size(),
                  module);
  return changed;
}

const Family* FindFamily(std::string_view model_type) {
  const auto* const found = std::find_if(
      std::begin(kFamilies), std::end(kFamilies),
      [&](const Family* f) { return f->model_type == model_type; });
  return found == std::end(kFamilies) ? nullptr : *found;
}

std::vector<FamilyClass> FamilyClasses() {
  std::vector<FamilyClass> classes;
  for (const Family* family : kFamilies) {
    if (family->transformers_class.empty()) continue;
    classes.push_back({family->transformers_class, family->model_type});
  }
  for (const BuiltInRules& rules : AllBuiltInRules()) {
    if (rules.transformers_class.empty()) continue;
    classes.push_back({rules.transformers_class, rules.model_type});
  }
  return classes;
}

std::vector<std::string_view> FamilyNames() {
  std::vector<std::string_view> names;
  for (const Family* family : kFamilies) names.push_back(family->model_type);
  for (const BuiltInRules& rules : AllBuiltInRules()) {
    names.push_back(rules.model_type);
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace refit
