#include "compiler/layout/layout.h"
#include "compiler/passes/passes.h"

namespace refit {

absl::Status LayOutSource(const PassOptions& options, Module& module) {
  module.source = LayOut({.model = options.model,
                          .side = options.job.source,
                          .which = fb::Side::kSource,
                          .buffers = module.buffers,
                          .diagnostics = options.diagnostics});
  AddBlockScales(options.job.source, fb::Side::kSource, module, module.source,
                 options.diagnostics);
  return absl::OkStatus();
}

absl::Status LayOutDestination(const PassOptions& options, Module& module) {
  module.destination = LayOut({.model = options.model,
                               .side = options.job.destination,
                               .which = fb::Side::kDestination,
                               .buffers = module.buffers,
                               .diagnostics = options.diagnostics});
  AddBlockScales(options.job.destination, fb::Side::kDestination, module,
                 module.destination, options.diagnostics);
  return absl::OkStatus();
}

}  // namespace refit
