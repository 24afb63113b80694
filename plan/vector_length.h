#ifndef REFIT_PLAN_VECTOR_LENGTH_H_
#define REFIT_PLAN_VECTOR_LENGTH_H_

#include <cstdint>

namespace refit {

// The length of a vector or string of FlatBuffers. A file may leave empty ones
// out: then it is null.
template <typename Vector>
uint32_t Length(const Vector* vector) {
  return vector == nullptr ? 0 : vector->size();
}

}  // namespace refit

#endif  // REFIT_PLAN_VECTOR_LENGTH_H_
