#include "plan/text/dealt.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "plan/text/plan_view.h"

namespace refit {

Dealt DealtOf(const PlanFile& plan) {
  Dealt dealt;
  if ((plan.plan().required_features() & kFeatureDealing) == 0) return dealt;
  const fb::Body& body = plan.body();
  const SendPayloads payloads(plan.messages());
  std::set<int32_t> receivers;
  for (uint32_t rank = body.source_ranks(); rank < body.programs()->size();
       ++rank) {
    const MessageVector& messages = plan.messages().Of(rank);
    uint64_t bytes = 0;
    receivers.clear();
    for (uint32_t position = 0; position < messages.size(); ++position) {
      const fb::Message& message = *messages.Get(position);
      if (message.kind() != fb::MessageKind::kSend || !IsHeld(body, message)) {
        continue;
      }
      bytes += payloads.Bytes(rank, position);
      receivers.insert(static_cast<int32_t>(PeerOf(body, rank, message)));
    }
    if (bytes == 0) continue;
    dealt.bytes += bytes;
    dealt.ranks += 1;
    if (bytes <= dealt.busiest_bytes) continue;
    dealt.busiest = rank;
    dealt.busiest_bytes = bytes;
    dealt.receivers.assign(receivers.begin(), receivers.end());
  }
  return dealt;
}

std::string DealtText(const Dealt& dealt) {
  return absl::StrCat(
      dealt.bytes, " bytes by ", dealt.ranks == 1 ? "rank " : "",
      dealt.ranks == 1
          ? absl::StrCat(dealt.busiest)
          : absl::StrCat(dealt.ranks, " ranks, most by rank ", dealt.busiest,
                         ": ", dealt.busiest_bytes, " bytes"),
      " to ", NumberSetText(dealt.receivers));
}

bool IsDealt(const fb::Body& body, uint32_t round, uint32_t source,
             uint32_t destination) {
  return body.rounds()->Get(round)->route() == fb::Route::kNetwork &&
         RouteBetween(body, source, destination) != fb::Route::kNetwork;
}

}  // namespace refit
