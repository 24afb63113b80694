// Jobs of one small model, compiled: for the tests of passes.
#ifndef REFIT_TESTS_COMPILER_COMPILE_TESTING_H_
#define REFIT_TESTS_COMPILER_COMPILE_TESTING_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "compiler/compile.h"
#include "plan/plan_file.h"
#include "tests/compiler/temporary_directory.h"

namespace refit {

// Compiles (which proves) the job; its errors, or "".
inline std::string ErrorsOf(
    const std::string& job_text, std::vector<uint8_t>* plan = nullptr,
    const std::function<void(Limits&)>& change_limits = {}) {
  const TemporaryDirectory directory;
  const std::string path = directory.Write("job.json", job_text);
  Diagnostics diagnostics;
  absl::StatusOr<std::vector<uint8_t>> bytes =
      CompileFile(path, {.change_limits = change_limits}, diagnostics);
  if (!diagnostics.ok()) return diagnostics.Render();
  if (!bytes.ok()) return std::string(bytes.status().message());
  if (plan != nullptr) *plan = *std::move(bytes);
  return "";
}

// A side on a one-dimensional mesh of `ranks`, every parameter placed alike.
inline std::string GenericSide(int ranks, const std::string& placement) {
  return R"({"layout": "generic", "meshes": {"m": {"axes": {"x": )" +
         std::to_string(ranks) +
         R"(}}}, "tensors": [{"match": "*", "mesh": "m", "placements": [")" +
         placement + R"("]}]})";
}

inline std::string GenericJob(const std::string& parameters,
                              const std::string& source,
                              const std::string& destination,
                              const std::string& more = "") {
  return R"({"model": {"parameters": [)" + parameters + R"(]}, "source": )" +
         source + R"(, "destination": )" + destination + more + "}";
}

inline PlanFile OpenJob(
    const std::string& job,
    const std::function<void(Limits&)>& change_limits = {}) {
  std::vector<uint8_t> bytes;
  EXPECT_EQ(ErrorsOf(job, &bytes, change_limits), "");
  absl::StatusOr<PlanFile> plan = PlanFile::FromBytes(std::move(bytes));
  EXPECT_TRUE(plan.ok());
  return *std::move(plan);
}

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_COMPILE_TESTING_H_
