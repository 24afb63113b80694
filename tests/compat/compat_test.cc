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

#include "absl/strings/escaping.h"
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
  uint64_t post_hooks = 0;  // tensors of destination ranks that ask for one
};

std::string PathOf(std::string_view name) {
  return absl::StrCat(REFIT_COMPAT_DIR "/", std::string(name), ".refit");
}

// A plan's text up to the bytes by route.
std::string HeadOf(const PlanFile& plan) {
  const std::string text = PlanText(plan, {});
  const size_t stats = text.find("\nstats ");
  return text.substr(0, text.find('\n', stats + 1) + 1);
}

uint64_t CountHooks(const RunOfRanksResult& run) {
  uint64_t tensors = 0;
  for (const auto& [hook, count] : run.post_hooks) tensors += count;
  return tensors;
}

// What `name`'s entry of the table below has to be, for a plan that is new.
std::string EntryFor(std::string_view name) {
  const absl::StatusOr<PlanFile> plan = PlanFile::Open(PathOf(name));
  if (!plan.ok()) return std::string(plan.status().message());
  const ProofResult proof = Prove(*plan);
  const absl::StatusOr<RunOfRanksResult> run = RunChecked(*plan, {});
  if (!run.ok()) return std::string(run.status().message());
  return absl::StrCat("{.name = \"", std::string(name), "\", .head = \"",
                      absl::CEscape(HeadOf(*plan)),
                      "\", .params = ", plan->body().params()->size(),
                      ", .buffers = ", plan->body().buffers()->size(),
                      ", .messages = ", proof.messages,
                      ", .destination_elements = ", proof.destination_elements,
                      ", .skipped_bytes = ", run->check.skipped_bytes,
                      ", .post_hooks = ", CountHooks(*run), "},\n");
}

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
    {.name = "1.2/post-hooks",
     .head = "plan 1.2 features 0x3 body 27c93db6ab9efdde1bc3b0fd5d9fad46 "
             "inputs ba22fbd63b98a7e28be9f4d378521cac\n"
             "ranks source 0..1 destination 2\n"
             "host 0 ranks 0..2\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 1608 bytes local 0 peer 1608 network 0\n",
     .params = 24,
     .buffers = 60,
     .messages = 2,
     .destination_elements = 800,
     .skipped_bytes = 0,
     .post_hooks = 1},
    {.name = "1.2/relays",
     .head = "plan 1.2 features 0x9 body d44f2b7e84f7800866983cd1e58c2ed5 "
             "inputs 222f5399d40ae9628b872f8a6f3261a5\n"
             "ranks source 0 destination 1..5\n"
             "host 0 ranks 0..2\n"
             "host 1 ranks 3..5\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 30800 bytes local 0 peer 24640 network 6160 "
             "relayed 18480\n",
     .params = 2,
     .buffers = 2,
     .messages = 17,
     .destination_elements = 15400,
     .skipped_bytes = 0},
    {.name = "1.3/staged-relays",
     .head = "plan 1.3 features 0x19 body 35c27e2ef8df36bd9630444b3e4ad817 "
             "inputs e093bfaabb35ceb9be93b4159a160315\n"
             "ranks source 0 destination 1..5\n"
             "host 0 ranks 0\n"
             "host 1 ranks 1..2\n"
             "host 2 ranks 3..4\n"
             "host 3 ranks 5\n"
             "limits bucket 4096 bytes staging 16384 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 30800 bytes local 0 peer 12320 network 18480 "
             "relayed 24640\n",
     .params = 2,
     .buffers = 2,
     .messages = 25,
     .destination_elements = 15400,
     .skipped_bytes = 0},
    {.name = "1.4/requirements",
     .head = "plan 1.4 features 0x1 body 1c749317db3cc863b9564bbc8542c465 "
             "inputs 1633dc3df13d55aad52df2bfa4b3b506\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0..3\n"
             "requires source moe_mlp_glu_interleave_size none\n"
             "requires destination expert_placement linear\n"
             "requires destination moe_backend triton\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 4064 bytes local 0 peer 4064 network 0\n",
     .params = 15,
     .buffers = 32,
     .messages = 4,
     .destination_elements = 2544,
     .skipped_bytes = 0},
    {.name = "1.5/fed-relays",
     .head = "plan 1.5 features 0x19 body 61497634da6dd8d6120e550ca8894706 "
             "inputs 72c81c847fb9b602bdbe7f6cb1baea71\n"
             "ranks source 0 destination 1..5\n"
             "host 0 ranks 0\n"
             "host 1 ranks 1..2\n"
             "host 2 ranks 3..4\n"
             "host 3 ranks 5\n"
             "limits bucket 4096 bytes staging 16384 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 30800 bytes local 0 peer 12320 network 18480 "
             "relayed 24640\n",
     .params = 2,
     .buffers = 2,
     .messages = 25,
     .destination_elements = 15400,
     .skipped_bytes = 0},
    {.name = "1.6/delta",
     .head = "plan 1.6 features 0x21 body 119f492ddd45e9a810d601c58b68ae7f "
             "inputs e9ce334ef2b56f2ea1fa331a6e33fc74\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0..3\n"
             "delta changes snapshot dense_every 10 check\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes "
             "slots 2 operations_per_round 32\n"
             "stats moved 448 bytes local 0 peer 448 network 0\n",
     .params = 2,
     .buffers = 5,
     .messages = 4,
     .destination_elements = 224,
     .skipped_bytes = 0},
    {.name = "1.7/topology",
     .head = "plan 1.7 body e01a388ff4f01a9e6388cba0aab835c1 inputs "
             "0449bac797665dbd08b04dfd1c086763\n"
             "ranks source 0..1 destination 2..6\n"
             "host 0 ranks 0\n"
             "host 1 ranks 2\n"
             "host 2 ranks 3\n"
             "host 3 ranks 1\n"
             "host 4 ranks 4\n"
             "host 5 ranks 5\n"
             "host 6 ranks 6\n"
             "topology machine \"gb200-nvl72\" hosts_per_nvlink_domain 3 "
             "gpus_per_nic 1 hosts_per_leaf 2 spine_oversubscription 2 peer "
             "1e+08 network 1e+07 bytes per second\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes slots 2 "
             "operations_per_round 32 network_peers 4\n"
             "stats moved 62080 bytes local 0 peer 0 network 62080\n",
     .params = 2,
     .buffers = 2,
     .messages = 6,
     .destination_elements = 31040,
     .skipped_bytes = 0},
    {.name = "1.8/folded",
     .head = "plan 1.8 features 0x49 body 46354c6b86269c7d8abdd36a2761f677 "
             "inputs e97f2e9074a474385c2dc041cc940eb0\n"
             "ranks source 0..7 destination 8..15\n"
             "host 0 ranks 0..3\n"
             "host 1 ranks 8..11\n"
             "host 2 ranks 4..7\n"
             "host 3 ranks 12..15\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes slots 2 "
             "operations_per_round 32\n"
             "stats moved 50176 bytes local 0 peer 25344 network 24832 relayed "
             "25344\n",
     .params = 2,
     .buffers = 7,
     .messages = 88,
     .destination_elements = 25088,
     .skipped_bytes = 0},
    {.name = "1.8/multiprocessors",
     .head = "plan 1.8 features 0x1 body eb85bc52696c4476250fc8fe0674fe14 "
             "inputs ecbde4ec1b932d5f3da88b8da70dccad\n"
             "ranks source 0 destination 1..2\n"
             "host 0 ranks 0..2\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes slots 2 "
             "operations_per_round 32 direct_multiprocessors 4\n"
             "stats moved 6336 bytes local 0 peer 6336 network 0\n",
     .params = 2,
     .buffers = 4,
     .messages = 2,
     .destination_elements = 3168,
     .skipped_bytes = 0},
    {.name = "1.9/delta",
     .head = "plan 1.9 features 0xa0 body a245adad9048f1bb9836797326258178 "
             "inputs bf1d14033994acec07e4363258329488\n"
             "ranks source 0..1 destination 2..3\n"
             "host 0 ranks 0\n"
             "host 1 ranks 1\n"
             "host 2 ranks 2\n"
             "host 3 ranks 3\n"
             "delta changes snapshot dense_every 10 check rungs 1/64 1/16 1/4\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes slots 2 "
             "operations_per_round 32\n"
             "stats moved 6400 bytes local 0 peer 0 network 6400\n",
     .params = 2,
     .buffers = 5,
     .messages = 4,
     .destination_elements = 3200,
     .skipped_bytes = 0},
    {.name = "1.10/dealt",
     .head = "plan 1.10 features 0x118 body e7ffdf8fef19e9a4e645b6ec339ae3c0 "
             "inputs 1787b5a1a7f4c594df6380b6c6cc52ca\n"
             "ranks source 0..1 destination 2..5\n"
             "host 0 ranks 0..1\n"
             "host 1 ranks 2..5\n"
             "limits bucket 4096 bytes staging 16384 bytes slots 2 "
             "operations_per_round 32\n"
             "stats moved 22016 bytes local 0 peer 9600 network 12416 relayed "
             "9600\n",
     .params = 2,
     .buffers = 7,
     .messages = 22,
     .destination_elements = 6400,
     .skipped_bytes = 0},
    {.name = "1.11/pulled",
     .head = "plan 1.11 features 0x1 body 5e07dd8b1116f6fe9d78547fafad1006 "
             "inputs 9b8ebde8e85ce017d079d27c96099d8a\n"
             "ranks source 0 destination 1..2\n"
             "host 0 ranks 0..2\n"
             "limits bucket 268435456 bytes staging 1073741824 bytes slots 2 "
             "operations_per_round 32 direct_multiprocessors 4 direct_pulls\n"
             "stats moved 6336 bytes local 0 peer 6336 network 0\n",
     .params = 2,
     .buffers = 4,
     .messages = 2,
     .destination_elements = 3168,
     .skipped_bytes = 0},
    {.name = "1.12/packed",
     .head = "plan 1.12 features 0x218 body 99e1f9b920a5e10a55acce4bf79e940c "
             "inputs 6e7129262c27dcfa82c33bc6137167e2\n"
             "ranks source 0..1 destination 2..7\n"
             "host 0 ranks 0..1\n"
             "host 1 ranks 2..3\n"
             "host 2 ranks 4..5\n"
             "host 3 ranks 6..7\n"
             "limits bucket 4096 bytes staging 16384 bytes slots 2 "
             "operations_per_round 32\n"
             "stats moved 75264 bytes local 0 peer 0 network 75264 relayed "
             "49152\n",
     .params = 2,
     .buffers = 5,
     .messages = 42,
     .destination_elements = 37248,
     .skipped_bytes = 0},
    {.name = "1.13/broadcast",
     .head = "plan 1.13 features 0x518 body 3c806626e354fd62871faf901d83226e "
             "inputs 222acb7f809642cc275c6a616f503630\nranks source 0 "
             "destination 1..5\nhost 0 ranks 0..1\nhost 1 ranks 2..3\nhost 2 "
             "ranks 4..5\nlimits bucket 268435456 bytes staging 1073741824 "
             "bytes slots 2 operations_per_round 32\nstats moved 62080 bytes "
             "local 0 peer 37248 network 24832 relayed 37248\n",
     .params = 2,
     .buffers = 2,
     .messages = 20,
     .destination_elements = 31040,
     .skipped_bytes = 0},
};

