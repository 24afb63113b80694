#include "executor/delta/staged_deltas.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "plan/dtype.h"

namespace refit {
namespace {

constexpr uint64_t kCodeAlignmentBytes = 8;

}  // namespace

StagedDeltas::StagedDeltas(const PlanFile& plan, int32_t rank,
                           const RankSchedule& schedule)
    : schedule_(schedule),
      sizes_(plan, rank, schedule),
      rung_(sizes_.rungs()),
      elements_(sizes_.elements()) {
  for (size_t i = 0; i < schedule.operations().size(); ++i) {
    const CodedOperation& sized = sizes_.of(i);
    MessageToCode& of = messages_.emplace_back();
    of.message = sized.message;
    of.is_send = schedule.operations()[i].kind == fb::MessageKind::kSend;
    of.rooms = sized.rooms;
  }
}

void StagedDeltas::AddCopy(size_t operation, const StridedCopy& copy,
                           absl::Span<const CopyLoop> loops, bool is_known) {
  MessageToCode& of = messages_[operation];
  uint64_t size_bytes = static_cast<uint64_t>(DTypeBytes(copy.to.dtype));
  for (const CopyLoop& loop : loops) size_bytes *= loop.extent;
  const uint64_t begin = copy.to.byte_offset;
  const uint64_t end = begin + size_bytes;
  bool is_received = false;
  bool always = !is_known;
  const std::vector<CodedOperation::ReceivedRange>& ranges =
      sizes_.of(operation).received;
  auto range =
      std::partition_point(ranges.begin(), ranges.end(),
                           [&](const CodedOperation::ReceivedRange& other) {
                             return other.end <= begin;
                           });
  for (; range != ranges.end() && range->begin < end; ++range) {
    is_received = true;
    if (!is_known && !range->always) {
      elements_ -= (std::min(end, range->end) - std::max(begin, range->begin)) /
                   static_cast<uint64_t>(DTypeBytes(copy.to.dtype));
    }
    // Of a copy of both kinds all is sent: too much is never wrong, but may
    // find no room. Both ends of the compiler's plans are cut alike.
    always |= range->always;
  }
  if (!is_received) return;
  of.copies.push_back(copy);
  of.copies.back().loops_begin = static_cast<uint32_t>(of.loops.size());
  of.copies.back().loops_count = static_cast<uint32_t>(loops.size());
  of.loops.insert(of.loops.end(), loops.begin(), loops.end());
  of.always.push_back(always);
}

// A proved plan may hold the copies of a message in any order.
void StagedDeltas::SortCopies(MessageToCode& of) {
  std::vector<size_t> order(of.copies.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return of.copies[a].to.byte_offset < of.copies[b].to.byte_offset;
  });
  const std::vector<StridedCopy> copies = of.copies;
  const std::vector<bool> always = of.always;
  for (size_t i = 0; i < order.size(); ++i) {
    of.copies[i] = copies[order[i]];
    of.always[i] = always[order[i]];
  }
}

absl::Status StagedDeltas::Bind(absl::Span<const Operation> whole,
                                std::byte* staging,
                                absl::Span<std::byte* const> table,
                                const ChangeEntries& changes, Device& device) {
  whole_.assign(whole.begin(), whole.end());
  codes_at_once_ = device.IsHost();
  for (size_t i = 0; i < messages_.size(); ++i) {
    if (!sizes_.IsCoded(i)) continue;
    const uint64_t offset = schedule_.parts()[i].staging_offset;
    if (offset % kCodeAlignmentBytes != 0) {
      return absl::UnimplementedError(absl::StrCat(
          "a message is staged at byte ", offset, ", no multiple of ",
          kCodeAlignmentBytes, "; refit-verify tells more"));
    }
    messages_[i].code = staging + offset;
    SortCopies(messages_[i]);
  }
  auto coder = device.PrepareCodes(table, changes, messages_);
  if (!coder.ok()) return coder.status();
  coder_ = *std::move(coder);
  Take(sizes_.rungs());
  return absl::OkStatus();
}

absl::Status StagedDeltas::RestartCounts(Stream stream) {
  changed_ = 0;
  return coder_->Restart(stream);
}

absl::Status StagedDeltas::EnqueueCount(Stream stream) {
  return coder_->Count(stream);
}

absl::StatusOr<size_t> StagedDeltas::FirstRung(Stream stream) {
  const absl::StatusOr<absl::Span<const ChangedElements>> counted =
      coder_->Counted(stream);
  if (!counted.ok()) return counted.status();
  size_t first = 0;
  for (size_t i = 0; i < messages_.size(); ++i) {
    if (!sizes_.IsCoded(i) || whole_[i].kind != fb::MessageKind::kSend)
      continue;
    const ChangedElements& changed = (*counted)[i];
    changed_ += changed.count;
    while (first < sizes_.rungs()) {
      const uint64_t room = sizes_.RoomOf(i, first);
      if (room == 0 || changed.room <= room) break;
      ++first;
    }
  }
  return first;
}

void StagedDeltas::Take(size_t rung) {
  rung_ = std::min(rung, sizes_.rungs());
  operations_ = whole_;
  takes_whole_ = true;
  for (const RoundWork& work : schedule_.rounds()) {
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const uint32_t number = work.operations_begin + i;
      const uint64_t room = sizes_.RoomOf(number, rung_);
      if (room == 0) continue;
      takes_whole_ = false;
      operations_[number].data = messages_[number].code;
      operations_[number].size_bytes =
          messages_[number].message.CodeBytes(room);
    }
  }
}

absl::Status StagedDeltas::EnqueueEncode(uint32_t begin, uint32_t count,
                                         Stream stream) {
  return coder_->Encode(begin, count, rung_, stream);
}

absl::Status StagedDeltas::EnqueueApply(uint32_t begin, uint32_t count,
                                        Stream stream) {
  const absl::Status status = coder_->Apply(begin, count, rung_, stream);
  return status.ok() && codes_at_once_ ? CheckCoding(stream) : status;
}

absl::Status StagedDeltas::EnqueueKeep(Stream stream) {
  return coder_->Keep(stream);
}

absl::Status StagedDeltas::CheckCoding(Stream stream) {
  const absl::StatusOr<std::optional<CodingFailure>> failure =
      coder_->FirstFailure(stream);
  if (!failure.ok()) return failure.status();
  if (!failure->has_value()) return absl::OkStatus();
  const CodingFailure& first = **failure;
  const auto& rounds = schedule_.rounds();
  const auto work = std::find_if(
      rounds.begin(), rounds.end(), [&](const RoundWork& candidate) {
        return first.message >= candidate.operations_begin &&
               first.message - candidate.operations_begin <
                   candidate.operations_count;
      });
  return absl::Status(
      first.why.code(),
      absl::StrCat("round ", work->index, ": recv of ",
                   operations_[first.message].size_bytes, " bytes from rank ",
                   whole_[first.message].peer, ": ", first.why.message()));
}

uint64_t StagedSendBytes(const RankSchedule& schedule,
                         absl::Span<const Operation> operations) {
  uint64_t bytes = 0;
  for (const RoundWork& work : schedule.rounds()) {
    if (!work.IsStagedRound()) continue;
    for (uint32_t i = 0; i < work.operations_count; ++i) {
      const Operation& operation = operations[work.operations_begin + i];
      if (operation.kind != fb::MessageKind::kSend) continue;
      bytes += operation.size_bytes;
    }
  }
  return bytes;
}

}  // namespace refit
