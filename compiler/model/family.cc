#include "compiler/model/family.h"

#include <algorithm>
#include <cstddef>

namespace refit {

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

}  // namespace refit
