#include "plan/network_peers.h"

#include <algorithm>

namespace refit {

std::vector<uint32_t> NetworkPeers(const fb::Body& body) {
  std::vector<uint32_t> counts;
  std::vector<uint32_t> peers;
  for (const fb::RankProgram* program : *body.programs()) {
    peers.clear();
    ForEachMessage(body, *program, [&](const fb::Message& message) {
      const uint32_t peer = PeerOf(body, *program, message);
      if (body.rounds()->Get(message.round())->route() == fb::Route::kNetwork &&
          body.programs()->Get(peer)->host() != program->host()) {
        peers.push_back(peer);
      }
      return true;
    });
    std::sort(peers.begin(), peers.end());
    counts.push_back(static_cast<uint32_t>(
        std::unique(peers.begin(), peers.end()) - peers.begin()));
  }
  return counts;
}

}  // namespace refit
