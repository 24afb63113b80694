// Names that nobody can guess, for what a process lends to others.
#ifndef REFIT_CONTROL_TOKEN_H_
#define REFIT_CONTROL_TOKEN_H_

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>

namespace refit {

// 128 bits of the system's generator. Whoever can name a thing was told of it.
using Token = std::array<char, 16>;

// Thread-safe.
Token NewToken();

inline std::string_view TokenBytes(const Token& token) {
  return {token.data(), token.size()};
}
// Nothing if there are too few or too many bytes.
std::optional<Token> TokenOf(std::string_view bytes);

// The process that asks; a child after fork is another one.
int ThisProcessId();

// Objects of this process that peers name by token. A token that comes from
// outside is looked up here, so it can stand for nothing but what is lent at
// that moment. Thread-safe.
template <typename T>
class TokenTable {
 public:
  Token Add(std::shared_ptr<T> object) {
    const Token token = NewToken();
    std::lock_guard lock(mutex_);
    objects_.emplace(Key(ThisProcessId(), token), std::move(object));
    return token;
  }
  void Remove(const Token& token) {
    std::lock_guard lock(mutex_);
    objects_.erase(Key(ThisProcessId(), token));
  }
  // Null: never lent here, or no longer.
  std::shared_ptr<T> Find(const Token& token) {
    std::lock_guard lock(mutex_);
    const auto found = objects_.find(Key(ThisProcessId(), token));
    return found == objects_.end() ? nullptr : found->second;
  }

 private:
  // By process too: a child after fork has a copy of its parent's table, and
  // other memory.
  using Key = std::pair<int, Token>;

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<T>> objects_;
};

}  // namespace refit

#endif  // REFIT_CONTROL_TOKEN_H_
