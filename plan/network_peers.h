// How many connections between hosts a plan needs.
#ifndef REFIT_PLAN_NETWORK_PEERS_H_
#define REFIT_PLAN_NETWORK_PEERS_H_

#include <cstdint>
#include <vector>

#include "plan/plan_file.h"

namespace refit {

// By rank: with how many ranks of other hosts it exchanges messages of network
// rounds, in either direction. What is broadcast goes round a ring.
std::vector<uint32_t> NetworkPeers(const fb::Body& body);

}  // namespace refit

#endif  // REFIT_PLAN_NETWORK_PEERS_H_
