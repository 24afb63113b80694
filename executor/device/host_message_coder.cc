#include "executor/device/host_message_coder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "executor/delta/message_code.h"

namespace refit {
namespace {

class HostMessageCoder : public MessageCoder {
 public:
  explicit HostMessageCoder(std::vector<MessageToCode> messages)
      : messages_(std::move(messages)), counted_(messages_.size()) {}

  absl::Status Restart(Stream) override {
    std::fill(counted_.begin(), counted_.end(), ChangedElements());
    failure_.reset();
    return absl::OkStatus();
  }
  absl::Status Count(size_t begin, size_t count, Stream) override {
    for (size_t i = begin; i < begin + count; ++i) {
      const MessageToCode& of = messages_[i];
      if (of.before == nullptr || of.message.element_bytes == 0) continue;
      counted_[i] = CountChanged(of.message, of.elements, of.before);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<absl::Span<const ChangedElements>> Counted(Stream) override {
    return counted_;
  }
  absl::Status Encode(size_t begin, size_t count, size_t rung,
                      Stream) override {
    for (size_t i = begin; i < begin + count; ++i) {
      const MessageToCode& of = messages_[i];
      if (of.before == nullptr || RoomOf(i, rung) == 0) continue;
      const uint64_t room = RoomOf(i, rung);
      const uint64_t changed =
          EncodeChanges(of.message, room, of.elements, of.before, of.code);
      if (changed <= room) continue;
      Fail(i, absl::FailedPreconditionError(absl::StrCat(
                  changed, " elements changed, with room for ", room)));
    }
    return absl::OkStatus();
  }
  absl::Status Apply(size_t begin, size_t count, size_t rung, Stream) override {
    for (size_t i = begin; i < begin + count; ++i) {
      const MessageToCode& of = messages_[i];
      if (of.before != nullptr || RoomOf(i, rung) == 0) continue;
      const absl::Status status =
          ApplyChanges(of.message, RoomOf(i, rung), of.code, of.elements);
      if (!status.ok()) Fail(i, status);
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<CodingFailure>> FirstFailure(Stream) override {
    return failure_;
  }

 private:
  uint64_t RoomOf(size_t message, size_t rung) const {
    const MessageToCode& of = messages_[message];
    return rung < of.rooms.size() ? of.rooms[rung] : 0;
  }
  void Fail(size_t message, absl::Status why) {
    if (!failure_.has_value()) failure_ = {message, std::move(why)};
  }

  const std::vector<MessageToCode> messages_;
  std::vector<ChangedElements> counted_;
  std::optional<CodingFailure> failure_;
};

}  // namespace

std::unique_ptr<MessageCoder> MakeHostMessageCoder(
    std::vector<MessageToCode> messages) {
  return std::make_unique<HostMessageCoder>(std::move(messages));
}

}  // namespace refit
