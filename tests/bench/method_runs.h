// A benchmark's method on all ranks, as threads over the fake libnccl.
#ifndef REFIT_TESTS_BENCH_METHOD_RUNS_H_
#define REFIT_TESTS_BENCH_METHOD_RUNS_H_

#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/transfer_methods.h"
#include "plan/plan_file.h"
#include "runner/rank_threads.h"
#include "tests/executor/fake_nccl/fake_nccl.h"

namespace refit {

struct MethodRuns {
  int times = 1;
  std::function<void(int32_t rank)> on_thread;  // what its thread calls first
  std::function<absl::StatusOr<std::unique_ptr<TransferMethod>>(int32_t rank)>
      make;
  // What a rank does before its method goes.
  std::function<absl::Status(int32_t rank)> at_end = [](int32_t) {
    return absl::OkStatus();
  };
};

struct MethodBytes {
  uint64_t wrong = 0;
  uint64_t sent = 0;  // in one run
};

// Of all ranks, after the last run.
inline MethodBytes RunMethod(const PlanFile& plan, const MethodRuns& runs) {
  std::atomic<uint64_t> wrong = 0;
  std::atomic<uint64_t> sent = 0;
  const auto run = [&](int32_t rank) -> absl::Status {
    const auto method = runs.make(rank);
    if (!method.ok()) return method.status();
    for (int i = 0; i < runs.times; ++i) {
      absl::Status status = (*method)->Enqueue(nullptr);
      if (!status.ok()) return status;
    }
    sent += (*method)->sent_bytes();
    const absl::StatusOr<std::optional<uint64_t>> of_rank =
        (*method)->WrongElements();
    if (!of_rank.ok()) return of_rank.status();
    wrong += of_rank->value();
    return runs.at_end(rank);
  };
  EXPECT_TRUE(RunRankThreads(plan.world_size(), [&](int32_t rank) {
                fake_nccl_set_rank(rank);
                runs.on_thread(rank);
                const absl::Status status = run(rank);
                EXPECT_TRUE(status.ok()) << rank << ": " << status;
              }).ok());
  return {.wrong = wrong, .sent = sent};
}

}  // namespace refit

#endif  // REFIT_TESTS_BENCH_METHOD_RUNS_H_
