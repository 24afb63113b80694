// SharedWords: words of host memory that processes of one host have in common.
#ifndef REFIT_EXECUTOR_DEVICE_SHARED_WORDS_H_
#define REFIT_EXECUTOR_DEVICE_SHARED_WORDS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "control/file_descriptor.h"
#include "control/socket.h"
#include "control/token.h"
#include "executor/device/descriptor_server.h"

namespace refit {

// The words are in a file without a name, so that nothing is left of them when
// all their processes have ended, however they did. The file's size is fixed,
// because a process that shrank it would take the words from the others.
class SharedWords {
 public:
  // New words are 0. Error: kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<SharedWords>> Create(size_t count);
  // Maps the words that another process has shown. Errors: kInvalidArgument,
  // these are no words, or not `count`; those of FetchDescriptor.
  static absl::StatusOr<std::unique_ptr<SharedWords>> Open(
      std::string_view shown, size_t count,
      std::chrono::steady_clock::time_point deadline);
  ~SharedWords();
  SharedWords(const SharedWords&) = delete;
  SharedWords& operator=(const SharedWords&) = delete;

  // What Open needs, as long as these words live. Processes need a network
  // namespace and a user in common (DescriptorServer).
  absl::StatusOr<std::string> Show();

  // This process holds word `index` from now on, as long as these words and the
  // process live. Its children do not. Once. Error: kResourceExhausted, also if
  // another process holds it.
  absl::Status Hold(size_t index);
  // Whether another process holds it, or other words of this one.
  bool IsHeld(size_t index) const;

  uint64_t* data() const { return data_; }
  size_t size_bytes() const { return size_bytes_; }  // whole pages

 private:
  SharedWords(FileDescriptor file, size_t count);
  absl::Status Map();

  const FileDescriptor file_;
  const size_t size_bytes_;
  uint64_t* data_ = nullptr;
  Socket held_;  // the same file, opened for a lock
  const Token token_ = NewToken();
  std::unique_ptr<DescriptorServer> server_;  // from the first Show
};

}  // namespace refit

#endif  // REFIT_EXECUTOR_DEVICE_SHARED_WORDS_H_
