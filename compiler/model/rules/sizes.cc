#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "compiler/model/rules/reader.h"

namespace refit {

// Sizes that layouts read, and what each is unless the file says.
template <typename Sizes>
struct KnownSize {
  std::string_view name;
  std::string_view otherwise;
  int64_t min;
  int64_t max;
  int64_t Sizes::*member;
};

namespace {

constexpr KnownSize<Architecture> kSizes[] = {
    {"layers", "num_hidden_layers", 1, kCountMax, &Architecture::layers},
    {"hidden", "hidden_size", 1, kExtentMax, &Architecture::hidden},
    {"heads", "num_attention_heads", 1, kExtentMax, &Architecture::heads},
    {"kv_heads", "num_key_value_heads or num_attention_heads", 1, kExtentMax,
     &Architecture::kv_heads},
    {"head_dim", "head_dim or hidden_size // num_attention_heads", 1,
     kExtentMax, &Architecture::head_dim},
    {"vocab", "vocab_size", 1, kExtentMax, &Architecture::vocab},
    {"experts", "0", 0, kCountMax, &Architecture::experts},
    {"expert_groups", "1", 0, kCountMax, &Architecture::expert_groups},
    {"mtp_block", "1", 0, kCountMax, &Architecture::mtp_block},
    {"mtp_layers", "0", 0, kCountMax, &Architecture::mtp_layers},
    {"output_groups", "0", 0, kExtentMax, &Architecture::output_groups},
    {"hash_layers", "0", 0, kCountMax, &Architecture::hash_layers},
    {"experts_per_token", "0", 0, kCountMax, &Architecture::experts_per_token},
};
// Sizes of a part that a model has or lacks: each is above 0, or all are 0.
// Products of two and sums of products stay far below 2^63.
constexpr int64_t kPartMax = int64_t{1} << 20;
constexpr KnownSize<LatentAttention> kLatentSizes[] = {
    {"key_value_rank", "0", 0, kPartMax, &LatentAttention::key_value_rank},
    {"nope_dim", "0", 0, kPartMax, &LatentAttention::nope_dim},
    {"rope_dim", "0", 0, kPartMax, &LatentAttention::rope_dim},
    {"value_dim", "0", 0, kPartMax, &LatentAttention::value_dim},
};
constexpr KnownSize<LatentAttention> kQueryRank = {
    "query_rank", "0", 0, kPartMax, &LatentAttention::query_rank};
constexpr KnownSize<MambaSizes> kMambaSizes[] = {
    {"mamba_heads", "0", 0, kPartMax, &MambaSizes::heads},
    {"mamba_head_dim", "0", 0, kPartMax, &MambaSizes::head_dim},
    {"mamba_groups", "0", 0, kPartMax, &MambaSizes::groups},
    {"mamba_state", "0", 0, kPartMax, &MambaSizes::state},
};
constexpr KnownSize<DeltaNetSizes> kDeltaSizes[] = {
    {"delta_key_heads", "0", 0, kPartMax, &DeltaNetSizes::key_heads},
    {"delta_value_heads", "0", 0, kPartMax, &DeltaNetSizes::value_heads},
    {"delta_key_dim", "0", 0, kPartMax, &DeltaNetSizes::key_dim},
    {"delta_value_dim", "0", 0, kPartMax, &DeltaNetSizes::value_dim},
};
constexpr std::string_view kTied = "tied";
constexpr std::string_view kTiedKey = "tie_word_embeddings";
constexpr std::string_view kTiedOtherwise = "tie_word_embeddings or false";
constexpr KnownSize<TowerSizes> kTowerSizes[] = {
    {"layers", "num_hidden_layers", 1, kCountMax, &TowerSizes::layers},
    {"hidden", "hidden_size", 1, kExtentMax, &TowerSizes::hidden},
    {"heads", "num_attention_heads", 1, kExtentMax, &TowerSizes::heads},
};

// Where the first of `names` that the file says stands, else `otherwise`.
Place PlaceOfSize(std::initializer_list<std::string_view> names,
                  absl::Span<const JsonMember> members,
                  const ValueReader& values, const Place& otherwise) {
  for (const std::string_view name : names) {
    for (const JsonMember& member : members) {
      if (member.key == name) return values.PlaceOf(member.value);
    }
  }
  return otherwise;
}

}  // namespace

std::string KeyOfSize(std::string_view name,
                      absl::Span<const JsonMember> sizes) {
  std::string_view text = name == "heads"      ? "num_attention_heads"
                          : name == "kv_heads" ? "num_key_value_heads"
                                               : name;
  for (const JsonMember& member : sizes) {
    if (member.key != name || member.value.AsString() == nullptr) continue;
    text = *member.value.AsString();
  }
  return std::string(text.substr(0, text.find(" or ")));
}

bool RulesReader::ReadTied(absl::Span<const JsonMember> sizes,
                           const Place& place) {
  if (&config_ == &whole_) {
    return ReadKnownSize<Architecture>({kTied, kTiedOtherwise, 0, 1, nullptr},
                                       sizes, place) != 0;
  }
  const JsonValue* otherwise = nullptr;
  for (const JsonMember& member : Members("defaults")) {
    if (member.key == kTiedKey) otherwise = &member.value;
  }
  if (otherwise == nullptr && !whole_.Has(kTiedKey)) {
    whole_.Error(kTiedKey,
                 "missing key \"%s\": classes of this model differ in what "
                 "that means; wanted true or false",
                 kTiedKey);
    return false;
  }
  const bool tied = whole_.FlagOr(
      kTiedKey, otherwise != nullptr && otherwise->AsBool() != nullptr &&
                    *otherwise->AsBool());
  scope_.sizes.emplace_back(kTied, tied);
  const absl::Span<const JsonMember> alike = Members("alike");
  const bool is_checked =
      std::any_of(alike.begin(), alike.end(),
                  [](const JsonMember& pair) { return pair.key == kTiedKey; });
  if (is_checked && config_.FlagOr(kTiedKey, tied) != tied) {
    config_.Error(kTiedKey,
                  "%s of text_config is %s, and the one beside it %s%s: "
                  "frameworks differ in which they take; wanted both alike",
                  kTiedKey, tied ? "false" : "true", tied ? "true" : "false",
                  whole_.Has(kTiedKey) ? "" : " by default");
  }
  return tied;
}

bool RulesReader::ReportConfig(std::string_view expression,
                               const absl::Status& status, IntegerRange range) {
  if (absl::IsUnavailable(status)) return true;
  const std::string key(status.ok()
                            ? expression.substr(0, expression.find(" or "))
                            : KeyOf(status));
  if (!is_compiled_in_ || key.empty()) return false;
  if (status.ok() && scope_.Find(key) == nullptr) return false;
  // Several sizes may be made of it.
  if (!reported_.insert(key).second) return true;
  const JsonValue* value = scope_.Find(key);
  if (value == nullptr) {
    config_.Size(key);  // which reports it
    return true;
  }
  config_.Error(key, "%s is %s; wanted an integer from %d to %d", key,
                value->Text(), range.min, range.max);
  return true;
}

std::optional<int64_t> RulesReader::Number(const JsonValue& value,
                                           const std::string& path,
                                           IntegerRange range) {
  const auto wanted = [&] {
    return absl::StrFormat("wanted %d to %d", range.min, range.max);
  };
  std::optional<int64_t> number;
  std::string shown = value.Text();
  if (const int64_t* integer = value.AsInteger()) {
    number = *integer;
  } else if (const bool* flag = value.AsBool()) {
    number = *flag ? 1 : 0;
  } else if (const std::string* text = value.AsString()) {
    const absl::StatusOr<int64_t> result = Evaluate(*text, scope_);
    if (!result.ok()) {
      if (ReportConfig(*text, result.status(), range)) return std::nullopt;
      values_.Error(value, "%s is %s: %s", path, shown,
                    result.status().message());
      return std::nullopt;
    }
    number = *result;
    absl::StrAppend(&shown, ", ", *number, " for this config.json");
  } else {
    values_.Wrong(value, path, "an integer or an expression in quotes");
    return std::nullopt;
  }
  if (*number >= range.min && *number <= range.max) return number;
  if (const std::string* text = value.AsString();
      text != nullptr && ReportConfig(*text, absl::OkStatus(), range)) {
    return std::nullopt;
  }
  values_.Error(value, "%s is %s; %s", path, shown, wanted());
  return std::nullopt;
}

template <typename Sizes>
int64_t RulesReader::ReadKnownSize(const KnownSize<Sizes>& size,
                                   absl::Span<const JsonMember> members,
                                   const Place& place) {
  const IntegerRange range = {.min = size.min, .max = size.max};
  const auto given =
      std::find_if(members.begin(), members.end(),
                   [&](const JsonMember& m) { return m.key == size.name; });
  std::optional<int64_t> value;
  if (given != members.end()) {
    value =
        Number(given->value,
               reader_.PathOf(absl::StrFormat("sizes.%s", size.name)), range);
  } else {
    const absl::StatusOr<int64_t> number = Evaluate(size.otherwise, scope_);
    const bool fits =
        number.ok() && *number >= range.min && *number <= range.max;
    if (fits) {
      value = *number;
    } else if (!ReportConfig(size.otherwise, number.status(), range)) {
      diagnostics().Error(
          place,

          "missing key \"%s\" in sizes, and its default \"%s\" is no size: %s; "
          "wanted an expression over config.json's keys",
          size.name, size.otherwise,
          number.ok() ? absl::StrFormat("%d is not %d to %d", *number,
                                        range.min, range.max)
                      : std::string(number.status().message()));
    }
  }
  scope_.sizes.emplace_back(size.name, value);
  return value.value_or(size.max == 1 ? 0 : 1);
}

template <typename Sizes, size_t N>
std::optional<Sizes> RulesReader::ReadPart(const KnownSize<Sizes> (&sizes)[N],
                                           absl::Span<const JsonMember> members,
                                           const Place& place) {
  const int64_t errors_before = diagnostics().error_count();
  Sizes part;
  for (const KnownSize<Sizes>& size : sizes) {
    part.*size.member = ReadKnownSize(size, members, place);
  }
  if (diagnostics().error_count() != errors_before) return part;
  const auto has = [&](const auto& size) { return part.*size.member > 0; };
  const auto* const given =
      std::find_if(std::begin(sizes), std::end(sizes), has);
  if (given == std::end(sizes)) return std::nullopt;
  const auto* const lacks =
      std::find_if_not(std::begin(sizes), std::end(sizes), has);
  if (lacks != std::end(sizes)) {
    diagnostics().Error(
        PlaceOfSize({given->name}, members, values_, place),
        "sizes.%s is %d and sizes.%s is 0; wanted both above 0, or neither",
        given->name, part.*given->member, lacks->name);
  }
  return part;
}

void RulesReader::ReadSizes() {
  const JsonValue* value = reader_.Find("sizes");
  const absl::Span<const JsonMember> members = Members("sizes");
  const Place place =
      value == nullptr ? reader_.place() : values_.PlaceOf(*value);
  const int64_t errors_before = diagnostics().error_count();
  for (const KnownSize<Architecture>& size : kSizes) {
    architecture().*size.member = ReadKnownSize(size, members, place);
  }
  mtp_layers_ = architecture().mtp_layers;
  if (!model_.mtp) architecture().mtp_layers = 0;
  int64_t& block = architecture().mtp_block;
  if (architecture().mtp_layers == 0) block = 1;
  if (block == 0 || architecture().mtp_layers % block != 0) {
    if (diagnostics().error_count() == errors_before) {
      diagnostics().Error(
          PlaceOfSize({"mtp_block", "mtp_layers"}, members, values_, place),
          "sizes.mtp_layers is %d and sizes.mtp_block is %d; wanted a multiple "
          "of it, above 0",
          architecture().mtp_layers, block);
    }
    architecture().mtp_layers = 0;
    block = 1;
  }
  architecture().hash_layers =
      std::min(architecture().hash_layers, architecture().layers);
  architecture().tied = ReadTied(members, place);
  architecture().index_rope_interleaved =
      ReadKnownSize<Architecture>(
          {"index_rope_interleaved", "0", 0, 1, nullptr}, members, place) != 0;
  architecture().output_gate =
      ReadKnownSize<Architecture>({"output_gate", "0", 0, 1, nullptr}, members,
                                  place) != 0;
  architecture().delta = ReadPart(kDeltaSizes, members, place);
  architecture().latent = ReadPart(kLatentSizes, members, place);
  const int64_t query_rank = ReadKnownSize(kQueryRank, members, place);
  if (architecture().latent.has_value()) {
    architecture().latent->query_rank = query_rank;
  }
  architecture().mamba = ReadPart(kMambaSizes, members, place);
  if (architecture().mamba.has_value()) {
    architecture().mamba->sglang_groups = architecture().mamba->groups;
  }
  ReadOwnSizes(members);
  const auto check_divides = [&](std::string_view name,
                                 std::string_view of_name) {
    const absl::StatusOr<int64_t> size = Evaluate(name, scope_);
    const absl::StatusOr<int64_t> of = Evaluate(of_name, scope_);
    if (!size.ok() || !of.ok() || *size == 0 || *of % *size == 0) return;
    const std::string key = KeyOfSize(name, members);
    if (is_compiled_in_ && config_.Has(key)) {
      config_.Error(key, "%s %d does not divide %s %d", key, *size,
                    KeyOfSize(of_name, members), *of);
      return;
    }
    diagnostics().Error(PlaceOfSize({name, of_name}, members, values_, place),
                        "sizes.%s %d does not divide sizes.%s %d", name, *size,
                        of_name, *of);
  };
  check_divides("mamba_groups", "mamba_heads");
  check_divides("delta_key_heads", "delta_value_heads");
  check_divides("output_groups", "heads");
  if (architecture().latent.has_value()) {
    // Which have no meaning there.
    architecture().kv_heads = 0;
    architecture().head_dim = 0;
  } else {
    check_divides("kv_heads", "heads");
  }
}

void RulesReader::ReadOwnSizes(absl::Span<const JsonMember> members) {
  const size_t of_layouts = scope_.sizes.size();
  for (const JsonMember& member : members) {
    const auto end = scope_.sizes.begin() + static_cast<ptrdiff_t>(of_layouts);
    if (std::any_of(scope_.sizes.begin(), end, [&](const auto& size) {
          return size.first == member.key;
        })) {
      continue;
    }
    scope_.sizes.emplace_back(
        member.key, Number(member.value, reader_.PathOf("sizes." + member.key),
                           {.min = 0, .max = kExtentMax}));
  }
}

void RulesReader::ReadTowerSizes(absl::Span<const JsonMember> members) {
  for (const KnownSize<TowerSizes>& size : kTowerSizes) {
    tower_.*size.member = ReadKnownSize(size, members, reader_.place());
  }
}

}  // namespace refit
