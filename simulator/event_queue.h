// What ends when, in a simulation.
#ifndef REFIT_SIMULATOR_EVENT_QUEUE_H_
#define REFIT_SIMULATOR_EVENT_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace refit::simulator {

// The end of a task.
struct Event {
  double seconds = 0;
  uint32_t task = 0;

  friend bool operator<(const Event& a, const Event& b) {
    return a.seconds < b.seconds || (a.seconds == b.seconds && a.task < b.task);
  }
};

// A binary heap in which a task has one event at most, which can be moved: a
// message's end is another whenever its rate is. Events of equal times come in
// the order of their tasks, so that this order does not depend on how often
// events were moved.
class EventQueue {
 public:
  // Tasks are 0 .. tasks - 1.
  explicit EventQueue(size_t tasks) : places_(tasks, kNowhere) {}

  bool empty() const { return heap_.empty(); }
  // Requires that it is not empty.
  const Event& top() const { return heap_.front(); }
  void Pop();
  // The task ends at this time, whatever was said before.
  void Set(const Event& event);

 private:
  static constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

  void Put(const Event& event, size_t place) {
    heap_[place] = event;
    places_[event.task] = static_cast<uint32_t>(place);
  }
  void MoveUp(const Event& event, size_t place);
  void MoveDown(const Event& event, size_t place);

  std::vector<Event> heap_;
  std::vector<uint32_t> places_;  // of each task's event in heap_
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_EVENT_QUEUE_H_
