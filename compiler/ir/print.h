// The module as stable text, one function per stage: what
// `refitc --print-after` shows and goldens hold.
#ifndef REFIT_COMPILER_IR_PRINT_H_
#define REFIT_COMPILER_IR_PRINT_H_

#include <string>

#include "compiler/ir/module.h"

namespace refit {

std::string SourceText(const Module& module);
std::string DestinationText(const Module& module);
std::string QuantizationText(const Module& module);
std::string PostHooksText(const Module& module);
std::string TopologyText(const Module& module);
std::string FoldText(const Module& module);
std::string PiecesText(const Module& module);
std::string TransfersText(const Module& module);
std::string MessagesText(const Module& module);
std::string RoundsText(const Module& module);
std::string BoundText(const Module& module);
std::string CostText(const Module& module);

}  // namespace refit

#endif  // REFIT_COMPILER_IR_PRINT_H_
