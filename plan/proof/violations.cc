#include "plan/proof/violations.h"

#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "plan/vector_length.h"

namespace refit::proof {
namespace {

std::string_view InvariantName(Invariant invariant) {
  switch (invariant) {
    case Invariant::kWrittenOnce:
      return "written once";
    case Invariant::kRightElement:
      return "right element";
    case Invariant::kInBounds:
      return "in bounds";
    case Invariant::kMatchedMessages:
      return "matched messages";
    case Invariant::kRoundLimits:
      return "round limits";
    case Invariant::kWellFormedInputs:
      return "well-formed inputs";
    case Invariant::kOrdered:
      return "ordered";
  }
  return "";
}

struct Element {
  std::string name;
  std::string index;  // "[3, 17]"
};

template <typename Stack>
Element ElementOf(const Stack& stack, int64_t offset) {
  const auto* shape = stack.shape();
  std::vector<uint64_t> index(Length(shape));
  auto rest = static_cast<uint64_t>(offset);
  for (size_t d = index.size(); d-- > 0;) {
    const uint64_t size = shape->Get(static_cast<uint32_t>(d));
    index[d] = rest % size;
    rest /= size;
  }
  return {TensorName(stack, rest),
          absl::StrCat("[", absl::StrJoin(index, ", "), "]")};
}

}  // namespace

void Violations::Report(const Site& site, Invariant invariant,
                        absl::FunctionRef<std::string()> text) {
  ++reports_;
  if (steps_ != nullptr && steps_->AreUsedUp()) return;
  if (first_.has_value() && *first_ <= site) return;
  first_ = site;
  invariant_ = invariant;
  const std::string where = SiteText(site);
  text_ = absl::StrFormat(
      "%s%s%s (invariant %d: %s)", where, where.empty() ? "" : ": ", text(),
      static_cast<int>(invariant), InvariantName(invariant));
}

std::string Violations::SiteText(const Site& site) const {
  std::vector<std::string> parts;
  if (site.rank >= 0) parts.push_back(absl::StrCat("rank ", site.rank));
  if (site.round != Site::kBeforeRounds && site.round != Site::kAfterRounds) {
    parts.push_back(absl::StrCat("round ", site.round));
  }
  if (site.buffer_slot >= 0) {
    const fb::RankProgram& program =
        *body_.programs()->Get(static_cast<uint32_t>(site.rank));
    const fb::Buffer& buffer = *body_.buffers()->Get(
        program.buffers()->Get(static_cast<uint32_t>(site.buffer_slot)));
    if (site.offset >= 0) {
      const Element element = ElementOf(buffer, site.offset);
      parts.push_back(absl::StrCat("buffer ", element.name));
      parts.push_back(absl::StrCat("index ", element.index));
    } else {
      parts.push_back(absl::StrCat("buffer ", TensorName(buffer, 0)));
    }
  }
  return absl::StrJoin(parts, ", ");
}

std::string ElementText(const fb::Param& param, int64_t offset) {
  const Element element = ElementOf(param, offset);
  return element.name + element.index;
}

std::string ElementText(const fb::Buffer& buffer, int64_t offset) {
  const Element element = ElementOf(buffer, offset);
  return element.name + element.index;
}

}  // namespace refit::proof
