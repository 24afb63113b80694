#include "simulator/all_ranks.h"

#include <algorithm>

namespace refit::simulator {
namespace {

// Whose work crossed the link first.
int32_t RankOf(const TaskGraph& graph, uint32_t link) {
  const auto next = std::upper_bound(graph.first_links.begin(),
                                     graph.first_links.end(), link);
  return static_cast<int32_t>(next - graph.first_links.begin()) - 1;
}

// From a link of `from` to that of `to`, which does the same.
uint32_t Moved(const TaskGraph& graph, uint32_t link, int32_t from,
               int32_t to) {
  return graph.first_links[static_cast<size_t>(to)] +
         (link - graph.first_links[static_cast<size_t>(from)]);
}

}  // namespace

Task TaskOf(const TaskGraph& graph, RankTask task) {
  Task of_rank = graph.tasks[task.number];
  of_rank.rank = graph.equal_ranks.Counterpart(of_rank.rank, task.rank);
  return of_rank;
}

Message MessageOf(const TaskGraph& graph, RankTask task) {
  Message message = graph.messages[graph.tasks[task.number].message];
  if (!graph.equal_ranks.any()) return message;
  message.source = graph.equal_ranks.Counterpart(message.source, task.rank);
  message.destination =
      graph.equal_ranks.Counterpart(message.destination, task.rank);
  for (uint32_t& link : message.links) link = LinkOf(graph, link, task.rank);
  return message;
}

uint32_t LinkOf(const TaskGraph& graph, uint32_t link, int32_t rank) {
  if (!graph.equal_ranks.any()) return link;
  const int32_t crossed_by = RankOf(graph, link);
  return Moved(graph, link, crossed_by,
               graph.equal_ranks.Counterpart(crossed_by, rank));
}

uint32_t SimulatedLink(const TaskGraph& graph, uint32_t link) {
  if (!graph.equal_ranks.any()) return link;
  const int32_t crossed_by = RankOf(graph, link);
  return Moved(graph, link, crossed_by,
               graph.equal_ranks.StandInOf(crossed_by));
}

}  // namespace refit::simulator
