// refit-meet: a process that is no rank, where the ranks of a plan meet.
#include <chrono>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "refit/control_plane.h"
#include "refit/unique_id.h"
#include "tools/args.h"
#include "tools/plan_input.h"

namespace {

constexpr std::chrono::milliseconds kPollTime{100};
// For this process to reach itself by the name that it has elsewhere.
constexpr std::chrono::seconds kEndTime{5};

int No(std::string_view why) {
  std::cerr << "refit-meet: " << why << "\n";
  return refit::kExitNo;
}

int Serve(const refit::UniqueId& id, int64_t ranks, int64_t timeout_seconds) {
  using Clock = std::chrono::steady_clock;
  auto deadline = timeout_seconds > 0
                      ? Clock::now() + std::chrono::seconds(timeout_seconds)
                      : Clock::time_point::max();
  std::string ended = "the meeting was ended";
  while (true) {
    const refit::HostedMeeting meeting = refit::MeetingHostedHere(id);
    if (meeting.is_over) {
      return meeting.has_met ? refit::kExitSuccess : No(ended);
    }
    if (!meeting.has_met && Clock::now() >= deadline) {
      deadline = Clock::time_point::max();
      ended = absl::StrCat("the ", ranks, " ranks did not meet within ",
                           timeout_seconds, " s; ", meeting.who_came);
      // Tells those that wait, after which the meeting is over.
      const absl::Status told = refit::EndMeetingTcp(
          *refit::RendezvousFromUniqueId(id, 0, static_cast<int32_t>(ranks)),
          absl::DeadlineExceededError(ended), Clock::now() + kEndTime);
      if (!told.ok() && !absl::IsFailedPrecondition(told)) return No(ended);
    }
    std::this_thread::sleep_for(kPollTime);
  }
}

int Main(int argc, char** argv) {
  int64_t ranks = 0, timeout_seconds = 0;
  std::string host;
  const refit::ToolInfo tool = {
      .name = "refit-meet",
      .usage = "refit-meet --ranks N [--host NAME] [--timeout SECONDS]",
      .summary =
          "Hosts a meeting of N ranks, and prints its id: 256 hexadecimal "
          "digits on one\n"
          "line. Serves it until the ranks have met and left. When this "
          "process ends before,\n"
          "their next call fails. Whoever has the id may join.\n"
          "Exit status: 0 they have met and left; 1 the meeting was ended, or "
          "they did not\n"
          "meet in time; 2 trouble.",
      .flags = {{"--ranks", "-n", "N", "how many ranks the plan has", &ranks, 1,
                 refit::TcpRendezvous::kWorldSizeMax},
                {"--host", "", "NAME",
                 "by which the ranks reach this host; default: REFIT_HOST, or "
                 "the first network interface that NCCL_SOCKET_IFNAME allows",
                 &host},
                {"--timeout", "", "SECONDS",
                 "for the ranks to meet; default: none", &timeout_seconds, 1}},
  };
  const refit::ParsedArgs args = refit::ParseArgs(tool, argc, argv);
  if (args.done) return args.exit_status;
  if (ranks == 0) return refit::Fail(tool, "--ranks is missing");
  const absl::StatusOr<refit::UniqueId> id =
      refit::HostMeeting(static_cast<int32_t>(ranks), host);
  if (!id.ok()) return refit::Fail(tool, id.status());
  const absl::Status written = refit::WriteStdout(absl::StrCat(
      absl::BytesToHexString({id->bytes.data(), id->bytes.size()}), "\n"));
  if (!written.ok()) return refit::Fail(tool, written);
  return Serve(*id, ranks, timeout_seconds);
}

}  // namespace

int main(int argc, char** argv) {
  return refit::RunTool("refit-meet", Main, argc, argv);
}
