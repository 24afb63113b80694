#include "bench/staged_messages.h"

namespace refit {

std::vector<std::vector<StagedMessage>> StagedRounds(const PlanFile& plan,
                                                     int32_t rank) {
  const fb::Body& body = plan.body();
  const auto me = static_cast<uint32_t>(rank);
  const fb::RankProgram& program = *body.programs()->Get(me);
  std::vector<std::vector<StagedMessage>> rounds;
  uint32_t last_round = 0;
  const MessageVector& messages = plan.messages().Of(program);
  for (uint32_t i = 0; i < messages.size(); ++i) {
    const fb::Message& message = *messages.Get(i);
    if (IsDirect(body, message.round())) continue;
    if (rounds.empty() || message.round() != last_round) rounds.emplace_back();
    last_round = message.round();
    rounds.back().push_back(
        {.peer = static_cast<int32_t>(PeerOf(body, program, message)),
         .is_send = message.kind() == fb::MessageKind::kSend,
         .offset = message.staging_offset(),
         .peer_offset = PartnerOf(plan.messages(), me, i)->staging_offset(),
         .size_bytes = message.size_bytes()});
  }
  return rounds;
}

}  // namespace refit
