// A plan whose equal ranks share lists and whose messages are packed, of a job
// of few ranks.
#ifndef REFIT_TESTS_COMPILER_MAKE_COMPACT_H_
#define REFIT_TESTS_COMPILER_MAKE_COMPACT_H_

#include "compiler/ir/module.h"

namespace refit {

// For CompileOptions::change_limits.
inline void MakeCompact(Limits& limits) { limits.compact_ranks_min = 0; }

}  // namespace refit

#endif  // REFIT_TESTS_COMPILER_MAKE_COMPACT_H_
