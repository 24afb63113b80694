// Keys that a config.json leaves out, beside what transformers' classes then
// have: tests/models/class_defaults.json, which class_defaults.py writes.
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "compiler/model/model.h"
#include "compiler/model/rules/rules.h"
#include "rapidjson/document.h"
#include "rapidjson/istreamwrapper.h"
#include "rapidjson/stringbuffer.h"
#include "rapidjson/writer.h"
#include "tests/compiler/model_listing.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

using Json = rapidjson::Value;

std::string TextOf(const Json& value) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> writer(buffer);
  value.Accept(writer);
  return buffer.GetString();
}

// All that the config says of the model, or the errors.
struct Reading {
  std::string model;
  std::string errors;
};

// The tower is read too, where the family's is known.
Reading ReadingOf(const Json& config, bool vision = true) {
  const TemporaryDirectory directory;
  Job job;
  job.model.config_path = directory.Write("config.json", TextOf(config));
  if (vision && config.HasMember("vision_config")) {
    job.source.vision = {.value = true, .place = {}, .given = true};
  }
  Diagnostics diagnostics;
  const std::optional<Model> model = ReadModel(job, diagnostics);
  Reading reading = {.model = "",
                     .errors = directory.Relative(diagnostics.Render())};
  if (vision && reading.errors.find("no vision tower") != std::string::npos) {
    return ReadingOf(config, /*vision=*/false);
  }
  if (!model.has_value()) return reading;
  reading.model = ModelListing(*model);
  for (const Skip& skip : model->skips) {
    absl::StrAppend(&reading.model, skip.name, " is left out\n");
  }
  return reading;
}

// The object of the config that has the last part of "text_config.head_dim",
// and that part.
std::pair<Json*, std::string> Find(Json& config, const std::string& path) {
  Json* object = &config;
  std::string key = path;
  if (const size_t dot = path.find('.'); dot != std::string::npos) {
    object = &config[path.substr(0, dot).c_str()];
    key = path.substr(dot + 1);
  }
  return {object, key};
}

// Some keys that must not be refused: the class's default is known.
constexpr const char* kDefaulted[] = {
    "deepseek_v2 q_lora_rank",
    "dots1 first_k_dense_replace",
    "deepseek_v3 first_k_dense_replace",
    "deepseek_v3 n_shared_experts",
    "deepseek_v3 q_lora_rank",
    "ernie4_5 head_dim",
    "glm4v_moe text_config.attention_bias",
    "jais2 mlp_bias",
    "seed_oss attention_bias",
    "starcoder2 use_bias",
    "gemma2 head_dim",
    "glm4_moe first_k_dense_replace",
    "glm4_moe n_shared_experts",
    "gpt_oss head_dim",
    "qwen3 head_dim",
};

TEST(ClassDefaultsTest, WhatAConfigLeavesOutIsTheClassesOrIsRefused) {
  std::ifstream file(REFIT_SOURCE_DIR "/tests/models/class_defaults.json");
  rapidjson::IStreamWrapper stream(file);
  rapidjson::Document table;
  table.ParseStream(stream);
  ASSERT_FALSE(table.HasParseError());
  std::set<std::string> defaulted;
  // By index: comparisons of rapidjson's iterators are ambiguous to Clang.
  const Json& families = table["families"];
  for (rapidjson::SizeType f = 0; f < families.MemberCount(); ++f) {
    const auto& [name, entry] = families.MemberBegin()[f];
    const std::string family = name.GetString();
    const Reading whole = ReadingOf(entry["config"]);
    ASSERT_EQ(whole.errors, "") << family;
    const Json& keys = entry["left_out"];
    for (rapidjson::SizeType k = 0; k < keys.MemberCount(); ++k) {
      const auto& [left_out, value] = keys.MemberBegin()[k];
      const std::string path = left_out.GetString();
      rapidjson::Document without;
      without.CopyFrom(entry["config"], without.GetAllocator());
      const auto [object, key] = Find(without, path);
      object->RemoveMember(key.c_str());
      const Reading found = ReadingOf(without);
      Json of_class(value, without.GetAllocator());
      object->AddMember(Json(key.c_str(), without.GetAllocator()), of_class,
                        without.GetAllocator());
      const Reading wanted = ReadingOf(without);
      if (!found.errors.empty()) {
        if (FindBuiltInRules(family) == nullptr) continue;
        // One mistake is one message.
        EXPECT_EQ(found.errors.find("error:"), found.errors.rfind("error:"))
            << family << " " << path << "\n"
            << found.errors;
        continue;
      }
      EXPECT_EQ(wanted.errors, "") << family << " " << path;
      // Not EXPECT_EQ, which takes minutes to print the difference.
      EXPECT_TRUE(found.model == wanted.model)
          << family << ": without " << path << " the class has "
          << TextOf((*object)[key.c_str()]);
      if (found.model != whole.model) {
        defaulted.insert(absl::StrCat(family, " ", path));
      }
    }
  }
  for (const BuiltInRules& rules : AllBuiltInRules()) {
    if (rules.transformers_class.empty()) continue;
    const std::string name(rules.model_type);
    EXPECT_TRUE(families.HasMember(name.c_str())) << name;
  }
  for (const char* key : kDefaulted)
    EXPECT_TRUE(defaulted.contains(key)) << key;
}

}  // namespace
}  // namespace refit
