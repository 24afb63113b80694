#include "runner/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "files/partial_files.h"
#include "plan/dtype.h"
#include "rapidjson/document.h"
#include "rapidjson/error/en.h"
#include "rapidjson/stringbuffer.h"
#include "rapidjson/writer.h"

namespace refit {
namespace {

// The reference implementation's limit.
constexpr uint64_t kMaxHeaderBytes = 100'000'000;
constexpr uint64_t kLengthBytes = 8;

absl::Status FileError(const std::string& path, const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", problem));
}

absl::Status SystemError(const std::string& path, int error) {
  const absl::StatusCode code = error == ENOENT ? absl::StatusCode::kNotFound
                                : error == ENOSPC
                                    ? absl::StatusCode::kResourceExhausted
                                    : absl::StatusCode::kUnavailable;
  return absl::Status(code, absl::StrCat(path, ": ", std::strerror(error)));
}

// Whether a file may take the place of what is at `path`.
absl::Status CheckReplaceable(const std::string& path) {
  struct stat existing;
  if (lstat(path.c_str(), &existing) != 0) {
    return errno == ENOENT ? absl::OkStatus() : SystemError(path, errno);
  }
  if (S_ISDIR(existing.st_mode)) return SystemError(path, EISDIR);
  if (S_ISREG(existing.st_mode) && access(path.c_str(), W_OK) != 0) {
    return SystemError(path, errno);
  }
  return absl::OkStatus();
}

// The product of `factors`; nullopt when it does not fit.
std::optional<uint64_t> CheckedProduct(const std::vector<uint64_t>& factors) {
  uint64_t product = 1;
  for (const uint64_t factor : factors) {
    if (__builtin_mul_overflow(product, factor, &product)) return std::nullopt;
  }
  return product;
}

std::optional<std::vector<uint64_t>> UintArray(const rapidjson::Value& object,
                                               const char* key) {
  const auto member = object.FindMember(key);
  if (member == object.MemberEnd() || !member->value.IsArray()) {
    return std::nullopt;
  }
  std::vector<uint64_t> values;
  for (const rapidjson::Value& value : member->value.GetArray()) {
    if (!value.IsUint64()) return std::nullopt;
    values.push_back(value.GetUint64());
  }
  return values;
}

// One member of the header. `data` is what follows the header.
absl::Status ParseTensor(const rapidjson::Value& description,
                         absl::Span<std::byte> data, BoundTensor& tensor) {
  const auto bad = [&](const std::string& problem) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor \"", tensor.name, "\": ", problem));
  };
  if (!description.IsObject()) return bad("its description is not an object");
  const auto dtype = description.FindMember("dtype");
  if (dtype == description.MemberEnd() || !dtype->value.IsString()) {
    return bad("dtype is not a string");
  }
  const std::string dtype_name = dtype->value.GetString();
  const std::optional<DType> parsed = ParseSafetensorsDType(dtype_name);
  if (!parsed.has_value()) {
    return bad(absl::StrCat("unknown dtype \"", dtype_name, "\""));
  }
  tensor.dtype = *parsed;
  const std::optional<std::vector<uint64_t>> shape =
      UintArray(description, "shape");
  if (!shape.has_value()) return bad("shape is not a list of sizes");
  tensor.shape = *shape;
  const std::optional<std::vector<uint64_t>> offsets =
      UintArray(description, "data_offsets");
  if (!offsets.has_value() || offsets->size() != 2) {
    return bad("data_offsets is not a pair of sizes");
  }
  const uint64_t begin = (*offsets)[0];
  const uint64_t end = (*offsets)[1];
  if (begin > end || end > data.size()) {
    return bad(absl::StrCat("data_offsets [", begin, ", ", end,
                            "] are outside the file's ", data.size(),
                            " data bytes"));
  }
  std::vector<uint64_t> factors = tensor.shape;
  factors.push_back(DTypeBytes(tensor.dtype));
  if (CheckedProduct(factors) != end - begin) {
    return bad(absl::StrCat("its shape and dtype do not have ", end - begin,
                            " bytes"));
  }
  tensor.data = data.data() + begin;
  tensor.size_bytes = end - begin;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<BoundTensor>> ParseTensors(const MappedFile& file) {
  if (file.size_bytes() < kLengthBytes) {
    return absl::InvalidArgumentError(
        "not a safetensors file: shorter than 8 bytes");
  }
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes >
      std::min(kMaxHeaderBytes, file.size_bytes() - kLengthBytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat("not a safetensors file: a header of ", header_bytes,
                     " bytes in a file of ", file.size_bytes()));
  }
  rapidjson::Document header;
  // Iterative: the nesting of a hostile file must not use up our stack.
  header.Parse<rapidjson::kParseIterativeFlag>(
      reinterpret_cast<const char*>(file.data()) + kLengthBytes, header_bytes);
  if (header.HasParseError()) {
    return absl::InvalidArgumentError(
        absl::StrCat("header byte ", header.GetErrorOffset(), ": ",
                     rapidjson::GetParseError_En(header.GetParseError())));
  }
  if (!header.IsObject()) {
    return absl::InvalidArgumentError("the header is not an object");
  }
  const absl::Span<std::byte> data(
      file.data() + kLengthBytes + header_bytes,
      file.size_bytes() - kLengthBytes - header_bytes);
  std::vector<BoundTensor> tensors;
  std::set<std::string> names;
  for (const auto& member : std::as_const(header).GetObject()) {
    BoundTensor tensor;
    tensor.name.assign(member.name.GetString(), member.name.GetStringLength());
    if (tensor.name == "__metadata__") continue;
    if (!names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", tensor.name, "\" stands there twice"));
    }
    absl::Status status = ParseTensor(member.value, data, tensor);
    if (!status.ok()) return status;
    tensors.push_back(std::move(tensor));
  }
  return tensors;
}

