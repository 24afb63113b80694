#include "control/membership.h"

#include <tuple>

#include "absl/strings/escaping.h"
#include "control/payload.h"
#include "control/sodium.h"

namespace refit::control {
namespace {

static_assert(std::tuple_size_v<Mac> == crypto_auth_BYTES);

// So that no other program's use of the same secret gives the same keys.
constexpr std::string_view kContext = "Refit control plane";

const unsigned char* Bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

std::string Signed(End end, const Transcript& transcript) {
  return PayloadWriter()
      .String(kContext)
      .U32(static_cast<uint32_t>(end))
      .U32(static_cast<uint32_t>(transcript.rank))
      .String(StructBytes(transcript.hello))
      .String({transcript.challenge.data(), transcript.challenge.size()})
      .String(StructBytes(transcript.claims))
      .Take();
}

}  // namespace

Membership::Membership(std::string_view secret) {
  InitSodium();
  static_assert(sizeof(key_) == crypto_auth_KEYBYTES);
  // Secrets have any length; the context is a hash key, which is never too long
  // nor too short.
  static_assert(kContext.size() >= crypto_generichash_KEYBYTES_MIN &&
                kContext.size() <= crypto_generichash_KEYBYTES_MAX);
  crypto_generichash(key_.data(), key_.size(), Bytes(secret), secret.size(),
                     Bytes(kContext), kContext.size());
}

Membership::~Membership() { sodium_memzero(key_.data(), key_.size()); }

Mac Membership::Prove(End end, const Transcript& transcript) const {
  const std::string text = Signed(end, transcript);
  Mac mac;
  crypto_auth(reinterpret_cast<unsigned char*>(mac.data()), Bytes(text),
              text.size(), key_.data());
  return mac;
}

bool Membership::Verify(const Mac& mac, End end,
                        const Transcript& transcript) const {
  const std::string text = Signed(end, transcript);
  return crypto_auth_verify(reinterpret_cast<const unsigned char*>(mac.data()),
                            Bytes(text), text.size(), key_.data()) == 0;
}

std::string Membership::KeyFor(std::string_view purpose) const {
  std::array<char, 32> key;
  crypto_generichash(reinterpret_cast<unsigned char*>(key.data()), key.size(),
                     Bytes(purpose), purpose.size(), key_.data(), key_.size());
  return absl::BytesToHexString({key.data(), key.size()});
}

Nonce NewNonce() {
  InitSodium();
  Nonce nonce;
  randombytes_buf(nonce.data(), nonce.size());
  return nonce;
}

uint64_t PublicName(std::string_view secret) {
  const std::string key =
      absl::HexStringToBytes(Membership(secret).KeyFor("public name"));
  const uint64_t name = PayloadReader(key).U64();
  return name != 0 ? name : 1;
}

}  // namespace refit::control
