#include "plan/plan_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"
#include "plan/file_limits.h"
#include "plan/proof/proof.h"
#include "tests/plan/plan_spec.h"

namespace refit {
namespace {

using Bytes = std::vector<uint8_t>;

absl::Status Load(Bytes bytes) {
  return PlanFile::FromBytes(std::move(bytes)).status();
}

// The loader's message for the sample plan after `change`.
std::string Refusal(const std::function<void(PlanSpec&)>& change) {
  PlanSpec spec = SampleSpec();
  change(spec);
  const absl::Status status = Load(BuildPlan(spec));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

struct Header {
  uint32_t format_version = kFormatMajor << 16 | kFormatMinor;
  uint64_t required_features = 0;
  bool digests = true;
};

// `body` as a plan; its digest is right.
Bytes Wrap(const Bytes& body, const Header& header) {
  flatbuffers::FlatBufferBuilder builder;
  builder.ForceVectorAlignment(body.size(), 1, 16);
  const auto vector = builder.CreateVector(body);
  const fb::Digest digest = DigestOf(body);
  builder.Finish(
      fb::CreatePlan(builder, header.format_version, header.required_features,
                     header.digests ? &digest : nullptr,
                     header.digests ? &digest : nullptr, vector),
      fb::PlanIdentifier());
  return {builder.GetBufferPointer(),
          builder.GetBufferPointer() + builder.GetSize()};
}

Bytes SampleBody() {
  const Bytes plan = BuildPlan(SampleSpec());
  const auto& body = *fb::GetPlan(plan.data())->body();
  return {body.begin(), body.end()};
}

class PlanFileTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "/plan_file_test.XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  std::string Write(const Bytes& bytes) {
    const std::string path = directory_ + "/plan.refit";
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path;
  }

  std::string directory_;
};

TEST_F(PlanFileTest, AFileOpensAsItsBytesDo) {
  const Bytes bytes = BuildPlan(SampleSpec());
  const absl::StatusOr<PlanFile> plan = PlanFile::Open(Write(bytes));
  ASSERT_TRUE(plan.ok()) << plan.status().message();
  EXPECT_EQ(Bytes(plan->bytes().begin(), plan->bytes().end()), bytes);
  EXPECT_EQ(plan->source_ranks(), 2);
  EXPECT_EQ(plan->world_size(), 4);
  EXPECT_EQ(plan->side(1), fb::Side::kSource);
  EXPECT_EQ(plan->side(2), fb::Side::kDestination);
}

TEST_F(PlanFileTest, APipeIsRead) {
  const std::string path = directory_ + "/pipe";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  const Bytes bytes = BuildPlan(SampleSpec());
  std::thread writer([&] {
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  });
  const absl::StatusOr<PlanFile> plan = PlanFile::Open(path);
  writer.join();
  EXPECT_TRUE(plan.ok()) << plan.status().message();
}

TEST_F(PlanFileTest, AMissingFileIsNotFound) {
  const absl::Status status = PlanFile::Open(directory_ + "/none").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(status.message(), directory_ + "/none: No such file or directory");
}

TEST_F(PlanFileTest, ADirectoryCannotBeRead) {
  EXPECT_EQ(PlanFile::Open(directory_).status().code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(PlanFileTest, AnEmptyFileIsNoPlan) {
  const std::string path = Write({});
  EXPECT_EQ(PlanFile::Open(path).status().message(),
            path + ": not a plan: 0 bytes are too few");
}

TEST(PlanLoaderTest, AnotherIdentifierIsNoPlan) {
  Bytes bytes = BuildPlan(SampleSpec());
  bytes[4] = 'J';
  bytes[7] = 0;
  EXPECT_EQ(Load(bytes).message(),
            "not a plan: file identifier is \"JFI\\x00\" when it should be "
            "\"RFIT\"");
}

TEST(PlanLoaderTest, EveryTruncationIsRefused) {
  const Bytes bytes = BuildPlan(SampleSpec());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(Load(Bytes(bytes.begin(), bytes.begin() + size)).code(),
              absl::StatusCode::kInvalidArgument)
        << size;
  }
}

TEST(PlanLoaderTest, BytesAppendedToAPlanAreRefused) {
  Bytes bytes = BuildPlan(SampleSpec());
  const auto& body = *fb::GetPlan(bytes.data())->body();
  const size_t padding = static_cast<size_t>(bytes.data() + bytes.size() -
                                             body.data() - body.size());
  bytes.push_back(0);
  EXPECT_EQ(Load(bytes).message(), "damaged: 1 bytes follow the plan");
  bytes.resize(bytes.size() + 15);
  EXPECT_EQ(Load(bytes).message(),
            "damaged: " + std::to_string(padding + 16) +
                " bytes follow the body, which should end the file");
  bytes.resize(bytes.size() + 4096, 0xAB);
  EXPECT_EQ(Load(bytes).code(), absl::StatusCode::kInvalidArgument);
}

TEST(PlanLoaderTest, ANewerMajorIsRefused) {
  const absl::Status status =
      Load(Wrap(SampleBody(), {.format_version = 2 << 16 | 3}));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "format version 2.3 is newer than this build's 1.13");
}

TEST(PlanLoaderTest, ANewerMinorIsRead) {
  EXPECT_TRUE(Load(Wrap(SampleBody(), {.format_version = 1 << 16 | 10})).ok());
}

TEST(PlanLoaderTest, DirectRoundsWithoutTheirFeatureBitAreRefused) {
  PlanSpec spec = SampleSpec();
  spec.rounds.push_back(fb::Route::kPeer);
  spec.mechanisms = {fb::Mechanism::kStaged, fb::Mechanism::kStaged,
                     fb::Mechanism::kDirect};
  const PlanFile plan = OpenSpec(spec);
  const auto* body = plan.plan().body();
  const std::vector<uint8_t> bytes(body->begin(), body->end());
  EXPECT_EQ(Load(Wrap(bytes, {})).message(),
            "the plan has direct rounds but does not require that executors "
            "know them (bit 0 of required_features)");
}

PlanSpec HookedSpec(const PlanSpec::PostHook& hook) {
  PlanSpec spec = SampleSpec();
  spec.buffers[4].post_hooks = {hook};
  return spec;
}

TEST(PlanLoaderTest, PostHooksRequireTheirFeatureAndItsVersion) {
  const PlanFile plan = OpenSpec(HookedSpec({"add-one", "add 1 to it"}));
  EXPECT_EQ(plan.plan().required_features(), kFeaturePostHooks);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 2);
  const auto* body = plan.plan().body();
  const std::vector<uint8_t> bytes(body->begin(), body->end());
  EXPECT_EQ(Load(Wrap(bytes, {})).message(),
            "the plan has post-hooks but does not require that executors know "
            "them (bit 1 of required_features)");
}