// The header's text, padded so that the data begins at a multiple of 8.
std::string HeaderText(const std::vector<const BoundTensor*>& tensors) {
  rapidjson::StringBuffer buffer;
  rapidjson::Writer<rapidjson::StringBuffer> json(buffer);
  json.StartObject();
  json.Key("__metadata__");
  json.StartObject();
  json.Key("format");
  json.String("pt");
  json.EndObject();
  uint64_t offset = 0;
  for (const BoundTensor* tensor : tensors) {
    json.Key(tensor->name.c_str(),
             static_cast<rapidjson::SizeType>(tensor->name.size()));
    json.StartObject();
    json.Key("dtype");
    const std::string dtype(SafetensorsDTypeName(tensor->dtype));
    json.String(dtype.c_str());
    json.Key("shape");
    json.StartArray();
    for (const uint64_t extent : tensor->shape) json.Uint64(extent);
    json.EndArray();
    json.Key("data_offsets");
    json.StartArray();
    json.Uint64(offset);
    offset += tensor->size_bytes;
    json.Uint64(offset);
    json.EndArray();
    json.EndObject();
  }
  json.EndObject();
  std::string text(buffer.GetString(), buffer.GetSize());
  text.resize((text.size() + 7) / 8 * 8, ' ');
  return text;
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::OpenReadOnly(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return SystemError(path, errno);
  MappedFile file(descriptor, nullptr, 0);
  struct stat status;
  if (fstat(descriptor, &status) != 0) return SystemError(path, errno);
  if (!S_ISREG(status.st_mode)) return FileError(path, "not a file");
  if (status.st_size == 0) return file;
  void* data =
      mmap(nullptr, status.st_size, PROT_READ, MAP_SHARED, descriptor, 0);
  if (data == MAP_FAILED) return SystemError(path, errno);
  file.data_ = static_cast<std::byte*>(data);
  file.size_bytes_ = status.st_size;
  return file;
}

absl::StatusOr<MappedFile> MappedFile::Create(const std::string& path,
                                              uint64_t size_bytes) {
  const int descriptor =
      open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return SystemError(path, errno);
  MappedFile file(descriptor, nullptr, 0);
  if (const int error = posix_fallocate(descriptor, 0, size_bytes);
      error != 0) {
    return SystemError(path, error);
  }
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                    descriptor, 0);
  if (data == MAP_FAILED) return SystemError(path, errno);
  file.data_ = static_cast<std::byte*>(data);
  file.size_bytes_ = size_bytes;
  return file;
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
  if (descriptor_ >= 0) close(descriptor_);
}

