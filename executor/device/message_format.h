// Numbers of the format of executor/delta/message_code.h, which kernels read
// too.
#ifndef REFIT_EXECUTOR_DEVICE_MESSAGE_FORMAT_H_
#define REFIT_EXECUTOR_DEVICE_MESSAGE_FORMAT_H_

#include <cstdint>

namespace refit {

inline constexpr uint64_t kCodeHeaderBytes = 8;
// A byte counts the changed ones of so many, another one places each.
inline constexpr uint64_t kCodeGroupElements = 128;

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_MESSAGE_FORMAT_H_
