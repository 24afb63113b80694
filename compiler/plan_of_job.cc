#include "compiler/plan_of_job.h"

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "compiler/compile.h"
#include "compiler/inputs_digest.h"
#include "compiler/model/model.h"
#include "plan/diff/diff.h"

namespace refit {
namespace {

bool SameDigest(const fb::Digest* a, const fb::Digest* b) {
  return a != nullptr && b != nullptr && a->low() == b->low() &&
         a->high() == b->high();
}

std::string FirstOf(const std::vector<Difference>& differences) {
  std::string text = absl::StrCat("job -> plan: ", differences[0].rule, " ",
                                  differences[0].text);
  const size_t more = differences.size() - 1;
  if (more > 0) {
    absl::StrAppend(&text, "; and ", more, " more difference",
                    more == 1 ? "" : "s");
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> DifferenceFromJob(const Job& job,
                                              const PlanFile& plan,
                                              Diagnostics& diagnostics) {
  absl::StatusOr<std::vector<uint8_t>> bytes =
      Compile(job, {.prove = false}, diagnostics);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<PlanFile> wanted =
      PlanFile::FromBytes(*std::move(bytes));
  if (!wanted.ok()) return wanted.status();
  if (SameDigest(wanted->plan().body_digest(), plan.plan().body_digest())) {
    return "";
  }
  // Contract first. An earlier build may have written the same in an earlier
  // format.
  std::vector<Difference> differences = ComparePlans(*wanted, plan).differences;
  std::erase_if(differences, [](const Difference& difference) {
    return difference.rule == kFormatChanged;
  });
  if (differences.empty()) return "";
  if (differences[0].kind != DifferenceClass::kContract &&
      SameDigest(wanted->plan().inputs_digest(), plan.plan().inputs_digest())) {
    return "";
  }
  return FirstOf(differences);
}

bool HasInputsOf(const Job& job, const PlanFile& plan,
                 Diagnostics& diagnostics) {
  std::optional<Model> model = ReadModel(job, diagnostics);
  if (!model.has_value()) return false;
  ApplyExcludes(job.options, *model, diagnostics);
  const fb::Digest digest = InputsDigest(job, *model);
  return diagnostics.ok() && SameDigest(&digest, plan.plan().inputs_digest());
}

}  // namespace refit
