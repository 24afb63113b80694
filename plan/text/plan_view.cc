#include "plan/text/plan_view.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {

int32_t IndexNumber(const fb::IndexDim& dim, uint32_t position) {
  if (dim.numbers() != nullptr) return dim.numbers()->Get(position);
  return dim.first() + static_cast<int32_t>(position);
}

uint64_t TensorCount(const IndexDims* index) {
  uint64_t count = 1;
  for (uint32_t dim = 0; dim < Length(index); ++dim)
    count *= index->Get(dim)->count();
  return count;
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

std::string QuotedText(const flatbuffers::String* name) {
  return absl::StrCat("\"", absl::Utf8SafeCEscape(name->str()), "\"");
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

uint64_t CopyElements(const fb::Body& body, const fb::Copy& copy) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < copy.loops_count(); ++i) {
    elements *= body.loops()->Get(copy.loops_begin() + i)->extent();
  }
  return elements;
}

std::vector<uint64_t> PayloadBytesByList(const fb::Body& body) {
  std::vector<uint64_t> payload_bytes(Length(body.copy_lists()));
  for (uint32_t list = 0; list < payload_bytes.size(); ++list) {
    const fb::CopyList& run = *body.copy_lists()->Get(list);
    for (uint32_t i = 0; i < run.count(); ++i) {
      const fb::Copy& copy = *body.copies()->Get(run.begin() + i);
      payload_bytes[list] +=
          CopyElements(body, copy) *
          static_cast<uint64_t>(DTypeBytes(copy.wire_dtype()));
    }
  }
  return payload_bytes;
}

uint64_t PayloadBytesOf(const fb::Body& body,
                        const std::vector<uint64_t>& payload_bytes,
                        uint32_t rank, uint32_t position) {
  const fb::RankProgram& program = *body.programs()->Get(rank);
  const fb::Message& send = *program.messages()->Get(position);
  if (rank < body.source_ranks() || !IsHeld(body, send)) {
    return payload_bytes[send.copies()];
  }
  const fb::Message* fed_by = FedBy(program, position);
  if (fed_by == nullptr) return 0;
  const fb::Message* packed = PartnerOf(
      body, rank, static_cast<uint32_t>(fed_by - program.messages()->Get(0)));
  if (packed == nullptr) return 0;
  const uint64_t begin = send.staging_offset() - fed_by->staging_offset();
  const fb::CopyList& list = *body.copy_lists()->Get(packed->copies());
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < list.count(); ++i) {
    const fb::Copy& copy = *body.copies()->Get(list.begin() + i);
    if (copy.staging_offset() - begin >= send.size_bytes()) continue;
    bytes += CopyElements(body, copy) *
             static_cast<uint64_t>(DTypeBytes(copy.wire_dtype()));
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
