#include "executor/binding.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace refit {
namespace {

constexpr size_t kMaxReportedProblems = 10;

// Abseil's and the standard's string_view are two types on some systems.
std::string NameOf(DType dtype) { return std::string(DTypeName(dtype)); }

std::string ShapeText(absl::Span<const uint64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::vector<uint64_t> ShapeOf(const fb::Buffer& buffer) {
  if (buffer.shape() == nullptr) return {};
  return {buffer.shape()->begin(), buffer.shape()->end()};
}

struct Expected {
  size_t slot = 0;
  uint64_t entry = 0;
};

class Binding {
 public:
  Binding(const TensorTable& table, absl::Span<const BoundTensor> tensors,
          bool allows_unaligned)
      : table_(table),
        tensors_(tensors),
        allows_unaligned_(allows_unaligned),
        addresses_(table.size(), nullptr),
        tensor_of_entry_(table.size(), kNone) {}

  void Check() {
    IndexExpected();
    for (size_t i = 0; i < tensors_.size(); ++i) CheckTensor(i);
    CheckMissing();
    CheckOverlaps();
  }

  void Add(absl::Span<const std::string> problems) {
    for (const std::string& problem : problems) Problem(problem);
  }

  const std::vector<std::string>& problems() const { return problems_; }
  size_t problem_count() const { return problem_count_; }
  std::vector<std::byte*> TakeAddresses() { return std::move(addresses_); }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  template <typename... Parts>
  void Problem(const Parts&... parts) {
    if (++problem_count_ <= kMaxReportedProblems) {
      problems_.push_back(absl::StrCat(parts...));
    }
  }

  void IndexExpected() {
    expected_.reserve(table_.size());
    for (size_t slot = 0; slot < table_.workers_stacks(); ++slot) {
      for (uint64_t entry = table_.begin(slot); entry < table_.begin(slot + 1);
           ++entry) {
        expected_.emplace(table_.Name(slot, entry - table_.begin(slot)),
                          Expected{.slot = slot, .entry = entry});
      }
    }
  }

  void CheckTensor(size_t i) {
    const BoundTensor& tensor = tensors_[i];
    const auto found = expected_.find(tensor.name);
    if (found == expected_.end()) {
      Problem("unexpected: \"", tensor.name, "\" ", NameOf(tensor.dtype), " ",
              ShapeText(tensor.shape), " is not in the plan");
      return;
    }
    const auto [slot, entry] = found->second;
    if (tensor_of_entry_[entry] != kNone) {
      Problem("duplicate: \"", tensor.name, "\" is given twice");
      return;
    }
    tensor_of_entry_[entry] = i;
    const fb::Buffer& buffer = table_.buffer(slot);
    const std::vector<uint64_t> shape = ShapeOf(buffer);
    const uint64_t size_bytes =
        TensorElements(buffer) * DTypeBytes(buffer.dtype());
    if (tensor.dtype != buffer.dtype()) {
      Problem("wrong dtype: \"", tensor.name, "\" is ", NameOf(tensor.dtype),
              ", the plan wants ", NameOf(buffer.dtype()));
    } else if (tensor.shape != shape) {
      Problem("wrong shape: \"", tensor.name, "\" is ", ShapeText(tensor.shape),
              ", the plan wants ", ShapeText(shape));
    } else if (tensor.size_bytes != size_bytes) {
      Problem("wrong size: \"", tensor.name, "\" has ", tensor.size_bytes,
              " bytes, the plan wants ", size_bytes);
    } else if (tensor.data == nullptr && size_bytes > 0) {
      Problem("null pointer: \"", tensor.name, "\" has ", size_bytes,
              " bytes and no address");
    } else if (const auto address = reinterpret_cast<uintptr_t>(tensor.data);
               !allows_unaligned_ && address % DTypeBytes(tensor.dtype) != 0) {
      Problem("not aligned: \"", tensor.name, "\" is at 0x", absl::Hex(address),
              ", the device wants a multiple of the ", DTypeBytes(tensor.dtype),
              " bytes of ", NameOf(tensor.dtype));
    } else {
      addresses_[entry] = static_cast<std::byte*>(tensor.data);
    }
  }

  void CheckMissing() {
    const std::vector<bool> skipped = table_.Skipped();
    for (size_t slot = 0; slot < table_.workers_stacks(); ++slot) {
      const fb::Buffer& buffer = table_.buffer(slot);
      for (uint64_t entry = table_.begin(slot); entry < table_.begin(slot + 1);
           ++entry) {
        if (tensor_of_entry_[entry] != kNone || skipped[entry]) continue;
        Problem("missing: \"", table_.Name(slot, entry - table_.begin(slot)),
                "\" ", NameOf(buffer.dtype()), " ", ShapeText(ShapeOf(buffer)));
      }
    }
  }

  void CheckOverlaps() {
    std::vector<const BoundTensor*> by_address;
    for (uint64_t entry = 0; entry < table_.size(); ++entry) {
      if (addresses_[entry] == nullptr) continue;
      const BoundTensor& tensor = tensors_[tensor_of_entry_[entry]];
      if (tensor.size_bytes > 0) by_address.push_back(&tensor);
    }
    std::sort(by_address.begin(), by_address.end(),
              [](const BoundTensor* a, const BoundTensor* b) {
                return std::pair(a->data, a) < std::pair(b->data, b);
              });
    const BoundTensor* reaching = nullptr;  // the one that ends last so far
    const auto end = [](const BoundTensor* tensor) {
      return reinterpret_cast<uintptr_t>(tensor->data) + tensor->size_bytes;
    };
    for (const BoundTensor* tensor : by_address) {
      const uintptr_t begin = reinterpret_cast<uintptr_t>(tensor->data);
      if (reaching != nullptr && begin < end(reaching)) {
        Problem("overlap: \"", reaching->name, "\" and \"", tensor->name,
                "\" share ", std::min(end(reaching), end(tensor)) - begin,
                " bytes");
      }
      if (reaching == nullptr || end(tensor) > end(reaching)) reaching = tensor;
    }
  }

  const TensorTable& table_;
  const absl::Span<const BoundTensor> tensors_;
  const bool allows_unaligned_;
  std::vector<std::byte*> addresses_;    // by entry
  std::vector<size_t> tensor_of_entry_;  // by entry
  absl::flat_hash_map<std::string, Expected> expected_;
  std::vector<std::string> problems_;
  size_t problem_count_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<std::byte*>> BindTensors(
    const TensorTable& table, int32_t rank,
    absl::Span<const BoundTensor> tensors, bool allows_unaligned,
    absl::Span<const std::string> other_problems) {
  Binding binding(table, tensors, allows_unaligned);
  binding.Check();
  binding.Add(other_problems);
  if (binding.problem_count() == 0) return binding.TakeAddresses();
  std::string message =
      absl::StrCat("rank ", rank, " cannot bind, ", binding.problem_count(),
                   " problem", binding.problem_count() == 1 ? "" : "s");
  for (const std::string& problem : binding.problems()) {
    absl::StrAppend(&message, "\n  ", problem);
  }
  if (binding.problem_count() > binding.problems().size()) {
    absl::StrAppend(&message, "\n  and ",
                    binding.problem_count() - binding.problems().size(),
                    " more");
  }
  return absl::InvalidArgumentError(std::move(message));
}

}  // namespace refit
