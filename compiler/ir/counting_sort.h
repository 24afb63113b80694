// A stable sort by small numbers, such as ranks and rounds.
#ifndef REFIT_COMPILER_IR_COUNTING_SORT_H_
#define REFIT_COMPILER_IR_COUNTING_SORT_H_

#include <cstddef>
#include <numeric>
#include <utility>
#include <vector>

namespace refit {

// Sorts by `key_of`, which is below `keys`. Stable, so that sorting by one key
// after the other sorts by several, the last one first.
template <typename Item, typename KeyOf>
void CountingSort(std::vector<Item>& items, size_t keys, const KeyOf& key_of) {
  std::vector<size_t> next(keys + 1, 0);  // place, by key
  for (const Item& item : items) ++next[key_of(item) + 1];
  std::partial_sum(next.begin(), next.end(), next.begin());
  std::vector<Item> sorted(items.size());
  for (Item& item : items) sorted[next[key_of(item)]++] = std::move(item);
  items = std::move(sorted);
}

}  // namespace refit

#endif  // REFIT_COMPILER_IR_COUNTING_SORT_H_
