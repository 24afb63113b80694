#include "control/token.h"

#include <unistd.h>

#include <algorithm>

#include "control/sodium.h"

namespace refit {

Token NewToken() {
  InitSodium();
  Token token;
  randombytes_buf(token.data(), token.size());
  return token;
}

std::optional<Token> TokenOf(std::string_view bytes) {
  Token token;
  if (bytes.size() != token.size()) return std::nullopt;
  std::copy(bytes.begin(), bytes.end(), token.begin());
  return token;
}

int ThisProcessId() { return getpid(); }

}  // namespace refit
