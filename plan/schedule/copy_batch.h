// Strided copies between tables of tensors, quantizations and digests, in the
// batches in which a device does them.
#ifndef REFIT_PLAN_SCHEDULE_COPY_BATCH_H_
#define REFIT_PLAN_SCHEDULE_COPY_BATCH_H_

#include <cstdint>
#include <vector>

#include "plan/dtype.h"
#include "plan/element_types.h"

namespace refit {

// A position in the table of addresses over which a batch is prepared.
struct CopyAddress {
  uint64_t entry = 0;        // of the table
  uint64_t byte_offset = 0;  // from the entry's address
  DType dtype = DType::kUnspecified;
};

// How far one iteration of a loop moves a position.
struct CopyStride {
  uint64_t entries = 0;
  uint64_t bytes = 0;
};

// One loop of a strided copy, outermost first.
struct CopyLoop {
  uint64_t extent = 1;
  CopyStride from;
  CopyStride to;
};

// Visits elements row-major over the loops, the last loop fastest, in
// both tensors at once. The dtypes differ if the copy casts.
struct StridedCopy {
  CopyAddress from;  // unused by kZero
  CopyAddress to;
  uint32_t loops_begin = 0;  // into CopyBatch::loops
  uint32_t loops_count = 0;
  // The link that the bytes take: copies over different links run at the same
  // time. Equal numbers of one batch are one link.
  uint32_t link = 0;
  // Of the batch's steps, which follow each other. Copies alone have any.
  uint32_t step = 0;
};

// A loop around the matrices of a BlockQuantize.
struct QuantizeLoop {
  uint64_t extent = 1;
  CopyStride input;
  CopyStride output;
  CopyStride scales;
};

// Quantizes matrices to fp8 e4m3, one scale for each block
// (executor/device/quantize.h holds the arithmetic). Blocks count from a
// matrix's first element; at its edges they may be smaller.
//
// Rows of an input may lie apart: where `run_rows` is not 0, row r of a matrix
// stands input_row_bytes * (r % run_rows) behind the input's address, moved by
// CopyBatch::row_runs[runs_begin + r / run_rows].
struct BlockQuantize {
  CopyAddress input;  // bf16, fp16 or fp32
  CopyAddress output;
  CopyAddress scales;
  uint64_t rows = 1;
  uint64_t columns = 1;  // contiguous in all three tensors
  uint64_t input_row_bytes = 0;
  uint64_t output_row_bytes = 0;
  uint64_t scale_row_bytes = 0;
  uint32_t block_rows = 1;
  uint32_t block_columns = 1;
  fb::ScaleFormat format = fb::ScaleFormat::kUnspecified;
  uint32_t loops_begin = 0;  // into CopyBatch::quantize_loops, outermost first
  uint32_t loops_count = 0;
  // As StridedCopy's; 0: all three are this device's own.
  uint32_t link = 0;
  uint32_t runs_begin = 0;
  uint64_t run_rows = 0;  // 0: the rows follow each other
};

// Applies functions, one after the other, to contiguous elements in place.
struct ElementApply {
  CopyAddress tensor;  // bf16, fp16 or fp32
  uint64_t elements = 0;
  uint32_t functions_begin = 0;  // into CopyBatch::functions
  uint32_t functions_count = 0;  // 16 at most
};

enum class CopyKind : uint8_t {
  kCopy,      // and `quantizes`, which read nothing that copies write
  kZero,      // writes zero bytes
  kQuantize,  // `quantizes` instead of copies
  kApply,     // `applies` instead of copies
  // Writes nothing but sums of state digests (refit/state_digest.h). The `to`
  // of a copy is no address but a position in the param's bytes, its entry
  // unused; its dtype is that in which the elements are digested.
  kDigest,
};

// Of a digested copy: the param's key, and which DigestSum it is added to.
struct DigestTarget {
  uint64_t param_key = 0;
  uint64_t entry = 0;        // of the table
  uint64_t byte_offset = 0;  // a multiple of 16
};

// How much of a device a batch takes, beside what other streams do meanwhile.
enum class DeviceShare : uint8_t {
  kAll,
  kHalf,  // beside kernels that compute or copy as much
  kLink,  // somewhat more than copies as fast as a link: beside what moves on
          // it
  kTwoLinks,  // twice that
};

// Copies that are issued together. No two of them write the same byte, and none
// reads what another writes. Digests may share a sum.
struct CopyBatch {
  CopyKind kind = CopyKind::kCopy;
  DeviceShare share = DeviceShare::kAll;  // of a kZero: kAll
  std::vector<StridedCopy> copies;
  std::vector<CopyLoop> loops;
  std::vector<DigestTarget> digests;  // of a kDigest: one for each copy
  // Of a kDigest: a 32-bit word for each of its steps, which counts what of it
  // has been begun. Clear them first. What is enqueued again, on another stream
  // too, does what is left.
  CopyAddress begun;
  std::vector<BlockQuantize> quantizes;
  std::vector<QuantizeLoop> quantize_loops;
  // Of BlockQuantizes: sums wrap, so that a run may lie before the address.
  std::vector<CopyStride> row_runs;
  std::vector<ElementApply> applies;
  std::vector<ElementFunction> functions;
};

}  // namespace refit

#endif  // REFIT_PLAN_SCHEDULE_COPY_BATCH_H_
