// GOAL (Group Operation Assembly Language): T. Hoefler, C. Siebert and
// A. Lumsdaine, "Group Operation Assembly Language - A Flexible Way to Express
// Collective Communication", ICPP 2009.
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "simulator/output.h"

namespace refit::simulator {
namespace {

// What one rank tells another without data: a fence. Some bytes have to travel.
constexpr uint64_t kFenceBytes = 8;

class GoalPrinter {
 public:
  GoalPrinter(const PlanFile& plan, const TaskGraph& graph)
      : graph_(graph),
        ranks_(static_cast<size_t>(plan.world_size())),
        labels_(graph.tasks.size()),
        labels_of_receives_(graph.messages.size()) {}

  void Print(const TextSink& sink);

 private:
  struct Rank {
    uint64_t labels = 0;
    std::string operations, requirements;
  };

  Rank& rank(int32_t number) { return ranks_[static_cast<size_t>(number)]; }

  template <typename... Parts>
  uint64_t Add(int32_t number, const Parts&... parts) {
    Rank& of = rank(number);
    const uint64_t label = ++of.labels;
    absl::StrAppend(&of.operations, "l", label, ": ", parts..., "\n");
    return label;
  }
  void Require(int32_t number, uint64_t label, uint64_t required) {
    absl::StrAppend(&rank(number).requirements, "l", label, " requires l",
                    required, "\n");
  }
  void AddTask(uint32_t number);
  void AddWait(const Wait& wait);

  const TaskGraph& graph_;
  std::vector<Rank> ranks_;
  std::vector<uint64_t> labels_;              // of a message: of its send
  std::vector<uint64_t> labels_of_receives_;  // by message
  uint64_t tags_ = 0;  // unique, so that no two operations can be confused
};

void GoalPrinter::AddTask(uint32_t number) {
  const Task& task = graph_.tasks[number];
  if (task.kind != TaskKind::kMessage) {
    labels_[number] =
        Add(task.rank, "calc ",
            static_cast<uint64_t>(std::llround(task.seconds * 1e9)));
    return;
  }
  const Message& message = graph_.messages[task.message];
  const uint64_t tag = tags_++;
  labels_[number] = Add(message.source, "send ", message.size_bytes, "b to ",
                        message.destination, " tag ", tag);
  labels_of_receives_[task.message] =
      Add(message.destination, "recv ", message.size_bytes, "b from ",
          message.source, " tag ", tag);
}

// A wait for a message is one for the rank's own end of it. Any other wait for
// another rank is a message of its own.
void GoalPrinter::AddWait(const Wait& wait) {
  const Task& from = graph_.tasks[wait.from];
  const Task& to = graph_.tasks[wait.to];
  const auto label_at = [&](uint32_t number, int32_t at) {
    const Task& task = graph_.tasks[number];
    const bool receives = task.kind == TaskKind::kMessage && task.rank != at;
    return receives ? labels_of_receives_[task.message] : labels_[number];
  };
  if (to.kind == TaskKind::kMessage) {
    Require(from.rank, label_at(wait.to, from.rank), labels_[wait.from]);
  } else if (from.kind == TaskKind::kMessage) {
    Require(to.rank, labels_[wait.to], label_at(wait.from, to.rank));
  } else if (from.rank == to.rank) {
    Require(to.rank, labels_[wait.to], labels_[wait.from]);
  } else {
    const uint64_t tag = tags_++;
    const uint64_t sent =
        Add(from.rank, "send ", kFenceBytes, "b to ", to.rank, " tag ", tag);
    Require(from.rank, sent, labels_[wait.from]);
    const uint64_t received =
        Add(to.rank, "recv ", kFenceBytes, "b from ", from.rank, " tag ", tag);
    Require(to.rank, labels_[wait.to], received);
  }
}

// Ranks come one after the other, and tasks in another order. So all ranks'
// lines are kept until then.
void GoalPrinter::Print(const TextSink& sink) {
  for (uint32_t i = 0; i < graph_.tasks.size(); ++i) AddTask(i);
  for (const Wait& wait : graph_.waits) AddWait(wait);
  sink(absl::StrCat("num_ranks ", ranks_.size(), "\n"));
  for (size_t i = 0; i < ranks_.size(); ++i) {
    const Rank rank = std::move(ranks_[i]);
    sink(absl::StrCat("\nrank ", i, " {\n"));
    sink(rank.operations);
    sink(rank.requirements);
    sink("}\n");
  }
}

}  // namespace

void WriteGoal(const PlanFile& plan, const TaskGraph& graph,
               const TextSink& sink) {
  GoalPrinter(plan, graph).Print(sink);
}

}  // namespace refit::simulator