absl::Status MappedFile::Sync() const {
  if (msync(data_, size_bytes_, MS_SYNC) != 0 || fsync(descriptor_) != 0) {
    return absl::UnavailableError(std::strerror(errno));
  }
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsReader> SafetensorsReader::Open(
    const std::string& path) {
  absl::StatusOr<MappedFile> file = MappedFile::OpenReadOnly(path);
  if (!file.ok()) return file.status();
  absl::StatusOr<std::vector<BoundTensor>> tensors = ParseTensors(*file);
  if (!tensors.ok()) {
    return FileError(path, std::string(tensors.status().message()));
  }
  return SafetensorsReader(*std::move(file), *std::move(tensors));
}

absl::StatusOr<SafetensorsWriter> SafetensorsWriter::Create(
    const std::string& path, std::vector<BoundTensor> tensors) {
  if (absl::Status status = CheckReplaceable(path); !status.ok()) {
    return status;
  }
  // The widest elements first, so that all are aligned.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return DTypeBytes(tensors[a].dtype) > DTypeBytes(tensors[b].dtype);
  });
  std::vector<const BoundTensor*> ordered;
  for (const size_t i : order) ordered.push_back(&tensors[i]);
  const std::string header = HeaderText(ordered);
  const uint64_t header_bytes = header.size();
  uint64_t size_bytes = kLengthBytes + header_bytes;
  for (const BoundTensor& tensor : tensors) size_bytes += tensor.size_bytes;

  std::string temporary_path = absl::StrCat(path, ".", getpid(), ".partial");
  PartialFiles::OfThisProcess().Add(temporary_path);
  absl::StatusOr<MappedFile> file =
      MappedFile::Create(temporary_path, size_bytes);
  if (!file.ok()) {
    unlink(temporary_path.c_str());
    PartialFiles::OfThisProcess().Remove(temporary_path);
    return file.status();
  }
  std::memcpy(file->data(), &header_bytes, kLengthBytes);
  std::memcpy(file->data() + kLengthBytes, header.data(), header_bytes);
  std::byte* next = file->data() + kLengthBytes + header_bytes;
  for (const size_t i : order) {
    tensors[i].data = next;
    next += tensors[i].size_bytes;
  }
  return SafetensorsWriter(path, std::move(temporary_path), *std::move(file),
                           std::move(tensors));
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_path_(std::exchange(other.temporary_path_, std::string())),
      committed_(std::exchange(other.committed_, false)),
      older_path_(std::exchange(other.older_path_, std::string())),
      file_(std::move(other.file_)),
      tensors_(std::move(other.tensors_)) {}

SafetensorsWriter::~SafetensorsWriter() {
  if (!temporary_path_.empty()) {
    unlink(temporary_path_.c_str());
    PartialFiles::OfThisProcess().Remove(temporary_path_);
  }
  if (!older_path_.empty()) unlink(older_path_.c_str());
}

absl::Status SafetensorsWriter::Finish() {
  const absl::Status status = file_.Sync();
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat(temporary_path_, ": ", status.message()));
}

absl::Status SafetensorsWriter::Commit() {
  // A target may have changed since Create.
  if (absl::Status status = CheckReplaceable(path_); !status.ok()) {
    return status;
  }
  std::string older_path = absl::StrCat(path_, ".", getpid(), ".older");
  if (std::rename(path_.c_str(), older_path.c_str()) == 0) {
    older_path_ = std::move(older_path);
  } else if (errno != ENOENT) {
    return SystemError(path_, errno);
  }
  if (std::rename(temporary_path_.c_str(), path_.c_str()) != 0) {
    const int error = errno;
    PutBackOlder();
    return SystemError(path_, error);
  }
  PartialFiles::OfThisProcess().Remove(temporary_path_);
  temporary_path_.clear();
  committed_ = true;
  return absl::OkStatus();
}

void SafetensorsWriter::Undo() {
  if (!committed_) return;
  committed_ = false;
  if (older_path_.empty()) {
    unlink(path_.c_str());
  } else {
    PutBackOlder();
  }
}

// Where even that fails the older file stays under its other name.
void SafetensorsWriter::PutBackOlder() {
  if (older_path_.empty()) return;
  std::rename(older_path_.c_str(), path_.c_str());
  older_path_.clear();
}

}  // namespace refit
