#include "control/waiting.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "control/log.h"
#include "refit/interruption.h"

namespace refit {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPollTime{100};
constexpr size_t kRanksNamedMax = 8;

// To be woken takes tens of microseconds, which is much for a small refit.
constexpr std::chrono::milliseconds kWaitWithoutSleep(2);
constexpr std::chrono::microseconds kShortestSleep(20);
constexpr std::chrono::milliseconds kLongestSleep(1);

thread_local ScopedInterruption* innermost = nullptr;

}  // namespace

ScopedInterruption::ScopedInterruption(Interruption interruption)
    : interruption_(std::move(interruption)),
      outer_(std::exchange(innermost, this)),
      next_poll_(Clock::now()) {}

ScopedInterruption::~ScopedInterruption() { innermost = outer_; }

absl::Status PollInterruption() {
  ScopedInterruption* const scope = innermost;
  if (scope == nullptr) return absl::OkStatus();
  const Clock::time_point now = Clock::now();
  if (!scope->status_.ok() || now < scope->next_poll_) return scope->status_;
  scope->next_poll_ = now + kPollTime;
  scope->status_ = scope->interruption_();
  return scope->status_;
}

Clock::duration SleepAfter(Clock::duration waited) {
  if (waited < kWaitWithoutSleep) return Clock::duration::zero();
  return std::clamp<Clock::duration>(waited / 100, kShortestSleep,
                                     kLongestSleep);
}

absl::Status InterruptionStatus() {
  return innermost == nullptr ? absl::OkStatus() : innermost->status_;
}

Clock::time_point NextPoll(Clock::time_point deadline) {
  if (innermost == nullptr) return deadline;
  return std::min(deadline, Clock::now() + kPollTime);
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start)
      .count();
}

bool WaitReminder::IsDue(TimePoint now) {
  const bool due = now >= next();
  while (now >= next()) wait_ *= 2;
  return due;
}

int64_t WaitReminder::Seconds(TimePoint now) const {
  return std::chrono::duration_cast<std::chrono::seconds>(now - start_).count();
}

std::string RanksText(absl::Span<const int32_t> ranks) {
  const auto named = ranks.subspan(0, kRanksNamedMax);
  std::string text = absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                                  absl::StrJoin(named, ", "));
  if (named.size() < ranks.size()) {
    absl::StrAppend(&text, " and ", ranks.size() - named.size(), " more");
  }
  return text;
}

void ReportWait(const std::string& who, const std::string& whom,
                int64_t seconds, const std::string& why) {
  Log(LogLevel::kWarning,
      absl::StrCat(who, ": waiting for ", whom, " (", seconds, " s)",
                   why.empty() ? "" : "; ", why));
}

}  // namespace refit
