# Writes OUT, a C++ file that holds the texts of FILES.
file(WRITE ${OUT}.new [==[// Made from compiler/model/families/*.json.
#include "compiler/model/rules/rules.h"

namespace refit {

absl::Span<const BuiltInRules> AllBuiltInRules() {
  static constexpr BuiltInRules kRules[] = {
]==])
foreach(file ${FILES})
  get_filename_component(name ${file} NAME_WE)
  file(READ ${file} text)
  if(NOT text MATCHES "\"transformers\": {(}|[ \n]*\"class\": \"([A-Za-z0-9_]+)\")")
    message(FATAL_ERROR "${file} names no class; wanted \"transformers\": {\"class\": \"…ForCausalLM\"} first, or {}")
  endif()
  set(class ${CMAKE_MATCH_2})
  string(CONFIGURE [==[      {"@name@", "@class@", R"refit_family(@text@)refit_family"},
]==] entry @ONLY)
  file(APPEND ${OUT}.new "${entry}")
endforeach()
file(APPEND ${OUT}.new [==[  };
  return kRules;
}

}  // namespace refit
]==])
file(RENAME ${OUT}.new ${OUT})
