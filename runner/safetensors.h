// Safetensors files, memory-mapped.
#ifndef REFIT_RUNNER_SAFETENSORS_H_
#define REFIT_RUNNER_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "refit/executor.h"

namespace refit {

// A file mapped into memory. Movable; unmapped by scope.
class MappedFile {
 public:
  static absl::StatusOr<MappedFile> OpenReadOnly(const std::string& path);
  // Creates the file, or empties it, and reserves its blocks: a full disk is an
  // error here and not a signal later.
  static absl::StatusOr<MappedFile> Create(const std::string& path,
                                           uint64_t size_bytes);

  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  ~MappedFile();

  std::byte* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }
  // Returns when all written bytes are on the disk.
  absl::Status Sync() const;

 private:
  MappedFile(int descriptor, std::byte* data, uint64_t size_bytes)
      : descriptor_(descriptor), data_(data), size_bytes_(size_bytes) {}

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  uint64_t size_bytes_ = 0;
};

class SafetensorsReader {
 public:
  static absl::StatusOr<SafetensorsReader> Open(const std::string& path);

  // In the header's order. Their memory is read-only.
  const std::vector<BoundTensor>& tensors() const { return tensors_; }

 private:
  SafetensorsReader(MappedFile file, std::vector<BoundTensor> tensors)
      : file_(std::move(file)), tensors_(std::move(tensors)) {}

  MappedFile file_;
  std::vector<BoundTensor> tensors_;
};

// A file that appears at `path` with `Commit`, and not at all without it.
class SafetensorsWriter {
 public:
  // `tensors` have everything but addresses. Elements are zero at first. An
  // error also if `path` is there and cannot be replaced.
  static absl::StatusOr<SafetensorsWriter> Create(
      const std::string& path, std::vector<BoundTensor> tensors);

  SafetensorsWriter(SafetensorsWriter&& other) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept = delete;
  ~SafetensorsWriter();

  // As given to Create, with addresses in the file.
  const std::vector<BoundTensor>& tensors() const { return tensors_; }

  // Returns when all bytes are on the disk, under a temporary name.
  absl::Status Finish();
  // Renames; an older file is kept aside until the writer is gone. Requires
  // that Finish succeeded. On an error `path` is as before.
  absl::Status Commit();
  // Puts back what Commit replaced. Does nothing before Commit.
  void Undo();

 private:
  SafetensorsWriter(std::string path, std::string temporary_path,
                    MappedFile file, std::vector<BoundTensor> tensors)
      : path_(std::move(path)),
        temporary_path_(std::move(temporary_path)),
        file_(std::move(file)),
        tensors_(std::move(tensors)) {}

  void PutBackOlder();

  std::string path_;
  std::string temporary_path_;  // "" once committed or moved from
  bool committed_ = false;
  std::string older_path_;  // what Commit replaced; "" if nothing
  MappedFile file_;
  std::vector<BoundTensor> tensors_;
};

}  // namespace refit

#endif  // REFIT_RUNNER_SAFETENSORS_H_
