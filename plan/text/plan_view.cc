#include "plan/text/plan_view.h"

#include <algorithm>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "plan/add_up_to.h"
#include "plan/dtype.h"

namespace refit {
namespace {

uint64_t CopyBytes(const fb::Body& body, const fb::Copy& copy) {
  return CopyElements(body, copy) *
         static_cast<uint64_t>(DTypeBytes(copy.wire_dtype()));
}

bool IsHeldSend(const fb::Body& body, uint32_t rank, const fb::Message& send) {
  return rank >= body.source_ranks() && IsHeld(body, send);
}

}  // namespace

std::string FormatText(const fb::Plan& plan) {
  std::string text = absl::StrCat("plan ", plan.format_version() >> 16, ".",
                                  plan.format_version() & 0xffff);
  if (plan.required_features() != 0) {
    absl::StrAppend(&text, " features 0x", absl::Hex(plan.required_features()));
  }
  return text;
}

std::string NumberSetText(absl::Span<const int32_t> numbers) {
  std::string text;
  for (size_t begin = 0; begin < numbers.size();) {
    size_t end = begin + 1;
    while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) ++end;
    absl::StrAppend(&text, begin == 0 ? "" : ", ", numbers[begin]);
    if (end - begin > 1) absl::StrAppend(&text, "..", numbers[end - 1]);
    begin = end;
  }
  return text;
}

std::string IndexText(const IndexDims* index) {
  std::string text;
  for (uint32_t i = 0; i < Length(index); ++i) {
    const fb::IndexDim& dim = *index->Get(i);
    absl::StrAppend(&text, " {", i, "}=");
    if (dim.numbers() == nullptr) {
      absl::StrAppend(&text, dim.first());
      if (dim.count() > 1) {
        absl::StrAppend(&text, "..", IndexNumber(dim, dim.count() - 1));
      }
    } else {
      const std::vector<int32_t> numbers(dim.numbers()->begin(),
                                         dim.numbers()->end());
      absl::StrAppend(&text, NumberSetText(numbers));
    }
  }
  return text;
}

std::string QuotedText(std::string_view name) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(std::string(name)), "\"");
}

std::string QuotedText(const flatbuffers::String* name) {
  return QuotedText(name->string_view());
}

std::string DimsText(const flatbuffers::Vector<uint64_t>* dims) {
  std::string text = "[";
  for (uint32_t dim = 0; dim < Length(dims); ++dim) {
    absl::StrAppend(&text, dim == 0 ? "" : ", ", dims->Get(dim));
  }
  text += ']';
  return text;
}

std::string PostHookText(const fb::PostHook& hook) {
  return absl::StrCat(hook.name()->str(), " ", QuotedText(hook.detail()));
}

std::string BoxText(const fb::Fragment& fragment) {
  std::string text = "[";
  for (uint32_t dim = 0; dim < Length(fragment.lo()); ++dim) {
    const uint64_t lo = fragment.lo()->Get(dim);
    absl::StrAppend(&text, dim == 0 ? "" : ", ", lo, ":",
                    lo + fragment.extent()->Get(dim));
  }
  text += ']';
  return text;
}

SentCopies SentCopiesOf(const MessageLists& messages, uint32_t rank,
                        uint32_t position) {
  const fb::Body& body = messages.body();
  SentCopies sent = {.packer = rank, .copies = {}};
  const fb::Message* packed = messages.Of(rank).Get(position);
  uint64_t begin = 0;
  uint64_t size_bytes = std::numeric_limits<uint64_t>::max();
  // From rank to rank that holds it, each of an earlier round, to the packer.
  while (IsHeldSend(body, sent.packer, *packed)) {
    const fb::RankProgram& program = *body.programs()->Get(sent.packer);
    const MessageVector& of_rank = messages.Of(program);
    const auto of_packed = static_cast<uint32_t>(packed - of_rank.Get(0));
    const fb::Message* fed_by = FedBy(messages, program, of_packed);
    if (fed_by == nullptr) return sent;
    const fb::Message* partner = PartnerOf(
        messages, sent.packer, static_cast<uint32_t>(fed_by - of_rank.Get(0)));
    if (partner == nullptr) return sent;
    begin += packed->staging_offset() - fed_by->staging_offset();
    size_bytes = std::min(size_bytes, packed->size_bytes());
    sent.packer = PeerOf(body, program, *fed_by);
    packed = partner;
  }
  for (const fb::Copy& copy : CopiesOf(body, packed->copies())) {
    if (copy.staging_offset() - begin >= size_bytes) continue;
    sent.copies.push_back(&copy);
  }
  return sent;
}

SendPayloads::SendPayloads(const MessageLists& messages)
    : messages_(messages), by_list_(Length(messages.body().copy_lists())) {
  const fb::Body& body = messages.body();
  for (uint32_t list = 0; list < by_list_.size(); ++list) {
    for (const fb::Copy& copy : CopiesOf(body, list)) {
      AddUpTo(CopyBytes(body, copy), by_list_[list]);
    }
  }
}

uint64_t SendPayloads::Bytes(uint32_t rank, uint32_t position) const {
  const fb::Body& body = messages_.body();
  const fb::Message& send = *messages_.Of(rank).Get(position);
  if (!IsHeldSend(body, rank, send)) return by_list_[send.copies()];
  uint64_t bytes = 0;
  for (const fb::Copy* copy : SentCopiesOf(messages_, rank, position).copies) {
    AddUpTo(CopyBytes(body, *copy), bytes);
  }
  return bytes;
}

std::vector<std::vector<int32_t>> HoldersByBuffer(const fb::Body& body) {
  std::vector<std::vector<int32_t>> holders(Length(body.buffers()));
  for (uint32_t rank = 0; rank < Length(body.programs()); ++rank) {
    const auto* buffers = body.programs()->Get(rank)->buffers();
    for (uint32_t slot = 0; slot < Length(buffers); ++slot) {
      std::vector<int32_t>& ranks = holders[buffers->Get(slot)];
      // A rank that lists one entry twice still holds it once.
      if (ranks.empty() || ranks.back() != static_cast<int32_t>(rank)) {
        ranks.push_back(static_cast<int32_t>(rank));
      }
    }
  }
  return holders;
}

std::map<uint32_t, std::vector<int32_t>> RanksByHost(const fb::Body& body) {
  std::map<uint32_t, std::vector<int32_t>> hosts;
  for (uint32_t rank = 0; rank < Length(body.programs()); ++rank) {
    hosts[body.programs()->Get(rank)->host()].push_back(
        static_cast<int32_t>(rank));
  }
  return hosts;
}

}  // namespace refit
