#include "executor/copy_boxes.h"

namespace refit {

const fb::Buffer& BufferOf(const fb::Body& body, const fb::RankProgram& program,
                           const fb::Copy& copy) {
  return *body.buffers()->Get(program.buffers()->Get(copy.buffer_slot()));
}

TensorBox BoxOf(const fb::Body& body, const fb::RankProgram& program,
                const fb::Copy& copy) {
  const uint64_t tensor_elements =
      TensorElements(BufferOf(body, program, copy));
  TensorBox box = TensorBoxAt(copy.offset(), tensor_elements);
  for (uint32_t l = 0; l < copy.loops_count(); ++l) {
    const fb::Loop& loop = *body.loops()->Get(copy.loops_begin() + l);
    AddLoop(loop.extent(), loop.stride(), tensor_elements, box);
  }
  return box;
}

}  // namespace refit
