#include "report/measured_run.h"

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compiler/job/json.h"
#include "compiler/job/text_file.h"

namespace refit::report {
namespace {

// A run of many refits with timed rounds stays far below.
constexpr int64_t kRunBytesMax = int64_t{256} << 20;

constexpr char kWanted[] = "; wanted what refit-run --json prints";

class RunReader {
 public:
  RunReader(const JsonDocument& document, const PlanFile& plan,
            Diagnostics& diagnostics)
      : document_(document), plan_(plan), diagnostics_(diagnostics) {}

  std::optional<MeasuredRun> Read();

 private:
  void Error(const JsonValue& at, const std::string& message) {
    diagnostics_.Error(document_.PlaceOf(at), message);
  }
  // Null if it is not there.
  static const JsonValue* Find(const JsonValue& object, const char* key);
  static bool SendsOnlyChanges(const JsonValue& refit);
  // Reports that it is not there.
  const JsonValue* Need(const JsonValue& object, const char* key);
  bool CheckPlan(const JsonValue& root);
  bool ReadSeconds(const JsonValue& object, const char* key, double& seconds);
  bool ReadRounds(const JsonValue& rounds, MeasuredRefit& refit);

  const JsonDocument& document_;
  const PlanFile& plan_;
  Diagnostics& diagnostics_;
};

const JsonValue* RunReader::Find(const JsonValue& object, const char* key) {
  const JsonValue::Object* members = object.AsObject();
  if (members == nullptr) return nullptr;
  for (const JsonMember& member : *members) {
    if (member.key == key) return &member.value;
  }
  return nullptr;
}

bool RunReader::SendsOnlyChanges(const JsonValue& refit) {
  const JsonValue* delta = Find(refit, "delta");
  const JsonValue* rung = delta == nullptr ? nullptr : Find(*delta, "rung");
  const std::string* name = rung == nullptr ? nullptr : rung->AsString();
  return name != nullptr && *name != "dense";
}

const JsonValue* RunReader::Need(const JsonValue& object, const char* key) {
  const JsonValue* value = Find(object, key);
  if (value == nullptr) {
    Error(object, object.AsObject() == nullptr
                      ? absl::StrCat("found ", object.Text(), kWanted)
                      : absl::StrCat("no \"", key, "\"", kWanted));
  }
  return value;
}

// Whether the run was of this plan.
bool RunReader::CheckPlan(const JsonValue& root) {
  const int64_t wanted[] = {plan_.source_ranks(),
                            plan_.world_size() - plan_.source_ranks()};
  const char* keys[] = {"source_ranks", "destination_ranks"};
  for (int i = 0; i < 2; ++i) {
    const JsonValue* ranks = Need(root, keys[i]);
    if (ranks == nullptr) return false;
    if (ranks->AsInteger() != nullptr && *ranks->AsInteger() == wanted[i]) {
      continue;
    }
    Error(*ranks,
          absl::StrCat(keys[i], " is ", ranks->Text(), ", the plan's is ",
                       wanted[i], ": a run of another plan"));
    return false;
  }
  const JsonValue* digest = Find(root, "plan_digest");
  if (digest == nullptr) return true;
  const std::string own = DigestText(*plan_.plan().body_digest());
  if (digest->AsString() != nullptr && *digest->AsString() == own) return true;
  Error(*digest,
        absl::StrCat("plan_digest is ", digest->Text(), ", the plan's is \"",
                     own, "\": a run of another plan"));
  return false;
}

bool RunReader::ReadSeconds(const JsonValue& object, const char* key,
                            double& seconds) {
  const JsonValue* value = Need(object, key);
  if (value == nullptr) return false;
  if (value->AsDouble() != nullptr) {
    seconds = *value->AsDouble();
  } else if (value->AsInteger() != nullptr) {
    seconds = static_cast<double>(*value->AsInteger());
  } else {
    seconds = -1;
  }
  if (seconds >= 0) return true;
  Error(*value, absl::StrCat(key, " is ", value->Text(),
                             "; wanted a number of seconds"));
  return false;
}

bool RunReader::ReadRounds(const JsonValue& rounds, MeasuredRefit& refit) {
  const JsonValue::Array* list = rounds.AsArray();
  const uint32_t wanted = plan_.body().rounds()->size();
  if (list == nullptr || list->size() != wanted) {
    Error(rounds, absl::StrCat("rounds is ",
                               list == nullptr
                                   ? rounds.Text()
                                   : absl::StrCat("a list of ", list->size()),
                               "; wanted the ", wanted, " rounds of the plan"));
    return false;
  }
  for (const JsonValue& round : *list) {
    if (!ReadSeconds(round, "seconds", refit.round_seconds.emplace_back())) {
      return false;
    }
  }
  return true;
}

std::optional<MeasuredRun> RunReader::Read() {
  const JsonValue& root = document_.root;
  if (!CheckPlan(root)) return std::nullopt;
  const JsonValue* refits = Need(root, "refits");
  if (refits == nullptr) return std::nullopt;
  const JsonValue::Array* list = refits->AsArray();
  if (list == nullptr || list->empty()) {
    Error(*refits, absl::StrCat("refits is ", refits->Text(),
                                "; wanted a list of one refit or more"));
    return std::nullopt;
  }
  MeasuredRun run;
  for (const JsonValue& entry : *list) {
    if (SendsOnlyChanges(entry)) {
      ++run.delta_refits;
      continue;
    }
    const uint64_t number = run.refits.size() + run.delta_refits;
    MeasuredRefit& refit = run.refits.emplace_back();
    refit.number = number;
    if (!ReadSeconds(entry, "seconds", refit.seconds) ||
        !ReadSeconds(entry, "pack_seconds", refit.pack_seconds) ||
        !ReadSeconds(entry, "wire_seconds", refit.wire_seconds) ||
        !ReadSeconds(entry, "unpack_seconds", refit.unpack_seconds)) {
      return std::nullopt;
    }
    const JsonValue* rounds = Find(entry, "rounds");
    if (rounds != nullptr && !ReadRounds(*rounds, refit)) return std::nullopt;
  }
  if (run.refits.empty()) {
    Error(*refits, "all refits sent only what had changed; wanted a dense one");
    return std::nullopt;
  }
  return run;
}

}  // namespace

std::optional<MeasuredRun> ReadMeasuredRun(const std::string& path,
                                           const PlanFile& plan,
                                           Diagnostics& diagnostics) {
  const absl::StatusOr<std::shared_ptr<const SourceFile>> file =
      ReadTextFile(path, kRunBytesMax);
  if (!file.ok()) {
    diagnostics.Error(WholeFile(path), std::string(file.status().message()));
    return std::nullopt;
  }
  const std::optional<JsonDocument> document =
      ParseJson(*file, (*file)->text, diagnostics);
  if (!document.has_value()) return std::nullopt;
  std::optional<MeasuredRun> run =
      RunReader(*document, plan, diagnostics).Read();
  if (run.has_value()) run->path = path;
  return run;
}

}  // namespace refit::report