class CompatTest : public testing::TestWithParam<OldPlan> {
 protected:
  CompatTest() : plan_(PlanFile::Open(PathOf(GetParam().name))) {}

  void SetUp() override { ASSERT_TRUE(plan_.ok()) << plan_.status().message(); }

  absl::StatusOr<PlanFile> plan_;
};

TEST_P(CompatTest, SaysWhatItSaid) {
  EXPECT_EQ(HeadOf(*plan_), GetParam().head);
  EXPECT_EQ(plan_->body().params()->size(), GetParam().params);
  EXPECT_EQ(plan_->body().buffers()->size(), GetParam().buffers);
  // Builds up to 1.12 have them in the body.
  if (plan_->plan().format_version() <= (kFormatMajor << 16 | 12)) {
    EXPECT_EQ(EstimatesOf(*plan_).predicted_seconds,
              plan_->body().stats()->predicted_seconds());
  }
  EXPECT_GT(EstimatesOf(*plan_).predicted_seconds, 0);
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
  EXPECT_EQ(CountHooks(*run), GetParam().post_hooks);
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
  for (const std::string& file : files) {
    EXPECT_TRUE(tested.contains(file)) << "wanted in kOldPlans:\n"
                                       << EntryFor(file);
  }
  for (const std::string& name : tested) {
    EXPECT_TRUE(files.contains(name)) << name << " has no file";
  }
}

}  // namespace
}  // namespace refit
