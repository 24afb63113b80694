# Writes OUT, a C++ file that holds the texts of FILES.
file(WRITE ${OUT}.new [==[// Made from compiler/model/families/*.json.
#include "compiler/model/rules/rules.h"

namespace refit {

absl::Span<const FamilyFile> FamilyFiles() {
  static constexpr FamilyFile kFiles[] = {
]==])
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  string(REGEX MATCH "\"class\": \"([A-Za-z0-9_]+)\"" class "${text}")
  set(class ${CMAKE_MATCH_1})
  string(CONFIGURE [==[      {"@name@", "@class@", R"refit_family(@text@)refit_family"},
]==] entry @ONLY)
  file(APPEND ${OUT}.new "${entry}")
endforeach()
file(APPEND ${OUT}.new [==[  };
  return kFiles;
}

}  // namespace refit
]==])
file(RENAME ${OUT}.new ${OUT})
