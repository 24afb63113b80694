// Writes lists of messages without what follows from their order.
#ifndef REFIT_COMPILER_EMIT_PACK_MESSAGES_H_
#define REFIT_COMPILER_EMIT_PACK_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "compiler/ir/module.h"
#include "plan_generated.h"

namespace refit {

class MessagePacker {
 public:
  explicit MessagePacker(const Module& module) : module_(module) {}

  // Before the first list: how many copy lists there are.
  void StartLists(size_t copy_lists);
  // The number of the packed list. None: it has to be written as it is. So have
  // those of ranks that deal out, where one empty copy list stands for messages
  // of any size.
  std::optional<int32_t> Pack(
      size_t count, absl::FunctionRef<const fb::Message&(size_t)> message_at);
  // 0 if nothing was packed.
  flatbuffers::Offset<fb::PackedMessages> Emit(
      flatbuffers::FlatBufferBuilder& builder) const;

 private:
  bool PackAll(size_t count,
               absl::FunctionRef<const fb::Message&(size_t)> message_at);
  // Whether a message with this copy list has the size of all others with it.
  bool IsSizeOf(uint32_t copies, uint64_t size_bytes);

  const Module& module_;
  std::vector<fb::MessageList> lists_;
  std::vector<fb::MessageRound> rounds_;
  std::vector<uint32_t> peers_;
  std::vector<uint32_t> copies_;
  std::vector<uint64_t> sizes_;  // by copy list; kNoSize: of no message
};

}  // namespace refit

#endif  // REFIT_COMPILER_EMIT_PACK_MESSAGES_H_
