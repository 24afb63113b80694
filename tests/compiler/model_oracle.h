// The parameters of a config.json, beside what an independent list says.
#ifndef REFIT_TESTS_COMPILER_MODEL_ORACLE_H_
#define REFIT_TESTS_COMPILER_MODEL_ORACLE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "compiler/model/model.h"
#include "tests/compiler/model_listing.h"

namespace refit {

struct ReadModelResult {
  std::optional<Model> model;
  std::string errors;
};

// What the job moves beside the language model's layers.
struct Beside {
  bool mtp = false;
  bool vision = false;
};

inline ReadModelResult ReadModelOf(const ModelSpec& spec, Beside beside = {}) {
  Job job;
  job.model = spec;
  job.source.mtp = {.value = beside.mtp, .place = {}, .given = true};
  if (beside.vision) {
    job.source.vision = {.value = true, .place = {}, .given = true};
  }
  Diagnostics diagnostics;
  ReadModelResult result;
  result.model = ReadModel(job, diagnostics);
  result.errors = diagnostics.Render();
  return result;
}

inline ReadModelResult ReadConfig(const std::string& path, Beside beside = {}) {
  ModelSpec spec;
  spec.config_path = path;
  return ReadModelOf(spec, beside);
}

inline std::vector<std::string> SortedLines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

// What tests/models/params.py, which knows nothing of Refit, says of a config.
inline std::string OracleListing(const std::string& config_path,
                                 const std::string& view) {
  const std::string command = "python3 -B '" + std::string(REFIT_SOURCE_DIR) +
                              "/tests/models/list_config.py' '" + config_path +
                              "' " + view;
  std::string listing;
  FILE* pipe = popen(command.c_str(), "r");
  char buffer[1 << 14];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) {
    listing.append(buffer, n);
  }
  EXPECT_EQ(pclose(pipe), 0) << command;
  return listing;
}

inline void ExpectEqualsOracle(const std::string& config_path,
                               Beside beside = {}) {
  const ReadModelResult result = ReadConfig(config_path, beside);
  ASSERT_EQ(result.errors, "");
  const bool all = beside.mtp || beside.vision;
  const std::vector<std::string> expected =
      SortedLines(OracleListing(config_path, all ? "weights" : "refit"));
  ASSERT_FALSE(expected.empty());
  const std::vector<std::string> found =
      SortedLines(ModelListing(*result.model));
  // Not EXPECT_EQ, which takes minutes to print 90,000 names.
  ASSERT_EQ(found.size(), expected.size());
  const auto [line, wanted] =
      std::mismatch(found.begin(), found.end(), expected.begin());
  if (line != found.end()) {
    EXPECT_EQ(*line, *wanted);
  }
}

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_MODEL_ORACLE_H_
