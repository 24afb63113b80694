// The work of all ranks, where one was simulated for those that do the same.
#ifndef REFIT_SIMULATOR_ALL_RANKS_H_
#define REFIT_SIMULATOR_ALL_RANKS_H_

#include <cstddef>
#include <cstdint>

#include "simulator/simulation.h"

namespace refit::simulator {

// A task that was simulated, as `rank` does it. What it is to its part, the
// rank's own is to the rank's part.
struct RankTask {
  uint32_t number = 0;  // in TaskGraph.tasks, and so its times
  int32_t rank = 0;
};

// The task and its message with the ranks and links of the rank's part.
Task TaskOf(const TaskGraph& graph, RankTask task);
Message MessageOf(const TaskGraph& graph, RankTask task);
// What the simulated `link` is to its part, in the part of `rank`.
uint32_t LinkOf(const TaskGraph& graph, uint32_t link, int32_t rank);
// The link that was simulated for `link`.
uint32_t SimulatedLink(const TaskGraph& graph, uint32_t link);

// Calls `visit` with each RankTask, in the order in which TaskGraph.tasks would
// have them if all ranks were simulated.
template <typename Visit>
void ForEachTask(const TaskGraph& graph, const Visit& visit) {
  for (uint32_t task = 0; task < graph.first_tasks.front(); ++task) {
    visit(RankTask{.number = task, .rank = graph.tasks[task].rank});
  }
  const auto ranks = static_cast<int32_t>(graph.first_tasks.size() - 1);
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const auto stand_in =
        static_cast<size_t>(graph.equal_ranks.StandInOf(rank));
    for (uint32_t task = graph.first_tasks[stand_in];
         task < graph.first_tasks[stand_in + 1]; ++task) {
      visit(RankTask{.number = task, .rank = rank});
    }
  }
}

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_ALL_RANKS_H_