TEST(PlanLoaderTest, RequirementsNeedNoFeatureButTheirVersion) {
  PlanSpec spec = SampleSpec();
  spec.requirements = {{fb::Side::kSource, "moe_backend", "triton"},
                       {fb::Side::kDestination, "expert_placement", "linear"},
                       {fb::Side::kDestination, "moe_backend", "triton"}};
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(), 0u);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 4);
}

TEST(PlanLoaderTest, RequirementsThatAreNoWordsOrStandTwiceAreRefused) {
  const auto message = [](std::vector<PlanSpec::Requirement> requirements) {
    PlanSpec spec = SampleSpec();
    spec.requirements = std::move(requirements);
    return std::string(Load(BuildPlan(spec)).message());
  };
  const fb::Side side = fb::Side::kDestination;
  for (const std::string word : {"", "MoE", "moe backend", "a\n"}) {
    const std::string wanted =
        "requirement 0: its key or value is not made of lower-case letters, "
        "digits and '_'";
    EXPECT_EQ(message({{side, word, "triton"}}), wanted);
    EXPECT_EQ(message({{side, "moe_backend", word}}), wanted);
  }
  EXPECT_EQ(message({{static_cast<fb::Side>(2), "a", "b"}}),
            "requirement 0: unknown side 2");
  EXPECT_EQ(message({{side, "a", "b"}, {side, "a", "c"}}),
            "requirement 1: not ascending by side and key");
  EXPECT_EQ(message({{side, "a", "b"}, {fb::Side::kSource, "b", "c"}}),
            "requirement 1: not ascending by side and key");
}

TEST(PlanLoaderTest, PlansThatNeedNothingNewAreWrittenAsBefore) {
  EXPECT_EQ(OpenSpec(SampleSpec()).plan().format_version(), 1 << 16 | 1);
}

TEST(PlanLoaderTest, PostHooksWithoutAWordOrASentenceAreRefused) {
  for (const std::string name : {"", "Add one", "add\n"}) {
    EXPECT_EQ(Load(BuildPlan(HookedSpec({name, "add 1 to it"}))).message(),
              "buffer 4: post-hook 0: its name is not made of lower-case "
              "letters, digits and '-'");
  }
  EXPECT_EQ(Load(BuildPlan(HookedSpec({"add-one", ""}))).message(),
            "buffer 4: post-hook 0: it has no detail");
  PlanSpec many = SampleSpec();
  many.buffers[4].post_hooks.assign(17, {"add-one", "add 1 to it"});
  EXPECT_EQ(Load(BuildPlan(many)).message(),
            "buffer 4: 17 post-hooks are more than 16");
}

TEST(PlanLoaderTest, PostHooksOfASourceAreRefused) {
  PlanSpec spec = SampleSpec();
  spec.buffers[2].post_hooks = {{"add-one", "add 1 to it"}};
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 0, buffer slot 1: buffer 2 has post-hooks, a "
            "source's has none");
}

TEST(PlanLoaderTest, PostHooksOfScratchAreRefused) {
  PlanSpec spec = SampleSpec();
  spec.buffers[4].post_hooks = {{"add-one", "add 1 to it"}};
  spec.programs[2].scratch_buffers = 1;
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 2, buffer slot 1: buffer 4 has post-hooks, "
            "scratch has none");
}

TEST(PlanLoaderTest, RelaysWithoutTheirFeatureBitAreRefused) {
  PlanSpec spec = SampleSpec();
  spec.rounds.push_back(fb::Route::kPeer);
  spec.mechanisms = {fb::Mechanism::kStaged, fb::Mechanism::kStaged,
                     fb::Mechanism::kDirect};
  spec.programs[2].messages.push_back(SendTo(3, 2, 5, 0, 64));
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(), 1 << 0 | 1 << 3);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 2);
  const auto* body = plan.plan().body();
  const std::vector<uint8_t> bytes(body->begin(), body->end());
  EXPECT_EQ(Load(Wrap(bytes, {.required_features = 1 << 0})).message(),
            "the plan has relays but does not require that executors know "
            "them (bit 3 of required_features)");
}

TEST(PlanLoaderTest, StagedRelaysOfWhichTheHeaderDoesNotTellAreRefused) {
  PlanSpec spec = SampleSpec();
  spec.programs[2].messages.push_back(SendTo(3, 1, 5, 0, 64));
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(), 1 << 3 | 1 << 4);
  EXPECT_EQ(plan.plan().format_version(), 1 << 16 | 3);
  const auto* body = plan.plan().body();
  const std::vector<uint8_t> bytes(body->begin(), body->end());
  EXPECT_EQ(Load(Wrap(bytes, {.required_features = 1 << 3})).message(),
            "the plan has staged relays but does not require that executors "
            "know them (bit 4 of required_features)");
}

// `packs`: the plan's messages are packed.
void ExpectThatRelaysAreEachSendAndAReceiveBeforeIt(bool packs) {
  PlanSpec spec = SampleSpec();
  const auto sent = static_cast<uint32_t>(spec.programs[2].messages.size());
  spec.rounds.push_back(fb::Route::kPeer);
  spec.programs[2].messages.push_back(SendTo(3, 2, 5, 0, 64));
  spec.programs[2].messages.push_back(SendTo(3, 2, 5, 0, 64));
  const auto relays = [&](const std::vector<fb::Relay>& given) {
    PlanSpec with_relays = spec;
    with_relays.programs[2].relays = given;
    if (packs) PackMessages(with_relays);
    return std::string(Load(BuildPlan(with_relays)).message());
  };
  EXPECT_EQ(relays({fb::Relay(sent, 0), fb::Relay(sent + 1, 1)}), "");
  EXPECT_EQ(relays({fb::Relay(sent + 1, 1), fb::Relay(sent, 0)}),
            absl::StrCat("program of rank 2: relay 0 is message ", sent + 1,
                         " when it should be message ", sent));
  EXPECT_EQ(relays({fb::Relay(sent, 0)}),
            absl::StrCat("program of rank 2: message ", sent + 1,
                         " is sent, and no relay"));
  EXPECT_EQ(relays({fb::Relay(sent, 0), fb::Relay(sent + 1, 1),
                    fb::Relay(sent + 2, 1)}),
            absl::StrCat("program of rank 2: relay 2 is message ", sent + 2,
                         " when it should be none"));
  for (const uint32_t fed_by : {sent, sent + 2, ~0u}) {
    EXPECT_EQ(relays({fb::Relay(sent, fed_by), fb::Relay(sent + 1, 1)}),
              absl::StrCat("program of rank 2: relay 0: message ", sent,
                           " is fed by message ", fed_by,
                           ", which is no receive of an earlier round"));
  }
  spec.programs[0].relays = {fb::Relay(0, 0)};
  EXPECT_EQ(relays({}), "program of rank 0: a source rank has relays");
}

