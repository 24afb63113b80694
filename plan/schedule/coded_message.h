// The size of a message of which only what changed is sent, and the numbers of
// its format, which kernels read too (executor/delta/message_code.h).
#ifndef REFIT_PLAN_SCHEDULE_CODED_MESSAGE_H_
#define REFIT_PLAN_SCHEDULE_CODED_MESSAGE_H_

#include <cstdint>

namespace refit {

inline constexpr uint64_t kCodeHeaderBytes = 8;
// A byte counts the changed ones of so many, another one places each.
inline constexpr uint64_t kCodeGroupElements = 128;

// A message, or the part of one that travels at once, of which only what
// changed is sent (executor/delta/message_code.h).
struct CodedMessage {
  uint64_t size_bytes = 0;
  uint32_t element_bytes = 0;  // 1, 2, 4 or 8; the narrowest
  uint64_t always_elements =
      0;  // of that size: sent whether they changed or not

  uint64_t elements() const {
    return (size_bytes + element_bytes - 1) / element_bytes;
  }
  // That are counted together.
  uint64_t groups() const {
    return (elements() + kCodeGroupElements - 1) / kCodeGroupElements;
  }
  // Room for what is always sent, and one changed element of 2^rung others.
  uint64_t RoomOn(uint32_t rung) const {
    const uint64_t others = elements() - always_elements;
    return always_elements + ((others + (uint64_t{1} << rung) - 1) >> rung);
  }
  uint64_t CodeBytes(uint64_t room) const {
    return kCodeHeaderBytes + room * element_bytes + groups() + room;
  }
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_CODED_MESSAGE_H_
