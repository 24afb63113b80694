// Ranks that meet where refit-meet says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>

#include "absl/strings/escaping.h"
#include "refit/unique_id.h"
#include "tests/control/control_plane_fixture.h"

namespace refit {
namespace {

// A process of the program.
class MeetTool {
 public:
  explicit MeetTool(const std::string& arguments)
      : out_(popen((REFIT_MEET " " + arguments + " 2>&1").c_str(), "r")) {}
  ~MeetTool() {
    if (out_ != nullptr) pclose(out_);
  }

  std::string Line() {
    char line[1024] = "";
    return fgets(line, sizeof(line), out_) == nullptr ? "" : line;
  }
  UniqueId Id() {
    const std::string line = Line();
    EXPECT_EQ(line.size(), 2 * sizeof(UniqueId) + 1) << line;
    const std::string bytes = absl::HexStringToBytes(line.substr(0, 256));
    UniqueId id;
    std::copy(bytes.begin(), bytes.end(), id.bytes.begin());
    return id;
  }
  int ExitStatus() {
    const int status = pclose(out_);
    out_ = nullptr;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }

 private:
  FILE* out_;
};

class MeetToolTest : public ControlPlaneTest {};

TEST_F(MeetToolTest, ServesUntilTheRanksHaveLeft) {
  MeetTool tool("--ranks 2 --host 127.0.0.1 --timeout 60");
  const UniqueId id = tool.Id();
  OnRanks({0, 1}, [&](int32_t rank) {
    const auto plane =
        ConnectTcp(*RendezvousFromUniqueId(id, rank, 2), Ample());
    ASSERT_TRUE(plane.ok()) << plane.status();
    EXPECT_EQ(Joined(GatherAll(**plane, "", "ids", Ample())), "[][]");
  });
  EXPECT_EQ(tool.Line(), "");
  EXPECT_EQ(tool.ExitStatus(), 0);
}

TEST_F(MeetToolTest, SaysThatTheMeetingWasEnded) {
  MeetTool tool("--ranks 2 --host 127.0.0.1");
  const absl::Status ended =
      EndMeetingTcp(*RendezvousFromUniqueId(tool.Id(), 1, 2),
                    absl::InternalError("no GPU"), Ample());
  EXPECT_TRUE(ended.ok()) << ended;
  EXPECT_EQ(tool.Line(), "refit-meet: the meeting was ended\n");
  EXPECT_EQ(tool.ExitStatus(), 1);
}

// A rank that gave up ends the meeting of those that had come; a member, all.
TEST_F(MeetToolTest, MeetingThatARankGaveUpIsEndedForGood) {
  MeetTool tool("--ranks 3 --host 127.0.0.1");
  const UniqueId id = tool.Id();
  const auto connect = [&](int32_t rank) {
    return ConnectTcp(*RendezvousFromUniqueId(id, rank, 3), Ample()).status();
  };
  {
    const ScopedInterruption scope =
        InterruptedAfter(std::chrono::milliseconds(300));
    ExpectStatus(connect(0), absl::StatusCode::kCancelled, "the worker stops");
  }
  const absl::Status ended =
      EndMeetingTcp(*RendezvousFromUniqueId(id, 1, 3),
                    absl::InternalError("no GPU"), Ample());
  EXPECT_TRUE(ended.ok()) << ended;
  OnRanks({0, 1, 2}, [&](int32_t rank) {
    ExpectStatus(connect(rank), absl::StatusCode::kAborted,
                 "the meeting was ended: no GPU");
  });
  EXPECT_EQ(tool.Line(), "refit-meet: the meeting was ended\n");
  EXPECT_EQ(tool.ExitStatus(), 1);
}

TEST_F(MeetToolTest, NamesTheRanksThatDidNotComeInTime) {
  MeetTool tool("--ranks 4 --host 127.0.0.1 --timeout 2");
  const UniqueId id = tool.Id();
  const auto connect = [&](int32_t rank, Deadline deadline) {
    return ConnectTcp(*RendezvousFromUniqueId(id, rank, 4), deadline).status();
  };
  EXPECT_FALSE(connect(2, In(std::chrono::milliseconds(100))).ok());
  const std::string missed =
      "the 4 ranks did not meet within 2 s; waiting: rank 0; came and left: "
      "rank 2; missing: ranks 1, 3";
  ExpectStatus(connect(0, Ample()), absl::StatusCode::kAborted,
               "the meeting was ended: " + missed);
  EXPECT_EQ(tool.Line(), "refit-meet: " + missed + "\n");
  EXPECT_EQ(tool.ExitStatus(), 1);
}

TEST_F(MeetToolTest, SaysThatNobodyCame) {
  MeetTool tool("--ranks 2 --host 127.0.0.1 --timeout 1");
  (void)tool.Id();
  EXPECT_EQ(tool.Line(),
            "refit-meet: the 2 ranks did not meet within 1 s; missing: ranks "
            "0, 1\n");
  EXPECT_EQ(tool.ExitStatus(), 1);
}

TEST_F(MeetToolTest, WarnsOfAHostThatHasNoAddress) {
  MeetTool tool("--ranks 2 --host no-such-host.invalid --timeout 1");
  EXPECT_THAT(tool.Line(),
              testing::StartsWith(
                  "refit: the host of a unique id: \"no-such-host.invalid\" "
                  "has no address: "));
}

TEST_F(MeetToolTest, NeedsTheNumberOfRanks) {
  MeetTool tool("");
  EXPECT_EQ(tool.Line(), "refit-meet: error: --ranks is missing\n");
  EXPECT_EQ(tool.ExitStatus(), 2);
}

}  // namespace
}  // namespace refit