TEST(PlanLoaderTest, RelaysAreEachSendAndAReceiveBeforeIt) {
  ExpectThatRelaysAreEachSendAndAReceiveBeforeIt(/*packs=*/false);
  PlanSpec spec = SampleSpec();
  spec.programs[2].messages.push_back(SendTo(3, 1, 5, 0, 64));
  spec.programs[2].relays = {fb::Relay(2, 0)};
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1 << 16 | 5);
}

TEST(PlanLoaderTest, PackedRelaysAreEachSendAndAReceiveBeforeIt) {
  ExpectThatRelaysAreEachSendAndAReceiveBeforeIt(/*packs=*/true);
}

// All ranks have to know of deltas: before each refit they agree on a base.
TEST(PlanLoaderTest, DeltasNeedTheirFeatureAndRungsInStagedRounds) {
  PlanSpec spec = SampleSpec();
  spec.delta = PlanSpec::Delta();
  const auto message = [&] {
    return std::string(Load(BuildPlan(spec)).message());
  };
  EXPECT_EQ(message(), "delta: round 0 is staged, and no rungs");
  spec.delta->rungs = {6, 6};
  EXPECT_EQ(message(),
            "delta: rung 1 is 6, rungs descend from at most 7 to at least 1");
  spec.delta->rungs = {8};
  EXPECT_EQ(message(),
            "delta: rung 0 is 8, rungs descend from at most 7 to at least 1");
  spec.delta->rungs = {1, 0};
  EXPECT_EQ(message(),
            "delta: rung 1 is 0, rungs descend from at most 7 to at least 1");
  spec.delta->rungs = {7, 1};
  EXPECT_EQ(message(), "");
  EXPECT_EQ(OpenSpec(spec).plan().required_features(),
            kFeatureDelta | kFeatureStagedDelta);
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1u << 16 | 9);
  spec.delta->changes = fb::DeltaChanges::kBitmap;
  EXPECT_EQ(message(), "");
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1u << 16 | 9);
  spec.delta = PlanSpec::Delta();
  spec.mechanisms.assign(spec.rounds.size(), fb::Mechanism::kDirect);
  for (PlanSpec::Program& program : spec.programs) {
    program.staging_bytes = 0;
    for (fb::Message& message : program.messages) {
      message = fb::Message(message.round(), message.peer(), message.copies(),
                            message.kind(), 0, 0, 0, message.size_bytes());
    }
  }
  EXPECT_EQ(message(), "");
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(),
            kFeatureDirectRounds | kFeatureDelta);
  EXPECT_EQ(plan.plan().format_version(), 1u << 16 | 6);
  const auto* body = plan.plan().body();
  const std::vector<uint8_t> bytes(body->begin(), body->end());
  EXPECT_EQ(Load(Wrap(bytes, {.required_features = 1 << 0})).message(),
            "the plan has delta refits but does not require that executors "
            "know them (bit 5 of required_features)");
  spec.delta->changes = static_cast<fb::DeltaChanges>(3);
  EXPECT_EQ(message(), "delta: unknown way 3 to find changes");
}

// An executor that does not know of it might pack where bytes are held.
TEST(PlanLoaderTest, DealingNeedsItsFeature) {
  const PlanFile plan = OpenSpec(DealtSpec());
  EXPECT_EQ(plan.plan().format_version(), 1u << 16 | 10);
  const auto* bytes_of_body = plan.plan().body();
  const std::vector<uint8_t> bytes(bytes_of_body->begin(),
                                   bytes_of_body->end());
  EXPECT_EQ(
      Load(Wrap(bytes,
                {.required_features = kFeatureRelays | kFeatureStagedRelays}))
          .message(),
      "the plan has dealt messages but does not require that executors know "
      "them (bit 8 of required_features)");
}

// An executor that ignored shifts would send to the peers of another rank.
TEST(PlanLoaderTest, ShiftsNeedTheirFeatureAndKeepPeersOnTheirSide) {
  PlanSpec spec = FoldedSpec();
  const PlanFile plan = OpenSpec(spec);
  EXPECT_EQ(plan.plan().required_features(), kFeatureShifts);
  EXPECT_EQ(plan.plan().format_version(), 1u << 16 | 8);
  const fb::Body& body = plan.body();
  const fb::RankProgram& shifted = *body.programs()->Get(2);
  EXPECT_TRUE(AreShared(*body.programs()->Get(0), shifted));
  EXPECT_FALSE(AreShared(*body.programs()->Get(1), shifted));
  EXPECT_EQ(PeerOf(body, 0, *shifted.messages()->Get(0)), 4u);
  EXPECT_EQ(PeerOf(body, 2, *shifted.messages()->Get(0)), 6u);
  EXPECT_EQ(PeerOf(body, 6, *body.programs()->Get(6)->messages()->Get(0)), 2u);
  const auto* bytes_of_body = plan.plan().body();
  const std::vector<uint8_t> bytes(bytes_of_body->begin(),
                                   bytes_of_body->end());
  EXPECT_EQ(Load(Wrap(bytes, {.required_features = 0})).message(),
            "the plan has shifted programs but does not require that executors "
            "know them (bit 6 of required_features)");
  spec.programs[2].destination_shift = 3;
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 2, message 1: peer 5 shifted by 3 is not below 8");
  spec = FoldedSpec();
  spec.programs[7].source_shift = 3;
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 7, message 0: peer 1 shifted by 3 is not below 4");
  spec.programs[7].source_shift = 0xffffffff;  // as if it were one rank back
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 7, message 0: peer 1 shifted by 4294967295 is not "
            "below 4");
}

