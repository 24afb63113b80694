// Models at full size, of which a sanitizer would see no more than of small
// ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/compiler/model_oracle.h"

namespace refit {
namespace {

std::string PublishedConfig(const std::string& name) {
  return absl::StrCat(REFIT_SOURCE_DIR, "/examples/models/", name, ".json");
}

class PublishedConfigTest : public ::testing::TestWithParam<const char*> {};

TEST_P(PublishedConfigTest, ListsWhatTheCheckpointHolds) {
  ExpectEqualsOracle(PublishedConfig(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Examples, PublishedConfigTest,
    ::testing::Values("llama-3.1-8b", "llama-3.1-70b", "qwen2.5-7b",
                      "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b",
                      "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3",
                      "deepseek-v4-flash", "deepseek-v4-pro", "kimi-k2",
                      "moonlight-16b-a3b", "glm-4.7-flash", "glm-4.5-air",
                      "glm-4.6", "nemotron-3-nano-30b-a3b",
                      "nemotron-3-super-120b-a12b", "qwen3-next-80b-a3b",
                      "gpt-oss-120b", "gemma-3-4b-it", "gemma-3-27b-it"),
    [](const auto& param_info) {
      std::string name = param_info.param;
      std::replace_if(
          name.begin(), name.end(), [](char c) { return !isalnum(c); }, '_');
      return name;
    });

TEST(PublishedModelsTest, PredictionLayersAreListedIfTheJobMovesThem) {
  for (const char* name : {"deepseek-v3", "glm-4.7-flash", "glm-4.6"}) {
    ExpectEqualsOracle(PublishedConfig(name), {.mtp = true});
  }
}

TEST(PublishedModelsTest, AVisionTowerIsListedIfTheJobMovesIt) {
  for (const char* name : {"gemma-3-4b-it", "kimi-k2.5"}) {
    ExpectEqualsOracle(PublishedConfig(name), {.vision = true});
  }
}

}  // namespace
}  // namespace refit
