// How the ranks of a meeting prove to each other that they belong to it: by a
// secret that all of them have and that never crosses the wire.
//
//   rank                                  rank 0
//   kHello      version, rank, world size,
//               nonce              ──▶
//                                  ◀──    kChallenge  nonce of rank 0
//   kProof      claims, MAC        ──▶
//                                  ◀──    kAccepted   MAC
//
// Each MAC is over everything that both have said (the transcript) and over
// which of the two ends says it. A MAC that was heard before has other nonces,
// and one that is sent back to its author is of the wrong end.
//
// The plan's digest is not part of it. Ranks that have met compare it in the
// handshake, because a rank with another plan must end the refit on all ranks
// at once; a rank that is refused here leaves the others waiting for it.
#ifndef REFIT_CONTROL_MEMBERSHIP_H_
#define REFIT_CONTROL_MEMBERSHIP_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "control/frame.h"

namespace refit::control {

// Which end a MAC is of.
enum class End : uint32_t { kRank = 1, kRankZero = 2 };

// What both ends have said when they prove themselves.
struct Transcript {
  int32_t rank = -1;
  Hello hello = {};
  Nonce challenge = {};
  ProofClaims claims = {};
};

class Membership {
 public:
  // Without a secret ("") everybody can prove to be a member.
  explicit Membership(std::string_view secret);
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;
  // Overwrites the key.
  ~Membership();

  // Thread-safe.
  Mac Prove(End end, const Transcript& transcript) const;
  // In the same time whatever differs.
  bool Verify(const Mac& mac, End end, const Transcript& transcript) const;

  // Another key, of 256 bits in hexadecimal digits, that all members have: for
  // `purpose` alone, and of no help to find the secret or another key.
  std::string KeyFor(std::string_view purpose) const;

 private:
  std::array<unsigned char, 32> key_;
};

// Fresh random numbers.
Nonce NewNonce();

// Tells secrets apart without a hint on what they are. Never 0.
uint64_t PublicName(std::string_view secret);

}  // namespace refit::control

#endif  // REFIT_CONTROL_MEMBERSHIP_H_