// SampleSpec with all messages in one round, so that they follow each other,
// packed or not.
PlanSpec OneRoundSpec() {
  PlanSpec spec = SampleSpec();
  for (PlanSpec::Program& program : spec.programs) {
    for (fb::Message& message : program.messages) {
      message =
          fb::Message(0, message.peer(), message.copies(), message.kind(), 0, 0,
                      message.staging_offset(), message.size_bytes());
    }
    std::sort(program.messages.begin(), program.messages.end(),
              [](const fb::Message& a, const fb::Message& b) {
                return a.peer() < b.peer();
              });
    uint64_t offset = 0;
    for (fb::Message& message : program.messages) {
      message = fb::Message(0, message.peer(), message.copies(), message.kind(),
                            0, 0, offset, message.size_bytes());
      offset += static_cast<uint64_t>(
          AlignStaging(static_cast<int64_t>(message.size_bytes())));
    }
  }
  return spec;
}

using MessageFields = std::tuple<uint32_t, uint32_t, uint32_t, fb::MessageKind,
                                 uint64_t, uint64_t>;
std::vector<MessageFields> MessagesOf(const PlanFile& plan, uint32_t rank) {
  std::vector<MessageFields> messages;
  for (const fb::Message* message : plan.messages().Of(rank)) {
    messages.emplace_back(message->round(), message->peer(), message->copies(),
                          message->kind(), message->staging_offset(),
                          message->size_bytes());
  }
  return messages;
}

TEST(PlanLoaderTest, PackedMessagesAreThoseThatWerePacked) {
  for (PlanSpec spec :
       {SampleSpec(), OneRoundSpec(), FoldedSpec(), QuantizedSpec()}) {
    const PlanFile plan = OpenSpec(spec);
    PackMessages(spec);
    const PlanFile packed = OpenSpec(spec);
    EXPECT_EQ(packed.plan().format_version(), 1u << 16 | 12);
    EXPECT_EQ(packed.plan().required_features(),
              plan.plan().required_features() | kFeaturePackedMessages);
    ASSERT_EQ(packed.world_size(), plan.world_size());
    for (uint32_t rank = 0; rank < spec.programs.size(); ++rank) {
      EXPECT_EQ(MessagesOf(packed, rank), MessagesOf(plan, rank)) << rank;
      EXPECT_EQ(&packed.messages().Of(rank), &packed.messages().Of(rank));
    }
    EXPECT_TRUE(Prove(packed).valid) << Prove(packed).violation;
  }
}

// All threads get one vector, which stays where it is.
TEST(PlanLoaderTest, PackedMessagesAreWrittenOutOnce) {
  PlanSpec spec = OneRoundSpec();
  PackMessages(spec);
  const PlanFile plan = OpenSpec(spec);
  std::vector<std::thread> threads;
  std::vector<const MessageVector*> found(8);
  for (size_t i = 0; i < found.size(); ++i) {
    threads.emplace_back([&, i] { found[i] = &plan.messages().Of(0); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const MessageVector* vector : found) EXPECT_EQ(vector, found[0]);
  EXPECT_EQ(found[0]->size(), 2u);
}

TEST(PlanLoaderTest, PackedMessagesNeedTheirFeature) {
  PlanSpec spec = SampleSpec();
  PackMessages(spec);
  const Bytes plan = BuildPlan(spec);
  const auto& body = *fb::GetPlan(plan.data())->body();
  EXPECT_EQ(Load(Wrap({body.begin(), body.end()}, {})).message(),
            "the plan has packed messages but does not require that executors "
            "know them (bit 9 of required_features)");
}

// The loader's message for packed messages after `change`.
std::string PackedRefusal(
    const std::function<void(PlanSpec&, fb::PackedMessagesT&)>& change,
    PlanSpec spec = OneRoundSpec()) {
  PackMessages(spec);
  change(spec, *spec.packed_messages);
  const absl::Status status = Load(BuildPlan(spec));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(PlanLoaderTest, PackedMessagesThatCannotBeReadAreRefused) {
  using Packed = fb::PackedMessagesT;
  const auto refusal = [](const std::function<void(Packed&)>& change) {
    return PackedRefusal([&](PlanSpec&, Packed& packed) { change(packed); });
  };
  EXPECT_EQ(refusal([](Packed& p) { p.sizes.clear(); }),
            "packed messages: a part is missing");
  EXPECT_EQ(refusal([](Packed& p) { p.sizes.pop_back(); }),
            "packed messages: 7 sizes of 8 copy lists");
  EXPECT_EQ(refusal([](Packed& p) { p.sizes[1] = (1ull << 48) + 1; }),
            "packed messages: size 1 is 281474976710657, above 2^48");
  EXPECT_EQ(refusal([](Packed& p) { p.copies.pop_back(); }),
            "packed messages: 8 peers have 7 copies");
  EXPECT_EQ(refusal([](Packed& p) { p.peers_high = {0}; }),
            "packed messages: 1 upper halves of 8 peers");
  EXPECT_EQ(refusal([](Packed& p) {
              p.copies_high = {0, 0};
            }),
            "packed messages: 2 upper halves of 8 copies");
  EXPECT_EQ(refusal([](Packed& p) { p.copies[3] = 8; }),
            "packed messages: copies 8 is not below 8");
  EXPECT_EQ(refusal([](Packed& p) {
              p.copies_high.resize(8);
              p.copies_high[7] = 0xffff;
            }),
            "packed messages: copies 4294901764 is not below 8");
  EXPECT_EQ(refusal([](Packed& p) {
              p.lists[3] = {3, 2, 6, 2};
            }),
            "packed messages: list 3: rounds end at 5 of 4");
  EXPECT_EQ(refusal([](Packed& p) {
              p.lists[3] = {0xffffffff, 1, 6, 2};
            }),
            "packed messages: list 3: rounds end at 4294967296 of 4");
  EXPECT_EQ(refusal([](Packed& p) {
              p.lists[3] = {3, 1, 7, 2};
            }),
            "packed messages: list 3: messages end at 9 of 8");
  EXPECT_EQ(refusal([](Packed& p) {
              p.lists[0] = {0, 2, 0, 2};
            }),
            "packed messages: list 0: round 0 follows round 0");
  EXPECT_EQ(refusal([](Packed& p) {
              p.rounds[0] = {0, 2, 0, 2};
            }),
            "packed messages: list 0: round 2 is not below 2");
  EXPECT_EQ(refusal([](Packed& p) {
              p.rounds[0] = {0, 0, 0, 0};
            }),
            "packed messages: list 0: round 0 has no messages");
  EXPECT_EQ(
      refusal([](Packed& p) {
        p.rounds[0] = {0, 0, 0, 1};
      }),
      "packed messages: list 0: its rounds have 1 messages when it has 2");
  // 2,000 lists of all 2,000 rounds are a file of some 48 KB.
  EXPECT_EQ(refusal([](Packed& p) {
              p.rounds.assign(2000, p.rounds[0]);
              p.lists.assign(2000, {0, 2000, 0, 2});
            }),
            "packed messages: its lists share rounds too often");
}

TEST(PlanLoaderTest, AProgramHasItsMessagesOnce) {
  using Packed = fb::PackedMessagesT;
  const auto refusal =
      [](const std::function<void(PlanSpec::Program&)>& change) {
        return PackedRefusal(
            [&](PlanSpec& spec, Packed&) { change(spec.programs[1]); });
      };
  EXPECT_EQ(refusal([](auto& program) { program.message_list = 4; }),
            "program of rank 1: message_list 4 is not below 4");
  EXPECT_EQ(refusal([](auto& program) { program.message_list = -2; }),
            "program of rank 1: message_list -2 is not below 4");
  EXPECT_EQ(refusal([](auto& program) {
              program.messages = OneRoundSpec().programs[1].messages;
            }),
            "program of rank 1: has messages and a message_list");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[1].message_list = 0;
              spec.programs[1].messages.clear();
            }),
            "program of rank 1: message_list 0 is not below 0");
}

