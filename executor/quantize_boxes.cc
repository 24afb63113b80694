#include "executor/quantize_boxes.h"

#include "executor/copy_boxes.h"

namespace refit {
namespace {

// One of the three boxes of an operation.
class Side {
 public:
  Side(const TensorTable& tensors, uint32_t slot, uint64_t offset)
      : numel_(TensorElements(tensors.buffer(slot))) {
    const DType dtype = tensors.buffer(slot).dtype();
    element_bytes_ = static_cast<uint64_t>(DTypeBytes(dtype));
    place_ = {.entry = tensors.begin(slot) + offset / numel_,
              .byte_offset = offset % numel_ * element_bytes_,
              .dtype = dtype};
  }

  const CopyPlace& place() const { return place_; }
  uint64_t RowBytes(uint64_t stride) const { return stride * element_bytes_; }
  // The loader has seen that a loop of 2 or more does not cross tensors.
  CopyStep Step(uint64_t stride) const {
    TensorBox box;
    AddLoop(/*extent=*/2, stride, numel_, box);
    return StepOf(box.loops.front(), element_bytes_);
  }

 private:
  uint64_t numel_;
  uint64_t element_bytes_ = 0;
  CopyPlace place_;
};

}  // namespace

void AppendQuantize(const fb::Body& body, const TensorTable& tensors,
                    const fb::Quantize& op, CopyBatch& batch) {
  const fb::Quantization& quantization =
      *body.quantizations()->Get(op.quantization());
  const Side input(tensors, op.input_slot(), op.input_offset());
  const Side output(tensors, op.output_slot(), op.output_offset());
  const Side scales(tensors, op.scale_slot(), op.scale_offset());
  batch.quantizes.push_back(
      {.input = input.place(),
       .output = output.place(),
       .scales = scales.place(),
       .rows = op.rows(),
       .columns = op.columns(),
       .input_row_bytes = input.RowBytes(op.input_row_stride()),
       .output_row_bytes = output.RowBytes(op.output_row_stride()),
       .scale_row_bytes = scales.RowBytes(op.scale_row_stride()),
       .block_rows = quantization.block_rows(),
       .block_columns = quantization.block_columns(),
       .format = quantization.scale_format(),
       .loops_begin = static_cast<uint32_t>(batch.quantize_loops.size()),
       .loops_count = op.loops_count()});
  for (uint32_t i = 0; i < op.loops_count(); ++i) {
    const fb::QuantizeLoop& loop =
        *body.quantize_loops()->Get(op.loops_begin() + i);
    batch.quantize_loops.push_back(
        {.extent = loop.extent(),
         .input = input.Step(loop.input_stride()),
         .output = output.Step(loop.output_stride()),
         .scales = scales.Step(loop.scale_stride())});
  }
}

}  // namespace refit
