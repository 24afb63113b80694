#include "compiler/model/safetensors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "compiler/job/object_reader.h"
#include "compiler/job/text_file.h"
#include "compiler/model/config.h"
#include "plan/dtype.h"

namespace refit {
namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kHeaderBytesMax = 100'000'000;  // the format's own limit
constexpr int64_t kIndexBytesMax = int64_t{128} << 20;
constexpr IntegerRange kOffsetRange = {.min = 0, .max = int64_t{1} << 60};

// Where a tensor's bytes lie, for finding overlaps.
struct Extent {
  int64_t begin_bytes = 0;
  int64_t end_bytes = 0;
  std::string name;
};

// Reads the header of one file.
class HeaderReader {
 public:
  HeaderReader(std::string path, Diagnostics& diagnostics)
      : path_(std::move(path)),
        place_(WholeFile(path_)),
        diagnostics_(diagnostics) {}

  // Appends to `tensors`. Returns false after an error.
  bool Read(std::vector<NamedTensor>& tensors) {
    const int64_t errors_before = diagnostics_.error_count();
    const std::optional<std::string> header = ReadHeader();
    if (!header.has_value()) return false;
    const std::optional<JsonDocument> document =
        ParseJson(place_.file, *header, diagnostics_);
    if (!document.has_value()) return false;
    const ValueReader values(*document, diagnostics_);
    if (!values.IsObject(document->root, "header")) return false;
    for (const JsonMember& member : *document->root.AsObject()) {
      if (member.key == "__metadata__") continue;
      if (const std::string_view dtype = BlockDType(member); !dtype.empty()) {
        Error(
            "tensor %s is %s, of a checkpoint in MXFP4 or "
            "MXFP8, which a refit does not read; wanted one in "
            "bf16, or \"model\": the path of its config.json",
            Quoted(member.key), dtype);
        return false;  // so are thousands of others
      }
      std::optional<NamedTensor> tensor = ReadTensor(values, member);
      if (tensor.has_value()) tensors.push_back(*std::move(tensor));
    }
    CheckOverlaps();
    return diagnostics_.error_count() == errors_before;
  }

 private:
  // Returns false.
  template <typename... Args>
  bool Error(const absl::FormatSpec<Args...>& format, const Args&... args) {
    return diagnostics_.Error(place_, format, args...);
  }

  std::optional<std::string> ReadHeader() {
    std::error_code error;
    const uintmax_t file_bytes = std::filesystem::file_size(path_, error);
    std::ifstream file(path_, std::ios::binary);
    if (error || !file) {
      Error("cannot be opened: %s", error ? error.message() : "no access");
      return std::nullopt;
    }
    const auto size = static_cast<int64_t>(file_bytes);
    std::array<char, kLengthBytes> length_bytes{};
    if (size < kLengthBytes || !file.read(length_bytes.data(), kLengthBytes)) {
      Error(
          "file has %d bytes; wanted at least the %d of a "
          "safetensors header length",
          size, kLengthBytes);
      return std::nullopt;
    }
    uint64_t length = 0;  // little-endian
    for (size_t i = length_bytes.size(); i-- > 0;) {
      length = length << 8 | static_cast<unsigned char>(length_bytes[i]);
    }
    if (length > static_cast<uint64_t>(kHeaderBytesMax)) {
      Error(
          "header length is %d bytes; wanted at most %d, is "
          "this a safetensors file?",
          length, kHeaderBytesMax);
      return std::nullopt;
    }
    data_bytes_ = size - kLengthBytes - static_cast<int64_t>(length);
    std::string header(length, '\0');
    if (data_bytes_ < 0 ||
        !file.read(header.data(), static_cast<std::streamsize>(length))) {
      Error("file is truncated: it has %d bytes, its header alone takes %d",
            size, length + kLengthBytes);
      return std::nullopt;
    }
    if (const absl::Status status = CheckText(header); !status.ok()) {
      Error("header: %s", status.message());
      return std::nullopt;
    }
    return header;
  }