// What is wrong with a message is said of packed ones too, also where those
// before it are right.
TEST(PlanLoaderTest, PackedMessagesAreHeldToTheirRank) {
  using Packed = fb::PackedMessagesT;
  const auto refusal = [](const std::function<void(Packed&)>& change) {
    return PackedRefusal([&](PlanSpec&, Packed& packed) { change(packed); });
  };
  EXPECT_EQ(refusal([](Packed& p) { p.peers[1] = 4; }),
            "program of rank 0, message 1: peer 4 is not below 4");
  EXPECT_EQ(refusal([](Packed& p) {
              p.peers_high.resize(8);
              p.peers_high[1] = 1;
            }),
            "program of rank 0, message 1: peer 65539 is not below 4");
  EXPECT_EQ(refusal([](Packed& p) { p.peers[3] = 1; }),
            "program of rank 1, message 1: peer is the rank itself");
  EXPECT_EQ(refusal([](Packed& p) {
              p.rounds[0] = {1, 0, 0, 2};
            }),
            "program of rank 0, message 1: 64 bytes from 81 leave the staging "
            "arena of 144 bytes");
  EXPECT_EQ(refusal([](Packed& p) {
              p.rounds[0] = {~0ull - 15, 0, 0, 2};
            }),
            "program of rank 0, message 0: 80 bytes from 18446744073709551600 "
            "leave the staging arena of 144 bytes");
  EXPECT_EQ(PackedRefusal(
                [](PlanSpec&, Packed& p) {
                  p.rounds[0] = {16, 0, 0, 2};
                },
                [] {
                  PlanSpec spec = OneRoundSpec();
                  spec.mechanisms = {fb::Mechanism::kDirect};
                  for (auto& program : spec.programs) {
                    for (fb::Message& message : program.messages) {
                      message = fb::Message(0, message.peer(), message.copies(),
                                            message.kind(), 0, 0, 0,
                                            message.size_bytes());
                    }
                  }
                  return spec;
                }()),
            "program of rank 0, message 0: a direct message has a "
            "staging_offset");
  EXPECT_EQ(refusal([](Packed& p) { p.sizes[1] = 64; }),
            "program of rank 0, message 0: copy 1: 8 elements of bf16 from "
            "byte 64 leave the message's 64 bytes");
}

// Rank 3 unpacks as rank 2 does, whose lists were checked before.
TEST(PlanLoaderTest, PackedMessagesWhoseCopiesWereCheckedAreHeldToTheirRank) {
  using Packed = fb::PackedMessagesT;
  const auto refusal = [](const std::function<void(PlanSpec&)>& before,
                          const std::function<void(Packed&)>& change) {
    PlanSpec spec = OneRoundSpec();
    spec.programs[3].messages = spec.programs[2].messages;
    before(spec);
    return PackedRefusal([&](PlanSpec&, Packed& packed) { change(packed); },
                         spec);
  };
  const auto nothing = [](PlanSpec&) {};
  EXPECT_EQ(refusal(nothing, [](Packed& p) { p.peers[7] = 4; }),
            "program of rank 3, message 1: peer 4 is not below 4");
  EXPECT_EQ(refusal(nothing, [](Packed& p) { p.peers[7] = 3; }),
            "program of rank 3, message 1: peer is the rank itself");
  EXPECT_EQ(refusal(nothing,
                    [](Packed& p) {
                      p.rounds[3] = {16, 0, 2, 0};
                    }),
            "program of rank 3, message 1: 64 bytes from 96 leave the staging "
            "arena of 144 bytes");
  EXPECT_EQ(refusal(nothing,
                    [](Packed& p) {
                      p.rounds[3] = {160, 0, 2, 0};
                    }),
            "program of rank 3, message 0: 80 bytes from 160 leave the staging "
            "arena of 144 bytes");
  EXPECT_EQ(refusal([](PlanSpec& spec) { spec.programs[3].source_shift = 1; },
                    [](Packed&) {}),
            "program of rank 3, message 1: peer 1 shifted by 1 is not below 2");
  EXPECT_EQ(
      refusal(
          [](PlanSpec& spec) {
            spec.programs[2].messages.assign(1, RecvFrom(0, 0, 0, 0, 0));
            spec.programs[3].messages.assign(33, RecvFrom(0, 0, 0, 0, 0));
          },
          [](Packed&) {}),
      "program of rank 3, message 32: round 0 has more than 32 operations of "
      "the rank; NCCL can hang in larger groups");
  EXPECT_EQ(
      refusal(
          [](PlanSpec& spec) {
            std::swap(spec.programs[3].buffers[0], spec.programs[3].buffers[1]);
            spec.programs[3].fills = 0;  // nothing
          },
          [](Packed&) {}),
      "program of rank 3, message 0: copy 0: loop 0: 2 strides of 40 leave "
      "the stack");
  const auto are_direct = [](PlanSpec& spec) {
    spec.mechanisms = {fb::Mechanism::kDirect};
    for (PlanSpec::Program& program : spec.programs) {
      for (fb::Message& message : program.messages) {
        message = fb::Message(0, message.peer(), message.copies(),
                              message.kind(), 0, 0, 0, message.size_bytes());
      }
    }
  };
  EXPECT_EQ(refusal(are_direct,
                    [](Packed& p) {
                      p.rounds[3] = {16, 0, 2, 0};
                    }),
            "program of rank 3, message 0: a direct message has a "
            "staging_offset");
}

