#include "plan/diff/facts.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "plan/scratch_windows.h"

namespace refit {

std::vector<NameId> NameTable::Intern(const fb::Param& param) {
  return InternStack(param);
}
std::vector<NameId> NameTable::Intern(const fb::Buffer& buffer) {
  return InternStack(buffer);
}

template <typename Stack>
std::vector<NameId> NameTable::InternStack(const Stack& stack) {
  const auto [pattern, is_new_pattern] = pattern_ids_.try_emplace(
      stack.name()->str(), static_cast<uint32_t>(patterns_.size()));
  if (is_new_pattern) patterns_.push_back(pattern->first);
  std::vector<NameId> ids(StackTensors(stack));
  for (uint64_t ordinal = 0; ordinal < ids.size(); ++ordinal) {
    std::string name = TensorName(stack, ordinal);
    const auto [entry, is_new] =
        ids_.try_emplace(std::move(name), static_cast<NameId>(entries_.size()));
    ids[ordinal] = entry->second;
    if (!is_new) continue;
    entries_.push_back({.name = entry->first,
                        .weight = WeightOf(entry->first),
                        .pattern = pattern->second,
                        .numbers = IndexNumbers(stack.index(), ordinal)});
  }
  return ids;
}

std::map<std::string, std::vector<NameId>> NameTable::ByPattern(
    absl::Span<const NameId> ids) const {
  std::map<std::string, std::vector<NameId>> by_pattern;
  for (const NameId id : ids)
    by_pattern[patterns_[entries_[id].pattern]].push_back(id);
  return by_pattern;
}

std::string NameTable::Text(absl::Span<const NameId> ids) const {
  const auto quoted = [](const std::string& name) {
    return absl::StrCat("\"", absl::Utf8SafeCEscape(name), "\"");
  };
  const Entry& first = entries_[ids[0]];
  if (ids.size() == 1) return quoted(first.name);
  std::vector<std::set<int32_t>> numbers(first.numbers.size());
  // All ids have one pattern, so as many numbers each.
  for (const NameId id : ids) {
    for (size_t dim = 0; dim < numbers.size(); ++dim)
      numbers[dim].insert(entries_[id].numbers[dim]);
  }
  size_t product = 1;
  for (const std::set<int32_t>& dim : numbers) product *= dim.size();
  if (product != ids.size()) {
    return absl::StrCat(quoted(first.name), " and ", ids.size() - 1, " more");
  }
  std::string text = quoted(patterns_[first.pattern]);
  for (size_t dim = 0; dim < numbers.size(); ++dim) {
    absl::StrAppend(&text, " {", dim, "}=",
                    NumberSetText(std::vector<int32_t>(numbers[dim].begin(),
                                                       numbers[dim].end())));
  }
  return text;
}

PlanFacts::PlanFacts(const PlanFile& plan, NameTable& names)
    : plan_(plan), names_(names), payloads_(plan.messages()) {
  std::vector<std::vector<Residue>> param_weights;
  for (const fb::Param* param : *body().params()) {
    params_.push_back(names.Intern(*param));
    std::vector<Residue>& weights = param_weights.emplace_back();
    for (const NameId id : params_.back()) weights.push_back(names.weight(id));
  }
  for (const fb::Buffer* buffer : *body().buffers()) {
    buffers_.push_back(names.Intern(*buffer));
    tensor_elements_.push_back(TensorElements(*buffer));
    layouts_.push_back(LayoutSums(body(), *buffer, param_weights));
  }
}

const std::vector<CopyPart>& PlanFacts::Parts(const fb::RankProgram& program,
                                              uint32_t list) {
  const auto elements_of = [&](const fb::Copy& copy) {
    return tensor_elements_[program.buffers()->Get(copy.buffer_slot())];
  };
  Residue sizes;
  for (const fb::Copy& copy : CopiesOf(body(), list)) {
    sizes = sizes * Residue(0x9e3779b97f4a7c15) + Residue(elements_of(copy));
  }
  const auto [entry, is_new] =
      parts_.try_emplace(std::make_pair(list, sizes.value()));
  if (is_new) {
    for (const fb::Copy& copy : CopiesOf(body(), list)) {
      AppendCopyParts(body(), copy, elements_of(copy), entry->second);
    }
  }
  return entry->second;
}

MessageFacts PlanFacts::FactsOf(uint32_t rank, uint32_t position) {
  const fb::RankProgram& program = *body().programs()->Get(rank);
  const fb::Message& message = *plan_.messages().Of(program).Get(position);
  const bool is_send = message.kind() == fb::MessageKind::kSend;
  const uint32_t peer = PeerOf(body(), program, message);
  const fb::Message* fed_by = FedBy(plan_.messages(), program, position);
  MessageFacts facts = {
      .src = is_send ? rank : peer,
      .dst = is_send ? peer : rank,
      .kind = message.kind(),
      .round = message.round(),
      .size_bytes = message.size_bytes(),
      .payload_bytes = is_send ? payloads_.Bytes(rank, position) : 0,
      .staging_offset = message.staging_offset(),
      .fed_by_round = fed_by == nullptr ? -1 : int64_t{fed_by->round()},
      .broadcast = message.broadcast(),
      .content = {},
      .packing = {}};
  for (const CopyPart& part : Parts(program, message.copies())) {
    const Residue weight =
        names_.weight(buffers_[program.buffers()->Get(part.slot)][part.tensor]);
    facts.content += weight * part.content;
    facts.packing += weight * part.packing;
  }
  return facts;
}

std::vector<MessageFacts> PlanFacts::Messages() {
  std::vector<MessageFacts> messages;
  for (uint32_t rank = 0; rank < body().programs()->size(); ++rank) {
    const uint32_t count = plan_.messages().Of(rank).size();
    for (uint32_t position = 0; position < count; ++position) {
      messages.push_back(FactsOf(rank, position));
    }
  }
  std::stable_sort(messages.begin(), messages.end(),
                   [](const MessageFacts& a, const MessageFacts& b) {
                     return std::tie(a.src, a.dst, a.kind, a.round) <
                            std::tie(b.src, b.dst, b.kind, b.round);
                   });
  return messages;
}

std::vector<Delivery> PlanFacts::Deliveries(uint32_t rank) {
  const fb::RankProgram& program = *body().programs()->Get(rank);
  std::vector<Delivery> parts;
  for (const fb::Message* message : plan_.messages().Of(program)) {
    if (message->kind() != fb::MessageKind::kRecv) continue;
    for (const CopyPart& part : Parts(program, message->copies())) {
      parts.push_back(
          {.tensor = buffers_[program.buffers()->Get(part.slot)][part.tensor],
           .src = PeerOf(body(), program, *message),
           .bytes = part.bytes,
           .content = part.content});
    }
  }
  std::sort(parts.begin(), parts.end(),
            [](const Delivery& a, const Delivery& b) {
              return std::tie(a.tensor, a.src) < std::tie(b.tensor, b.src);
            });
  std::vector<Delivery> deliveries;
  for (const Delivery& part : parts) {
    if (deliveries.empty() || deliveries.back().tensor != part.tensor ||
        deliveries.back().src != part.src) {
      deliveries.push_back(part);
    } else {
      deliveries.back().bytes += part.bytes;
      deliveries.back().content += part.content;
    }
  }
  return deliveries;
}

std::map<NameId, Residue> PlanFacts::Scratch(uint32_t rank) const {
  const fb::RankProgram& program = *body().programs()->Get(rank);
  std::map<NameId, Residue> scratch;
  for (uint32_t slot = 0; slot < program.buffers()->size(); ++slot) {
    if (!IsScratch(program, slot)) continue;
    const uint32_t buffer = program.buffers()->Get(slot);
    for (size_t i = 0; i < buffers_[buffer].size(); ++i) {
      scratch[buffers_[buffer][i]] += layouts_[buffer][i];
    }
  }
  return scratch;
}

Residue PlanFacts::Fills(uint32_t rank) {
  const fb::RankProgram& program = *body().programs()->Get(rank);
  Residue sum;
  for (const CopyPart& part : Parts(program, program.fills())) {
    sum +=
        part.content *
        names_.weight(buffers_[program.buffers()->Get(part.slot)][part.tensor]);
  }
  return sum;
}

}  // namespace refit
