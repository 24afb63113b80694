// Plans that earlier versions wrote are read, proved and run as they were then.
#include <gtest/gtest.h>

#include <cctype>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <ostream>
#include <set>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "plan/plan_file.h"
#include "plan/proof/proof.h"
#include "plan/text/text.h"
#include "runner/checked_run.h"

namespace refit {
namespace {

// A plan, and what was seen in it when it was added.
struct OldPlan {
  std::string_view name;  // VERSION/NAME
  std::string_view head;  // its text up to the bytes by route
  uint32_t params;
  uint32_t buffers;
  int64_t messages;
  int64_t destination_elements;
  uint64_t skipped_bytes;
};

// Names tests and failures.
void PrintTo(const OldPlan& plan, std::ostream* out) { *out << plan.name; }

const OldPlan kOldPlans[] = {
    {.name = "1.0/colocated",
     .head = "plan 1.0 body 635ee229aa4b8e70c35639baaecf0a07 "
             "inputs 2052ff51382d5f5ed80613a14a2701af\n"
             "ranks source 0..1 destination 2..3 colocated\n"
             "host 0 ranks 0..3\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 2944 bytes local 1584 peer 1360 network 0\n",
     .params = 14,
     .buffers = 32,
     .messages = 4,
     .destination_elements = 1584,
     .skipped_bytes = 0},
    {.name = "1.0/dense",
     .head = "plan 1.0 body e3170c95ef698a8316e39aa26f3f03fe "
             "inputs 32be413f81c1bc39c7334b03eb074b65\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0..3\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 1\n"
             "stats moved 3680 bytes local 0 peer 3680 network 0\n",
     .params = 12,
     .buffers = 30,
     .messages = 4,
     .destination_elements = 2064,
     .skipped_bytes = 0},
    {.name = "1.0/generic-cast",
     .head = "plan 1.0 body 762955e0e63fb87f3ba356264c427d1c "
             "inputs a481ef0d851d7994a01c3a9fc814696b\n"
             "ranks source 0..3 destination 4..5\n"
             "host 0 ranks 0..5\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 192 bytes local 0 peer 192 network 0\n",
     .params = 3,
     .buffers = 16,
     .messages = 8,
     .destination_elements = 102,
     .skipped_bytes = 12},
    {.name = "1.0/moe-hosts",
     .head = "plan 1.0 body c2d883051b81b93a64c687fb211550b9 "
             "inputs b5993c75cd27dce711410222a068e9d8\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0, 2\n"
             "host 1 ranks 1\n"
             "host 2 ranks 3\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 9152 bytes local 0 peer 3808 network 5344\n",
     .params = 15,
     .buffers = 26,
     .messages = 4,
     .destination_elements = 4576,
     .skipped_bytes = 0},
    {.name = "1.1/direct",
     .head = "plan 1.1 features 0x1 body 84b178f7a5010304c4a3f431d426210d "
             "inputs 26eec3413a6ea00479ba45c5f7bfa943\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0..3\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 3680 bytes local 0 peer 3680 network 0\n",
     .params = 12,
     .buffers = 30,
     .messages = 4,
     .destination_elements = 2064,
     .skipped_bytes = 0},
};

class CompatTest : public testing::TestWithParam<OldPlan> {
 protected:
  CompatTest()
      : plan_(PlanFile::Open(absl::StrCat(
            REFIT_COMPAT_DIR "/", std::string(GetParam().name), ".refit"))) {}

  void SetUp() override { ASSERT_TRUE(plan_.ok()) << plan_.status().message(); }

  absl::StatusOr<PlanFile> plan_;
};

TEST_P(CompatTest, SaysWhatItSaid) {
  const std::string text = PlanText(*plan_, {});
  EXPECT_EQ(text.substr(0, GetParam().head.size()), GetParam().head);
  EXPECT_EQ(plan_->body().params()->size(), GetParam().params);
  EXPECT_EQ(plan_->body().buffers()->size(), GetParam().buffers);
}

TEST_P(CompatTest, IsProved) {
  const ProofResult proof = Prove(*plan_);
  EXPECT_EQ(proof.violation, "");
  EXPECT_TRUE(proof.valid);
  EXPECT_EQ(proof.messages, GetParam().messages);
  EXPECT_EQ(proof.destination_elements, GetParam().destination_elements);
}

TEST_P(CompatTest, RunsByteExact) {
  const absl::StatusOr<RunOfRanksResult> run =
      RunChecked(*plan_, {.timeout = std::chrono::minutes(1)});
  ASSERT_TRUE(run.ok()) << run.status().message();
  EXPECT_EQ(run->check.wrong_elements, 0)
      << testing::PrintToString(run->check.mismatches);
  EXPECT_EQ(run->check.checked_bytes, run->destination_bytes);
  EXPECT_EQ(run->check.skipped_bytes, GetParam().skipped_bytes);
}

INSTANTIATE_TEST_SUITE_P(Plans, CompatTest, testing::ValuesIn(kOldPlans),
                         [](const testing::TestParamInfo<OldPlan>& info) {
                           std::string name(info.param.name);
                           for (char& c : name) {
                             if (!std::isalnum(static_cast<unsigned char>(c)))
                               c = '_';
                           }
                           return name;
                         });

TEST(CompatFilesTest, EveryPlanIsTested) {
  std::set<std::string> files;
  const std::filesystem::path root = REFIT_COMPAT_DIR;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(root)) {
    if (entry.path().extension() != ".refit") continue;
    files.insert(
        entry.path().lexically_relative(root).replace_extension().string());
  }
  std::set<std::string> tested;
  for (const OldPlan& plan : kOldPlans) tested.emplace(plan.name);
  EXPECT_EQ(files, tested);
}

}  // namespace
}  // namespace refit
