#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>

#include "refit/control_plane.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {
namespace {

class RendezvousTest : public testing::Test {
 protected:
  using Variables = std::map<std::string, std::string>;

  // An environment with these variables and no others that matter.
  void SetUp() override {
    for (const char* name :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
          "REFIT_PORT", "REFIT_SECRET", "REFIT_SECRET_FILE",
          "TORCHELASTIC_USE_AGENT_STORE", "SLURM_PROCID", "SLURM_NTASKS",
          "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_NODELIST",
          "SLURM_LAUNCH_NODE_IPADDR", "OMPI_COMM_WORLD_RANK",
          "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}) {
      unsetenv(name);
    }
  }

  static void Set(const Variables& variables) {
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
    }
  }

  // "rank 1 of 4 at host:29500", or the error's text.
  static std::string Found(const Variables& variables) {
    Set(variables);
    const auto found = RendezvousFromEnvironment();
    if (!found.ok()) {
      EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument);
      return std::string(found.status().message());
    }
    return "rank " + std::to_string(found->rank) + " of " +
           std::to_string(found->world_size) + " at " + found->host + ":" +
           std::to_string(found->port);
  }
  static std::string FoundLocalRank(const Variables& variables) {
    Set(variables);
    const auto found = LocalRankFromEnvironment();
    return found.ok() ? std::to_string(*found)
                      : std::string(found.status().message());
  }

  const Variables torch_ = {{"RANK", "3"},
                            {"WORLD_SIZE", "4"},
                            {"MASTER_ADDR", "10.0.0.7"},
                            {"MASTER_PORT", "12345"}};
};

TEST_F(RendezvousTest, ReadsWhatTorchrunSets) {
  EXPECT_EQ(Found(torch_), "rank 3 of 4 at 10.0.0.7:12345");
}

TEST_F(RendezvousTest, LeavesThePortOfTorchrunsAgentAlone) {
  Set(torch_);
  EXPECT_EQ(Found({{"TORCHELASTIC_USE_AGENT_STORE", "True"}}),
            "rank 3 of 4 at 10.0.0.7:12346");
  EXPECT_EQ(Found({{"TORCHELASTIC_USE_AGENT_STORE", "False"}}),
            "rank 3 of 4 at 10.0.0.7:12345");
}

TEST_F(RendezvousTest, OwnPortGoesFirst) {
  Set(torch_);
  EXPECT_EQ(Found({{"REFIT_PORT", "7"}}), "rank 3 of 4 at 10.0.0.7:7");
}

TEST_F(RendezvousTest, ReadsWhatSlurmSets) {
  EXPECT_EQ(Found({{"SLURM_PROCID", "1"},
                   {"SLURM_NTASKS", "16"},
                   {"SLURM_NODELIST", "gpu[007-009,12],login1"}}),
            "rank 1 of 16 at gpu007:29500");
}

TEST_F(RendezvousTest, FirstHostOfSlurmsListMayHaveManyForms) {
  Set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}});
  EXPECT_EQ(Found({{"SLURM_NODELIST", "a1,b2"}}), "rank 0 of 2 at a1:29500");
  EXPECT_EQ(Found({{"SLURM_NODELIST", "n-[3,5]-ib,x"}}),
            "rank 0 of 2 at n-3-ib:29500");
  EXPECT_EQ(Found({{"SLURM_NODELIST", "rack[1-2]n[04-07]"}}),
            "rank 0 of 2 at rack1n04:29500");
  EXPECT_EQ(Found({{"SLURM_STEP_NODELIST", "step9"}}),
            "rank 0 of 2 at step9:29500");
}

TEST_F(RendezvousTest, LaunchNodeServesWhereSlurmGivesNoList) {
  EXPECT_EQ(Found({{"SLURM_PROCID", "1"},
                   {"SLURM_NTASKS", "2"},
                   {"SLURM_LAUNCH_NODE_IPADDR", "10.1.1.1"}}),
            "rank 1 of 2 at 10.1.1.1:29500");
}

TEST_F(RendezvousTest, OpenMpiGoesBeforeSlurmThatStartedItsDaemons) {
  EXPECT_EQ(Found({{"OMPI_COMM_WORLD_RANK", "5"},
                   {"OMPI_COMM_WORLD_SIZE", "8"},
                   {"SLURM_PROCID", "0"},
                   {"SLURM_NTASKS", "1"},
                   {"MASTER_ADDR", "::1"},
                   {"MASTER_PORT", "65535"}}),
            "rank 5 of 8 at ::1:65535");
}

