// What is known of ranges of bytes.
#ifndef REFIT_PLAN_PROOF_BYTE_MAP_H_
#define REFIT_PLAN_PROOF_BYTE_MAP_H_

#include <cstdint>
#include <utility>

#include "absl/container/btree_map.h"

namespace refit::proof {

template <typename T>
class ByteMap {
 public:
  // Calls `visit` with what is known of each part of [begin, end).
  template <typename Visit>
  void ForEach(uint64_t begin, uint64_t end, const Visit& visit) {
    Cut(begin);
    Cut(end);
    for (auto it = ranges_.lower_bound(begin);
         it != ranges_.end() && it->first < end; ++it) {
      visit(it->second.known);
    }
  }

  // In place of what was known.
  void Assign(uint64_t begin, uint64_t end, T known) {
    if (begin == end) return;
    Cut(begin);
    Cut(end);
    ranges_.erase(ranges_.lower_bound(begin), ranges_.lower_bound(end));
    ranges_.emplace(begin, Range{end, std::move(known)});
  }

 private:
  struct Range {
    uint64_t end = 0;
    T known = {};
  };

  // No range has `at` inside.
  void Cut(uint64_t at) {
    auto it = ranges_.lower_bound(at);
    if (it == ranges_.begin()) return;
    --it;
    if (it->second.end <= at) return;
    Range behind = it->second;
    it->second.end = at;
    ranges_.emplace(at, std::move(behind));
  }

  absl::btree_map<uint64_t, Range> ranges_;  // by first byte; disjoint
};

}  // namespace refit::proof

#endif  // REFIT_PLAN_PROOF_BYTE_MAP_H_