  // A dtype that only formats with a scale for each block have; "": another.
  static std::string_view BlockDType(const JsonMember& member) {
    if (member.value.AsObject() == nullptr) return "";
    for (const JsonMember& key : *member.value.AsObject()) {
      const std::string* dtype = key.value.AsString();
      if (key.key != "dtype" || dtype == nullptr) continue;
      if (*dtype == "F8_E8M0" || *dtype == "F4") return *dtype;
    }
    return "";
  }

  std::optional<NamedTensor> ReadTensor(const ValueReader& values,
                                        const JsonMember& member) {
    const std::string path = absl::StrFormat("tensor %s", Quoted(member.key));
    if (!values.IsObject(member.value, path)) return std::nullopt;
    ObjectReader reader(values, member.value, path);
    const JsonValue* dtype = reader.Require("dtype", "a string");
    const JsonValue* shape = reader.Require("shape", "an array of integers");
    const JsonValue* offsets = reader.Require("data_offsets", "two integers");
    if (dtype == nullptr || shape == nullptr || offsets == nullptr) {
      return std::nullopt;
    }
    const std::optional<std::vector<int64_t>> extents =
        values.Integers(*shape, reader.PathOf("shape"), kExtentRange);
    const std::optional<std::vector<int64_t>> range =
        values.Integers(*offsets, reader.PathOf("data_offsets"), kOffsetRange);
    const std::string* dtype_name =
        values.String(*dtype, reader.PathOf("dtype"));
    if (!extents.has_value() || !range.has_value() || dtype_name == nullptr) {
      return std::nullopt;
    }
    const std::optional<DType> type = ParseSafetensorsDType(*dtype_name);
    if (!type.has_value()) {
      Error("%s has unknown dtype %s", path, Quoted(*dtype_name));
      return std::nullopt;
    }
    NamedTensor tensor = {.name = member.key,
                          .shape = Dims(extents->begin(), extents->end()),
                          .dtype = *type,
                          .place = place_};
    if (!CheckRange(tensor, path, *range)) return std::nullopt;
    return tensor;
  }

  bool CheckRange(const NamedTensor& tensor, const std::string& path,
                  const std::vector<int64_t>& range) {
    if (range.size() != 2 || range[0] > range[1]) {
      return Error(
          "%s has data_offsets that are no range; wanted begin and end", path);
    }
    if (range[1] > data_bytes_) {
      return Error(
          "%s ends at byte %d of the data; the file has %d, is it truncated?",
          path, range[1], data_bytes_);
    }
    int64_t bytes = DTypeBytes(tensor.dtype);
    for (const int64_t extent : tensor.shape) {
      if (extent > kOffsetRange.max / bytes) {
        return Error("%s has a shape of more than %d bytes", path,
                     kOffsetRange.max);
      }
      bytes *= extent;
    }
    if (bytes != range[1] - range[0]) {
      return Error("%s has %d bytes of data; wanted %d by its shape and dtype",
                   path, range[1] - range[0], bytes);
    }
    extents_.push_back(
        {.begin_bytes = range[0], .end_bytes = range[1], .name = tensor.name});
    return true;
  }

  void CheckOverlaps() {
    std::sort(extents_.begin(), extents_.end(),
              [](const Extent& a, const Extent& b) {
                return std::pair(a.begin_bytes, a.end_bytes) <
                       std::pair(b.begin_bytes, b.end_bytes);
              });
    for (size_t i = 1; i < extents_.size(); ++i) {
      const Extent& before = extents_[i - 1];
      if (extents_[i].begin_bytes < before.end_bytes) {
        Error("tensors %s and %s overlap at byte %d of the data",
              Quoted(before.name), Quoted(extents_[i].name),
              extents_[i].begin_bytes);
      }
    }
  }

