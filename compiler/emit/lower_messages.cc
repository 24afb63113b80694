#include "compiler/emit/lower_messages.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "plan/message_lists.h"

namespace refit {
namespace {

// A message and its copy lists. It has all that lowering asks of the message,
// so that many messages are read one after the other.
struct LoweredMessage {
  uint32_t number = 0;  // of Module::messages
  int32_t round = 0;
  Rank source{};
  Rank destination{};
  int32_t contents = 0;
  uint32_t pack = 0;
  uint32_t unpack = 0;
  bool is_held = false;
  uint8_t broadcast = 0;  // its number in the round
  bool is_unpacked = true;
  bool is_staged = false;
  int64_t source_staging_offset = 0;
  int64_t destination_staging_offset = 0;
  int64_t size_bytes = 0;
};

std::vector<LoweredMessage> MessagesInOrder(const Module& module) {
  std::vector<LoweredMessage> messages;
  messages.reserve(module.message_order.size());
  for (const uint32_t number : module.message_order) {
    const Message& message = module.messages[number];
    messages.push_back(
        {.number = number,
         .round = message.round,
         .source = message.source,
         .destination = message.destination,
         .contents = message.contents,
         .is_held = message.is_held,
         .is_unpacked = message.is_unpacked,
         .is_staged = message.mechanism == Mechanism::kStaged,
         .source_staging_offset = message.source_staging_offset,
         .destination_staging_offset = message.destination_staging_offset,
         .size_bytes = message.size_bytes});
  }
  return messages;
}

// Numbers what a rank broadcasts in a round.
class BroadcastNumbers {
 public:
  uint8_t NumberOf(const Message& message) {
    const auto [found, is_new] = numbers_.try_emplace(message.broadcast.first);
    if (is_new) found->second = ++counts_[{message.round, message.source}];
    return found->second;
  }

 private:
  absl::flat_hash_map<int32_t, uint8_t> numbers_;  // by first message
  absl::flat_hash_map<std::pair<int32_t, Rank>, uint8_t> counts_;
};

}  // namespace

absl::StatusOr<LoweredMessages> LowerMessages(const Module& module,
                                              CopyLowering& lowering) {
  std::vector<LoweredMessage> messages = MessagesInOrder(module);
  BroadcastNumbers broadcasts;
  LoweredMessages lowered;
  lowered.ranks.resize(static_cast<size_t>(module.world_size()));
  lowered.received_at.resize(module.messages.size());
  std::vector<size_t> counts(lowered.ranks.size(), 0);
  for (LoweredMessage& message : messages) {
    const absl::StatusOr<uint32_t> pack =
        message.is_held ? lowering.Nothing()
        : module.IsRelay(message.source)
            ? lowering.Relay(message.source, message.contents)
            : lowering.Pack(message.source, message.contents);
    if (!pack.ok()) return pack.status();
    const absl::StatusOr<uint32_t> unpack =
        message.is_unpacked
            ? lowering.Unpack(message.destination, message.contents)
            : lowering.Nothing();
    if (!unpack.ok()) return unpack.status();
    message.pack = *pack;
    message.unpack = *unpack;
    const Message& of = module.messages[message.number];
    if (of.is_broadcast()) message.broadcast = broadcasts.NumberOf(of);
    ++counts[IndexOf(message.source)];
    ++counts[IndexOf(message.destination)];
  }
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    lowered.ranks[rank].ends.reserve(counts[rank]);
  }
  const auto add = [&](const LoweredMessage& message, bool sends) {
    const Rank rank = sends ? message.source : message.destination;
    const Rank peer = sends ? message.destination : message.source;
    const int64_t staging_offset = sends ? message.source_staging_offset
                                         : message.destination_staging_offset;
    RankMessages& of_rank = lowered.ranks[IndexOf(rank)];
    of_rank.ends.push_back(
        {.message = fb::Message(
             static_cast<uint32_t>(message.round),
             static_cast<uint32_t>(IndexOf(peer)),
             sends ? message.pack : message.unpack,
             sends ? fb::MessageKind::kSend : fb::MessageKind::kRecv,
             /*broadcast=*/message.broadcast, /*reserved2=*/0,
             static_cast<uint64_t>(staging_offset),
             static_cast<uint64_t>(message.size_bytes)),
         .of = &module.messages[message.number]});
    if (!message.is_staged) return;
    of_rank.staging_bytes =
        std::max(of_rank.staging_bytes,
                 AlignStaging(staging_offset + message.size_bytes));
  };
  // Round by round, a rank's receives before its sends.
  for (size_t begin = 0, end = 0; begin < messages.size(); begin = end) {
    while (end < messages.size() &&
           messages[end].round == messages[begin].round) {
      ++end;
    }
    for (size_t i = begin; i < end; ++i) {
      lowered.received_at[messages[i].number] = static_cast<uint32_t>(
          lowered.ranks[IndexOf(messages[i].destination)].ends.size());
      add(messages[i], /*sends=*/false);
    }
    for (size_t i = begin; i < end; ++i) add(messages[i], /*sends=*/true);
  }
  return lowered;
}

std::vector<fb::Relay> LowerRelays(const Module& module,
                                   const LoweredMessages& lowered,
                                   size_t rank) {
  std::vector<fb::Relay> relays;
  if (!module.IsRelay(Rank{static_cast<int32_t>(rank)})) return relays;
  const std::vector<RankMessages::End>& ends = lowered.ranks[rank].ends;
  for (uint32_t i = 0; i < ends.size(); ++i) {
    if (ends[i].message.kind() != fb::MessageKind::kSend) continue;
    const MessageRange& feeds = ends[i].of->fed_by;
    uint32_t fed_by = 0;
    for (size_t feed = 0; feed < feeds.count; ++feed) {
      fed_by = std::max(fed_by, lowered.received_at[feeds.begin + feed]);
    }
    relays.emplace_back(i, fed_by);
  }
  return relays;
}

}  // namespace refit
