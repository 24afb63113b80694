#include "compiler/emit/pack_messages.h"

#include <algorithm>
#include <limits>

#include "plan/message_lists.h"

namespace refit {
namespace {

constexpr uint64_t kNoSize = std::numeric_limits<uint64_t>::max();

using Halves = flatbuffers::Offset<flatbuffers::Vector<uint16_t>>;

Halves EmitHalves(flatbuffers::FlatBufferBuilder& builder,
                  const std::vector<uint32_t>& numbers, int shift) {
  uint16_t* halves = nullptr;
  const auto offset =
      builder.CreateUninitializedVector<uint16_t>(numbers.size(), &halves);
  for (const uint32_t number : numbers) {
    flatbuffers::WriteScalar(halves++, static_cast<uint16_t>(number >> shift));
  }
  return offset;
}

// 0 where all are 0.
Halves EmitHighHalves(flatbuffers::FlatBufferBuilder& builder,
                      const std::vector<uint32_t>& numbers) {
  const bool has_any =
      std::any_of(numbers.begin(), numbers.end(),
                  [](uint32_t number) { return number >> 16 != 0; });
  return has_any ? EmitHalves(builder, numbers, 16) : Halves();
}

}  // namespace

void MessagePacker::StartLists(size_t copy_lists) {
  sizes_.assign(copy_lists, kNoSize);
}

std::optional<int32_t> MessagePacker::Pack(
    size_t count, absl::FunctionRef<const fb::Message&(size_t)> message_at) {
  const size_t rounds = rounds_.size();
  const size_t messages = peers_.size();
  if (!PackAll(count, message_at)) {
    rounds_.resize(rounds);
    peers_.resize(messages);
    copies_.resize(messages);
    return std::nullopt;
  }
  lists_.emplace_back(static_cast<uint32_t>(rounds),
                      static_cast<uint32_t>(rounds_.size() - rounds),
                      static_cast<uint32_t>(messages),
                      static_cast<uint32_t>(peers_.size() - messages));
  return static_cast<int32_t>(lists_.size() - 1);
}

bool MessagePacker::PackAll(
    size_t count, absl::FunctionRef<const fb::Message&(size_t)> message_at) {
  for (size_t i = 0; i < count;) {
    const uint32_t round = message_at(i).round();
    const uint64_t staging_offset = message_at(i).staging_offset();
    const bool is_staged =
        module_.rounds[round].mechanism == Mechanism::kStaged;
    uint64_t offset = staging_offset;
    size_t receives = 0, sends = 0;
    for (; i < count && message_at(i).round() == round; ++i) {
      const fb::Message& message = message_at(i);
      const bool is_send = message.kind() == fb::MessageKind::kSend;
      if (message.staging_offset() != offset || (!is_send && sends > 0) ||
          !IsSizeOf(message.copies(), message.size_bytes())) {
        return false;
      }
      ++(is_send ? sends : receives);
      peers_.push_back(message.peer());
      copies_.push_back(message.copies());
      if (is_staged) {
        offset += static_cast<uint64_t>(
            AlignStaging(static_cast<int64_t>(message.size_bytes())));
      }
    }
    constexpr size_t kMost = std::numeric_limits<uint16_t>::max();
    if (receives > kMost || sends > kMost) return false;
    rounds_.emplace_back(staging_offset, round, static_cast<uint16_t>(receives),
                         static_cast<uint16_t>(sends));
  }
  return true;
}

bool MessagePacker::IsSizeOf(uint32_t copies, uint64_t size_bytes) {
  uint64_t& size = sizes_[copies];
  if (size == kNoSize) size = size_bytes;
  return size == size_bytes;
}

flatbuffers::Offset<fb::PackedMessages> MessagePacker::Emit(
    flatbuffers::FlatBufferBuilder& builder) const {
  if (lists_.empty()) return 0;
  std::vector<uint64_t> sizes = sizes_;
  std::replace(sizes.begin(), sizes.end(), kNoSize, uint64_t{0});
  const auto lists = builder.CreateVectorOfStructs(lists_);
  const auto rounds = builder.CreateVectorOfStructs(rounds_);
  const Halves peers = EmitHalves(builder, peers_, 0);
  const Halves peers_high = EmitHighHalves(builder, peers_);
  const Halves copies = EmitHalves(builder, copies_, 0);
  const Halves copies_high = EmitHighHalves(builder, copies_);
  return fb::CreatePackedMessages(builder, lists, rounds, peers, peers_high,
                                  copies, copies_high,
                                  builder.CreateVector(sizes));
}

}  // namespace refit