// Of a plan that packs some lists: rank 2 has room for all copies, rank 3 not.
TEST(PlanLoaderTest, CopiesAreHeldToTheSizeOfPackedMessages) {
  PlanSpec spec = OneRoundSpec();
  spec.programs[3].messages = spec.programs[2].messages;
  const std::vector<fb::Message> of_rank_2 = spec.programs[2].messages;
  PackMessages(spec);
  spec.programs[2].messages = of_rank_2;
  spec.programs[2].message_list = -1;
  EXPECT_EQ(Load(BuildPlan(spec)).message(), "");
  spec.packed_messages->sizes[of_rank_2[0].copies()] = 64;
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 3, message 0: copy 1: 8 elements of bf16 from "
            "byte 64 leave the message's 64 bytes");
}

TEST(PlanLoaderTest, PackedGroupsInWhichNcclCanHangAreRefused) {
  PlanSpec spec = OneRoundSpec();
  spec.programs[0].messages.assign(33, SendTo(2, 0, 0, 0, 0));
  PackMessages(spec);
  EXPECT_EQ(
      Load(BuildPlan(spec)).message(),
      "program of rank 0, message 32: round 0 has more than 32 operations "
      "of the rank; NCCL can hang in larger groups");
}

TEST(PlanLoaderTest, APlanThatBoundsMultiprocessorsIsOf1_8) {
  PlanSpec spec = SampleSpec();
  spec.direct_multiprocessors = 16;
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1u << 16 | 8);
}

TEST(PlanLoaderTest, APlanWhoseReceiversReadIsOf1_11) {
  PlanSpec spec = SampleSpec();
  spec.direct_pulls = true;
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1u << 16 | 11);
}

TEST(PlanLoaderTest, ATopologyHasNumbersThatOneMayDivideBy) {
  PlanSpec spec = SampleSpec();
  const auto message = [&] {
    return std::string(Load(BuildPlan(spec)).message());
  };
  using Topology = PlanSpec::Topology;
  spec.topology = Topology();
  EXPECT_EQ(message(), "");
  EXPECT_EQ(OpenSpec(spec).plan().format_version(), 1u << 16 | 7);
  spec.topology = Topology{.hosts_per_nvlink_domain = 0};
  EXPECT_EQ(message(),
            "topology: hosts_per_nvlink_domain or gpus_per_nic is 0; wanted at "
            "least 1");
  spec.topology = Topology{.gpus_per_nic = 0};
  EXPECT_EQ(message(),
            "topology: hosts_per_nvlink_domain or gpus_per_nic is 0; wanted at "
            "least 1");
  spec.topology = Topology{.spine_oversubscription = 0.5};
  EXPECT_EQ(message(),
            "topology: spine_oversubscription is 0.5; wanted at least 1");
  spec.topology = Topology{.spine_oversubscription = std::nan("")};
  EXPECT_EQ(message(),
            "topology: spine_oversubscription is nan; wanted at least 1");
  spec.topology = Topology{.network_bytes_per_second = 0};
  EXPECT_EQ(message(),
            "topology: a link has 0 bytes per second; wanted more than 0");
  spec.topology = Topology{.peer_bytes_per_second =
                               std::numeric_limits<double>::infinity()};
  EXPECT_EQ(message(),
            "topology: a link has inf bytes per second; wanted more than 0");
}

TEST(PlanLoaderTest, AMajorThatNeverWasIsRefused) {
  EXPECT_EQ(Load(Wrap(SampleBody(), {.format_version = 7})).message(),
            "format version 0.7 does not exist; this build reads 1.13");
}

TEST(PlanLoaderTest, AnUnknownFeatureIsRefused) {
  const absl::Status status =
      Load(Wrap(SampleBody(), {.required_features = 1 << 11}));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(status.message(),
            "required feature bit 11 is unknown to this build");
}

TEST(PlanLoaderTest, AbsentDigestsAreRefused) {
  EXPECT_EQ(Load(Wrap(SampleBody(), {.digests = false})).message(),
            "the plan has no digests");
}

TEST(PlanLoaderTest, ABodyOfAnotherDigestIsDamaged) {
  Bytes bytes = BuildPlan(SampleSpec());
  const auto& body = *fb::GetPlan(bytes.data())->body();
  const std::string right =
      DigestText(*fb::GetPlan(bytes.data())->body_digest());
  bytes[static_cast<size_t>(body.data() - bytes.data()) + body.size() / 2] ^= 1;
  const std::string message(Load(bytes).message());
  EXPECT_EQ(message.substr(0, 30), "damaged: the body's digest is ");
  EXPECT_EQ(message.substr(62), " when it should be " + right);
}

TEST(PlanLoaderTest, ABodyThatIsNoFlatBufferIsRefused) {
  EXPECT_EQ(Load(Wrap(Bytes(64, 0xff), {})).message(),
            "the body is no well-formed FlatBuffer");
}

TEST(PlanLoaderTest, DamageUnderARightDigestNeverCrashes) {
  const Bytes body = SampleBody();
  std::mt19937 random(1);
  int opened = 0;
  for (int i = 0; i < 1500; ++i) {
    Bytes damaged = body;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      damaged[random() % damaged.size()] ^=
          static_cast<uint8_t>(1 << random() % 8);
    }
    const absl::StatusOr<PlanFile> plan =
        PlanFile::FromBytes(Wrap(damaged, {}));
    if (!plan.ok()) continue;
    ++opened;
    Prove(*plan);
  }
  EXPECT_GT(opened, 50);
}

// Every index and range of the body.

TEST(PlanLoaderTest, APeerOutsideThePlanIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[1].messages[0] = SendTo(9, 0, 1, 0, 80);
            }),
            "program of rank 1, message 0: peer 9 is not below 4");
}

TEST(PlanLoaderTest, ARankThatSendsToItselfIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[1].messages[0] = SendTo(1, 0, 1, 0, 80);
            }),
            "program of rank 1, message 0: peer is the rank itself");
}

TEST(PlanLoaderTest, ARoundOutsideThePlanIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[3].messages[1] = RecvFrom(0, 2, 5, 80, 64);
            }),
            "program of rank 3, message 1: round 2 is not below 2");
}

