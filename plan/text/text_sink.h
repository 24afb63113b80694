// Where a text goes that is too long to keep.
#ifndef REFIT_PLAN_TEXT_TEXT_SINK_H_
#define REFIT_PLAN_TEXT_TEXT_SINK_H_

#include <functional>
#include <string_view>

namespace refit {

// Gets a text piece by piece, in order. A piece is gone when the call returns.
using TextSink = std::function<void(std::string_view piece)>;

}  // namespace refit

#endif  // REFIT_PLAN_TEXT_TEXT_SINK_H_
