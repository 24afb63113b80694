#include "plan/broadcasts.h"

#include <algorithm>
#include <iterator>

namespace refit {

Broadcasts::Broadcasts(const fb::Body& body) {
  if (!HasBroadcasts(body)) return;
  to_.resize(body.programs()->size());
  for (uint32_t root = 0; root < to_.size(); ++root) {
    const fb::RankProgram& program = *body.programs()->Get(root);
    if (ArePacked(program)) continue;
    const fb::Message* first = nullptr;
    for (const fb::Message* message : *program.messages()) {
      if (message->broadcast() == 0 ||
          message->kind() != fb::MessageKind::kSend) {
        continue;
      }
      if (first == nullptr) first = message;
      if (message->round() != first->round()) break;
      if (message->broadcast() == first->broadcast()) {
        to_[root].push_back(PeerOf(body, program, *message));
      }
    }
    std::sort(to_[root].begin(), to_[root].end());
  }
}

uint32_t Broadcasts::Before(uint32_t root, uint32_t receiver) const {
  const absl::Span<const uint32_t> to = To(root);
  const auto found = std::lower_bound(to.begin(), to.end(), receiver);
  return found == to.begin() ? root : *std::prev(found);
}

std::optional<uint32_t> Broadcasts::After(uint32_t root,
                                          uint32_t receiver) const {
  const absl::Span<const uint32_t> to = To(root);
  const auto found = std::upper_bound(to.begin(), to.end(), receiver);
  if (found == to.end()) return std::nullopt;
  return *found;
}

}  // namespace refit
