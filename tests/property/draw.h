// Reproducible random choices: the same seed gives the same draws everywhere.
#ifndef REFIT_TESTS_PROPERTY_DRAW_H_
#define REFIT_TESTS_PROPERTY_DRAW_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace refit {

// SplitMix64's output function: every bit of the result depends on every bit.
constexpr uint64_t Mix(uint64_t bits) {
  bits += 0x9E3779B97F4A7C15;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB;
  return bits ^ (bits >> 31);
}

class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(Mix(seed)) {}

  uint64_t Bits() { return Mix(state_++); }

  // Both ends included.
  int64_t Between(int64_t low, int64_t high) {
    return low +
           static_cast<int64_t>(Bits() % static_cast<uint64_t>(high - low + 1));
  }

  bool Chance(int64_t percent) { return Between(1, 100) <= percent; }

  template <typename T>
  const T& Pick(const std::vector<T>& choices) {
    return choices[Bits() % choices.size()];
  }

  template <typename T>
  void Shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[Bits() % i]);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace refit

#endif  // REFIT_TESTS_PROPERTY_DRAW_H_