// The sample plan, whose rank 0 has `count` operations in round 0 under limits
// that allow any number.
PlanSpec CrowdedSpec(uint32_t count) {
  PlanSpec spec = SampleSpec();
  spec.operations_per_round = 1 << 20;
  std::vector<fb::Message>& messages = spec.programs[0].messages;
  while (messages.size() < count + 1) {  // one is of round 1
    messages.insert(messages.begin(), SendTo(2, 0, 0, 0, 0));
  }
  return spec;
}

// The limit of a plan is its compiler's word; NCCL has one of its own.
TEST(PlanLoaderTest, AGroupInWhichNcclCanHangIsRefusedWhateverThePlanAllows) {
  EXPECT_TRUE(Load(BuildPlan(CrowdedSpec(32))).ok());
  const absl::Status status = Load(BuildPlan(CrowdedSpec(33)));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "program of rank 0, message 32: round 0 has more than 32 "
            "operations of the rank; NCCL can hang in larger groups");
}

TEST(PlanLoaderTest, AGroupIsCountedInAnyOrderOfMessages) {
  PlanSpec spec = CrowdedSpec(33);
  std::swap(spec.programs[0].messages[3], spec.programs[0].messages.back());
  EXPECT_EQ(Load(BuildPlan(spec)).message(),
            "program of rank 0, message 33: round 0 has more than 32 "
            "operations of the rank; NCCL can hang in larger groups");
}

TEST(PlanLoaderTest, DirectRoundsAreNoGroups) {
  PlanSpec spec = CrowdedSpec(200);
  spec.mechanisms = {fb::Mechanism::kDirect};
  for (PlanSpec::Program& program : spec.programs) {
    for (fb::Message& message : program.messages) {
      if (message.round() != 0) continue;
      message =
          fb::Message(0, message.peer(), message.copies(), message.kind(), 0, 0,
                      /*staging_offset=*/0, message.size_bytes());
    }
  }
  EXPECT_EQ(Load(BuildPlan(spec)).message(), "");
}

TEST(PlanLoaderTest, ACopyListOutsideThePlanIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[3].messages[1] = RecvFrom(0, 1, 912, 80, 64);
            }),
            "program of rank 3, message 1: copies 912 is not below 8");
}

TEST(PlanLoaderTest, FillsOutsideThePlanAreRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.programs[2].fills = 8; }),
            "program of rank 2: fills 8 is not below 8");
}

TEST(PlanLoaderTest, ABufferOutsideThePlanIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.programs[0].buffers[1] = 5; }),
            "program of rank 0, buffer slot 1: buffer 5 is not below 5");
}

TEST(PlanLoaderTest, AMessageOutsideItsArenaIsRefused) {
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) { spec.programs[0].staging_bytes = 143; }),
      "program of rank 0, message 1: 64 bytes from 80 leave the staging "
      "arena of 143 bytes");
}

TEST(PlanLoaderTest, MoreStagingThanAnyMemoryIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[0].staging_bytes = (uint64_t{1} << 48) + 1;
            }),
            "program of rank 0: staging_bytes 281474976710657 is above 2^48");
}

TEST(PlanLoaderTest, ACopyOutsideItsMessageIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[3][1].staging_offset = 72;
            }),
            "program of rank 2, message 0: copy 1: 8 elements of bf16 from "
            "byte 72 leave the message's 80 bytes");
}

TEST(PlanLoaderTest, ACopyOutsideItsBufferIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.copy_lists[3][1].offset = 8; }),
            "program of rank 2, message 0: copy 1: offset 8 is not below the "
            "buffer's 8 elements");
}

TEST(PlanLoaderTest, ACopyThatLeavesItsTensorIsRefused) {
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) {
        spec.copy_lists[2][0].loops = {{32, 1}};
      }),
      "program of rank 0, message 1: copy 0: loop 0: 32 strides of 1 leave "
      "the tensor");
}

TEST(PlanLoaderTest, ACopyThatLeavesItsStackIsRefused) {
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) {
        spec.copy_lists[2][0].loops = {{3, 16}, {4, 1}};
      }),
      "program of rank 0, message 1: copy 0: loop 0: 3 strides of 16 leave "
      "the stack");
}

TEST(PlanLoaderTest, AStrideOfOneAndAHalfTensorsIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[2][0].loops = {{2, 24}, {4, 1}};
            }),
            "program of rank 0, message 1: copy 0: loop 0: stride 24 is "
            "neither inside a tensor of 16 elements nor whole tensors");
}

TEST(PlanLoaderTest, LoopsThatOverflowAreRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[2][0].loops = {{uint64_t{1} << 63, 2}};
            }),
            "program of rank 0, message 1: copy 0: loop 0: 9223372036854775808 "
            "strides of 2 leave the tensor");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[2][0].loops = {{uint64_t{1} << 40, 0},
                                             {uint64_t{1} << 40, 0}};
            }),
            "program of rank 0, message 1: copy 0: loop 1: too many elements");
}

TEST(PlanLoaderTest, ALoopOfOneIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[1][1].loops = {{1, 1}};
            }),
            "loop 2: extent 1 is below 2");
}

TEST(PlanLoaderTest, ABufferSlotOutsideTheRankIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.copy_lists[3][1].slot = 2; }),
            "program of rank 2, message 0: copy 1: buffer_slot 2 is not below "
            "2");
}

TEST(PlanLoaderTest, ACastThatNoExecutorHasIsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[3][1].dtype = DType::kInt16;
            }),
            "program of rank 2, message 0: copy 1: no cast between int16 on "
            "the wire and the buffer's bf16");
}

TEST(PlanLoaderTest, UnknownDTypesAreRefused) {
  const auto unknown = static_cast<DType>(99);
  EXPECT_EQ(Refusal([&](PlanSpec& spec) { spec.params[1].dtype = unknown; }),
            "param 1: unknown dtype 99");
  EXPECT_EQ(Refusal([&](PlanSpec& spec) { spec.buffers[4].dtype = unknown; }),
            "buffer 4: unknown dtype 99");
  EXPECT_EQ(
      Refusal([&](PlanSpec& spec) { spec.copy_lists[3][1].dtype = unknown; }),
      "copy 4: unknown dtype 99");
  EXPECT_EQ(Refusal([&](PlanSpec& spec) {
              spec.casts = {{DType::kBf16, unknown}};
            }),
            "cast 0: unknown dtype 99");
}