TEST_F(RendezvousTest, OneRankNeedsNoAddress) {
  EXPECT_EQ(Found({{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
            "rank 0 of 1 at localhost:29500");
}

TEST_F(RendezvousTest, NamesWhatIsMissing) {
  EXPECT_EQ(Found({}),
            "WORLD_SIZE is not set (nor OMPI_COMM_WORLD_SIZE nor "
            "SLURM_NTASKS), it should be a number from 1 to 1048576");
  EXPECT_EQ(Found({{"WORLD_SIZE", "4"}}),
            "RANK is not set (nor OMPI_COMM_WORLD_RANK nor SLURM_PROCID), it "
            "should be a number from 0 to 3");
  EXPECT_EQ(
      Found({{"RANK", "0"}}),
      "MASTER_ADDR is not set, it should be rank 0's host name or address");
}

TEST_F(RendezvousTest, NamesWhatIsWrong) {
  Set(torch_);
  EXPECT_EQ(Found({{"WORLD_SIZE", "0"}}),
            "WORLD_SIZE is \"0\", it should be a number from 1 to 1048576");
  EXPECT_EQ(Found({{"WORLD_SIZE", "3"}}),
            "RANK is \"3\", it should be a number from 0 to 2");
  EXPECT_EQ(Found({{"RANK", "first"}}),
            "RANK is \"first\", it should be a number from 0 to 2");
  EXPECT_EQ(Found({{"RANK", "-1"}}),
            "RANK is \"-1\", it should be a number from 0 to 2");
  EXPECT_EQ(Found({{"RANK", "0"}, {"MASTER_PORT", "65536"}}),
            "MASTER_PORT is \"65536\", it should be a number from 1 to 65535");
  EXPECT_EQ(Found({{"MASTER_ADDR", ""}}),
            "MASTER_ADDR is \"\", it should be rank 0's host name or address");
}

TEST_F(RendezvousTest, NamesTheLaunchersOwnVariable) {
  Set({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}});
  EXPECT_EQ(Found({{"SLURM_NODELIST", "gpu[1-"}}),
            "SLURM_NODELIST is \"gpu[1-\", it should be a list of hosts like "
            "\"gpu[07-09,12]\"");
  EXPECT_EQ(Found({{"SLURM_PROCID", "2"}}),
            "SLURM_PROCID is \"2\", it should be a number from 0 to 1");
}

// The secret, or the error's text.
std::string FoundSecret(const char* name, const std::string& value) {
  unsetenv("REFIT_SECRET");
  unsetenv("REFIT_SECRET_FILE");
  setenv(name, value.c_str(), /*overwrite=*/1);
  const auto found = SecretFromEnvironment();
  if (found.ok()) return *found;
  EXPECT_EQ(found.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(found.status().message());
}

TEST_F(RendezvousTest, SecretIsOfTheEnvironment) {
  EXPECT_EQ(*SecretFromEnvironment(), "");
  Set(torch_);
  Set({{"REFIT_SECRET", " a secret of my own "}});
  EXPECT_EQ(RendezvousFromEnvironment()->secret, " a secret of my own ");
  EXPECT_EQ(FoundSecret("REFIT_SECRET", ""),
            "REFIT_SECRET is empty, it should be a secret of 16 bytes or more");
}

TEST_F(RendezvousTest, SecretThatCanBeGuessedIsWarnedOfOnce) {
  testing::internal::CaptureStderr();
  EXPECT_EQ(FoundSecret("REFIT_SECRET", "fifteen letters"), "fifteen letters");
  EXPECT_EQ(FoundSecret("REFIT_SECRET", "swordfish"), "swordfish");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "refit: REFIT_SECRET has 15 bytes; a secret of fewer than 16 "
            "random bytes can be guessed\n");
}

TEST_F(RendezvousTest, SecretMayBeInAFile) {
  const TemporaryDirectory directory;
  const std::string path = directory.Path("secret");
  const auto in_file = [&](const std::string& text) {
    return FoundSecret("REFIT_SECRET_FILE", directory.Write("secret", text));
  };
  EXPECT_EQ(in_file("a secret of my own\n"), "a secret of my own");
  EXPECT_EQ(in_file(std::string(4096, 's')), std::string(4096, 's'));
  EXPECT_EQ(in_file(std::string(4097, 's')),
            "REFIT_SECRET_FILE is \"" + path +
                "\", which has more than the 4096 bytes of a secret");
  EXPECT_EQ(in_file(" \n"), "REFIT_SECRET_FILE is \"" + path +
                                "\", which is empty; it should hold a secret "
                                "of 16 bytes or more");
  EXPECT_EQ(FoundSecret("REFIT_SECRET_FILE", "/nowhere/secret"),
            "REFIT_SECRET_FILE is \"/nowhere/secret\", which cannot be read: "
            "No such file or directory");
  setenv("REFIT_SECRET", "another secret to know", 1);
  EXPECT_EQ(SecretFromEnvironment().status().message(),
            "REFIT_SECRET and REFIT_SECRET_FILE are both set, one of them "
            "suffices");
}

TEST_F(RendezvousTest, ReadsTheLocalRank) {
  EXPECT_EQ(FoundLocalRank({{"SLURM_LOCALID", "2"}}), "2");
  EXPECT_EQ(FoundLocalRank({{"OMPI_COMM_WORLD_LOCAL_RANK", "3"}}), "3");
  EXPECT_EQ(FoundLocalRank({{"LOCAL_RANK", "4"}}), "4");
  EXPECT_EQ(FoundLocalRank({{"LOCAL_RANK", "4.5"}}),
            "LOCAL_RANK is \"4.5\", it should be a number from 0 to 1048575");
}

TEST_F(RendezvousTest, NamesTheMissingLocalRank) {
  EXPECT_EQ(FoundLocalRank({}),
            "LOCAL_RANK is not set (nor OMPI_COMM_WORLD_LOCAL_RANK nor "
            "SLURM_LOCALID), it should be a number from 0 to 1048575");
}

}  // namespace
}  // namespace refit
