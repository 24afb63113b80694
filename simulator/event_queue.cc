#include "simulator/event_queue.h"

namespace refit::simulator {

void EventQueue::MoveUp(const Event& event, size_t place) {
  while (place > 0) {
    const size_t parent = (place - 1) / 2;
    if (!(event < heap_[parent])) break;
    Put(heap_[parent], place);
    place = parent;
  }
  Put(event, place);
}

void EventQueue::MoveDown(const Event& event, size_t place) {
  for (size_t child = 2 * place + 1; child < heap_.size();
       child = 2 * place + 1) {
    if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
    if (!(heap_[child] < event)) break;
    Put(heap_[child], place);
    place = child;
  }
  Put(event, place);
}

void EventQueue::Set(const Event& event) {
  const uint32_t place = places_[event.task];
  if (place == kNowhere) {
    heap_.push_back(event);
    MoveUp(event, heap_.size() - 1);
  } else if (event < heap_[place]) {
    MoveUp(event, place);
  } else {
    MoveDown(event, place);
  }
}

void EventQueue::Pop() {
  places_[heap_.front().task] = kNowhere;
  const Event last = heap_.back();
  heap_.pop_back();
  if (!heap_.empty()) MoveDown(last, 0);
}

}  // namespace refit::simulator