  const std::string path_;
  const Place place_;
  Diagnostics& diagnostics_;
  int64_t data_bytes_ = 0;
  std::vector<Extent> extents_;
};

// What an index says: which file holds which tensor.
struct Index {
  Place place;
  std::vector<std::pair<std::string, std::string>> file_of_tensor;
};

std::optional<Index> ReadIndex(const std::string& path, const Place& asked,
                               Diagnostics& diagnostics) {
  const std::optional<JsonDocument> document =
      ReadJsonFile(path, asked, kIndexBytesMax, "index", diagnostics);
  if (!document.has_value()) return std::nullopt;
  const ValueReader values(*document, diagnostics);
  ObjectReader reader(values, document->root, "");
  const JsonValue* map = reader.Require("weight_map", "an object");
  if (map == nullptr || !values.IsObject(*map, "weight_map")) {
    return std::nullopt;
  }
  Index index = {.place = values.PlaceOf(*map), .file_of_tensor = {}};
  for (const JsonMember& member : *map->AsObject()) {
    const std::string* name = values.String(
        member.value, absl::StrFormat("weight_map[%s]", Quoted(member.key)),
        "the name of a file");
    if (name == nullptr) return std::nullopt;
    index.file_of_tensor.emplace_back(member.key, *name);
  }
  return index;
}

// Reads files one by one and checks them against an index, if there is one.
std::optional<Checkpoint> ReadFiles(Checkpoint checkpoint,
                                    const std::set<std::string>& files,
                                    const std::optional<Index>& index,
                                    Diagnostics& diagnostics) {
  bool good = true;
  absl::flat_hash_set<std::pair<std::string, std::string>> found;
  for (const std::string& file : files) {
    const size_t first = checkpoint.tensors.size();
    HeaderReader header(ResolvePath(checkpoint.directory, file), diagnostics);
    good &= header.Read(checkpoint.tensors);
    for (size_t i = first; i < checkpoint.tensors.size(); ++i) {
      found.emplace(checkpoint.tensors[i].name, file);
    }
  }
  if (!good) return std::nullopt;
  if (index.has_value()) {
    for (const auto& [tensor, file] : index->file_of_tensor) {
      if (found.contains(std::pair(tensor, file))) continue;
      diagnostics.Error(index->place, "tensor %s is not in %s", Quoted(tensor),
                        Quoted(file));
      good = false;
    }
  }
  if (good && checkpoint.tensors.empty()) {
    diagnostics.Error(
        checkpoint.place,
        "there is no tensor in these safetensors; wanted at least one");
    return std::nullopt;
  }
  if (!CheckNames(checkpoint.tensors, diagnostics) || !good) {
    return std::nullopt;
  }
  return checkpoint;
}

// The names of the *.safetensors in `directory`.
std::set<std::string> ListFiles(const std::string& directory) {
  std::set<std::string> files;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end;
       !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".safetensors") {
      files.insert(it->path().filename().string());
    }
  }
  return files;
}

}  // namespace

std::optional<Checkpoint> ReadCheckpoint(const std::string& path,
                                         const Place& asked,
                                         Diagnostics& diagnostics) {
  constexpr std::string_view kIndexName = "model.safetensors.index.json";
  std::error_code error;
  const bool is_directory = std::filesystem::is_directory(path, error);
  Checkpoint checkpoint = {.directory = is_directory ? path : DirectoryOf(path),
                           .place = WholeFile(path),
                           .tensors = {}};
  std::string index_path;
  if (is_directory) {
    const std::string inside = ResolvePath(path, std::string(kIndexName));
    if (std::filesystem::exists(inside, error)) index_path = inside;
  } else if (!path.ends_with(".safetensors")) {
    index_path = path;
  }

  std::set<std::string> files;
  std::optional<Index> index;
  if (!index_path.empty()) {
    index = ReadIndex(index_path, asked, diagnostics);
    if (!index.has_value()) return std::nullopt;
    checkpoint.place = index->place;
    for (const auto& [tensor, file] : index->file_of_tensor) {
      files.insert(file);
    }
  } else if (is_directory) {
    files = ListFiles(path);
  } else if (!std::filesystem::exists(path, error)) {
    diagnostics.Error(asked, "%s: no such file", Quoted(path));
    return std::nullopt;
  } else {
    files = {std::filesystem::path(path).filename().string()};
  }
  if (files.empty()) {
    diagnostics.Error(asked, "%s: no *.safetensors there", Quoted(path));
    return std::nullopt;
  }
  return ReadFiles(std::move(checkpoint), files, index, diagnostics);
}

}  // namespace refit
