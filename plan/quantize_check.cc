#include "plan/quantize_check.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/types/span.h"
#include "plan/check.h"
#include "plan/plan_file.h"
#include "plan/scratch_windows.h"
#include "plan/vector_length.h"

namespace refit {
namespace {

constexpr uint32_t kLargestBlock = 1 << 16;
// More than any list of operations needs; keeps hostile files from costing
// time.
constexpr uint32_t kMostLoops = 16;

bool IsQuantizable(DType dtype) {
  return dtype == DType::kBf16 || dtype == DType::kFp16 ||
         dtype == DType::kFp32;
}

bool SameIndex(const fb::Param& a, const fb::Param& b) {
  if (Length(a.index()) != Length(b.index())) return false;
  for (uint32_t d = 0; d < Length(a.index()); ++d) {
    if (a.index()->Get(d)->count() != b.index()->Get(d)->count()) return false;
  }
  return true;
}

absl::Status CheckQuantization(const fb::Body& body,
                               const fb::Quantization& quantization) {
  const uint32_t params = body.params()->size();
  for (const uint32_t param :
       {quantization.of(), quantization.data(), quantization.scales()}) {
    if (param >= params) {
      return Bad("param %u is not below %u", param, params);
    }
  }
  const fb::Param& of = *body.params()->Get(quantization.of());
  const fb::Param& data = *body.params()->Get(quantization.data());
  const fb::Param& scales = *body.params()->Get(quantization.scales());
  for (const uint32_t block :
       {quantization.block_rows(), quantization.block_columns()}) {
    if (block == 0 || block > kLargestBlock) {
      return Bad("a block of %u is not possible", block);
    }
  }
  const DType scale_dtype = ScaleDType(quantization.scale_format());
  if (scale_dtype == DType::kUnspecified) {
    return Bad("unknown scale format %u",
               static_cast<uint32_t>(quantization.scale_format()));
  }
  if (!IsQuantizable(of.dtype()) || data.dtype() != DType::kFp8E4m3 ||
      scales.dtype() != scale_dtype) {
    return Bad("%s to %s with scales of %s does not exist",
               DTypeName(of.dtype()), DTypeName(data.dtype()),
               DTypeName(scales.dtype()));
  }
  if (Length(of.shape()) != 2 || Length(data.shape()) != 2 ||
      Length(scales.shape()) != 2 || !SameIndex(of, data) ||
      !SameIndex(of, scales) || of.shape()->Get(0) != data.shape()->Get(0) ||
      of.shape()->Get(1) != data.shape()->Get(1) ||
      scales.shape()->Get(0) !=
          BlockCount(of.shape()->Get(0), quantization.block_rows()) ||
      scales.shape()->Get(1) !=
          BlockCount(of.shape()->Get(1), quantization.block_columns())) {
    return Bad("the three params are no matrices of matching shapes");
  }
  return absl::OkStatus();
}

// Extent and stride in a buffer's virtual elements.
struct Strided {
  uint64_t extent = 1;
  uint64_t stride = 0;
};

// That a box of a buffer stays inside its tensors, as a copy has to, and that
// its rows and columns, the last two, stay inside one of them.
absl::Status CheckStrides(const BufferSize& buffer, uint64_t offset,
                          absl::Span<const Strided> box) {
  if (offset >= buffer.elements()) {
    return Bad("offset %u is not below the buffer's %u elements", offset,
               buffer.elements());
  }
  const uint64_t numel = buffer.tensor_elements;
  uint64_t tensor = offset / numel;
  uint64_t element = offset % numel;
  for (size_t i = 0; i < box.size(); ++i) {
    const Strided& loop = box[i];
    if (loop.extent == 1) continue;
    const bool inside = loop.stride < numel;
    if (loop.stride == 0) {
      return Bad("%u strides of 0", loop.extent);
    }
    if (!inside && i + 2 >= box.size()) {
      return Bad("a matrix's stride %u leaves its tensor of %u elements",
                 loop.stride, numel);
    }
    if (!inside && loop.stride % numel != 0) {
      return Bad(
          "stride %u is neither inside a tensor of %u elements nor whole "
          "tensors",
          loop.stride, numel);
    }
    uint64_t& position = inside ? element : tensor;
    uint64_t span = 0;
    if (__builtin_mul_overflow(loop.extent - 1,
                               inside ? loop.stride : loop.stride / numel,
                               &span) ||
        __builtin_add_overflow(position, span, &position) ||
        position >= (inside ? numel : buffer.tensors)) {
      return Bad("%u strides of %u leave the %s", loop.extent, loop.stride,
                 inside ? "tensor" : "stack");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckQuantize(const fb::Body& body, const fb::RankProgram& program,
                           const fb::Quantize& op,
                           const std::vector<BufferSize>& buffers) {
  if (op.quantization() >= Length(body.quantizations())) {
    return Bad("quantization %u is not below %u", op.quantization(),
               Length(body.quantizations()));
  }
  const uint32_t slots = program.buffers()->size();
  for (const uint32_t slot :
       {op.input_slot(), op.output_slot(), op.scale_slot()}) {
    if (slot >= slots) {
      return Bad("slot %u is not below %u", slot, slots);
    }
  }
  const uint32_t loops = Length(body.quantize_loops());
  if (op.loops_count() > kMostLoops ||
      uint64_t{op.loops_begin()} + op.loops_count() > loops) {
    return Bad("%u loops from %u of %u", op.loops_count(), op.loops_begin(),
               loops);
  }
  if (op.rows() == 0 || op.columns() == 0 || op.rows() > kLargestSize ||
      op.columns() > kLargestSize) {
    return Bad("a matrix of %u x %u is not possible", op.rows(), op.columns());
  }
  const fb::Quantization& quantization =
      *body.quantizations()->Get(op.quantization());
  const auto buffer = [&](uint32_t slot) -> const BufferSize& {
    return buffers[program.buffers()->Get(slot)];
  };
  const BufferSize& input = buffer(op.input_slot());
  const BufferSize& output = buffer(op.output_slot());
  const BufferSize& scales = buffer(op.scale_slot());
  if (!IsQuantizable(input.dtype) || output.dtype != DType::kFp8E4m3 ||
      scales.dtype != ScaleDType(quantization.scale_format())) {
    return Bad("%s to %s with scales of %s does not exist",
               DTypeName(input.dtype), DTypeName(output.dtype),
               DTypeName(scales.dtype));
  }
  std::vector<Strided> in, out, scale;
  uint64_t elements = 1;
  for (const fb::QuantizeLoop& loop : LoopsOf(body, op)) {
    in.push_back({loop.extent(), loop.input_stride()});
    out.push_back({loop.extent(), loop.output_stride()});
    scale.push_back({loop.extent(), loop.scale_stride()});
    if (!Multiply(loop.extent(), elements)) return Bad("too many elements");
  }
  if (!Multiply(op.rows(), elements) || !Multiply(op.columns(), elements)) {
    return Bad("too many elements");
  }
  // Each is written once; a file that says more would cost time without end.
  if (elements > output.elements()) {
    return Bad("%u elements are more than the output's %u", elements,
               output.elements());
  }
  in.push_back({op.rows(), op.input_row_stride()});
  in.push_back({op.columns(), 1});
  out.push_back({op.rows(), op.output_row_stride()});
  out.push_back({op.columns(), 1});
  scale.push_back({BlockCount(op.rows(), quantization.block_rows()),
                   op.scale_row_stride()});
  scale.push_back({BlockCount(op.columns(), quantization.block_columns()), 1});
  absl::Status status = CheckStrides(input, op.input_offset(), in);
  if (!status.ok()) return At("input", status);
  status = CheckStrides(output, op.output_offset(), out);
  if (!status.ok()) return At("output", status);
  status = CheckStrides(scales, op.scale_offset(), scale);
  if (!status.ok()) return At("scales", status);
  return absl::OkStatus();
}

}  // namespace

DType ScaleDType(fb::ScaleFormat format) {
  switch (format) {
    case fb::ScaleFormat::kFp32:
    case fb::ScaleFormat::kUe8m0:
      return DType::kFp32;
    case fb::ScaleFormat::kE8m0:
      return DType::kUint8;
    case fb::ScaleFormat::kUnspecified:
      break;
  }
  return DType::kUnspecified;
}

bool HasQuantization(const fb::Body& body) {
  if (Length(body.quantizations()) > 0) return true;
  for (const fb::RankProgram* program : *body.programs()) {
    if (program->scratch_buffers() > 0 || Length(program->quantizes()) > 0) {
      return true;
    }
  }
  return false;
}

absl::Status CheckQuantizations(const fb::Body& body) {
  for (uint32_t i = 0; i < Length(body.quantizations()); ++i) {
    absl::Status status =
        CheckQuantization(body, *body.quantizations()->Get(i));
    if (!status.ok()) return At(absl::StrCat("quantization ", i), status);
  }
  // One param is one thing: made from another once, or what is made from.
  std::vector<bool> named(body.params()->size(), false);
  for (uint32_t i = 0; i < Length(body.quantizations()); ++i) {
    const fb::Quantization& quantization = *body.quantizations()->Get(i);
    for (const uint32_t param :
         {quantization.of(), quantization.data(), quantization.scales()}) {
      if (named[param]) {
        return Bad("quantization %u: param %u stands in a quantization already",
                   i, param);
      }
      named[param] = true;
    }
  }
  if (!IsAligned(body.quantize_loops())) {
    return Bad("quantize_loops are not aligned to 8 bytes");
  }
  for (uint32_t i = 0; i < Length(body.quantize_loops()); ++i) {
    const uint64_t extent = body.quantize_loops()->Get(i)->extent();
    if (extent >= 2) continue;
    return Bad("quantize loop %u: extent %u is below 2", i, extent);
  }
  return absl::OkStatus();
}

namespace {

absl::Status CheckWindow(const fb::Body& body, const fb::RankProgram& program,
                         const fb::ScratchWindow& window,
                         const BufferSize& buffer) {
  if (window.offset() % kScratchAlignmentBytes != 0) {
    return Bad("offset %u is not a multiple of %u", window.offset(),
               kScratchAlignmentBytes);
  }
  const uint64_t arena = program.scratch_arena_bytes();
  const uint64_t bytes = buffer.elements() * DTypeBytes(buffer.dtype);
  if (window.offset() > arena || bytes > arena - window.offset()) {
    return Bad("%u bytes from %u leave the arena of %u bytes", bytes,
               window.offset(), arena);
  }
  if (window.begin() >= window.end() || window.end() > body.rounds()->size()) {
    return Bad("rounds %u to %u of %u", window.begin(), window.end(),
               body.rounds()->size());
  }
  return absl::OkStatus();
}

absl::Status CheckWindows(const fb::Body& body, const fb::RankProgram& program,
                          const std::vector<BufferSize>& buffers) {
  const uint32_t windows = Length(program.scratch_windows());
  if (!IsAligned(program.scratch_windows())) {
    return Bad("scratch_windows are not aligned to 8 bytes");
  }
  if (program.scratch_arena_bytes() > (windows == 0 ? 0 : kLargestSize)) {
    return Bad("a scratch arena of %u bytes for %u windows",
               program.scratch_arena_bytes(), windows);
  }
  if (windows == 0) return absl::OkStatus();
  if (windows != program.scratch_buffers()) {
    return Bad("%u scratch windows of %u scratch buffers", windows,
               program.scratch_buffers());
  }
  const uint32_t first = program.buffers()->size() - windows;
  uint64_t end = 0;
  for (uint32_t i = 0; i < windows; ++i) {
    const fb::ScratchWindow& window = *program.scratch_windows()->Get(i);
    const BufferSize& buffer = buffers[program.buffers()->Get(first + i)];
    absl::Status status = CheckWindow(body, program, window, buffer);
    if (!status.ok()) return At(absl::StrCat("scratch window ", i), status);
    end = std::max(
        end, window.offset() + buffer.elements() * DTypeBytes(buffer.dtype));
  }
  // More would only cost workers memory.
  if (program.scratch_arena_bytes() != end) {
    return Bad("a scratch arena of %u bytes when its windows end at %u",
               program.scratch_arena_bytes(), end);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckQuantizes(const fb::Body& body,
                            const fb::RankProgram& program,
                            const std::vector<BufferSize>& buffers) {
  const uint32_t slots = program.buffers()->size();
  if (program.scratch_buffers() > slots) {
    return Bad("%u scratch buffers are more than the %u buffers",
               program.scratch_buffers(), slots);
  }
  uint64_t scratch_bytes = 0;
  for (uint32_t slot = slots - program.scratch_buffers(); slot < slots;
       ++slot) {
    const BufferSize& buffer = buffers[program.buffers()->Get(slot)];
    const uint64_t bytes = buffer.elements() * DTypeBytes(buffer.dtype);
    if (__builtin_add_overflow(scratch_bytes, bytes, &scratch_bytes) ||
        scratch_bytes > kLargestSize) {
      return Bad("more than 2^63 bytes of scratch");
    }
  }
  if (absl::Status status = CheckWindows(body, program, buffers);
      !status.ok()) {
    return status;
  }
  if (!IsAligned(program.quantizes())) {
    return Bad("quantizes are not aligned to 8 bytes");
  }
  for (uint32_t i = 0; i < Length(program.quantizes()); ++i) {
    absl::Status status =
        CheckQuantize(body, program, *program.quantizes()->Get(i), buffers);
    if (!status.ok()) return At(absl::StrCat("quantize ", i), status);
  }
  return absl::OkStatus();
}

}  // namespace refit