TEST(PlanLoaderTest, UnknownEnumsAreRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.params[2].skip = static_cast<fb::SkipReason>(77);
            }),
            "param 2: unknown skip reason 77");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.skips[0].reason = fb::SkipReason::kUnspecified;
            }),
            "skip 0: unknown reason 0");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].regions[0].kind = static_cast<fb::RegionKind>(9);
            }),
            "buffer 3: region 0: unknown kind 9");
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) { spec.rounds[1] = fb::Route::kUnspecified; }),
      "round 1: unknown route 0");
}

// Their digests are right: whoever wrote them redid all three.
TEST(PlanLoaderTest, TextThatIsNotUtf8IsRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.params[1].name = "norm\xff"; }),
            "param 1: name is not UTF-8: byte 0xff at offset 4");
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.buffers[4].name = "\xc0\xaf"; }),
            "buffer 4: name is not UTF-8: byte 0xc0 at offset 0");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].regions[0].detail = "\xed\xa0\x80";
            }),
            "buffer 3: region 0: detail is not UTF-8: byte 0xed at offset 0");
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.skips[0].name = "w\x80"; }),
            "skip 0: name is not UTF-8: byte 0x80 at offset 1");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.skips[0].detail = "\xf4\x90\x80\x80";
            }),
            "skip 0: detail is not UTF-8: byte 0xf4 at offset 0");
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.producer = "refitc\xe2\x82"; }),
            "the producer is not UTF-8: byte 0xe2 at offset 6");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.topology = PlanSpec::Topology{.machine = "hgx\xff"};
            }),
            "the machine is not UTF-8: byte 0xff at offset 3");
  EXPECT_EQ(Load(BuildPlan(HookedSpec({"add-one", "add \xfe"}))).message(),
            "buffer 4: post-hook 0: detail is not UTF-8: byte 0xfe at offset "
            "4");
}

TEST(PlanLoaderTest, TextInAnyScriptIsTaken) {
  PlanSpec spec = SampleSpec();
  spec.params[1].name = "norm.\u03b3.\u5f15.\U0001f600";
  EXPECT_TRUE(Load(BuildPlan(spec)).ok());
}

TEST(PlanLoaderTest, ReservedFieldsMustBeZero) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs[0].messages[0] =
                  fb::Message(0, 2, 1, fb::MessageKind::kSend, 0, 1, 0, 80);
            }),
            "program of rank 0, message 0: a reserved field is not 0");
}

TEST(PlanLoaderTest, SizesThatOverflowAreRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.params[1].shape = {uint64_t{1} << 32, uint64_t{1} << 32};
            }),
            "param 1: dimension 1 of 4294967296 overflows the size");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[4].shape = {uint64_t{1} << 62};
            }),
            "buffer 4: more than 2^63 bytes");
}

// Else readers would take a time quadratic in the file's size.
TEST(PlanLoaderTest, WhatReadersWalkTogetherIsBounded) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.slots = kSlotsMax + 1; }),
            "limits: slots is 9; wanted at most 8");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[1][0].loops.assign(63, {2, 1});
            }),
            "copy 0: 63 loops are more than 62");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.copy_lists[1].assign(10000, spec.copy_lists[1][0]);
              spec.shared_copy_lists.assign(10000, 1);
            }),
            "copy lists share copies too often");
  // 100,000 ranks without messages that list the same buffers.
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.programs.emplace_back().buffers.assign(1000, 2);
              const size_t first = spec.programs.size() - 1;
              for (uint32_t i = 1; i <= 100000; ++i) {
                spec.programs.emplace_back().shares = first;
                spec.programs.back().destination_shift = i;
              }
            }),
            "program of rank 67113: shares its lists too often");
}

TEST(PlanLoaderTest, FragmentsStayInsideParamAndBuffer) {
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) { spec.buffers[3].fragments[0].param = 3; }),
      "buffer 3: fragment 0: param 3 is not below 3");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].fragments[0].lo = {0, 1, 0};
            }),
            "buffer 3: fragment 0: dimension 1: 4 elements from 1 leave the "
            "param's 4");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].fragments[0].lo = {0, 0};
            }),
            "buffer 3: fragment 0: lo has 2 and extent 3 entries when param 0 "
            "has 3 dimensions");
  EXPECT_EQ(
      Refusal([](PlanSpec& spec) { spec.buffers[3].fragments[0].offset = 9; }),
      "buffer 3: fragment 0: leaves the buffer's 80 elements");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].fragments[0].stride = {~uint64_t{0}, 8, 1};
            }),
            "buffer 3: fragment 0: dimension 0 overflows");
  EXPECT_EQ(Refusal([](PlanSpec& spec) {
              spec.buffers[3].regions[0].extent = {2, 0};
            }),
            "buffer 3: region 0: extent 1 is 0");
}

TEST(PlanLoaderTest, SourceRanksBeyondThePlanAreRefused) {
  EXPECT_EQ(Refusal([](PlanSpec& spec) { spec.source_ranks = 5; }),
            "source_ranks 5 is above the 4 programs");
}

TEST(TensorNameTest, NumbersStandForTheirPositions) {
  PlanSpec spec = SampleSpec();
  spec.params[0].name = "layers.{0}.experts.{1}.w{9}{x}";
  spec.params[0].index = {{.first = 3, .count = 2}, {.first = 10, .count = 3}};
  spec.params[0].shape = {4, 8};
  for (PlanSpec::Buffer& buffer : spec.buffers) buffer.fragments.clear();
  const PlanFile plan = OpenSpec(spec);
  const fb::Param& param = *plan.body().params()->Get(0);
  EXPECT_EQ(TensorName(param, 0), "layers.3.experts.10.w{9}{x}");
  EXPECT_EQ(TensorName(param, 5), "layers.4.experts.12.w{9}{x}");
  const fb::Buffer& buffer = *plan.body().buffers()->Get(3);
  EXPECT_EQ(TensorName(buffer, 1), "model.layers.1.mlp.up_proj.weight");
  EXPECT_EQ(TensorElements(buffer), 40u);
  EXPECT_EQ(StackTensors(buffer), 2u);
}

TEST(DigestTest, IsXxh3OfTheBytesHighHalfFirst) {
  // XXH3-128 of no bytes, from the xxHash specification.
  EXPECT_EQ(DigestText(DigestOf({})), "99aa06d3014798d86001c324468d497f");
}

}  // namespace
}  // namespace refit
