// Tasks of messages, which both ends of a message name alike.
#ifndef REFIT_SIMULATOR_MESSAGE_TASKS_H_
#define REFIT_SIMULATOR_MESSAGE_TASKS_H_

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "plan/broadcasts.h"
#include "plan/schedule/rank_schedule.h"
#include "simulator/links.h"
#include "simulator/simulation.h"

namespace refit::simulator {

// As parts of a round: of what is read behind all rounds, and of the n-th
// broadcast of a rank, less n.
inline constexpr uint32_t kBehindRounds = kNone;
inline constexpr uint32_t kBroadcastPart = kNone - 1;

// What one end of a message knows of it.
struct MessageEnd {
  int32_t rank = 0;
  const RoundWork& work;
  uint32_t part = 0;  // of a round that is sent in parts
  const Operation& operation;
  uint64_t size_bytes = 0;
  uint32_t position = 0;  // in the rank's messages
  uint32_t ordinal = 0;   // among those of the same ranks, round and part
  bool is_broadcast = false;
};

class MessageTasks {
 public:
  // All references must outlive it. Messages are added to the graph.
  MessageTasks(const PlanFile& plan, Links& links, TaskGraph& graph)
      : body_(plan.body()), broadcasts_(body_), links_(links), graph_(graph) {}

  const Broadcasts& broadcasts() const { return broadcasts_; }
  void Reserve(size_t messages) { messages_.reserve(messages); }

  // The message's task; adds it if no end came before.
  uint32_t TaskOf(const MessageEnd& end);
  // The task of what `rank` passes on to `next` of a broadcast to it.
  uint32_t TaskOfPassedOn(int32_t rank, const RoundWork& work,
                          const Operation& received, int32_t next);

  // UCX asks a sender for its message over the connection on which it sends its
  // own. So of two ranks of different hosts that send to each other in a round,
  // one waits until the other has sent: here the one with the higher number.
  void AddConnections();
  // What is wrong: the two ends of a message do not agree, or a rank has
  // another order of messages than its peers can follow.
  absl::Status Check() const;

 private:
  struct Key {
    uint32_t round = 0;
    uint32_t part = 0;
    int32_t source = 0;
    int32_t destination = 0;
    uint32_t ordinal = 0;

    friend bool operator==(const Key&, const Key&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Key& key) {
      // Two words are hashed in a third of the time of five.
      return H::combine(
          std::move(h),
          uint64_t{key.round} << 32 ^ uint64_t{key.part} << 16 ^ key.ordinal,
          static_cast<uint64_t>(key.source) << 32 ^
              static_cast<uint64_t>(key.destination));
    }
  };
  struct Open {
    uint32_t task = 0;
    bool is_sent = false;
    bool is_received = false;
    uint64_t sent_bytes = 0;
    uint64_t received_bytes = 0;
  };

  // `sender`: from whom it comes to its destination. `rank`: who comes to it.
  Open& Find(const Key& key, const RoundWork& work, int32_t rank,
             int32_t sender, uint64_t size_bytes, uint64_t dense_bytes);

  const fb::Body& body_;
  const Broadcasts broadcasts_;
  Links& links_;
  TaskGraph& graph_;
  absl::flat_hash_map<Key, Open> messages_;
  absl::Status misordered_;  // the first rank's messages that are, if any
};

}  // namespace refit::simulator

#endif  // REFIT_SIMULATOR_MESSAGE_TASKS_H_
