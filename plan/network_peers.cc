#include "plan/network_peers.h"

#include <algorithm>

#include "plan/broadcasts.h"

namespace refit {

std::vector<uint32_t> NetworkPeers(const fb::Body& body) {
  const auto& programs = *body.programs();
  std::vector<std::vector<uint32_t>> peers(programs.size());
  const auto add = [&](uint32_t a, uint32_t b) {
    if (programs.Get(a)->host() != programs.Get(b)->host()) {
      peers[a].push_back(b);
    }
  };
  const Broadcasts broadcasts(body);
  for (uint32_t rank = 0; rank < programs.size(); ++rank) {
    ForEachMessage(body, *programs.Get(rank), [&](const fb::Message& message) {
      if (message.broadcast() == 0 &&
          body.rounds()->Get(message.round())->route() == fb::Route::kNetwork) {
        add(rank, PeerOf(body, rank, message));
      }
      return true;
    });
    // A ring, which ends where it begins.
    uint32_t last = rank;
    for (const uint32_t receiver : broadcasts.To(rank)) {
      add(last, receiver);
      add(receiver, last);
      last = receiver;
    }
    if (last == rank) continue;
    add(last, rank);
    add(rank, last);
  }
  std::vector<uint32_t> counts;
  for (std::vector<uint32_t>& of_rank : peers) {
    std::sort(of_rank.begin(), of_rank.end());
    counts.push_back(static_cast<uint32_t>(
        std::unique(of_rank.begin(), of_rank.end()) - of_rank.begin()));
  }
  return counts;
}

}  // namespace refit
